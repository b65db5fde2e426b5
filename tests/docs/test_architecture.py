"""docs/architecture.md cannot rot: what it names exists, and no folder outgrows a reader."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "tilewise"
ADD_ONS = tuple((ROOT / "packages").glob("*/src"))
PAGE = ROOT / "docs" / "architecture.md"
REFERENCE = re.compile(r"`([\w./-]+\.(?:py|cpp|h|toml))(?:::([\w.]+))?`")
MOST_MODULES = 20


def _references() -> list[tuple[str, str]]:
    return sorted(set(REFERENCE.findall(PAGE.read_text(encoding="utf-8"))))


def _find(path: str) -> Path | None:
    return next((base / path for base in (PACKAGE, ROOT, *ADD_ONS) if (base / path).is_file()), None)


def _defined(path: Path) -> set[str]:
    """Functions, classes, methods and module constants of a Python file, by dotted name."""
    hosts = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            hosts.add(node.name)
        if isinstance(node, ast.ClassDef):
            hosts |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            hosts |= {target.id for target in targets if isinstance(target, ast.Name)}
    return hosts


def test_the_page_names_many_places() -> None:
    assert len(_references()) > 50


@pytest.mark.parametrize(("path", "name"), _references())
def test_what_the_page_names_exists(path: str, name: str) -> None:
    file = _find(path)
    assert file is not None, f"docs/architecture.md names {path}, which is not there"
    if name and file.suffix == ".py":
        assert name in _defined(file), f"docs/architecture.md names {name}, which {path} does not define"
    elif name:
        assert re.search(rf"\b{name}\(", file.read_text(encoding="utf-8"))


def test_the_tree_shows_folders_and_files_that_exist() -> None:
    tree = PAGE.read_text(encoding="utf-8").split("```")[1]
    parent = ""
    for line in filter(None, tree.splitlines()):
        names = [word for word in line.split("   ")[0].split() if "/" in word or word.endswith(".py")]
        if not line.startswith(" "):
            parent = names[-1]
        for name in names:
            assert (PACKAGE / (parent if line.startswith(" ") else "") / name).exists(), line


def test_no_folder_has_more_modules_than_a_reader_can_keep_apart() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    crowded = [str(f.relative_to(ROOT)) for f in folders if len(list(f.glob("*.py"))) > MOST_MODULES]
    assert not crowded
