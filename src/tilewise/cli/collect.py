"""`tilewise collect`: measure tiled kernels on this machine, and turn the measurements into collections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

collect = typer.Typer(
    help="Measure tiled kernels on this CPU or GPU, and make collections of the measurements.", no_args_is_help=True
)

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
StorePath = Annotated[Path, typer.Argument(help="A store, or the folder a visit to a GPU brought home.")]


@collect.command()
def export(
    store: StorePath,
    out: Annotated[Path, typer.Option(help="Folder for train, valid, test and schema.json.")],
    name: Annotated[str, typer.Option(help="What to call the collection.")] = "own",
    as_json: AsJson = False,
) -> None:
    """Write a store as a folder of npz files in TpuGraphs' format.

    Example: tilewise collect export measurements.sqlite --out my_collection
    """
    from tilewise.tune.export import export_folder, make_collection
    from tilewise.tune.measured import open_measurements

    with open_measurements(store) as measurements:
        collection = make_collection(measurements, name)
    export_folder(collection, out)
    _tell(collection, out, as_json)


@collect.command()
def embed(
    store: StorePath,
    name: Annotated[str, typer.Option(help="What load_dataset will call it, such as cpu or h200.")],
    out: Annotated[Path | None, typer.Option(help="The file to write; default: in the package.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a store as one small file; without --out it becomes, or replaces, an embedded collection.

    Example: tilewise collect embed measurements.sqlite --name cpu
    """
    from tilewise.costmodel.dataset import embedded_folder
    from tilewise.tune.export import embed as write
    from tilewise.tune.export import make_collection
    from tilewise.tune.measured import open_measurements

    with open_measurements(store) as measurements:
        collection = make_collection(measurements, name)
    target = out or embedded_folder() / f"{name}.npz"
    write(collection, target)
    _tell(collection, target, as_json)


def _tell(collection: object, target: Path, as_json: bool) -> None:
    from tilewise.costmodel.collection import Collection

    assert isinstance(collection, Collection)
    kernels = {split: len(members) for split, members in collection.splits.items()}
    pairs = sum(m.kernel.n_configs for members in collection.splits.values() for m in members)
    if as_json:
        typer.echo(json.dumps({"out": str(target), "kernels": kernels, "pairs": pairs}))
    else:
        parts = ", ".join(f"{count} {split}" for split, count in kernels.items())
        typer.echo(f"{target} holds {sum(kernels.values())} kernels ({parts}) with {pairs} measured configurations.")
