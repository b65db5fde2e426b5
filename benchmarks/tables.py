"""The results in README.md and docs/results.md, written from the JSON files of `make bench` and from nothing else; and
the figures of the data cards, from the collections themselves.

`python -m benchmarks.tables` writes them; `--check` only says whether they are up to date, and a test calls it, so a
number that nobody measured cannot stay.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.costmodel.describe import describe

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- results: written by `python -m benchmarks.tables` -->", "<!-- end of results -->"


@dataclass(frozen=True)
class Line:
    """A line of README's table: the cases of one file whose names match, beside the peers they were timed with."""

    label: str
    file: str
    names: str = ""
    without: str = "$^"


LINES = (
    Line("Matrix product, 512 to 2048 cubed", "gemm", r"^(512|1024|2048)×\1×\1$"),
    Line("Matrix product, small, skinny and odd shapes", "gemm", "", r"^(512|1024|2048)×\1×\1$|routing|threads"),
    Line("Convolution networks, forward", "conv", "forward|batch", "training"),
    Line("Training steps", "train_step"),
    Line("Softmax, layer norm, GELU, attention and gradients", "rows", "", "gpt"),
    Line("INT8 matrix product", "int8", "^[0-9]+×[0-9]+×[0-9]+$"),
    Line("INT8 convolution networks", "int8", "vgg6|resnet8", "float32"),
    Line("Sparse linear layer, 70 % zeros", "sparse", "at 70%", "conv|int8"),
    Line("Sparse linear layer, 90 % zeros", "sparse", "at 90%", "conv|int8"),
    Line("GPT decoding with a cache, float32", "decode", "float32, a token"),
    Line("GPT decoding with a cache, int8 weights", "decode", "int8, a token"),
    Line("GPT, 200 tokens, cache against none", "decode", "200 tokens"),
)


def read(name: str) -> dict[str, Any]:
    """One results file, or an empty one where it was not written yet."""
    path = RESULTS / f"{name}.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found if isinstance(found, dict) and "rows" in found else {"rows": []}


def summary() -> str:
    """README's table."""
    lines = ["| | beside | ratio: typical (worst to best) | cases | threads | measured |", "|---|---|---|---|---|---|"]
    for line in LINES:
        found = read(line.file)
        rows = [r for r in found["rows"] if re.search(line.names, r["name"]) and not re.search(line.without, r["name"])]
        for threads in sorted({row["threads"] for row in rows}):
            lines.append(_summary_line(line.label, [r for r in rows if r["threads"] == threads], threads, found))
    return "\n".join(lines)


def _summary_line(label: str, rows: list[dict[str, Any]], threads: int, found: dict[str, Any]) -> str:
    ratios = [row["ratio"] for row in rows]
    mean = math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))
    peers = ", ".join(dict.fromkeys(who for row in rows for who in row["seconds"] if who != "tilewise"))
    spread = f"{mean:.2f}× ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"| {label} | {peers} | {spread} | {len(rows)} | {threads} | {found.get('date', 'undated')} |"


def machine_sentence() -> str:
    kinds = {json.dumps(read(line.file).get("machine", {}), sort_keys=True) for line in LINES}
    machines = [json.loads(kind) for kind in sorted(kinds) if kind != "{}"]
    said = sorted({f"{m['cpus']} cores of {m['processor']}, {m.get('kernels', 'avx512')} kernels" for m in machines})
    return "Measured on a shared machine (" + "; ".join(said) + ")."


def all_results() -> str:
    """docs/results.md: every case of every file."""
    parts = [
        "# Results",
        "",
        "Written from `benchmarks/results/*.json` by `python -m benchmarks.tables`; `make bench` measures them anew.",
        "A ratio is the fastest peer's time over tilewise's, in one process, taking turns, at equal threads: above 1,",
        "tilewise is faster.",
        machine_sentence(),
    ]
    for path in sorted(RESULTS.glob("*.json")):
        found = read(path.stem)
        if not found["rows"]:
            continue
        parts += ["", f"## {path.stem}", "", f"Measured {found.get('date', 'undated')}.", ""]
        parts += ["| case | threads | fastest peer | ratio |", "|---|---|---|---|"]
        parts += [_case(row) for row in found["rows"]]
    return "\n".join(parts) + "\n"


def _case(row: dict[str, Any]) -> str:
    peers = {who: seconds for who, seconds in row["seconds"].items() if who != "tilewise"}
    fastest = min(peers, key=lambda who: peers[who]) if peers else ""
    return f"| {row['name']} | {row['threads']} | {fastest} | {row['ratio']:.2f}× |"


def card(collection: str) -> str:
    """The figures of an embedded collection, for its data card."""
    found = describe(collection, progress=False)
    parts = ", ".join(f"{name} {s.kernels} kernels of {s.programs} programs" for name, s in found.splits.items())
    noise = np.concatenate(list(found.deviations.values()))
    lower, upper = np.quantile(noise, [0.75, 0.9])
    total = found.total
    assert total is not None
    lines = [
        "| | |",
        "|---|---|",
        f"| contents | {total.kernels} kernels in {len(found.families)} families, {total.configs:,} configurations |",
        f"| splits | {parts}; by architecture |",
        f"| noise | median relative deviation of the repeats {total.noise or 0:.2%}; 75 % of the pairs below "
        f"{lower:.1%}, 90 % below {upper:.1%} |",
        "",
        "| family | kernels | configurations | worst over best | median over best | fixed choice | default | noise |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {g.kernels} | {g.configs:,} | {g.spread:.1f}× | {g.median_config:.2f}× | +{g.fixed_loss:.0%} "
        f"| +{g.default_loss:.0%} | {g.noise or 0:.2%} |"
        for name, g in found.families.items()
    ]
    return "\n".join(lines)


def _replaced(path: Path, block: str) -> str:
    """The text of a page with what stands between its marks replaced."""
    before, rest = path.read_text(encoding="utf-8").split(BEGIN)
    return f"{before}{BEGIN}\n{block}\n{END}{rest.split(END)[1]}"


def written() -> dict[Path, str]:
    """What README.md, docs/results.md and the data cards should hold."""
    readme, cards = ROOT / "README.md", [ROOT / "docs" / "collections" / f"{name}.md" for name in ("cpu", "h200")]
    return {
        readme: _replaced(readme, f"{summary()}\n\n{machine_sentence()}"),
        ROOT / "docs" / "results.md": all_results(),
        **{path: _replaced(path, card(path.stem)) for path in cards},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether the tables are up to date")
    check = parser.parse_args().check
    stale = [path for path, text in written().items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if check and stale:
        sys.exit(f"{stale[0].name} does not show what was measured; run python -m benchmarks.tables")
    for path, text in written().items():
        if path in stale:
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
