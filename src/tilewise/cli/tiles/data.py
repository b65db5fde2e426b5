"""`tilewise tiles download|from-pb|from-jax|import|kaggle|score`: read datasets, and write or score predictions."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewise._wording import pluralize
from tilewise.cli.every import AsJson, answer, argument, one_of, option, output_file, output_folder
from tilewise.cli.tables import progress_bar, show, table

if TYPE_CHECKING:
    from tilewise.costmodel.course.download import DownloadPlan, Report

Collection = Annotated[str, argument("A folder with train, valid and test, or an embedded collection's name.")]
Limit = Annotated[int | None, option("Read at most this many kernels of each split.", min=1)]
Fill = Annotated[
    list[str] | None, option("The value of a column that the collection lacks and the model reads, such as group=8.")
]


def download(
    out: Annotated[Path, output_folder(help="Folder for npz/tile/xla/…")] = Path("~/data/tpugraphs"),
    split: Annotated[list[str] | None, option("train, valid or test; all three when not given.")] = None,
    archives: Annotated[list[Path] | None, option("Unpack these local archives instead.", "--from")] = None,
    url: Annotated[str | None, option("Another server that holds npz_tile_xla_<split>.tar.")] = None,
    yes: Annotated[bool, option("Do not ask before a large download.", "--yes", "-y")] = False,
    as_json: AsJson = False,
) -> None:
    """Fetch the TpuGraphs tile dataset, about 7,200 kernels; resumes, verifies, and unpacks safely.

    Example: tilewise tiles download --split valid
    """
    from tilewise.costmodel.course import download as downloads
    from tilewise.costmodel.course.download import unpack_tar

    root = out.expanduser()
    kernel_counts: dict[str, int] = {}
    if archives:
        for archive in archives:
            kernel_counts |= unpack_tar(archive.expanduser(), root).kernels
    else:
        splits = split or list(downloads.SPLITS)
        plan = downloads.plan_download(root, splits, url or downloads.BASE_URL)
        _announce(plan, root, yes or as_json)
        for name in splits:
            kernel_counts |= downloads.download_split(name, plan, root, _report()).kernels
    data_root = root / "npz" / "tile" / "xla"
    counts_text = ", ".join(f"{count} {name}" for name, count in kernel_counts.items())
    facts = {"data_root": str(data_root), "kernels": kernel_counts}
    answer(as_json, facts, f"{data_root} holds the kernels now: {counts_text}.")


def _announce(plan: DownloadPlan, root: Path, agreed: bool) -> None:
    """Print the size and the expected time; on a terminal, ask before a download."""
    from tilewise.costmodel.course.download import estimate_seconds

    seconds = estimate_seconds(plan, root)
    remaining = f"{plan.bytes_to_fetch / 1e6:,.0f} of {plan.total_bytes / 1e6:,.0f} MB to fetch into {root}"
    typer.echo(f"{remaining}, about {max(1, round(seconds))} s at the speed measured just now.", err=True)
    if plan.bytes_to_fetch and not agreed and sys.stdin.isatty():
        typer.confirm("Go on?", abort=True)


def _report() -> Report:
    """Return a function that prints progress at most once a second on a terminal, every 15 s in a log."""
    interval, state = (1.0 if sys.stderr.isatty() else 15.0), {"last": 0.0}

    def show(name: str, done: int, total: int) -> None:
        """Print how many of `total` bytes of file `name` are downloaded."""
        now = time.monotonic()
        if now - state["last"] >= interval or done == total:
            state["last"] = now
            end = "\n" if done == total or not sys.stderr.isatty() else "\r"
            print(f"{name}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB", end=end, file=sys.stderr, flush=True)

    return show


def from_pb(
    file: Annotated[Path, argument("A serialized TuningData (op_tuning_data.pb) or ModuleTuningData.")],
    out: Annotated[Path, output_folder(help="Folder for the npz files.")],
    as_json: AsJson = False,
) -> None:
    """Turn an autotuner's measurements of HLO modules into kernel files, or those of layouts into a graph's file.

    Example: tilewise tiles from-pb op_tuning_data.pb --out my_kernels/train
    """
    from tilewise.costmodel.hlo.tuning_data import convert_tuning_data

    result = convert_tuning_data(file.expanduser(), out.expanduser())
    valid = f"{result.valid_runs:,} of {pluralize(result.runs, 'run')} valid"
    contents = f"{out} holds {pluralize(len(result.files), result.unit)}, {valid}."
    answer(as_json, result, contents, notes=result.skipped)


def from_jax(
    target: Annotated[str, argument("package.module:function; its example arguments: function_args.")],
    out: Annotated[Path, output_file(help="The npz file to write.")],
    as_json: AsJson = False,
) -> None:
    """Turn a JAX function into a kernel file with its graph and one empty, unmeasured configuration.

    Example: tilewise tiles from-jax my_models.mlp:forward --out mlp.npz
    """
    import numpy as np

    from tilewise._atomic import write_atomic
    from tilewise.costmodel.data.kernel import make_kernel
    from tilewise.costmodel.data.schema import TILE_FEATURES
    from tilewise.costmodel.data.writing import kernel_npz
    from tilewise.costmodel.hlo.featurize import featurize_jax

    graph = featurize_jax(target)
    config, zero = np.zeros((1, len(TILE_FEATURES)), np.float32), np.zeros(1, np.int64)
    write_atomic(out.expanduser(), kernel_npz(make_kernel(out.stem, *graph, config, zero, zero)))
    counts = {"nodes": len(graph.node_opcode), "edges": len(graph.edge_index)}
    size = f"{pluralize(counts['nodes'], 'node')}, {pluralize(counts['edges'], 'edge')}"
    answer(as_json, {"file": str(out), **counts}, f"{out} holds the graph of {target}: {size}.")


def import_(
    format_name: Annotated[
        str,
        one_of(
            "kernel-tuner",
            "autotvm",
            "metaschedule",
            "inductor",
            "triton",
            "helion",
            metavar="FORMAT",
            declare=typer.Argument,
        ),
    ],
    files: Annotated[list[Path], argument("The logs; gzipped ones and zip archives are read as they are.")],
    out: Annotated[Path, output_folder(help="Folder for the new collection.")],
    describe: Annotated[
        Path | None, option("JSON file that says what the kernels compute: loops, operands, tile.")
    ] = None,
    device: Annotated[str, option("The device's name, if the log does not have it.")] = "",
    split: Annotated[str | None, option("Put all kernels into this split (default: split by shape).")] = None,
    as_json: AsJson = False,
) -> None:
    """Read other autotuners' logs into a collection that `tiles train` learns from.

    Example: tilewise tiles import kernel-tuner convolution_A100.T4.json.gz --out a100 --device A100
    """
    from tilewise.costmodel.data.importers import import_logs, read_description

    description = read_description(describe.expanduser()) if describe else None
    with progress_bar(lambda done, total, text: None) as move:  # a log only gets the result
        result = import_logs(
            format_name,
            [file.expanduser() for file in files],
            out.expanduser(),
            description=description,
            device=device,
            split=split,
            progress=lambda records: move(records, None, "records read"),
        )
    notes = [*result.missing, *(f"{count:,} left out: {reason}." for reason, count in result.skipped.items())]
    counts_text = ", ".join(f"{count} {name}" for name, count in sorted(result.splits.items()))
    contents = (
        f"{out} holds {pluralize(result.kernels, 'kernel')} ({counts_text}) with "
        f"{pluralize(result.configurations, 'configuration')}, "
        f"{pluralize(result.timings, 'timing')} and {pluralize(result.failures, 'failure')}."
    )
    answer(as_json, {"out": out, **dataclasses.asdict(result)}, contents, notes=notes)


def kaggle(
    predictions: Annotated[
        list[Path] | None, argument("Predictions CSVs, of tiles and of layouts (default: the tiles' in this folder).")
    ] = None,
    out: Annotated[Path, output_file(help="The file to upload.")] = Path("predictions_kaggle.csv"),
    sample: Annotated[Path | None, option("A sample_submission.csv that decides the rows.")] = None,
    force: Annotated[
        bool, option("Write the file even if tile predictions are missing.", "--force/--no-force")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the Kaggle file of all five collections: 844 tile rows and 50 layout rows, matched by ID.

    Rows that no file predicts are reported and get the placeholder of the competition.

    Example: tilewise tiles kaggle predictions_model_output.csv xla_random.csv nlp_random.csv
    """
    from tilewise.costmodel.course.predictions import find_predictions, write_kaggle

    paths: list[Path | None] = list(predictions) if predictions else [None]
    files = [find_predictions(str(path) if path else None, Path.cwd()) for path in paths]
    result = write_kaggle(out, files, sample, force=force)
    ready = f"{out} is ready: {result.predicted} tile rows and {result.layouts} layout rows predicted."
    answer(as_json, {"file": out, **dataclasses.asdict(result)}, ready, notes=result.notes)


def score(
    predictions: Annotated[Path, argument("A predictions CSV.")],
    truth: Annotated[str, option("A split folder with runtimes, or COLLECTION/valid of an embedded one.")],
    as_json: AsJson = False,
) -> None:
    """Score a predictions file against measured runtimes: tile score and top-K errors, overall and per program.

    Example: tilewise tiles score predictions_model_output.csv --truth ~/data/tpugraphs/npz/tile/xla/valid
    """
    from tilewise.costmodel.course.predictions import score_predictions
    from tilewise.costmodel.data.dataset import SPLITS, load_dataset
    from tilewise.errors import ConfigurationError

    split = Path(truth).expanduser()
    if split.name not in SPLITS:
        raise ConfigurationError(f"--truth {truth} names no split; end it in /train, /valid or /test, as in h200/test")
    result = score_predictions(predictions, load_dataset(str(split.parent)).split(split.name))
    if as_json:
        return answer(as_json, result)
    errors = result.error_at_by_program | {"all": result.error_at}
    headings = ("program", *(f"top {k}" for k in result.error_at))
    rows = [(name, *(f"{100 * values[k]:.2f} %" for k in result.error_at)) for name, values in errors.items()]
    show(table(headings, rows, "Slower than the best configuration, on average"))
    typer.echo(f"tile score {result.tile_score:.4f} over {pluralize(result.kernels, 'kernel')}")
