"""Write the lessons as Jupyter notebooks, from the Markdown of their pages: ``python -m tools.notebooks``.

Text becomes text cells and every block of Python a code cell. A first cell installs tilewise if it is missing (Colab,
Binder) from a wheel in the same folder, and the exercises become cells that write the answers to a file and check them.
Outputs are not stored.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tilewise.learn import LESSONS

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "learn"
FOLDER = PAGES / "notebooks"
START = ROOT / "src" / "tilewise" / "learn" / "start"
_BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.M | re.S)
_NO_SCREEN = 'import matplotlib\n\nmatplotlib.use("Agg")\n'  # a page has no screen, a notebook shows its figures
# The name is not published on PyPI, where anybody could take it: nothing is installed from there.
_INSTALL = """try:
    import tilewise
except ImportError:
    from pathlib import Path

    wheels = sorted(Path().glob("tilewise-*.whl"))
    if not wheels:
        message = "Put your course's wheel next to this notebook, or run: %pip install git+ADDRESS_OF_THE_REPOSITORY"
        raise SystemExit(message) from None
    %pip install -q {wheels[-1]}"""


def notebook(lesson: str) -> dict[str, Any]:
    """Convert one lesson to a notebook."""
    text = (PAGES / f"{lesson}.md").read_text(encoding="utf-8")
    cells, at = [_cell("code", _INSTALL)], 0
    for block in _BLOCK.finditer(text):
        cells += [_cell("markdown", _links(text[at : block.start()])), _cell("code", block[1].replace(_NO_SCREEN, ""))]
        at = block.end()
    cells += [_cell("markdown", _links(text[at:])), *_exercises(lesson)]
    cells = [cell for cell in cells if cell["source"]]
    for number, cell in enumerate(cells, 1):
        cell["id"] = f"{lesson}-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}


def _exercises(lesson: str) -> list[dict[str, Any]]:
    """Create a cell that writes the answers to a file, one that checks them, and one for a hint."""
    start = (START / f"{lesson}.py").read_text(encoding="utf-8")
    instruction = (
        "Write the functions into the next cell and run it; then run the check. `hint` helps with one of them."
    )
    check = f'from tilewise.learn import hint, report\n\nreport("{lesson}")'
    first = re.findall(r"^def (\w+)", start, re.M)[0]
    return [
        _cell("markdown", instruction),
        _cell("code", f"%%writefile {lesson}.py\n{start}"),
        _cell("code", check),
        _cell("code", f'hint("{lesson}", "{first}")'),
    ]


def _cell(kind: str, text: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "metadata": {}, "source": text.strip("\n").splitlines(keepends=True)}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def _links(text: str) -> str:
    """Rewrite links between pages so that they work from the notebooks' folder."""
    text = re.sub(r"\]\((\w+)\.md\)", lambda m: f"]({m[1]}.ipynb)" if m[1] in LESSONS else f"](../{m[1]}.md)", text)
    return re.sub(r"\]\(\.\./", "](../../", text)


def notebook_text(lesson: str) -> str:
    return json.dumps(notebook(lesson), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for lesson in LESSONS:
        (FOLDER / f"{lesson}.ipynb").write_text(notebook_text(lesson), encoding="utf-8")
    print(f"{len(LESSONS)} notebooks in {FOLDER.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
