"""Every figure of README and docs comes from a file of results: what is marked is written, what is not is listed."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks import figures, tables
from benchmarks.__main__ import ALL

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TYPED = tomllib.loads((Path(__file__).parent / "typed_figures.toml").read_text(encoding="utf-8"))
UNITS = (
    r"(?:×|x\b|%|per cent|µs|us\b|ns\b|ms\b|s\b|seconds?|minutes?|hours?|[GTM]FLOP/s|[KMGT]i?B(?:/s)?\b"
    r"|bytes|points?|times|MHz|kernels|configurations|measurements|images)"
)
FIGURE = re.compile(rf"\d+\.\d+|\d[\d,]*\s?{UNITS}")
GENERATED = re.compile(r"<!-- results .*?<!-- end of results -->|<!--figure .*?<!--/figure-->", re.S)
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.M | re.S)


def by_hand(text: str, allowed: list[str]) -> list[str]:
    """The figures of a page that nothing writes and nobody listed."""
    text = GENERATED.sub("", text)
    for piece in allowed:
        text = text.replace(piece, "")
    return FIGURE.findall(CODE.sub("", text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_measured_figure_is_typed_by_hand(page):
    if page.name in ("results.md", "results-cases.md"):  # written whole
        return
    assert by_hand(page.read_text(encoding="utf-8"), TYPED.get(str(page.relative_to(ROOT)), [])) == []


@pytest.mark.parametrize(
    "sentence", ["It is 1.59 times faster.", "takes 17 ms", "2× the speed", "97 % of it", "a 4x gain"]
)
def test_a_figure_typed_by_hand_is_found(sentence):
    assert by_hand(f"# A page\n\n{sentence}\n", []) != []
    assert by_hand(f"<!--figure a-->{sentence}<!--/figure-->", []) == []


@pytest.mark.parametrize(("page", "piece"), [(page, piece) for page, pieces in TYPED.items() for piece in pieces])
def test_what_is_listed_as_typed_is_still_there(page, piece):
    assert piece in (ROOT / page).read_text(encoding="utf-8")


def test_every_name_the_tables_know_is_shown_on_a_page():
    marks = [
        mark
        for page in PAGES
        for mark in re.findall(r"<!-- results ([\w ]+):|<!--figure ([\w -]+)-->", page.read_text(encoding="utf-8"))
    ]
    figure_names = {section or figure for section, figure in marks}
    assert figure_names == {*tables.SECTIONS, *figures.FIGURES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_marked_figure_does_not_begin_a_line(page):
    """Markdown takes a line that begins with a comment for HTML, and its words would stay as they are."""
    assert not re.search(r"^\s*<!--figure", page.read_text(encoding="utf-8"), re.M)


def test_a_changed_figure_is_noticed():
    page = "It is <!--figure a-->1.59<!--/figure--> times faster."
    assert tables.filled(page, {}, {"a": lambda: "1.60"}) == page.replace("1.59", "1.60")
    with pytest.raises(KeyError):
        tables.filled(page, {}, {})


@pytest.mark.parametrize("name", ALL)
def test_make_bench_writes_a_file_for_every_benchmark_it_runs(name):
    source = (ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8")  # importing it might need the peers
    assert "\ndef main() -> None:" in source
    assert f'results/{name}.json"' in source or f'"results" / "{name}.json"' in source
    assert (ROOT / "benchmarks" / "results" / f"{name}.json").is_file()


def test_tables_show_what_was_measured():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.tables", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
