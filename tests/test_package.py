"""Importing tilewise is light, works without the compiled kernels, and brings in no heavy library."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ["torch", "matplotlib", "lightgbm", "scipy", "sklearn", "typer", "rich", "onnxruntime"]


def run(code: str, **env: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | env)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_brings_in_no_heavy_library():
    loaded = run(f"import sys, tilewise; print([m for m in {HEAVY} if m in sys.modules])")
    assert loaded == "[]"


def test_layers_are_there_before_numpys_random_generators():
    assert run("import sys; from tilewise import Tensor, nn; print('numpy.random' in sys.modules)") == "False"


def test_the_framework_trains_without_compiled_kernels():
    code = (
        "import numpy as np, tilewise as tw\n"
        "m = tw.models.cnn(); x = tw.Tensor(np.ones((2, 1, 8, 8), np.float32))\n"
        "tw.nn.functional.cross_entropy(m(x), [0, 1]).backward()\n"
        "tw.optim.AdamW(m.parameters()).step(); print(tw._extension.native)"
    )
    assert run(code, TILEWISE_NATIVE="0") == "None"


def test_a_free_threaded_python_gets_one_sentence_and_numpy():
    code = (
        "import sys, warnings; sys.abiflags = 't'\n"
        "with warnings.catch_warnings(record=True) as said:\n"
        "    warnings.simplefilter('always'); import tilewise._extension\n"
        "print(tilewise._extension.native, *[str(w.message) for w in said])"
    )
    output = run(code, TILEWISE_NATIVE="1")  # "0" where nothing is compiled, which leaves nothing to say
    assert output.startswith("None tilewise's compiled kernels need the global interpreter lock") and "\n" not in output


@pytest.mark.parametrize(
    "name", ["Tensor", "nn", "optim", "no_grad", "save", "load", "set_num_threads", "data", "models"]
)
def test_public_names_are_there(name):
    import tilewise

    assert name in tilewise.__all__
    assert hasattr(tilewise, name)


def test_the_version_stands_in_one_place_and_citation_and_changelog_agree():
    import tilewise

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"] and "version" not in project["project"]
    assert project["tool"]["scikit-build"]["metadata"]["version"]["input"] == "src/tilewise/__init__.py"
    assert f"version: {tilewise.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(
        rf"^## \[{re.escape(tilewise.__version__)}\] - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )


def test_the_changelog_keeps_its_form():
    """Releases from new to old, after what is not released yet; changes under the headings of Keep a Changelog."""
    text = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## (.*)$", text, re.M)
    assert releases[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", release) for release in releases[1:])
    headings = set(re.findall(r"^### (.*)$", text, re.M))
    assert headings <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_version_names_kernels_and_machine():
    command = [sys.executable, "-m", "tilewise", "--version"]
    for native, kernels in (("0", "none compiled"), ("1", "kernels:")):
        process = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TILEWISE_NATIVE": native})
        assert process.returncode == 0, process.stderr
        version, built, machine = process.stdout.splitlines()
        assert version.startswith("tilewise ") and ", built as " in version and kernels in built and "Python" in machine


SDIST = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["scikit-build"]["sdist"]
SDIST_FILES = [pattern.removeprefix("!/") for pattern in SDIST["exclude"][1:]]


def working_copy(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name in SDIST_FILES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, folder / name)
    return folder


def built(folder: Path, what: str) -> Path:
    """The sdist or, without compiling, the wheel of a working copy."""
    pytest.importorskip("scikit_build_core")
    code = f"import sys; from scikit_build_core.build import build_{what}; print(build_{what}('out'))"
    environment = os.environ | {"TILEWISE_PURE": "1", "SOURCE_DATE_EPOCH": "1700000000"}
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True, env=environment)
    return max((folder / "out").iterdir(), key=lambda path: path.stat().st_mtime_ns)


def test_an_sdist_holds_what_is_named_and_nothing_else(tmp_path):
    """A folder that happens to lie in a working copy stays out; a bare name would match folders of the package too."""
    assert SDIST["exclude"][0] == "/*" and all(pattern.startswith("!/") for pattern in SDIST["exclude"][1:])
    working_copy(tmp_path)
    for stranger in ("left/large.bin", ".device/x.whl", "tests/x.py", "notes.md"):
        (tmp_path / stranger).parent.mkdir(exist_ok=True)
        (tmp_path / stranger).write_text("x")
    archive_path = built(tmp_path, "sdist")
    with tarfile.open(archive_path) as archive:
        assert f"{archive_path.name.removesuffix('.tar.gz')}/src/tilewise/learn/__init__.py" in archive.getnames()
        assert {name.split("/")[1] for name in archive.getnames()} == {"PKG-INFO", *SDIST_FILES}


@pytest.mark.parametrize("what", ["sdist", "wheel"])
def test_two_builds_from_two_places_are_the_same_bytes(tmp_path, what):
    """Copied one after the other, so that the files' times differ; `make wheels AGAIN=1` does it with compiled ones."""
    one, other = (built(working_copy(tmp_path / name), what) for name in "ab")
    assert one.read_bytes() == other.read_bytes()


def test_the_lock_and_the_bill_of_materials_name_the_versions_of_the_constraints():
    constraints = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    versions = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in constraints.items()}
    lines = [line.split() for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    locked = dict(line[0].split("==") for line in lines)
    assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", word) for line in lines for word in line[1:])
    assert all(len(line) > 1 for line in lines)
    assert {name: version for name, version in locked.items() if versions.get(name, version) != version} == {}
    bill = json.loads((ROOT / "sbom.json").read_text())
    assert {part["name"]: part["version"] for part in bill["components"]} == locked
    hashes = {part["name"]: [one["content"] for one in part["hashes"]] for part in bill["components"]}
    assert hashes == {line[0].split("==")[0]: [word.split(":")[1] for word in line[1:]] for line in lines}


def test_workflows_run_the_targets_of_the_makefile_and_every_python_of_the_classifiers():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    texts = {path.name: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    make_targets = {name for text in texts.values() for name in re.findall(r"make ([a-z][a-z-]*)", text)}
    assert make_targets - targets == set()
    assert {
        "test",
        "test-machines",
        "lint",
        "docs",
        "fuzz",
        "fuzz-paths",
        "sanitize",
        "check-arm",
        "audit",
        "wheels",
    } <= make_targets
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    pythons = {c.split(" :: ")[-1] for c in project["project"]["classifiers"] if re.search(r":: 3\.\d+$", c)}
    for name in ("tests.yml", "wheels.yml"):
        assert pythons <= set(re.findall(r'"(3\.\d+)"', texts[name]))
    assert {f"cp{python.replace('.', '')}-*" for python in pythons} == set(project["tool"]["cibuildwheel"]["build"])
