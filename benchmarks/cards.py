"""The figures of the embedded collections, from the collections themselves: for their data cards and their list."""

from __future__ import annotations

from functools import cache

import numpy as np

from benchmarks.results_files import read_any, table
from tilewise.costmodel.data.collection import read_collection
from tilewise.costmodel.data.dataset import embedded_collections, find_collection, load_dataset
from tilewise.costmodel.data.describe import CollectionSummary, describe
from tilewise.tune.measure.export import slug

_HARDWARE = {
    "h200": "NVIDIA H200, Triton kernels",
    "cpu": "Zen 4 and Sapphire Rapids, each as AVX-512 and as AVX2, native kernels",
}


@cache
def _described(collection: str) -> CollectionSummary:
    return describe(collection, progress=False)


def collections_table() -> str:
    """The collections that come with the package."""
    lines = []
    for name in sorted(embedded_collections(), reverse=True):
        total, families = _described(name).total, _described(name).families
        assert total is not None
        hardware = _HARDWARE.get(name, str(_described(name).hardware))
        link = f"[collections/{name}.md](collections/{name}.md)"
        lines.append(
            (f"`{name}`", hardware, f"{total.kernels} in {len(families)} families", f"{total.configs:,}", link)
        )
    return table(("name", "hardware", "kernels", "configurations", "card"), lines)


def card(collection: str) -> str:
    """Describe a collection: its kernels, its noise, and how far apart its configurations are."""
    description = _described(collection)
    parts = ", ".join(f"{name} {s.kernels} kernels of {s.programs} programs" for name, s in description.splits.items())
    lower, upper = np.quantile(np.concatenate(list(description.deviations.values())), [0.75, 0.9])
    total = description.total
    assert total is not None
    contents = f"{total.kernels} kernels in {len(description.families)} families, {total.configs:,} configurations"
    facts = [
        ("contents", contents),
        ("splits", f"{parts}; by {'shape' if collection == 'cpu' else 'architecture'}"),
        (
            "noise",
            f"relative standard deviation of repeated timings: median {total.noise or 0:.2%}; "
            f"below {lower:.1%} for 75 % of the configurations, below {upper:.1%} for 90 %",
        ),
        ("left out", _verdicts(collection)),
        ("size", f"{find_collection(collection).stat().st_size / 1e6:.1f} MB"),
    ]
    headings = ("family", "kernels", "configurations", "slowest / fastest", "median / fastest", "fixed choice",
                "default")  # fmt: skip
    families = [
        (
            name, str(g.kernels), f"{g.configs:,}", f"{g.spread:.1f}×", f"{g.median_config:.2f}×",
            f"+{g.fixed_loss:.0%}", f"+{g.default_loss:.0%}", f"{g.noise or 0:.2%}",
        )
        for name, g in description.families.items()
    ]  # fmt: skip
    return table(("", ""), facts) + "\n\n" + table((*headings, "noise"), families)


def machines() -> str:
    """The kinds of CPU in the CPU's collection, in numbers as its columns hold them."""
    collection = read_collection(find_collection("cpu"))
    every = [kernel for members in collection.splits.values() for kernel in members]
    lines = []
    for part in collection.schema.extra["machines"]:
        features = part["machine"]["features"]
        mine = [m for m in every if m.kernel.program.endswith("." + slug(str(part["hardware"])))]
        threads = sorted({int(m.problem["threads"]) for m in mine})
        caches = " / ".join(f"{features[f'machine_{name}_kib']:,}" for name in ("l1", "l2", "l3", "l3_share"))
        rates = " / ".join(f"{features[f'machine_{name}_mbs'] / 1e3:.0f}" for name in ("l1", "l2", "l3", "memory"))
        lines.append(
            (
                str(part["hardware"]),
                str(len(mine)),
                ", ".join(map(str, threads)),
                str(features["machine_lanes"]),
                str(features["machine_registers"]),
                caches,
                f"{features['machine_mflops'] / 1e3:.0f}",
                rates,
            )
        )
    headings = ("machine", "kernels", "threads", "float32 lanes", "vector registers", "L1 / L2 / L3 / L3 per core, KiB")
    return table((*headings, "GFLOP/s per core", "GB/s per core from L1 / L2 / L3 / memory"), lines)


def _verdicts(collection: str) -> str:
    """Configurations that were measured by no clock: wrong results, and what did not fit the hardware."""
    extra = load_dataset(collection, progress=False).schema.extra
    verdicts = [by for part in extra.get("machines", [extra]) for by in part.get("verdicts", {}).values()]
    wrong, misfit = (sum(by.get(kind, 0) for by in verdicts) for kind in ("wrong", "misfit"))
    return f"{wrong} configurations with a wrong result, {misfit} that the hardware could not run"


def again(collection: str) -> str:
    """Compare a second measurement with the first, as printed by `tilewise collect compare FIRST SECOND --json`."""
    record = read_any(f"again_{collection}")
    if record is None:
        return "No second measurement is kept for this collection."
    below = sum(kernel["rank_correlation"] < 0.9 for kernel in record["kernels"])
    median, least = (f"{record[key]:.4f}" for key in ("median_correlation", "least_correlation"))
    return (
        f"{len(record['kernels'])} kernels with {record['configs']:,} configurations were measured twice.\n\n"
        f"- **Rank correlation** between the runtimes of a kernel's two measurements: {median} in the median,\n"
        f"  {least} for the worst kernel. It is below 0.9 for {below or 'no'} kernel{'' if below == 1 else 's'}.\n"
        "- **Choice**: by the second measurement, the first measurement's fastest configuration is on average\n"
        f"  {record['mean_choice_loss']:.2%} slower than the fastest one, and {record['largest_choice_loss']:.2%} "
        "in the worst case."
    )
