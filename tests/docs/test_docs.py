"""The documentation is true: promises name tests that exist, examples run, links lead somewhere."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml

import tilewise
from tilewise._extension import native
from tilewise.learn import LESSONS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def test_every_promise_names_a_test_that_exists():
    tests_named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (DOCS / "promises.md").read_text())
    assert len(tests_named) > 15
    for file, name in tests_named:
        assert (ROOT / file).is_file(), file
        assert not name or f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"


def python_blocks(page: Path) -> str:
    """The page's Python, top to bottom, less what is marked as an excerpt."""
    blocks = re.findall(r"(<!-- excerpt -->\n)?^```(?:python|py)\n(.*?)^```", page.read_text(), re.M | re.S)
    return "\n".join(code for excerpt, code in blocks if not excerpt)


RUN_ELSEWHERE = {DOCS / "learn" / f"{name}.md" for name in (*LESSONS, "modules")}  # by test_lessons.py, test_modules.py
EVERY = {ROOT / "README.md", *DOCS.rglob("*.md")}
PAGES = [page for page in sorted(EVERY - RUN_ELSEWHERE) if python_blocks(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_of_a_page_runs_from_top_to_bottom(page, tmp_path):
    """Every block on every page, as it stands; what cannot run by itself has `<!-- excerpt -->` above it."""
    env = os.environ | {"TILEWISE_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", python_blocks(page)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    if native is None and done.returncode and "compiled kernels" in done.stderr.splitlines()[-1]:
        pytest.skip("a block of this page needs the compiled kernels")
    assert done.returncode == 0, done.stderr


BULLET = re.compile(r"^(?:[-*]|\d+\.) .*(?:\n {2,}\S.*)*", re.M)
MAX_BULLET_CHARACTERS = 3 * 120  # three lines of a page


@pytest.mark.parametrize("page", sorted(EVERY), ids=lambda page: str(page.relative_to(ROOT)))
def test_no_bullet_of_a_page_is_longer_than_three_lines(page):
    text = re.sub(r"^```.*?^```|<!--.*?-->", "", page.read_text(), flags=re.M | re.S)
    assert [bullet for bullet in BULLET.findall(text) if len(bullet) > MAX_BULLET_CHARACTERS] == []


LESSON_PAGES = {DOCS / "learn" / f"{name}.md" for name in LESSONS}  # they start with the question that they answer


@pytest.mark.parametrize("page", sorted(EVERY - LESSON_PAGES - {ROOT / "README.md", DOCS / "index.md"}), ids=str)
def test_every_page_starts_with_what_you_can_do_there(page):
    _, blank, lead, *_ = page.read_text().splitlines()
    assert blank == "" and lead.startswith("**Here you can** "), page


def is_defined(dotted: str) -> bool:
    """Tell whether a dotted name is a module, or an attribute that a module has."""
    try:
        resolve(dotted)
    except (ImportError, AttributeError):
        return False
    return True


ENTRY_POINT_GROUPS = {"tilewise.commands"}


@pytest.mark.parametrize("page", sorted(EVERY), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_name_and_file_on_a_page_exists(page):
    text = page.read_text()
    names = set(re.findall(r"\b(tilewise(?:_arena|_fleet)?(?:\.\w+)+)", text)) - ENTRY_POINT_GROUPS
    assert [
        name for name in sorted(names) if not name.endswith((".toml", ".lock", ".example")) and not is_defined(name)
    ] == []
    files = re.findall(r"`((?:src|native|tests|tools|benchmarks|course|packages)/[\w./-]+\.(?:py|cpp|h))", text)
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_every_setting_has_a_line_on_its_page():
    """The variables that the code reads, and no others."""
    sources = [
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / "packages").rglob("*.py"),
        *(ROOT / "native").rglob("*.cpp"),
        *(ROOT / "course").glob("*.py"),
    ]
    in_code = {name for path in sources for name in re.findall(r"\b(TILEWISE_[A-Z_]+)\b", path.read_text())}
    on_page = set(re.findall(r"`(TILEWISE_[A-Z_]+)`", (DOCS / "environment.md").read_text()))
    assert in_code - on_page <= {"TILEWISE_PARENT", "TILEWISE_FILLS_NUMPY_API"}  # not for users
    assert on_page - in_code <= {"TILEWISE_PURE"}  # read by the build


def test_every_command_is_in_the_reference():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import cli_reference
    finally:
        sys.path.remove(str(ROOT / "tools"))
    from tilewise.cli.app import command_line

    text = cli_reference.reference()
    for name, command in cli_reference.leaves(command_line()):
        assert f"## tilewise {name}\n" in text
        options = [opt for parameter in command.params for opt in parameter.opts if opt.startswith("--")]
        assert all(opt in text for opt in options if opt not in ("--help", "--json", "--quiet"))


def test_every_link_of_the_readme_leads_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not link.startswith("http") and not (ROOT / link).exists()] == []


def test_every_page_is_in_the_navigation_and_every_link_leads_somewhere(tmp_path):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (make docs installs it)")
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    pages = [page.read_text() for page in site.rglob("*.html")]
    loaded = [
        host for page in pages for host in re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', page)
    ]
    assert loaded == []
    assert_works_from_disk(site)


def test_the_navigation_has_four_groups_and_every_page_once():
    """Tutorials, how-to guides, reference and explanation, after the start page."""
    text = (ROOT / "mkdocs.yml").read_text()
    start, *groups = yaml.safe_load(text[text.index("\nnav:") :])["nav"]
    assert start == {"Start": "index.md"}
    assert [name for group in groups for name in group] == ["Tutorials", "How-to guides", "Reference", "Explanation"]
    entries = [entry for group in groups for entries in group.values() for entry in entries]
    pages = ["index.md", *(entry if isinstance(entry, str) else next(iter(entry.values())) for entry in entries)]
    assert sorted(pages) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def assert_works_from_disk(site: Path) -> None:
    """Every link names a file, and the search has its index as a script: a page from disk may read nothing else."""
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # only a server shows it, and its links start at the server's root
            continue
        links = re.findall(r'<(?:a|link|script|img)\b[^>]*?(?:href|src)="?([^"#>\s]+)', page.read_text())
        local = {link for link in links if not re.match(r"(?:https?|mailto|data):|//", link)}
        missing = [link for link in local if not (page.parent / unquote(link)).is_file()]
        assert missing == [], f"{page.relative_to(site)}: {missing}"
    assert (site / "search" / "search_index.js").is_file()
    assert (site / "assets" / "iframe-worker.js").is_file()


def test_every_file_for_packagers_has_the_version_of_the_package():
    for name, line in (("CITATION.cff", "version: {}\n"), ("packaging/meta.yaml", 'version = "{}"')):
        assert line.format(tilewise.__version__) in (ROOT / name).read_text(), name
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        assert yaml.safe_load(workflow.read_text())["jobs"], workflow


PUBLIC_PACKAGES = (
    "tilewise", "tilewise.plan", "tilewise.quantize", "tilewise.prune", "tilewise.generate", "tilewise.profile",
    "tilewise.bench", "tilewise.costmodel", "tilewise.tune", "tilewise.inductor", "tilewise.gpu.products",
    "tilewise.tune.triton", "tilewise.nn", "tilewise.backend", "tilewise.gguf", "tilewise.learn",
)  # fmt: skip


def resolve(name):
    """Return an object by its dotted name; an attribute (`learn.start`) goes before a folder of the same name."""
    parent, _, leaf = name.rpartition(".")
    try:
        return pkgutil.resolve_name(f"{parent}:{leaf}")
    except (ImportError, AttributeError, ValueError):
        return pkgutil.resolve_name(name)


@pytest.mark.parametrize("package", PUBLIC_PACKAGES)
def test_every_public_name_is_in_the_api_reference(package):
    text = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    modules = set(re.findall(r"^::: (\S+)", text, re.M))
    documented = {id(resolve(name)) for name in modules}
    missing = []
    for name in importlib.import_module(package).__all__:
        value = resolve(f"{package}.{name}")
        where = getattr(value, "__module__", None)  # modules and constants have none
        if where and id(value) not in documented and not {where, package} & modules:
            missing.append(name)
    assert missing == []


def test_every_test_that_the_security_page_names_is_there():
    tests_named = set(re.findall(r"`(test_\w+)`", (ROOT / "SECURITY.md").read_text())) - {"test_cheats"}
    there = {
        name for path in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert len(tests_named) > 20 and tests_named <= there
