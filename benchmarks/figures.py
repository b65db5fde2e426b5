"""The generated tables and figures of README.md and docs/, by name.

A page marks a section with a pair of comments and a single figure with `<!--figure NAME-->…<!--/figure-->`;
`benchmarks.tables` fills both from here. Every function reads a file of results, or a constant of the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from benchmarks import gpu_tables, llama_cpp_tables, ranker_tables
from benchmarks.cards import again, card, collections_table, machines
from benchmarks.cases import age_note
from benchmarks.results_files import RESULTS, geometric, kinds, read_any, table
from tilewise._wording import with_interval
from tilewise.costmodel.board import HEADINGS, board_lines, read_board
from tilewise.costmodel.metrics import over_seeds
from tilewise.tune.search.replay import OURS, SIMPLE

NOT_MEASURED = "not measured yet"


def gpu_tuning() -> str:
    """Tabulate the tuner on a GPU, as recorded by `python3 -m tilewise.tune.triton.check --out DIR`."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in read_any("gpu_tuning")["problems"]:
        groups.setdefault(_group(row["problem"]), []).append(row)
    cells = [_gpu_line(_with_shape_count(name, members), members) for name, members in groups.items()]
    headings = ("", "first choice, not measured", "five measurements", "default", "tuning time, exhaustive / five")
    return table((*headings, "worst after five"), cells)


def _group(problem: Mapping[str, Any]) -> str:
    if problem["family"] != "matmul":
        return "other families"
    return "matmul, rows of odd lengths" if problem["n"] % 8 or problem["k"] % 8 else "matmul"


def _with_shape_count(name: str, members: list[Mapping[str, Any]]) -> str:
    column = "dtype" if name.startswith("matmul") else "family"
    values = sorted({row["problem"][column].replace("_", " ") for row in members})
    return f"{name}: {len(members)} shapes ({', '.join(values)})"


def _gpu_line(name: str, members: list[Mapping[str, Any]]) -> list[str]:
    means = [f"{geometric(row[column] for row in members):.3f}" for column in ("first", "five", "default")]
    quicker = geometric(row["exhaustive_seconds"] / row["five_seconds"] for row in members)
    return [name, *means, f"{quicker:.0f}", f"{min(row['five'] for row in members):.3f}"]


def own_kernels() -> str:
    """Tabulate `autotune` on kernels of unknown families: the first three shapes, and the later ones."""
    cells = []
    for name, kernel in read_any("gpu_tuning")["own"].items():
        first, later = kernel["shapes"][:3], kernel["shapes"][3:]
        cells.append((f"{name} ({kernel['shapes'][0]['configs']})", *_both(first), *_both(later)))
    headings = ("kernel (configurations)", "first three shapes", "measurements", "after them", "measurements")
    return table(headings, sorted(cells))


def _both(shapes: list[Mapping[str, Any]]) -> tuple[str, str]:
    return f"{geometric(s['ratio'] for s in shapes):.3f}", f"{sum(s['measured'] for s in shapes) / len(shapes):.1f}"


def replayed() -> str:
    """Tabulate the replay on held-out programs, with a column for each collection."""
    collections = read_any("replay")["replay"]
    names = sorted(collections, reverse=True)
    lines: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("kernels", lambda r: str(r["kernels"])),
        *(_replay_row(strategy, k) for k in (3, 5, 10) for strategy in (SIMPLE, OURS)),
        *((f"error saved by expected improvement, k = {k} (95 % interval)", partial(_saving, k)) for k in (3, 5, 10)),
        ("the first choice, not measured", lambda r: f"{r['first_choice']:.3f} of the best"),
        ("the default", lambda r: f"{100 * r['default']:.1f} %"),
    ]
    return table(
        ("", *(f"`{n}`" for n in names)), [(what, *(say(collections[n]) for n in names)) for what, say in lines]
    )


# How the tables call the strategies of a replay.
_STRATEGIES = {
    SIMPLE: "in the model's order",
    OURS: "by expected improvement",
    "random": "random order",
    "the mean over earlier problems": "mean of earlier problems",
    "a process of one problem": "Gaussian process of this problem",
    "a process over problems": "Gaussian process across problems",
}


def _replay_row(strategy: str, count: int) -> tuple[str, Callable[[Mapping[str, Any]], str]]:
    return f"{_STRATEGIES[strategy]}, k = {count}", lambda r: f"{100 * r['regret'][strategy][count - 1]:.2f} %"


def _saving(count: int, replay: Mapping[str, Any]) -> str:
    one = next(c for c in replay["comparisons"] if c["measurements"] == count)
    return with_interval(*(f"{100 * one[name]:.2f}" for name in ("saving", "low", "high")))


def without_model() -> str:
    """Tabulate the replay without a model, and what each mechanism saves over the simpler one."""
    collections = {
        name: row["without_model"] for name, row in sorted(read_any("replay")["replay"].items(), reverse=True)
    }
    cells = [("problems", *(str(row["problems"]) for row in collections.values()))]
    for place, strategy in enumerate(next(iter(collections.values()))["strategies"]):
        values = [row["strategies"][place]["regret"][4] for row in collections.values()]
        cells.append((f"{_STRATEGIES[strategy['name']]}, k = 5", *(f"{100 * value:.1f} %" for value in values)))
    pairs = dict.fromkeys((c["mechanism"], c["simpler"]) for row in collections.values() for c in row["comparisons"])
    for pair in pairs:
        some = [
            [c for c in row["comparisons"] if (c["mechanism"], c["simpler"]) == pair] for row in collections.values()
        ]
        saved = [_saving(5, {"comparisons": one}) for one in some]
        cells.append((f"{_STRATEGIES[pair[0]]}: error saved over {_STRATEGIES[pair[1]]} (95 % interval)", *saved))
    return table(("", *(f"`{name}`" for name in collections)), cells)


def unseen_tuning() -> str:
    """Tabulate tuning with a model that was not trained on the processor, for each kind of CPU."""
    ways = ("default", "first", "five")
    cells = []
    for kind in kinds():
        content = read_any("tuning_unseen", kind) or {}
        for family, content_of_family in (content.get("families") or {}).items():
            ratios = [f"{content_of_family[way]['mean']:.3f} ({content_of_family[way]['worst']:.2f})" for way in ways]
            when = f"{content['date']}{age_note(content, 'tuning')}"
            cells.append((kind, f"{content_of_family['problems']} of {family}", *ratios, when))
    return table(("", "", "default", "first choice", "five measurements", "measured"), cells)


def shipped_errors() -> str:
    """Tabulate the errors of the shipped models and of simple baselines on the test programs."""
    collections = read_any("replay")["replay"]
    cells = [
        (f"`{name}`: {who}", *(f"{100 * errors[k]:.2f} %" for k in ("top1", "top5", "top10")))
        for name in sorted(collections, reverse=True)
        for who, errors in collections[name]["errors"].items()
    ]
    return table(("test programs", "top-1 error", "top-5", "top-10"), cells)


def sure() -> str:
    """Tabulate how often the tuner claims to be within 5 % on the test programs, and how often it is right."""
    collections = read_any("replay")["replay"]
    cells = [
        (f"`{name}`, {'none' if count == '0' else count} measured", f"{row['said']:.0%}",
         f"{row['right']:.1%}" if "right" in row else "", f"{row['close']:.0%}")
        for name in sorted(collections, reverse=True)
        for count, row in collections[name]["sure"].items()
    ]  # fmt: skip
    cells += [
        (f"`{name}`, the recorded fastest, measured again", "", "", f"{collections[name]['read_again']:.0%}")
        for name in sorted(collections, reverse=True)
    ]
    return table(("within 5 % (calibrated)", "claimed for", "claim is right", "share of all choices within 5 %"), cells)


def board() -> str:
    """Collections and models: `tilewise tiles board`."""
    rows = read_board(RESULTS / "board.json")
    if not rows:
        return f"{NOT_MEASURED}: `tilewise tiles board h200 cpu --out benchmarks/results/board.json` writes it."
    return table(HEADINGS, board_lines(rows))


def devices() -> str:
    """A device left out of training: `python -m benchmarks.devices`."""
    content = read_any("devices")
    if content is None:
        return f"{NOT_MEASURED}: `python -m benchmarks.devices` writes `benchmarks/results/devices.json`."
    who = list(content["left_out"])
    cells = [
        (name, *(f"{content['left_out'][device][name]:.3f}" for device in who), f"{mean:.3f} ({low:.3f} to {high:.3f})")
        for name, (mean, low, high) in content["means"].items()
    ]
    for what, row in content.get("ceilings", {}).items():
        label = f"hindsight: best of {what}"
        mean = math.exp(sum(math.log(row[device]) for device in who) / len(who))
        cells.append((label, *(f"{row[device]:.3f}" for device in who), f"{mean:.3f}"))
    near = ("configurations within 10 % of the best", *(str(content["within_10"][device]) for device in who), "")
    short = [device.partition("-")[2] or device for device in who]
    return table(("left out:", *short, "geometric mean (95 % interval)"), [*cells, near])


def product_choice() -> str:
    """Paths and tiles of float32 products on a machine left out of the fit: `python -m tools.fit_products`."""
    cells = []
    for row in read_any("product_choice"):
        if row["held_out"] != "machine":
            continue
        labels = f"{row['set']}: {row['machine']} {row['isa']}", str(row["threads"]), str(row["products"])
        rules, gain = "", ""  # not recorded on newer machines
        if "rules" in row:
            rules = f"{row['rules']:.3f} ({row['rules_slowest']:.2f})"
            gain = f"{row['gain']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        cells.append((*labels, f"{row['learned']:.3f} ({row['learned_slowest']:.2f})", rules, gain))
    headings = ("left out", "threads", "products", "learned", "hand-written rules", "gain (95 % interval)")
    return table(headings, cells)


def product_paths() -> str:
    """Range of the shares of the fastest path's speed, over machines and instruction sets left out of the fit."""
    rows = [row for row in read_any("product_choice") if row["held_out"] == "machine" and row["set"] == "paths"]
    shares = [row["learned"] for row in rows]
    return f"{min(shares):.2f} to {max(shares):.2f}"


def processors() -> str:
    """The CPU collection with a processor left out: `python -m benchmarks.devices --processors`."""
    content = (read_any("devices") or {}).get("processors")
    if not content:
        return f"{NOT_MEASURED}: `python -m benchmarks.devices --processors` writes it into `devices.json`."
    cells = [
        (name, f"{row['plain']:.4f}", f"{row['reached']:.4f}", "{:+.2%} ({:+.2%} to {:+.2%})".format(*row["gain"]))
        for name, row in content.items()
        if isinstance(row, dict)
    ]
    headings = (f"{content['kernels']} kernels", "the model alone", "with measurements", "gain (95 % interval)")
    return table(headings, cells)


def kernel_tuner() -> str:
    """Search strategies of Kernel Tuner compared with ours on its own spaces: `python -m benchmarks.devices`."""
    content = read_any("devices")
    if content is None or not content.get("strategies"):
        return f"{NOT_MEASURED}: `python -m benchmarks.devices --kernel-tuner` writes it into `devices.json`."
    rows = sorted(content["strategies"].items(), key=lambda item: -item[1]["score"])
    cells = [
        (name, "{:.3f} ({:.3f} to {:.3f})".format(row["score"], *row["interval"]), f"{row['reached']:.3f}")
        for name, row in rows
    ]
    return table(("strategy", "score over the first 20 (95 % interval)", "best / best of 20"), cells)


def layout() -> str:
    """Layout models on synthetic graphs, over seeds: `python -m benchmarks.layout`."""
    content = read_any("layout")
    if content is None:
        return f"{NOT_MEASURED}: `python -m benchmarks.layout` writes `benchmarks/results/layout.json`."
    cells = []
    for name, models in content["runs"].items():
        for model, runs in models.items():
            tau = over_seeds([run["tau"] for run in runs.values()])
            half = f" ± {tau.mean - tau.low:.3f}" if len(runs) > 1 else ""
            seconds = [run["processor_seconds"] for run in runs.values() if "processor_seconds" in run]
            used = f"{sum(seconds) / len(seconds):.0f} s" if seconds else ""
            cells.append((f"synthetic `{name}`", model, f"{tau.mean:.3f}{half}", used, str(len(runs))))
    counts = ", ".join(f"{count} {split}" for split, count in content["graphs"].items())
    sizes = f"about {content['nodes']} nodes and {content['configurations']} configurations each"
    headings = ("collection", "model", "Kendall's tau", "processor time of training", "seeds")
    return f"{table(headings, cells)}\n\nGraphs of a seed: {counts}; {sizes}."


def ranking() -> str:
    """TileRanker compared with boosted trees and the course's network, over seeds: `python -m benchmarks.ranking`."""
    content = read_any("ranking")
    if content is None:
        return f"{NOT_MEASURED}: `python -m benchmarks.ranking` writes `benchmarks/results/ranking.json`."
    cells = []
    for name, models in content.items():
        for model, row in models.items():
            if model == "kernels":
                continue
            errors = (f"{row[k][0]:.2f} ± {row[k][1]:.2f} %" for k in ("top1", "top5"))
            cells.append((f"`{name}`", model, *errors, f"{row['processor_seconds'][0]:.0f} s", str(row["seeds"])))
    return table(("collection", "model", "top-1 error", "top-5 error", "processor time of training", "seeds"), cells)


def int8_accuracy() -> str:
    """Points lost by the worst observer, model by model."""
    rows = [row for row in read_any("int8_accuracy")["accuracy"] if "observer" in row]
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["seed"]), []).append(row)
    cells = []
    for (model, seed), members in groups.items():
        worst = max(members, key=lambda row: (row["points lost"], row["interval"][1]))
        name = model if "shipped" in model else f"{model}, seed {seed}"
        drop = with_interval(*(f"{value:.2f}" for value in (worst["points lost"], *worst["interval"])))
        cells.append((name, f"{worst['float32 %']:.2f} %", f"{worst['images']:,}", drop))
    return table(("model", "float32", "images", "points lost, worst of four observers (95 % interval)"), cells)


def profiling_checks() -> str:
    """The instruments compared with their peers."""
    parts = read_any("profiling")["parts"]
    flops, memory = parts["flops"], [row["ratio"] for row in parts["memory"].values()]
    pyperf = [row["ratio"] for row in parts["pyperf"].values()]
    cost = [row["overhead"] for row in parts["overhead"].values() if isinstance(row, dict)]
    same, different = parts["same"], parts["different"]
    cells = [
        ("FLOPs equal to PyTorch's FlopCounterMode", f"{sum(r['equal'] for r in flops.values())} of {len(flops)}"),
        ("peak memory over memray's", f"{min(memory):.3f} to {max(memory):.3f} on {len(memory)} workloads"),
        ("p50 over pyperf's, interleaved", f"{min(pyperf):.3f} to {max(pyperf):.3f} on {len(pyperf)} functions"),
        ("identical functions called different", f"{same['claimed']} of {same['trials']}"),
        ("functions 5 % apart called different", f"{different['claimed']} of {different['trials']}"),
        ("what profiling adds to an operation of a millisecond", f"{min(cost):.1%} to {max(cost):.1%}"),
        ("what it adds when it is off", f"{1e9 * parts['overhead']['off_seconds']:.0f} ns an operation"),
    ]
    return table(("check", "found"), cells)


@cache
def _accuracy(model: str) -> Mapping[str, Any]:
    return next(row for row in read_any("int8_accuracy")["accuracy"] if row["model"] == model)


def left_out() -> str:
    """The CPU's model on machines that it was not taught on."""
    cells = []
    for model, content in read_any("machines")["models"].items():
        for fold, row in content["folds"].items():
            low, high = (100 * x for x in row["five_over_default"])
            cells.append(
                (
                    fold,
                    model,
                    str(row["kernels"]),
                    *(f"{row[way]:.3f}" for way in ("default", "first", "five", "five_drawn")),
                    f"{row['slower_than_default']:.2f}",
                    f"{low:+.1f} to {high:+.1f} %",
                )
            )
    headings = ("left out", "model", "kernels", "default", "first choice", "five measurements")
    more = ("five at random", "first / default, worst", "five over default, 95 % interval")
    return table((*headings, *more), cells)


_REQUESTS = {
    "known, one a request": "measured problem, one per request",
    "known, 64 a request": "measured problems, 64 per request",
    "not known, 500 configurations": "new problem, ranked by the model among 500 configurations",
    "known, at 1,000 a second": "measured problem, at 1,000 requests per second",
}


def fleet() -> str:
    """Tabulate the throughput of one service and one store, on one core of the reference machine."""
    content = read_any("fleet")
    service = [
        [_REQUESTS[row["what"]], f"{row['choices_per_s']:,}", f"{row['p50_ms']:.1f} ms", f"{row['p99_ms']:.1f} ms"]
        for row in content["service"]
    ]
    stores = [[row["what"], f"{row['batches_per_s']:,}", f"{row['timings_per_s']:,}"] for row in content["stores"]]
    answers = table(["request", "choices per second", "median latency", "99th percentile"], service)
    return f"{answers}\n\n{table(['store', 'batches per second', 'timings per second'], stores)}"


def campaign() -> str:
    """The campaign in which everything was killed once, and how its timings agree with one process alone."""
    content = read_any("campaign")
    if content is None:
        return "It has not been measured on a quiet machine yet."
    size = f"{content['kernels']:,} kernels with {content['timings']:,} timings"
    whole = f"The campaign measured {size} in {content['seconds']:,} s. No timing was lost or stored twice."
    columns = ("pooled", "median_kernel", "mean_kernel", "worst_kernel")
    names = {"fleet and alone": "campaign and single process", "alone twice": "single process, measured twice"}
    compared = {names[name]: content[name] for name in names if name in content}
    cells = [[what, f"{of['kernels']:,}", *(f"{of[name]:.3f}" for name in columns)] for what, of in compared.items()]
    headings = ["compared", "kernels", "all configurations", "median kernel", "mean kernel", "worst kernel"]
    return f"{whole}\n\n{table(headings, cells)}"


SECTIONS: Mapping[str, Callable[[], str]] = {
    "fleet": fleet,
    "campaign": campaign,
    "collections": collections_table,
    "card h200": lambda: card("h200"),
    "card cpu": lambda: card("cpu"),
    "machines": machines,
    "left out": left_out,
    "again h200": lambda: again("h200"),
    "gpu tuning": gpu_tuning,
    "gpu products": gpu_tables.products,
    "gpu compiled": gpu_tables.compiled,
    "gpu exhaustive": gpu_tables.exhaustive,
    "gpu training": gpu_tables.training,
    "gpu ways": gpu_tables.ways,
    "gpu serving": gpu_tables.serving,
    "gpu serving new shapes": gpu_tables.serving_new_shapes,
    "gpu left out": gpu_tables.left_out_gpus,
    "own kernels": own_kernels,
    "replay": replayed,
    "replay without a model": without_model,
    "unseen tuning": unseen_tuning,
    "shipped models": shipped_errors,
    "sure": sure,
    "board": board,
    "devices": devices,
    "processors left out": processors,
    "product choice": product_choice,
    "kernel tuner": kernel_tuner,
    "foreign": ranker_tables.foreign,
    "unseen": ranker_tables.unseen,
    "reliability": ranker_tables.reliability,
    "tile peers": ranker_tables.tile_peers,
    "train devices": ranker_tables.train_devices,
    "tile sample": ranker_tables.tile_sample,
    "products of another device": ranker_tables.products,
    "ranking": ranking,
    "layout": layout,
    "int8 accuracy": int8_accuracy,
    "profiling": profiling_checks,
    "llama cpp speeds": llama_cpp_tables.speeds,
    "gguf models": llama_cpp_tables.models,
    "llama cpp perplexities": llama_cpp_tables.perplexities,
    "ctranslate2 speeds": llama_cpp_tables.beside_ctranslate2,
}


def _processor_gain(row: str) -> str:
    """Return the gain of a row of `processors`."""
    return f"{read_any('devices')['processors'][row]['gain'][0]:+.2%}"


FIGURES: Mapping[str, Callable[[], str]] = {
    "processors one by one": lambda: _processor_gain("10, one by one"),
    "product paths": product_paths,
    "perplexity float32": lambda: f"{_accuracy('gpt 4x128, dynamic')['perplexity float32']:.3f}",
    "perplexity int8": lambda: f"{_accuracy('gpt 4x128, dynamic')['int8']:.3f}",
    "perplexity up": lambda: f"{_accuracy('gpt 4x128, dynamic')['up %']:.2f} %",
    "int8 held": lambda: f"{_accuracy('vgg6, size')['held']:.3f}",
    "int8 disk": lambda: f"{_accuracy('vgg6, size')['disk']:.3f}",
    "int8 grows": lambda: f"{_accuracy('vgg6, size')['grows int8 MB']:.2f} MB",
    "float32 grows": lambda: f"{_accuracy('vgg6, size')['grows float32 MB']:.2f} MB",
}
