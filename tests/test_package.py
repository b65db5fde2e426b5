"""Importing tilewise is light, works without the compiled kernels, and brings in no heavy library."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

HEAVY = ["torch", "matplotlib", "lightgbm", "scipy", "sklearn", "typer", "rich", "onnxruntime"]


def run(code: str, **env: str) -> str:
    import os

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | env)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_brings_in_no_heavy_library():
    loaded = run(f"import sys, tilewise; print([m for m in {HEAVY} if m in sys.modules])")
    assert loaded == "[]"


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
    said = run(code)
    assert said.startswith("None tilewise's compiled kernels expect the interpreter's lock") and "\n" not in said


@pytest.mark.parametrize(
    "name", ["Tensor", "nn", "optim", "no_grad", "save", "load", "set_num_threads", "data", "models"]
)
def test_public_names_are_there(name):
    import tilewise

    assert name in tilewise.__all__
    assert hasattr(tilewise, name)


def test_the_version_stands_in_one_place_and_the_citation_agrees():
    import tomllib
    from pathlib import Path

    import tilewise

    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"] and "version" not in project["project"]
    assert project["tool"]["scikit-build"]["metadata"]["version"]["input"] == "src/tilewise/__init__.py"
    assert f"version: {tilewise.__version__}\n" in (root / "CITATION.cff").read_text()


def test_the_version_names_kernels_and_machine():
    import os

    command = [sys.executable, "-m", "tilewise", "--version"]
    for native, kernels in (("0", "none compiled"), ("1", "kernels:")):
        said = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TILEWISE_NATIVE": native})
        assert said.returncode == 0, said.stderr
        version, built, machine = said.stdout.splitlines()
        assert version.startswith("tilewise ") and kernels in built and "Python" in machine


def test_what_the_sdist_leaves_out_is_named_from_the_root():
    """A bare name would match folders inside the package too, and wheels follow the same list."""
    settings = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    assert all(pattern.startswith("/") for pattern in settings["tool"]["scikit-build"]["sdist"]["exclude"])


def test_the_lock_and_the_bill_of_materials_name_the_versions_of_the_constraints():
    root = Path(__file__).parents[1]
    constraints = dict(line.split("==") for line in (root / "constraints.txt").read_text().split() if "==" in line)
    known = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in constraints.items()}
    lines = [line.split() for line in (root / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    locked = dict(line[0].split("==") for line in lines)
    assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", line[1]) for line in lines)
    assert {name: version for name, version in locked.items() if known.get(name, version) != version} == {}
    bill = json.loads((root / "sbom.json").read_text())
    assert {part["name"]: part["version"] for part in bill["components"]} == locked
