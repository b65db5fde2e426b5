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
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import replay
from benchmarks.cases import LINES, NOT_HELD, ROWS, Case, Line, age_note, all_cases, counted_cases, source_hash
from benchmarks.diagrams import DIAGRAMS
from benchmarks.figures import FIGURES
from benchmarks.figures import SECTIONS as OTHER_SECTIONS
from benchmarks.picture import Group, Lane, Picture, ratio_ticks
from benchmarks.results_files import (
    HOME_KIND,
    RESULTS,
    ROOT,
    dates,
    folder_of,
    geometric,
    kinds,
    read,
    read_any,
    table,
)
from tilewise._wording import with_interval

_SECTION = re.compile(
    r"(<!-- results ([\w ]+): written by `python -m benchmarks.tables` -->\n).*?(<!-- end of results -->)", re.S
)
_FIGURE = re.compile(r"(<!--figure ([\w -]+)-->).*?(<!--/figure-->)", re.S)


# How peers are written on pages; a name that is not here is written as the benchmarks write it.
_PEERS = {
    "numpy": "NumPy", "pytorch": "PyTorch", "torch": "PyTorch", "torch._int_mm": "PyTorch `_int_mm`",
    "pytorch fx": "PyTorch FX", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "ctranslate2": "CTranslate2",
    "scipy csr": "SciPy CSR", "tensorflow": "TensorFlow", "tilewise dense": "our dense layer",
    "tilewise dense int8": "our dense layer",
}  # fmt: skip
_STALE = "†"
ABOUT_RATIOS = f"""A ratio compares the speed of tilewise with another library (a peer): it is the peer's time divided
by tilewise's time. If the ratio is above 1, tilewise is faster. Both are timed alternately in one process, with the
same number of threads. Each case (one computation on one CPU) is compared with the **fastest** of all peers that were
ever timed on it. The mark {_STALE} means that tilewise's kernels have changed since the measurement."""
_ABOUT_CHOICES = """**Choosing without measuring.** The cost model of tilewise ranks the configurations of a kernel.
The table compares the configuration that it ranks first, and the default without tuning, with the fastest of all
measured configurations. A value of 0.90 means that a kernel runs at 90 % of the speed of the fastest one."""
_ABOUT_SPEEDS = """**Speed compared with other libraries.** In each measured case, tilewise is compared with the
fastest of several libraries (peers). A value such as 2× is the peer's time divided by tilewise's time: at 2×,
tilewise takes half the time, and below 1× it is slower. "Typical" is the geometric mean over the cases of a row."""
_ABOUT_CELLS = """This table shows how fast tilewise is for each kind of work and CPU. A cell contains the geometric
mean of the ratios (the peer's time divided by tilewise's) and, in brackets, the smallest ratio. A case is not counted
if a peer that is often the fastest was not timed on it. In the rows about sparse layers, the sparse kernels were used
in every case, even if tilewise would choose the dense kernel by itself."""
_ABOUT_ITSELF = """This table compares two ways to run the same work in tilewise, such as INT8 and float32. A ratio
above 1 means that the way named first is faster. No other library is involved."""
_ABOUT_MEMORY = """This table shows the peak memory of a process that loads and runs a network, on one thread. Each
library runs each network in a new process. The last column is tilewise's peak divided by the smaller peak of the
other two libraries, so below 1 tilewise needs less. To repeat the measurement, run `python -m benchmarks.memory`."""
_ABOUT_PRUNING = """This table shows how much accuracy models lose by pruning. In each row, pruning has set a share of
the model's weights to zero (column zeros), with or without fine-tuning afterwards. The points lost are percentage
points of test accuracy, compared with the dense model."""


def peer_names(cases: Iterable[Case]) -> str:
    """The peers of some cases, each once, without the variants of one peer."""
    names = dict.fromkeys(peer for case in cases for peer in case.ratios if NOT_HELD not in peer)
    titles = [_PEERS.get(name, _PEERS.get(re.split(r",| ", name)[0], name)) for name in names]
    return ", ".join(dict.fromkeys(titles))


def ratio_cell(cases: list[Case]) -> str:
    """The typical and the worst ratio of some cases, or why there is none."""
    complete = counted_cases(cases)
    if not complete:
        missing = sorted({_PEERS.get(peer, peer) for case in cases for peer in case.missing_peers})
        return f"not measured against {', '.join(missing)}" if cases else "not measured"
    ratios = [case.ratio for case in complete]
    worst = f" ({min(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{geometric(ratios):.2f}×{worst}{_STALE if any(case.is_stale for case in complete) else ''}"


def summary() -> str:
    """README's two tables: choices of the cost model, then one row for each kind of work over all CPUs."""
    cells, cases = [], all_cases()
    for key, (label, _) in ROWS.items():
        recorded = counted_cases(case for case in cases if case.line.row == key)
        members = current_cases(recorded)
        mark = _STALE if any(case.is_stale for case in members) else ""
        ratios, cpus = [case.ratio for case in members], list(dict.fromkeys(case.kind for case in members))
        slower = sum(ratio < 1 for ratio in ratios) / len(ratios)
        count = str(len(ratios)) if len(ratios) == len(recorded) else f"{len(ratios)} of {len(recorded)}"
        where = f"{len(cpus)} CPUs" if len(cpus) > 1 else cpus[0]
        cells.append((label, peer_names(members), f"{geometric(ratios):.2f}×{mark}", f"{min(ratios):.2f}×",
                      f"{slower:.0%}", f"{count} on {where}"))  # fmt: skip
    choices = table(("kernels", "model, typical", "model, worst", "default, typical", "model slower than default in",
                     "measured"), cost_model_rows())  # fmt: skip
    speeds = table(("work", "peers", "typical", "worst", "tilewise slower in", "measured cases"), cells)
    return f"{_ABOUT_CHOICES}\n\n{choices}\n\n{_ABOUT_SPEEDS}\n\n{speeds}"


def current_cases(cases: list[Case]) -> list[Case]:
    """Return the cases of the CPUs on which all of them were measured with the current kernels, or else all cases.

    A CPU counts whole or not at all, so that measuring only the cases that came out well changes nothing.
    """
    older = {case.kind for case in cases if case.is_stale}
    return [case for case in cases if case.kind not in older] or cases


def cost_model_rows() -> list[tuple[str, ...]]:
    """Configurations that the model chose without measuring, as a share of the best one's speed."""
    gpu, devices = read_any("gpu_tuning")["problems"], read_any("devices")
    folds = [row for fold, row in read_any("machines")["models"]["CpuRidge"]["folds"].items() if " " not in fold]
    first, default = (geometric(row[way] for row in gpu) for way in ("first", "default"))
    kernels = sum(row["kernels"] for row in folds)
    cpu_first, cpu_default, cpu_five = (
        math.exp(sum(row["kernels"] * math.log(row[way]) for row in folds) / kernels)
        for way in ("first", "default", "five")
    )
    products = devices["products"]
    left_out = {name: row["first"] for name, row in devices["left_out"].items()}
    worse = sum(row["first"] < row["default"] for row in gpu) / len(gpu)
    return [
        ("Triton kernels, new shapes", f"{first:.2f}", f"{min(row['first'] for row in gpu):.2f}", f"{default:.2f}",
         f"{worse:.0%}", f"{len(gpu)} problems on an H200"),
        ("A convolution, GPU not in the training data", f"{geometric(left_out.values()):.2f}",
         f"{min(left_out.values()):.2f}", "not measured", "not measured",
         f"{len(left_out)} GPUs, each left out once"),
        ("Matrix products, GPU not in the training data", f"{products['means']['first'][0]:.2f}", "not measured",
         "not measured", "not measured", f"{products['kernels']} problems on an A100"),
        ("CPU kernels, CPU not in the training data", f"{cpu_first:.2f} ({cpu_five:.2f} after five measurements)",
         f"{min(row['worst_first'] for row in folds):.2f}", f"{cpu_default:.2f}",
         f"at most {sum(row['taken'] for row in folds) / kernels:.1%}",
         f"{kernels} problems on {len(folds)} CPUs, each left out once"),
    ]  # fmt: skip


def machine_table() -> str:
    """Tabulate the number of cores of each kind of machine, and its caches where they were recorded."""
    return table(("CPU", "cores and caches"), [(kind, _machine(kind)) for kind in kinds()])


def _machine(kind: str) -> str:
    """Return the number of cores of a kind of machine, and its caches where they were recorded."""
    machine: dict[str, Any] = {}
    for path in sorted(RESULTS.glob("*.json") if kind == HOME_KIND else RESULTS.glob(f"{folder_of(kind)}/*.json")):
        machine |= read(path.stem, kind).get("machine", {})
    caches = [f"{level.upper()} {machine[level] >> 10} KB" for level in ("l1", "l2", "l3") if level in machine]
    return ", ".join([f"{machine['cpus']} cores", *caches]) if machine else "nothing yet"


_ALT = "Configurations chosen by the cost model, and speed compared with the fastest peer"
PICTURE = f"![{_ALT}](assets/results.svg#only-light)\n![{_ALT}](assets/results-dark.svg#only-dark)"
_WAYS = ("default", "first", "five")
_WAY_NAMES = ("default configuration", "chosen without measuring", "after five measurements")


def picture(dark: bool, is_narrow: bool = False) -> str:
    """Draw README's table: the cost model's choices, and beside or (narrow) below them the speed against the peers."""
    drawing = Picture(dark)
    draw_choices(drawing)
    if is_narrow:
        drawing.y += 10
    else:
        drawing.next_column()
    speeds = []
    for label, members in cases_by_row().items():
        lane = _lane(0, [case.ratio for case in members], any(case.is_stale for case in members))
        speeds.append(Group(label, peers_line(members), [lane]))
    draw_speeds(drawing, speeds)
    return drawing.svg(_ALT)


def picture_by_cpu(dark: bool) -> str:
    """Draw the results page's picture: the choices above, below them the speed on every CPU."""
    drawing = Picture(dark)
    draw_choices(drawing)
    drawing.y += 10
    cases = counted_cases(all_cases())
    speeds = []
    for key, (label, _) in ROWS.items():
        members = [case for case in cases if case.line.row == key]
        lanes = []
        for place, kind in enumerate(kinds()):
            if on_cpu := [case for case in members if case.kind == kind]:
                is_stale = any(case.is_stale for case in on_cpu)
                lanes.append(_lane(place, [case.ratio for case in on_cpu], is_stale))
        speeds.append(Group(label, peers_line(members), lanes))
    draw_speeds(drawing, speeds)
    drawing.legend(kinds())
    return drawing.svg(_ALT)


def cases_by_row() -> dict[str, list[Case]]:
    """Return the cases that count in each of README's measured rows, by the row's label."""
    cases = counted_cases(all_cases())
    return {label: current_cases([case for case in cases if case.line.row == key]) for key, (label, _) in ROWS.items()}


def peers_line(cases: list[Case]) -> str:
    return f"fastest of {peer_names(cases)}".replace("`", "")


def draw_choices(drawing: Picture) -> None:
    """Draw the share of the best configuration's speed: by default, without measuring, after five measurements."""
    gpu, folds = read_any("gpu_tuning")["problems"], read_any("machines")["models"]["CpuRidge"]["folds"]
    devices = read_any("devices")["left_out"].values()
    choices = [
        Group("Triton kernels, shapes never seen", f"{len(gpu)} kernels on an H200", [
            _lane(place, [row[way] for row in gpu]) for place, way in enumerate(_WAYS)
        ]),
        Group("GPUs never seen", f"a convolution on {len(devices)} GPUs, each left out of training once", [
            _lane(1, [row["first"] for row in devices]), _lane(2, [row["five, in order"] for row in devices])
        ]),
        Group("CPUs never seen", "our kernels on 4 CPUs, each left out once; means", [
            _lane(place, [row[way] for fold, row in folds.items() if " " not in fold])
            for place, way in enumerate(_WAYS)
        ]),
    ]  # fmt: skip
    subtitle = "share of the speed of the best configuration"
    drawing.panel("Choosing a configuration", subtitle, choices, [0.0, 0.25, 0.5, 0.75, 1.0], False)
    drawing.legend(_WAY_NAMES)


def draw_speeds(drawing: Picture, speeds: list[Group]) -> None:
    """Draw how many times as fast as the fastest peer tilewise runs, with the line between slower and faster."""
    subtitle = "time of the fastest peer / ours; dot: typical, bar: worst to best"
    drawing.panel("Running products and networks", subtitle, speeds, ratio_ticks(speeds), True)
    if any(lane.is_stale for group in speeds for lane in group.lanes):
        drawing.y += 20
        drawing.note("Hollow dot: the kernels have changed since.")


PICTURES: Mapping[str, Callable[[bool], str]] = {
    **DIAGRAMS,
    "results": picture,
    "results-narrow": partial(picture, is_narrow=True),
    "results-by-cpu": picture_by_cpu,
}


def _lane(series: int, values: list[float], is_stale: bool = False) -> Lane:
    return Lane(series, min(values), geometric(values), max(values), is_stale)


_MOST_LOSSES = 15


def results_page() -> str:
    """docs/results.md: the picture, every line on every CPU, and where tilewise loses most."""
    cases = all_cases()
    peers = counted_cases(case for case in cases if case.line.row in ROWS)
    losses = sorted((case for case in peers if case.ratio < 1), key=lambda case: case.ratio)
    worst = {(case.line.label, case.kind): case for case in reversed(losses)}  # one of each line and CPU
    loss_cells = [
        [case.kind, case.name, str(case.threads), case.fastest_peer, f"{case.ratio:.2f}×"]
        for case in sorted(worst.values(), key=lambda case: case.ratio)[:_MOST_LOSSES]
    ]
    parts = [
        "# Results",
        "**Here you can** look up how fast tilewise is on your kind of CPU, against which peers, and where it loses.",
        PICTURE.replace("results", "results-by-cpu"),
        f"{ABOUT_RATIOS}\nThe page [Every case](results-cases.md) lists all peers of each case.",
        "To compare tilewise with other libraries on your machine for one kind of work, such as products, run\n"
        f"`make reproduce ROW=products`. The kinds of work are {', '.join(f'`{key}`' for key in ROWS)}.\n"
        "`make bench` measures all of them.",
        "## By kind of work and CPU",
        _ABOUT_CELLS,
        line_table([line for key in ROWS for line in LINES if line.row == key], cases, "against the fastest of"),
        "## Where tilewise is slower",
        f"In {len(losses)} of {len(peers)} measured cases, tilewise is slower than the fastest peer that it was\n"
        f"compared with. This table lists the {_MOST_LOSSES} largest losses, with at most one case for each kind of\n"
        "work and CPU:",
        table(("CPU", "case", "threads", "fastest peer", "ratio"), loss_cells),
        "## Against tilewise itself",
        _ABOUT_ITSELF,
        line_table([line for line in LINES if line.row == "self"], cases, "against"),
        "## Peak memory",
        memory(),
        "## Accuracy after pruning",
        _ABOUT_PRUNING,
        pruning(),
        "## Machines",
        "Other programs ran on these machines during the measurements, so trust the ratios more than the times.",
        machine_table(),
    ]
    return "\n\n".join(parts) + "\n"


def line_table(lines: list[Line], cases: list[Case], heading: str) -> str:
    """Tabulate the lines that were measured anywhere, with a column for each kind of CPU."""
    cells = []
    for line in lines:
        members = [case for case in cases if case.line is line]
        by_kind = (ratio_cell([case for case in members if case.kind == kind]) for kind in kinds())
        if members:
            cells.append((line.label, peer_names(members), *by_kind))
    return table(("", heading, *kinds()), cells)


def cases_page() -> str:
    """docs/results-cases.md: every case with the ratio to each of its peers."""
    parts = [
        "# Every case",
        "",
        "**Here you can** look up one measured case, with every peer that was timed on it.",
        "",
        ABOUT_RATIOS,
    ]
    cases = all_cases()
    ordered = [line for row in (*ROWS, "self", "check") for line in LINES if line.row == row]
    for line, kind in itertools.product(ordered, kinds()):
        members = [case for case in cases if case.line is line and case.kind == kind]
        if members:
            days = dates({"date": day} for case in members for day in case.dates)
            stale = f" {_STALE}" if any(case.is_stale for case in members) else ""
            parts += ["", f"## {line.label}, {kind}", "", f"Measured {days}{stale}.", ""]
            parts.append(table(("case", "threads", "peers", "ratio"), map(_case_cells, members)))
    return "\n".join(parts) + "\n"


def _case_cells(case: Case) -> list[str]:
    ratios = ", ".join(f"{peer} {ratio:.2f}×" for peer, ratio in sorted(case.ratios.items(), key=lambda item: item[1]))
    missing = "".join(f"; {_PEERS.get(peer, peer)} not measured" for peer in case.missing_peers)
    ratio = f"{case.ratio:.2f}×" if not missing else "not counted"
    return [case.name, str(case.threads), ratios + missing, ratio]


def memory() -> str:
    """Tabulate the peak memory of a process that loads, prepares and runs a network, against the smallest peer."""
    cells = []
    for kind in kinds():
        for row in (read_any("memory", kind) or {}).get("peaks", []):
            sizes = [f"{size / 1e6:.0f} MB" for size in row["bytes"].values()]
            mark = "" if row.get("source") == source_hash("memory") else _STALE
            cells.append([kind, row["name"], *sizes, *[""] * (3 - len(sizes)), f"{1 / row['ratio']:.2f}{mark}"])
    headings = ("CPU", "network, float32", "tilewise", "ONNX Runtime", "OpenVINO", "tilewise / smaller peer")
    return f"{_ABOUT_MEMORY}\n\n{table(headings, cells)}"


def pruning() -> str:
    """Points lost at each sparsity, with the share of the dense file that is left where it was written."""
    cells = []
    for row in read_any("prune_accuracy") or []:
        if "sparsity" in row:
            drop = with_interval(*(f"{value:.2f}" for value in (row["points lost"], *row["interval"])))
            size = f"{row['file']:.3f}" if "file" in row else ""
            name = f"{row['model']}, seed {row['seed']}"
            cells.append((name, f"{row['sparsity']:.0%}", row["then"], f"{row['dense %']:.2f} %", drop, size))
    headings = ("model", "zeros", "fine-tuning", "dense", "points lost (95 % interval)", "file size / dense file size")
    return table(headings, cells)


# How many times faster the plan says that something is; without a number, any gain counts.
_LEAST_GAIN = {"10–100×": 10, "4×": 4, "70 %": 1, "O(N²) → O(N)": 5, "cumulative": 1}


def plan_claims() -> str:
    """The teaching plan's success metrics on every reference model: accuracy by cross-validation, speed, memory."""
    accuracy, validation = [], []
    for row in read_any("modules") or []:
        drop = with_interval(*(f"{value:+.2f}" for value in (row["points lost"], *row["interval"])))
        bound = "< 1 point" if row["form"] == "int8" else "< 2 points"
        form, _, epochs = row["form"].partition(", ")
        form = {"int8": "INT8", "zeros": "70 % zeros", "filters": "70 % of the weights, as filters"}[form]
        if row["data"] == "validation":
            validation.append((row["model"], form, epochs, f"{row['images']:,}", drop))
            continue
        holds = "yes" if row["interval"][1] < (1 if row["form"] == "int8" else 2) else "no"
        answers, dense = f"{row['images']:,}", f"{row['dense %']:.2f} %"
        accuracy.append((row["data"], row["model"], form, answers, dense, drop, bound, holds))
    speed = []
    claims = read_any("plan_speed")
    for row in claims["claims"]:
        gain = with_interval(*(f"{value:.2f}" for value in (row["times faster"], *row["interval"])))
        memory = f"{row['memory']:.2f}" if "memory" in row else ""
        holds = "yes" if row["interval"][0] >= _LEAST_GAIN[row["claim"]] else "no"
        if "with" in row:
            growth = (row["4 times the tokens, without"], row["with"])
            holds += ": 4 times the tokens take {:.1f} times as long without, {:.1f} with".format(*growth)
        speed.append((row["claim"], row["model"], row["compared"], gain, memory, holds))
    headings = (
        "data",
        "model",
        "form",
        "test answers",
        "float32, dense",
        "points lost (95 % interval)",
        "claim",
        "holds",
    )
    first = table(headings, accuracy)
    headings = ("claim", "model", "what is compared", "times faster (95 % interval)", "memory, of the first", "holds")
    second = f"{table(headings, speed)}\n\nMeasured {claims['date']}{age_note(claims, 'plan_speed')}."
    headings = ("model", "form", "fine-tuning", "answers", "points lost (95 % interval)")
    return f"{first}\n\n{second}\n\n{table(headings, validation)}"


def int8_speeds() -> str:
    """Tabulate INT8 against the peers and against our own float32, on the CPUs where it was measured."""
    lines = [line for line in LINES if line.row == "int8" or line.label.startswith("INT8 against")]
    cells = []
    for line in lines:
        members = [case for case in all_cases() if case.line == line]
        for kind in kinds():
            on_cpu = [case for case in members if case.kind == kind]
            if counted_cases(on_cpu):
                cells.append((line.label, kind, peer_names(on_cpu), ratio_cell(on_cpu), str(len(on_cpu))))
    return table(("", "CPU", "against the fastest of", "typical (worst)", "cases"), cells)


SECTIONS = {**OTHER_SECTIONS, "summary": summary, "plan": plan_claims, "int8 speeds": int8_speeds}


def filled(text: str, sections: Mapping[str, Callable[[], str]], figures: Mapping[str, Callable[[], str]]) -> str:
    """Return a page with all its marked sections and figures rewritten; an unknown name is an error."""
    text = _SECTION.sub(lambda mark: f"{mark[1]}{sections[mark[2]]()}\n{mark[3]}", text)
    return _FIGURE.sub(lambda mark: f"{mark[1]}{figures[mark[2]]()}{mark[3]}", text)


def written() -> dict[Path, str]:
    """Return the expected text of README.md, every page under docs/ and the generated pictures."""
    docs = ROOT / "docs"
    whole = {
        docs / "results.md": results_page(),
        docs / "results-cases.md": cases_page(),
        **{
            docs / "assets" / f"{name}{suffix}.svg": draw(bool(suffix))
            for name, draw in PICTURES.items()
            for suffix in ("", "-dark")
        },
    }
    pages = [ROOT / "README.md", *sorted(path for path in docs.rglob("*.md") if path not in whole)]
    return whole | {p: filled(p.read_text(encoding="utf-8"), SECTIONS, FIGURES) for p in pages}


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
