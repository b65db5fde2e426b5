"""The figures in README.md and docs/, written from the JSON files of `make bench`, the embedded collections and the
shipped models, and from nothing else.

`python -m benchmarks.tables` writes them; `--check` only says whether they are up to date, and a test calls it, so a
number that nobody measured cannot stay. docs/results.md is written whole. Other pages hold sections,

    <!-- results NAME: written by `python -m benchmarks.tables` -->
    ...
    <!-- end of results -->

and single figures inside sentences, `<!--figure NAME-->1.59<!--/figure-->`; `benchmarks.figures` knows the names.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import replay
from benchmarks.figures import FIGURES, SECTIONS
from benchmarks.results_files import HOME_KIND, RESULTS, ROOT, dates, geometric, kinds, read, read_any, rows, table

_SECTION = re.compile(
    r"(<!-- results ([\w ]+): written by `python -m benchmarks.tables` -->\n).*?(<!-- end of results -->)", re.S
)
_FIGURE = re.compile(r"(<!--figure ([\w -]+)-->).*?(<!--/figure-->)", re.S)


@dataclass(frozen=True)
class Line:
    """A line of README's table: the cases of one file whose names match, beside the peers they were timed with."""

    label: str
    file: str
    names: str = ""
    without: str = "$^"


_CUBES = r"^(51\d|[5-9]\d\d|\d{4})×\1×\1$"
_LAYERS = r"^\d+×(768×768|2304×768|3072×768|768×3072|1024×1024|4096×1024|1024×4096)( [nt]{2})?$"
LINES = (
    Line("Matrix product, large cubes", "gemm", _CUBES),
    Line("Matrix product, layers of transformers", "gemm", _LAYERS, _CUBES),
    Line("Matrix product, small, skinny and odd shapes", "gemm", "", f"{_CUBES}|{_LAYERS}|routing|threads"),
    Line("Matrix product, several threads beside one", "gemm", "threads beside one"),
    Line("Convolution networks, forward", "conv", "forward|batch", "training"),
    Line("Training steps", "train_step"),
    Line("Softmax, layer norm, GELU, attention and gradients", "rows", "", "gpt"),
    Line("INT8 matrix product", "int8", "^[0-9]+×[0-9]+×[0-9]+$"),
    Line("INT8 convolution networks", "int8", "vgg6|resnet8", "float32"),
    Line("Sparse linear layer, 70 % zeros", "sparse", "at 70%", "conv|int8"),
    Line("Sparse linear layer, 90 % zeros", "sparse", "at 90%", "conv|int8"),
    Line("EarlyJoinSAGE, training", "costmodel", "EarlyJoinSAGE, training"),
    Line("EarlyJoinSAGE, predicting", "costmodel", "EarlyJoinSAGE, predicting"),
    Line("GPT decoding with a cache, float32", "decode", "float32, a token"),
    Line("GPT decoding with a cache, int8 weights", "decode", "int8, a token"),
    Line("GPT decoding, 8 bits", "llama_cpp", "int8, a token"),
    Line("GPT decoding, four bits", "llama_cpp", "int4, a token"),
    Line("GPT, a prompt of 256, float32 to four bits", "llama_cpp", "a prompt"),
    Line("GPT, 200 tokens, cache against none", "decode", "200 tokens"),
)


def summary() -> str:
    """README's table: every line on every kind of CPU that it was measured on."""
    cells = []
    for line, kind in itertools.product(LINES, kinds()):
        found = rows(line.file, line.names, line.without, kind)
        for threads in sorted({row["threads"] for row in found}):
            cells.append(_summary_line(line.label, kind, [r for r in found if r["threads"] == threads], threads))
    headings = ("", "CPU", "beside", "ratio: typical (worst to best)", "cases", "threads", "measured")
    return f"{table(headings, cells)}\n\n{machine_sentence()}"


def _summary_line(label: str, kind: str, found: list[dict[str, Any]], threads: int) -> list[str]:
    ratios = [row["ratio"] for row in found]
    peers = ", ".join(dict.fromkeys(who for row in found for who in row["seconds"] if who != "tilewise"))
    spread = f"{geometric(ratios):.2f}× ({min(ratios):.2f} to {max(ratios):.2f})"
    return [label, kind, peers, spread, str(len(found)), str(threads), dates(found)]


def machine_sentence() -> str:
    """How many cores each kind had, and its caches where they were written down."""
    said = [f"{kind}: {_machine(kind)}" for kind in kinds()]
    return f"Measured on shared machines ({'; '.join(said)})."


def _machine(kind: str) -> str:
    told: dict[str, Any] = {}
    for line in LINES:
        told |= read(line.file, kind).get("machine", {})
    caches = [f"{level.upper()} {told[level] >> 10} KB" for level in ("l1", "l2", "l3") if level in told]
    return ", ".join([f"{told['cpus']} cores", *caches]) if told else "nothing yet"


def all_results() -> str:
    """docs/results.md: every case of every file."""
    parts = [
        "# Results",
        "",
        "Written from `benchmarks/results` by `python -m benchmarks.tables`; `make bench` adds this machine.",
        "A ratio is the fastest peer's time over tilewise's, in one process, taking turns, at equal threads: above 1,",
        "tilewise is faster.",
        machine_sentence(),
    ]
    names = sorted({path.stem for path in (*RESULTS.glob("*.json"), *RESULTS.glob("*/*.json"))})
    for name, kind in itertools.product(names, kinds()):
        found = rows(name, kind=kind)
        if found:
            title = name if kind == HOME_KIND else f"{name}, {kind}"
            parts += ["", f"## {title}", "", f"Measured {dates(found)} on {kind}.", ""]
            parts.append(table(("case", "threads", "fastest peer", "ratio"), map(_case, found)))
    return "\n".join([*parts, "", "## Accuracy after pruning", "", pruning()]) + "\n"


def _case(row: dict[str, Any]) -> list[str]:
    peers = {who: seconds for who, seconds in row["seconds"].items() if who != "tilewise"}
    fastest = min(peers, key=lambda who: peers[who]) if peers else ""
    return [row["name"], str(row["threads"]), fastest, f"{row['ratio']:.2f}×"]


def pruning() -> str:
    """Points lost at each sparsity, with the share of the dense file that is left where it was written."""
    cells = []
    for row in read_any("prune_accuracy") or []:
        if "sparsity" in row:
            lost = f"{row['points lost']:.2f} ({row['interval'][0]:.2f} to {row['interval'][1]:.2f})"
            size = f"{row['file']:.3f}" if "file" in row else ""
            name = f"{row['model']}, seed {row['seed']}"
            cells.append((name, f"{row['sparsity']:.0%}", row["then"], f"{row['dense %']:.2f} %", lost, size))
    headings = ("model", "zeros", "then", "dense", "points lost (95 % interval)", "file, of the dense one's")
    return table(headings, cells)


def filled(text: str, sections: Mapping[str, Callable[[], str]], figures: Mapping[str, Callable[[], str]]) -> str:
    """A page with every section and figure it marks written anew; a name that nobody knows is an error."""
    text = _SECTION.sub(lambda mark: f"{mark[1]}{sections[mark[2]]()}\n{mark[3]}", text)
    return _FIGURE.sub(lambda mark: f"{mark[1]}{figures[mark[2]]()}{mark[3]}", text)


def written() -> dict[Path, str]:
    """What README.md and every page under docs/ should hold."""
    sections = {**SECTIONS, "summary": summary}
    whole = ROOT / "docs" / "results.md"
    pages = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if path != whole)]
    return {whole: all_results()} | {p: filled(p.read_text(encoding="utf-8"), sections, FIGURES) for p in pages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the tables are up to date")
    check = parser.parse_args().check
    if not replay.up_to_date():
        if check:
            sys.exit("results/replay.json tells of other models than those shipped; run python -m benchmarks.tables")
        replay.main()
    stale = {p: t for p, t in written().items() if not p.is_file() or p.read_text(encoding="utf-8") != t}
    if check and stale:
        sys.exit(f"{next(iter(stale)).name} does not show what was measured; run python -m benchmarks.tables")
    for path, text in stale.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
