"""Commands of `tilewise tiles layout`: TpuGraphs' layout collections, from files to a Kaggle row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise._wording import pluralize, with_interval
from tilewise.cli.every import AsJson, answer, argument, one_of, option, output_file, output_folder
from tilewise.cli.tables import show, table
from tilewise.errors import ConfigurationError

if TYPE_CHECKING:
    from tilewise.costmodel.layout import TrainedLayoutModel

layout = typer.Typer(
    help="Rank the tensor layouts of whole programs (TpuGraphs' other collections).", no_args_is_help=True
)
Collection = Annotated[str, argument("A folder with train, valid and test, such as npz/layout/xla/random.")]
Limit = Annotated[int | None, option("Read at most this many graphs of each split.", min=1)]
Name = Annotated[str | None, one_of("xla:random", "xla:default", "nlp:random", "nlp:default")]


@layout.command()
def toy(
    out: Annotated[Path, output_folder(help="Folder in which npz/layout/… is created.")],
    collection: Annotated[str, one_of("xla:random", "xla:default", "nlp:random", "nlp:default")] = "xla:random",
    graphs: Annotated[int, option("Graphs to train on; valid and test get a quarter each.", min=1)] = 32,
    nodes: Annotated[int, option("Approximate number of nodes of a graph.", min=8, max=100_000)] = 64,
    configs: Annotated[int, option("Configurations of a graph.", min=2, max=1_000_000)] = 200,
    seed: Annotated[int, option("Seed of every random choice.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Write synthetic graphs in the dataset's format; their runtimes come from a formula, not from a TPU.

    Time goes into operations, into passes over padded tensors, and into a transpose wherever neighbours disagree.

    Example: tilewise tiles layout toy --out toy --graphs 16
    """
    from tilewise.cli.every import check_memory
    from tilewise.costmodel.layout import write_synthetic
    from tilewise.costmodel.layout.graph import check_name

    check_name(collection)
    check_memory(float(nodes) * configs * 100, "A graph of that size")
    held_out_graphs = max(1, graphs // 4)
    counts = {"train": graphs, "valid": held_out_graphs, "test": held_out_graphs}
    paths = write_synthetic(out.expanduser(), collection, counts, seed=seed, nodes=nodes, configs=configs)
    folder = paths[0].parents[1]
    contents = f"{pluralize(len(paths), 'graph')}: {', '.join(f'{n} {s}' for s, n in counts.items())}"
    answer(as_json, {"folder": str(folder), "graphs": counts}, f"{folder} holds {contents}.")


@layout.command()
def train(
    collection: Collection,
    out: Annotated[Path, output_folder(help="Folder for the model and its checkpoint.")],
    model: Annotated[str, one_of("LayoutMPNN", "LayoutSAGE")] = "LayoutMPNN",
    model_kwargs: Annotated[str, option('Arguments of the model as JSON, as in {"hidden": 64}.')] = "{}",
    segment_nodes: Annotated[
        int, option("Nodes of a segment: fewer take less memory and cut more edges.", min=1)
    ] = 1000,
    hops: Annotated[int, option("Leave out nodes farther than this from a configurable one.")] = 3,
    epochs: Annotated[int | None, option("Passes over the train split.")] = None,
    losses: Annotated[str | None, option("Names and weights, such as PairwiseHingeLoss:1.")] = None,
    learning_rate: Annotated[float | None, option("Adam's learning rate.")] = None,
    configs: Annotated[int | None, option("Configurations sampled per graph and step.")] = None,
    batch: Annotated[int | None, option("Graphs per step, one after another in memory.")] = None,
    max_seconds: Annotated[float | None, option("Stop after this many seconds of training.")] = None,
    seed: Annotated[int, option("Seed of every random choice.")] = 0,
    device: Annotated[str, option("cpu, cuda, or auto.")] = "auto",
    resume: Annotated[bool, option("Continue from the folder's checkpoint.")] = True,
    limit: Limit = None,
    as_json: AsJson = False,
) -> None:
    """Train on a layout collection in bounded memory; Kendall's tau on valid chooses the weights that are kept.

    A step takes some configurations of a few graphs and sends gradients through one segment of each. Ctrl-C loses the
    epoch in progress; the same command continues.

    Example: tilewise tiles layout train toy/npz/layout/xla/random --out runs/layout --epochs 2
    """
    from tilewise.costmodel.layout import open_layouts, train_layouts
    from tilewise.costmodel.training.config import parse_kwargs

    settings: dict[str, Any] = {
        "epochs": epochs, "losses": losses, "learning_rate": learning_rate, "configs": configs, "batch": batch,
        "max_seconds": max_seconds, "seed": seed, "model_kwargs": parse_kwargs(model_kwargs),
    }  # fmt: skip
    data = open_layouts(collection, splits=("train", "valid"), limit=limit)
    segmentation: dict[str, Any] = {"segment_nodes": segment_nodes, "hops": hops}
    trained = train_layouts(data, model, out_dir=out, resume=resume, device=device, **segmentation, **settings)
    best = next(row for row in trained.record["curve"] if row["epoch"] == trained.record["best_epoch"])
    facts = {"out": out, "valid_tau": best["val_tau"], "best_epoch": best["epoch"]}
    tau = f"Kendall's tau on valid is {best['val_tau']:.3f} (epoch {best['epoch'] + 1})"
    answer(as_json, facts | {"seconds": trained.record["seconds"]}, f"{out} holds a {model}; {tau}.")


@layout.command()
def evaluate(
    collection: Collection,
    models: Annotated[list[Path], argument("Model files, or folders of training runs.")],
    split: Annotated[str, one_of("train", "valid", "test")] = "valid",
    configs: Annotated[int | None, option("Score at most this many of a graph's configurations.", min=2)] = None,
    seed: Annotated[int, option("Seed of chance and of the bootstrap.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Compare layout models with chance: Kendall's tau, the competition's metric, with its 95 % interval over graphs.

    Example: tilewise tiles layout evaluate toy/npz/layout/xla/random runs/layout
    """
    from tilewise.costmodel.layout import open_layouts
    from tilewise.costmodel.layout.trained import evaluate_layouts
    from tilewise.costmodel.models.file_writer import without_nans

    trained_models = {str(path): _load_model(path) for path in models}
    data = open_layouts(collection, splits=(split,))
    evaluation = evaluate_layouts(trained_models, data.split(split), max_configs=configs, seed=seed)
    if as_json:
        plain = {name: {key: vars(interval) for key, interval in row.items()} for name, row in evaluation.items()}
        return typer.echo(json.dumps(without_nans({"split": split, "rows": plain}), indent=1))
    title = f"{split}: {pluralize(len(data.split(split)), 'graph')} (mean, 95 % interval)"
    rows = []
    for name, row in evaluation.items():
        tau = with_interval(*(f"{v:.3f}" for v in (row["tau"].mean, row["tau"].low, row["tau"].high)))
        rows.append((name, tau, *(f"{row[key].mean:.2%}" for key in ("opa", "top1", "top5"))))
    show(table(("model", "Kendall tau", "ordered pairs", "top-1 error", "top-5 error"), rows, title))


@layout.command()
def predict(
    model: Annotated[Path, argument("A model file, or the folder of a training run.")],
    collection: Collection,
    split: Annotated[str, one_of("train", "valid", "test")] = "test",
    out: Annotated[Path, output_file(help="The CSV to write.")] = Path("layout_predictions.csv"),
    name: Name = None,
    as_json: AsJson = False,
) -> None:
    """Rank all configurations of every graph and write them in the competition's rows, fastest first.

    The rows are named after the collection: by its folders, or by --name. `tilewise tiles kaggle` puts the files
    of several collections together.

    Example: tilewise tiles layout predict runs/layout toy/npz/layout/xla/random --out xla_random.csv
    """
    from tilewise.costmodel.course.predictions import write_layout_predictions
    from tilewise.costmodel.layout import open_layouts
    from tilewise.costmodel.layout.trained import rank_layouts

    trained = _load_model(model)
    full_name = _collection_name(name, collection)
    data = open_layouts(collection, splits=(split,))
    rankings = rank_layouts(trained, data.split(split))
    write_layout_predictions(out.expanduser(), full_name, rankings)
    facts = {"out": str(out), "collection": full_name, "graphs": len(rankings)}
    answer(as_json, facts, f"{pluralize(len(rankings), 'graph')} of layout:{full_name} ranked into {out}.")


@layout.command()
def score(
    predictions: Annotated[Path, argument("A CSV of layout predictions.")],
    truth: Annotated[Path, option("A split's folder with runtimes, such as npz/layout/xla/random/valid.")],
    name: Name = None,
    as_json: AsJson = False,
) -> None:
    """Score a file of layout predictions against measured runtimes: the mean of Kendall's tau over graphs.

    Example: tilewise tiles layout score xla_random.csv --truth toy/npz/layout/xla/random/test
    """
    from tilewise.costmodel.layout import open_layouts
    from tilewise.costmodel.layout.trained import score_rankings
    from tilewise.costmodel.metrics import bootstrap
    from tilewise.costmodel.models.file_writer import without_nans

    full_name = _collection_name(name, str(truth.parent))
    graphs = open_layouts(truth.parent, splits=(truth.name,)).split(truth.name)
    taus = score_rankings(predictions.expanduser(), full_name, graphs)
    mean = bootstrap(list(taus.values()))
    tau = f"Kendall's tau {mean.mean:.4f} over {pluralize(len(taus), 'graph')} of layout:{full_name}"
    answer(as_json, without_nans({"tau": mean.mean, "graphs": taus}), tau)


def _load_model(path: Path) -> TrainedLayoutModel:
    """Load a layout model from a file."""
    from tilewise.costmodel.layout import load_layout_model

    return load_layout_model(path)


def _collection_name(name: str | None, folder: str) -> str:
    """Return the name given with --name, or the one that the folder's path ends in, such as `xla:random`."""
    from tilewise.costmodel.layout.graph import check_name, collection_name

    full_name = check_name(name) if name is not None else collection_name(Path(folder).expanduser())
    if not full_name:
        raise ConfigurationError(
            f"The folders of {folder} do not name a collection of the competition; name it with --name."
        )
    return full_name
