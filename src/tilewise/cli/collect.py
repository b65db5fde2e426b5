"""`tilewise collect`: measure tiled kernels on this machine, and turn the measurements into collections."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise._addons import require
from tilewise._wording import pluralize
from tilewise.cli.every import AsJson, answer, argument, option, output_file, output_folder
from tilewise.cli.tables import progress_bar, show, table

if TYPE_CHECKING:
    from tilewise.costmodel.data.collection import Collection

collect = typer.Typer(
    help="Measure tiled kernels on this CPU or GPU, and make collections of the measurements.", no_args_is_help=True
)

StorePath = Annotated[str, argument("A store (a file or a postgresql:// URL), or the folder of a GPU run.")]
MachineName = Annotated[str | None, option("Which machine's part of a shared store.", "--machine")]


Shapes = Annotated[Path | None, option("A JSON list of your own problems (default: built-in programs).")]
Minutes = Annotated[float, option("Stop after this many minutes; the same command continues later.")]
Out = Annotated[Path | None, output_file(help="The store, created if missing (default: cpu.sqlite or triton.sqlite).")]
StoreUrl = Annotated[
    str | None, option("Instead of --out: a postgresql:// URL that several machines write to, or a file.")
]
RayAddress = Annotated[
    str | None, option("Measure on the nodes of this Ray cluster instead (auto, or host:port); needs tilewise-fleet.")
]
Seed = Annotated[int, option("Seed of the order of kernels and configurations.")]
Configs = Annotated[int | None, option("Measure at most this many configurations of a kernel; 0 for all.")]
Finals = Annotated[
    bool,
    option("Only repeat the timing of the best few configurations of finished kernels, if not done yet.", "--finals"),
]
Plugin = Annotated[list[str] | None, option("A module that adds families of your own; may be repeated.")]


@collect.command()
def cpu(
    shapes: Shapes = None,
    minutes: Minutes = 20.0,
    out: Out = None,
    store: StoreUrl = None,
    ray: RayAddress = None,
    seed: Seed = 0,
    configs: Configs = None,
    plugin: Plugin = None,
    finals: Finals = False,
    plan: Annotated[bool, option("Only print what would be measured, and how long it takes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure the native kernels of this CPU: check every tile against NumPy, then time it against the default.

    Example: tilewise collect cpu --minutes 10 --out measurements.sqlite
    """
    if plan:
        return _plan(shapes, configs, plugin or (), as_json)
    options = {"seed": seed, "configs": configs, "finals": finals, "plugins": tuple(plugin or ())}
    _measure("cpu", ray, as_json, shapes=shapes, minutes=minutes, out=_store_location(out, store), **options)


@collect.command()
def triton(
    shapes: Shapes = None,
    minutes: Minutes = 8.0,
    out: Out = None,
    store: StoreUrl = None,
    ray: RayAddress = None,
    seed: Seed = 0,
    configs: Configs = None,
    plugin: Plugin = None,
    finals: Finals = False,
    device: Annotated[str, option("cuda, or interpreter for a dry run without a GPU.")] = "cuda",
    as_json: AsJson = False,
) -> None:
    """Measure Triton kernels on this GPU: compile in parallel, check against PyTorch, time against the default.

    Example: tilewise collect triton --shapes shapes.json --minutes 5 --out measurements.sqlite
    """
    if device not in ("cuda", "interpreter"):
        raise typer.BadParameter("device is cuda or interpreter.")
    if ray is None and device == "cuda":
        from tilewise.gpu.measure.execution import check_gpu

        check_gpu()
    options = {"seed": seed, "configs": configs, "finals": finals, "plugins": tuple(plugin or ()), "device": device}
    _measure("triton", ray, as_json, shapes=shapes, minutes=minutes, out=_store_location(out, store), **options)


def _measure(kind: str, ray: str | None, as_json: bool, **options: Any) -> None:
    """Measure on this machine, or with `ray` on the nodes of a cluster."""
    if ray is not None:
        require("tilewise_fleet.cli.campaign", "a campaign on Ray").on_ray(kind, ray, as_json, **options)
    else:
        _collect(kind, as_json, **options)


def _store_location(out: Path | None, store: str | None) -> Path | str | None:
    """Return the store named by --out or --store; both together are an error."""
    if out is not None and store is not None:
        raise typer.BadParameter("--out and --store both name the store; give one of them.")
    return store if store is not None else out


def _plan(shapes: Path | None, configs: int | None, plugins: Sequence[str], as_json: bool) -> None:
    """Print the kernels that would be measured and the expected time, family by family."""
    from tilewise.tune.measure.collector import plan_cpu

    lines = plan_cpu(shapes=shapes, configs=configs, plugins=plugins)
    if as_json:
        typer.echo(json.dumps(lines))
        return
    rows = [(n["family"], n["threads"], n["kernels"], f"{n['configs']:,}", f"{n['seconds'] / 60:.1f}") for n in lines]
    show(table(("family", "threads", "kernels", "configurations", "minutes"), rows))
    kernels, pairs = (sum(line[name] for line in lines) for name in ("kernels", "configs"))
    minutes = sum(line["seconds"] for line in lines) / 60
    summary = f"{pluralize(kernels, 'kernel')}, {pluralize(pairs, 'configuration')}"
    typer.echo(f"{summary}, about {pluralize(round(minutes), 'minute')} on an idle machine.")


def _collect(kind: str, as_json: bool, **options: Any) -> None:
    """Measure on this machine and print what the store holds afterwards."""
    from tilewise.tune import collect as measure

    with progress_bar(None) as progress:
        try:
            result = measure(kind, say=lambda line: typer.echo(line, err=True), progress=progress, **options)
        except KeyboardInterrupt:
            typer.echo("Stopped. The measurements so far are in the store; the same command continues.", err=True)
            raise typer.Exit(130) from None
    noise = f", scatter {result.scatter:.2%}" if result.scatter is not None else ""
    kernels_text = pluralize(result.in_store["kernels"], "measured kernel")
    lines = [f"{result.store} holds {kernels_text}, {result.kernels} of them new{noise}."]
    if result.left:
        kernels_left = "1 kernel is" if result.left == 1 else f"{result.left} kernels are"
        why = "(the time was up, the machine was busy, or a kernel failed); the same command continues."
        lines.append(f"{kernels_left} still to be measured {why}")
    answer(as_json, result, *lines, notes=result.failures[:10])


@collect.command()
def compare(
    first: Annotated[str, argument("A store, the folder of a GPU run, or a collection by name, file or folder.")],
    second: Annotated[str, argument("The same kernels measured again.")],
    out: Annotated[Path | None, output_file(help="A file to write the JSON to as well.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two measurements of the same kernels: rank correlation, and the loss of the first one's choice.

    Example: tilewise collect compare h200 second_visit
    """
    from tilewise._atomic import write_atomic
    from tilewise.tune.measure.export import compare as agreement
    from tilewise.tune.measure.export import open_collection

    result = agreement(open_collection(first), open_collection(second))
    result_json = json.dumps(result)
    if out is not None:
        write_atomic(out, f"{result_json}\n")
    if as_json:
        typer.echo(result_json)
        return
    headings = ("kernel", "configurations", "rank correlation", "best of first, in second", "second / first")
    rows = []
    for k in result["kernels"]:
        figures = f"{k['rank_correlation']:.4f}", f"+{k['choice_loss']:.2%}", f"{k['speed_ratio']:.3f}"
        rows.append((k["kernel"], k["configs"], *figures))
    show(table(headings, rows, f"{first} and {second}"))
    correlation = f"{result['median_correlation']:.4f} in the median, {result['least_correlation']:.4f} at least"
    loss = f"{result['mean_choice_loss']:.2%} in the mean, {result['largest_choice_loss']:.2%} at most"
    compared = f"{pluralize(len(result['kernels']), 'kernel')}, {pluralize(result['configs'], 'configuration')}"
    typer.echo(f"{compared}. Rank correlation: {correlation}.")
    typer.echo(f"The first one's best configuration is slower in the second by {loss}.")
    typer.echo(f"Runtimes relative to the default differ by {result['median_deviation']:.2%} in the median.")


@collect.command()
def export(
    store: StorePath,
    out: Annotated[Path, output_folder(help="Folder for train, valid, test and schema.json.")],
    name: Annotated[str, option("Name of the collection.")] = "own",
    split: Annotated[
        str,
        option("auto (your own kernels by shape, built-in ones by program), shape, program, or train (everything)."),
    ] = "auto",
    machine: MachineName = None,
    plugin: Plugin = None,
    as_json: AsJson = False,
) -> None:
    """Write a store as a folder of npz files in TpuGraphs' format.

    Example: tilewise collect export measurements.sqlite --out my_collection
    """
    from tilewise.store.aggregate import open_measurements
    from tilewise.tune.measure.collector import load_plugins
    from tilewise.tune.measure.export import export_folder, make_collection

    load_plugins(plugin or ())
    with open_measurements(store, machine) as measurements:
        collection = make_collection(measurements, name, split=split)
    export_folder(collection, out)
    _report_collection(collection, out, as_json)


@collect.command()
def embed(
    stores: Annotated[list[Path], argument("One or more stores; those of several machines become one collection.")],
    name: Annotated[str, option("The name that load_dataset will know it by, such as cpu or h200.")],
    out: Annotated[Path | None, output_file(help="The file to write (default: NAME.npz in this folder).")] = None,
    telling: Annotated[
        float, option("Leave out kernels whose tiles differ by less than this many times the noise.", min=0)
    ] = 5.0,
    plugin: Plugin = None,
    as_json: AsJson = False,
) -> None:
    """Write stores into one small file that load_dataset and every command can read.

    Example: tilewise collect embed measurements.sqlite --name mine
    """
    from tilewise.store.aggregate import open_measurements
    from tilewise.tune.measure.collector import load_plugins
    from tilewise.tune.measure.export import embed as write
    from tilewise.tune.measure.export import make_collection, merge_collections

    load_plugins(plugin or ())
    collections = []
    for store in stores:
        with open_measurements(store) as measurements:
            collections.append(make_collection(measurements, name, telling))
    collection = collections[0] if len(collections) == 1 else merge_collections(collections, name)
    target = out or Path(f"{name}.npz")
    write(collection, target)
    _report_collection(collection, target, as_json)


def _report_collection(collection: Collection, target: Path, as_json: bool) -> None:
    """Print how many kernels and measured configurations were written to `target`."""
    kernels = {split: len(members) for split, members in collection.splits.items()}
    pairs = sum(m.kernel.n_configs for members in collection.splits.values() for m in members)
    splits = ", ".join(f"{count} {split}" for split, count in kernels.items())
    contents = f"{pluralize(sum(kernels.values()), 'kernel')} ({splits}) with {pairs} measured configurations"
    answer(as_json, {"out": str(target), "kernels": kernels, "pairs": pairs}, f"{target} holds {contents}.")
