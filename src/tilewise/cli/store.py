"""`tilewise store`: summarize, merge and export measurement stores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tilewise._wording import pluralize
from tilewise.cli.every import AsJson, answer, argument, option, output_file
from tilewise.cli.tables import show, table

store = typer.Typer(
    help="Look into measurement stores, files or PostgreSQL, and take one over into another.", no_args_is_help=True
)

Where = Annotated[str, argument("A store: a file or a postgresql:// URL.")]
MachineName = Annotated[str | None, option("Only this part, as `store info` names it.", "--machine")]


@store.command()
def info(where: Where, as_json: AsJson = False) -> None:
    """Show what a store contains, machine by machine.

    Example: tilewise store info measurements.sqlite
    """
    from tilewise.store.database import is_url
    from tilewise.store.store import Store

    counts_by_machine = {}
    # The first command that opens an empty database creates the tables; a file that does not exist is a typing error.
    with Store(where, create=is_url(where)) as source:
        name = source.name
        for part in source.partitions():
            source.choose_partition(part)
            counts_by_machine[part] = {**source.counts(), "waiting": len(source.queue()), "runs": len(source.runs())}
    if as_json or not counts_by_machine:
        return answer(as_json, {"store": name, "machines": counts_by_machine}, f"{name} holds no measurements yet.")
    headings = ("machine", "kernels", "pairs", "timings", "batches", "disturbed", "waiting", "runs")
    rows = [(part, *(f"{n:,}" for n in counts.values())) for part, counts in counts_by_machine.items()]
    show(table(headings, rows, name))


@store.command()
def merge(
    sources: Annotated[list[str], argument("Stores to copy from: files, or postgresql:// URLs.")],
    into: Annotated[str, option("The store to copy into, created if missing.")],
    as_json: AsJson = False,
) -> None:
    """Copy everything from other stores into one; merging twice changes nothing.

    Example: tilewise store merge journal.sqlite --into postgresql://tilewise@db/measurements
    """
    from tilewise.store.merge import merge as merge_stores
    from tilewise.store.store import Store

    results = {}
    with Store(into) as target:
        into_name = target.name
        for location in sources:
            with Store(location, create=False) as source:
                results[source.name] = merge_stores(source, target)
    lines = []
    for name, counts in results.items():
        added = ", ".join(f"{n:,} {what}" for what, n in counts.items() if what != "conflicts")
        lines.append(f"{name}: added {added}.")
        if counts["conflicts"]:
            batches = "1 batch was" if counts["conflicts"] == 1 else f"{counts['conflicts']:,} batches were"
            lines.append(f"{name}: {batches} not copied, because {into_name} has other timings under the same name.")
    answer(as_json, results, *lines)


@store.command()
def export(
    where: Where,
    out: Annotated[Path, output_file(help="The file to write: a new store, or one to add to.")],
    machine: MachineName = None,
    as_json: AsJson = False,
) -> None:
    """Copy a machine's part of a store into a file, which every command reads.

    Example: tilewise store export postgresql://tilewise@db/measurements --machine "triton NVIDIA H200" --out h.sqlite
    """
    from tilewise.errors import ConfigurationError
    from tilewise.store.merge import merge as merge_stores
    from tilewise.store.store import Store

    with Store(where, create=False, partition=machine) as source:
        if machine is not None and machine not in source.partitions():
            raise ConfigurationError(f"{source.name} has nothing of {machine!r}; `tilewise store info` lists it all.")
        part = source.partition  # refuses, with a list, where there are several
        with Store(out) as target:
            merged = merge_stores(source, target)
    received = f"{pluralize(merged['kernels'], 'finished kernel')} with {pluralize(merged['timings'], 'timing')}"
    answer(as_json, {"out": str(out), "machine": part, **merged}, f"{out} received {received}.")


# --- PyTorch's compiler ---


inductor = typer.Typer(help="PyTorch's compiler with tilewise choosing its templates.", no_args_is_help=True)
store.add_typer(inductor, name="inductor")


@inductor.command()
def report(
    folder: Annotated[Path | None, option("Folder of the records (default: in the cache folder).")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what was skipped, kept, measured and remembered, product by product.

    Example: tilewise store inductor report
    """
    from tilewise.gpu.inductor.decision_log import report as summarise

    summary = summarise(folder)
    if as_json:
        return typer.echo(json.dumps(summary))
    if not summary["products"]:
        return typer.echo("Nothing yet: call tilewise.inductor.enable() before torch.compile.")
    for row in summary["rows"]:
        fastest = f"; fastest {row['fastest']}, {row['of_aten']:.2f}x of ATen's speed" if row["fastest"] else ""
        typer.echo(f"{row['product']}: {row['considered']} templates, {row['kept']} kept ({row['why']}){fastest}")
    skipped = summary["considered"] - summary["kept"]
    typer.echo(
        f"{summary['products']} products: {skipped} of {summary['considered']} templates skipped, "
        f"{summary['measured']} products measured, {summary['remembered']} remembered; "
        f"choosing took {summary['choosing_seconds'] * 1e3:.1f} ms in all."
    )
