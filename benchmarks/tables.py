"""The figures in README.md and docs/, written from the JSON files of `make bench`, the embedded collections and the
shipped models, and from nothing else.

`python -m benchmarks.tables` writes them; `--check` only says whether they are up to date, and a test calls it, so a
number that nobody measured cannot stay. docs/results.md, docs/results-cases.md and their picture are written whole.
Other pages hold sections,

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
from benchmarks.harness import NOT_HELD
from benchmarks.picture import Range, picture
from benchmarks.results_files import HOME_KIND, RESULTS, ROOT, dates, geometric, kinds, read, read_any, rows, table
from tilewise._wording import with_interval

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
    Line("Matrix product, several threads against one", "gemm", "threads beside one"),
    Line("Convolution networks, forward", "conv", "forward|batch", "training"),
    Line("Networks people run, float32", "networks", "float32", "int8"),
    Line("Networks people run, INT8", "networks", "int8", "to float32"),
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
    Line("GPT against CTranslate2, 16 tokens", "ctranslate2", "tokens after"),
    Line("GPT against CTranslate2, a prompt of 256", "ctranslate2", "a prompt"),
    Line("GPT, 200 tokens, cache against none", "decode", "200 tokens"),
)


@dataclass(frozen=True)
class Summary:
    """One line on one kind of CPU with one number of threads, and its cases."""

    label: str
    kind: str
    threads: int
    cases: list[dict[str, Any]]

    @property
    def ratios(self) -> list[float]:
        return [row["ratio"] for row in self.cases]


def summaries() -> list[Summary]:
    """Every line on every kind of CPU and with every number of threads that it was measured with."""
    found = []
    for line, kind in itertools.product(LINES, kinds()):
        cases = rows(line.file, line.names, line.without, kind)
        for threads in sorted({row["threads"] for row in cases}):
            label = line.label if threads == 1 or "threads" in line.label else f"{line.label}, all cores"
            found.append(Summary(label, kind, threads, [row for row in cases if row["threads"] == threads]))
    return sorted(found, key=lambda summary: [s.label for s in found].index(summary.label))


def summary() -> str:
    """README's table: a column for each kind of CPU."""
    found = {(s.label, s.kind): _typical_and_worst(s.ratios) for s in summaries()}
    labels = dict.fromkeys(label for label, _ in found)
    cells = [[label, *(found.get((label, kind), "") for kind in kinds())] for label in labels]
    return f"{table(('typical ratio (worst)', *kinds()), cells)}\n\n{machine_sentence()}"


def _typical_and_worst(ratios: list[float]) -> str:
    return f"{geometric(ratios):.2f}×" + (f" ({min(ratios):.2f})" if len(ratios) > 1 else "")


def full_summary() -> str:
    """The same with peers, ranges and dates."""
    headings = ("", "CPU", "compared with", "ratio: typical (worst to best)", "cases", "threads", "measured")
    return table(headings, map(_summary_line, summaries()))


def _summary_line(found: Summary) -> list[str]:
    peers = ", ".join(dict.fromkeys(who for row in found.cases for who in row["seconds"] if who != "tilewise"))
    spread = with_interval(f"{geometric(found.ratios):.2f}×", f"{min(found.ratios):.2f}", f"{max(found.ratios):.2f}")
    return [found.label, found.kind, peers, spread, str(len(found.cases)), str(found.threads), dates(found.cases)]


def drawn() -> str:
    """The picture of the summary, one thread or several beside one."""
    shown = [s for s in summaries() if "all cores" not in s.label]
    ranges = [Range(s.label, s.kind, min(s.ratios), geometric(s.ratios), max(s.ratios)) for s in shown]
    return picture(ranges, kinds())


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


_ABOUT_RATIOS = """A ratio is the fastest peer's time divided by tilewise's, interleaved in one process, with equal
threads. Above 1, tilewise is faster. Written from `benchmarks/results` by `python -m benchmarks.tables`; `make bench`
adds your machine."""
_MOST_LOSSES = 15


def results_page() -> str:
    """docs/results.md: the picture, the summary, and where tilewise loses most."""
    every = [
        (kind, row) for line in LINES for kind in kinds() for row in rows(line.file, line.names, line.without, kind)
    ]
    lost = sorted(((kind, row) for kind, row in every if row["ratio"] < 1), key=lambda found: found[1]["ratio"])
    losses = [[kind, *_case(row)] for kind, row in lost[:_MOST_LOSSES]]
    parts = [
        "# Results",
        f"{_ABOUT_RATIOS}\n[Every case](results-cases.md) is listed on its own page.",
        "![Speed compared with the fastest peer, by kind of work and CPU](assets/results.svg)",
        machine_sentence(),
        "## By kind of work",
        full_summary(),
        "## Where tilewise is slower",
        f"{len(lost)} of {len(every)} cases are slower than the fastest peer; these are the worst.",
        table(("CPU", "case", "threads", "fastest peer", "ratio"), losses),
        "## Peak memory",
        memory(),
        "## Accuracy after pruning",
        pruning(),
    ]
    return "\n\n".join(parts) + "\n"


def cases_page() -> str:
    """docs/results-cases.md: every case of every file, what is beside libraries first."""
    parts = ["# Every case", "", _ABOUT_RATIOS, "[Results](results.md) has the summary."]
    files = {path.stem for path in (*RESULTS.glob("*.json"), *RESULTS.glob("*/*.json"))}
    first = [name for name in dict.fromkeys(line.file for line in LINES) if name in files]
    for name, kind in itertools.product([*first, *sorted(files - set(first))], kinds()):
        found = rows(name, kind=kind)
        if found:
            title = name if kind == HOME_KIND else f"{name}, {kind}"
            parts += ["", f"## {title}", "", f"Measured {dates(found)} on {kind}.", ""]
            parts.append(table(("case", "threads", "fastest peer", "ratio"), map(_case, found)))
    return "\n".join(parts) + "\n"


def _case(row: dict[str, Any]) -> list[str]:
    peers = {who: s for who, s in row["seconds"].items() if who != "tilewise" and NOT_HELD not in who}
    fastest = min(peers, key=lambda who: peers[who]) if peers else ""
    return [row["name"], str(row["threads"]), fastest, f"{row['ratio']:.2f}×"]


def memory() -> str:
    """The most memory of a process that loads a network, makes it ready and runs it, beside the least of theirs."""
    cells = []
    for kind in kinds():
        for row in (read_any("memory", kind) or {}).get("peaks", []):
            held = [f"{size / 1e6:.0f} MB" for size in row["bytes"].values()]
            cells.append([kind, row["name"], *held, *[""] * (3 - len(held)), f"{1 / row['ratio']:.2f}"])
    headings = ("CPU", "network, float32", "tilewise", "ONNX Runtime", "OpenVINO", "ours to the least of theirs")
    return f"`python -m benchmarks.memory`: a process each, one thread.\n\n{table(headings, cells)}"


def pruning() -> str:
    """Points lost at each sparsity, with the share of the dense file that is left where it was written."""
    cells = []
    for row in read_any("prune_accuracy") or []:
        if "sparsity" in row:
            lost = with_interval(*(f"{value:.2f}" for value in (row["points lost"], *row["interval"])))
            size = f"{row['file']:.3f}" if "file" in row else ""
            name = f"{row['model']}, seed {row['seed']}"
            cells.append((name, f"{row['sparsity']:.0%}", row["then"], f"{row['dense %']:.2f} %", lost, size))
    headings = ("model", "zeros", "then", "dense", "points lost (95 % interval)", "file, of the dense one's")
    return table(headings, cells)


def plan_claims() -> str:
    """The teaching plan's success metrics on every reference model: accuracy by cross-validation, speed, memory."""
    accuracy = []
    for row in read_any("modules") or []:
        lost = with_interval(*(f"{value:+.2f}" for value in (row["points lost"], *row["interval"])))
        bound = "< 1 point" if row["form"] == "int8" else "< 2 points"
        form = {"int8": "INT8", "zeros": "70 % zeros", "filters": "70 % of the weights, as filters"}[row["form"]]
        accuracy.append((row["data"], row["model"], form, f"{row['images']:,}", f"{row['dense %']:.2f} %", lost, bound))
    speed = []
    for row in read_any("plan_speed") or []:
        gain = with_interval(*(f"{value:.2f}" for value in (row["times faster"], *row["interval"])))
        memory = f"{row['memory']:.2f}" if "memory" in row else ""
        speed.append((row["claim"], row["model"], row["compared"], gain, memory))
    headings = ("data", "model", "form", "test images", "float32, dense", "points lost (95 % interval)", "claim")
    first = table(headings, accuracy)
    headings = ("claim", "model", "what is compared", "times faster (95 % interval)", "memory, of the first")
    return f"{first}\n\n{table(headings, speed)}"


def filled(text: str, sections: Mapping[str, Callable[[], str]], figures: Mapping[str, Callable[[], str]]) -> str:
    """A page with every section and figure it marks written anew; a name that nobody knows is an error."""
    text = _SECTION.sub(lambda mark: f"{mark[1]}{sections[mark[2]]()}\n{mark[3]}", text)
    return _FIGURE.sub(lambda mark: f"{mark[1]}{figures[mark[2]]()}{mark[3]}", text)


def written() -> dict[Path, str]:
    """What README.md and every page under docs/ should hold."""
    sections = {**SECTIONS, "summary": summary, "plan": plan_claims}
    docs = ROOT / "docs"
    whole = {
        docs / "results.md": results_page(),
        docs / "results-cases.md": cases_page(),
        docs / "assets" / "results.svg": drawn(),
    }
    pages = [ROOT / "README.md", *sorted(path for path in docs.rglob("*.md") if path not in whole)]
    return whole | {p: filled(p.read_text(encoding="utf-8"), sections, FIGURES) for p in pages}


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
