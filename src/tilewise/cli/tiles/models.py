"""`tilewise tiles train|evaluate|predict|export`: train cost models on measured kernels and use them."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise._addons import require
from tilewise._wording import pluralize
from tilewise.cli.every import AsJson, answer, argument, one_of, option, output_file, output_folder, output_picture
from tilewise.cli.tables import show, table
from tilewise.cli.tiles.data import Collection, Fill, Limit
from tilewise.cli.tiles.drawings import draw_curve, draw_evaluation
from tilewise.errors import ConfigurationError

if TYPE_CHECKING:
    from tilewise.costmodel.data.dataset import Dataset
    from tilewise.costmodel.evaluation import Evaluation
    from tilewise.tune.search.calibration import Case
    from tilewise.tune.search.gaussian_process import Hyperparameters

_METRICS = {
    "top1": "top-1 error",
    "top5": "top-5 error",
    "top10": "top-10 error",
    "tile_score": "tile score",
    "opa": "ordered pairs",
}


def train(
    collection: Collection,
    out: Annotated[Path, output_folder(help="Folder for the model, its learning curve and its checkpoint.")],
    model: Annotated[
        str,
        option("TileRanker, GBDT, a baseline, your own package.module:Class, or auto: the best of several on valid."),
    ] = "TileRanker",
    model_kwargs: Annotated[str, option('Arguments of the model as JSON, as in {"hidden_dim": 128}.')] = "{}",
    epochs: Annotated[int | None, option("Passes over the train split.")] = None,
    early_stop: Annotated[int | None, option("Stop after this many epochs without improvement.")] = None,
    losses: Annotated[str | None, option("Names and weights of the losses, such as ListMLELoss:1,MSE:0.02.")] = None,
    learning_rate: Annotated[float | None, option("Adam's learning rate.")] = None,
    configs: Annotated[int | None, option("Configurations sampled per kernel and step.")] = None,
    batch: Annotated[int | None, option("Kernels per step.")] = None,
    select: Annotated[str | None, option("Metric that chooses the checkpoint: opa, tau, top1, top5, top.")] = None,
    max_seconds: Annotated[float | None, option("Fit the training into this many seconds.", min=0.1)] = None,
    recipe: Annotated[str, one_of("default", "winners")] = "default",
    seed: Annotated[int, option("Seed of every random choice.")] = 0,
    seeds: Annotated[
        int, option("Train this many models, with consecutive seeds, and report mean and interval.", min=1)
    ] = 1,
    device: Annotated[str, option("cpu, cuda, or auto.")] = "auto",
    resume: Annotated[bool, option("Continue from the folder's checkpoint.")] = True,
    ray: Annotated[
        str | None, option("Try seeds, folds and settings on this Ray cluster (auto, or host:port).")
    ] = None,
    folds: Annotated[int, option("With --ray: folds of train and valid to validate on.", min=1)] = 1,
    draws: Annotated[int, option("With --ray: settings to try, the given ones first.", min=1)] = 1,
    workers: Annotated[int, option("With --ray: trials at once (default: as many as there are CPUs).")] = 0,
    limit: Limit = None,
    as_json: AsJson = False,
) -> None:
    """Train a cost model on a collection; the checkpoint best on the valid split is kept.

    Example: tilewise tiles train h200 --out runs/ranker --seeds 5
    """
    from tilewise.costmodel.data.dataset import load_dataset
    from tilewise.costmodel.training.config import parse_kwargs

    if not re.fullmatch(r"[\w.]+(:\w+)?", model):  # before anything heavy is imported
        raise ConfigurationError(f"{model[:80]!r} is not a model's name; give your own as package.module:Class.")
    if recipe not in ("default", "winners"):
        raise ConfigurationError(f"there is no recipe {recipe[:80]!r}; choose default or winners.")
    is_recipe, is_auto = recipe == "winners", model == "auto"
    if is_recipe and (model != "TileRanker" or parse_kwargs(model_kwargs)):
        raise ConfigurationError("A recipe chooses its own models; leave --model and --model-kwargs out.")
    if is_auto and parse_kwargs(model_kwargs):
        raise ConfigurationError("The models that auto tries have different arguments; leave --model-kwargs out.")
    settings: dict[str, Any] = {
        "epochs": epochs, "early_stop": early_stop, "losses": losses, "learning_rate": learning_rate,
        "configs": configs, "batch": batch, "select": select, "max_seconds": max_seconds,
    }  # fmt: skip
    if ray is not None:
        sweep = require("tilewise_fleet.cli.sweep", "a sweep on Ray")
        where: dict[str, Any] = {"collection": collection, "out": str(out), "model": model, "limit": limit}
        where |= {"device": "cpu" if device == "auto" else device}
        what = {"settings": settings, "model_kwargs": parse_kwargs(model_kwargs)}
        sweep.on_ray(ray, as_json, workers, **where, **what, seed=seed, seeds=seeds, folds=folds, draws=draws)
        return
    from tilewise.costmodel.training.auto import train_auto, train_winners
    from tilewise.costmodel.training.loop import train as train_model

    data = load_dataset(collection, limit=limit)
    trainer: Any = functools.partial(train_model, model=model, model_kwargs=parse_kwargs(model_kwargs))
    if is_recipe or is_auto:
        trainer = train_winners if is_recipe else train_auto
    results = []
    for number in range(seed, seed + seeds):
        folder = out if seeds == 1 else out / f"seed_{number}"
        trained = trainer(data, out_dir=folder, seed=number, device=device, resume=resume, **settings)
        if trained.record.get("curve") and _is_main_process():
            draw_curve(trained.record, folder / "curve.png")
        facts = {"seed": number, "folder": str(folder), "seconds": trained.record.get("seconds")}
        results.append(facts | _metrics(trained, data))
    if _is_main_process():
        _report_training(results, out, as_json)


def _is_main_process() -> bool:
    """Return whether this is the first of the processes that torchrun starts, which alone prints."""
    return os.environ.get("RANK", "0") == "0"


def _metrics(trained: Any, data: Dataset) -> dict[str, dict[str, float]]:
    """Return a model's metrics on each split that has runtimes, by split."""
    from tilewise.costmodel.evaluation import evaluate as evaluate_model

    rows = {
        split: evaluate_model(trained, data, split, baselines=False).rows[0].metrics
        for split in ("valid", "test")
        if data.split(split).labelled
    }
    return {split: {name: interval.mean for name, interval in metrics.items()} for split, metrics in rows.items()}


def _report_training(results: list[dict[str, Any]], out: Path, as_json: bool) -> None:
    """Print the metrics of the trained models, averaged over seeds."""
    from tilewise.costmodel.metrics import over_seeds

    summary = {
        split: {name: over_seeds([r[split][name] for r in results]) for name in results[0][split]}
        for split in ("valid", "test")
        if split in results[0]
    }
    if as_json:
        intervals = {s: {n: vars(i) for n, i in metrics.items()} for s, metrics in summary.items()}
        typer.echo(json.dumps({"runs": results, "summary": intervals}, indent=1))
        return
    _show_metrics("split", summary.items(), f"{pluralize(len(results), 'model')} in {out}")


def _show_metrics(
    first: str,
    metrics_by_name: Iterable[tuple[str, dict[str, Any]]],
    title: str,
    ceiling: dict[str, float] | None = None,
) -> None:
    """Print a table of metrics, one row per split or model, and one for the noise ceiling if given."""
    rows = []
    for name, metrics in metrics_by_name:
        cells = [_percent(metrics[key]) if key in metrics else "" for key in _METRICS]
        rows.append([name, *cells, f"{metrics['tau'].mean:.3f}" if "tau" in metrics else ""])
    if ceiling:
        rows.append(["noise ceiling", *(f"{ceiling[key]:.2%}" if key in ceiling else "" for key in _METRICS), ""])
    show(table((first, *_METRICS.values(), "Kendall tau"), rows, title))


def evaluate(
    collection: Collection,
    models: Annotated[list[Path], argument("Model files, folders of training runs, or shipped models: h200, cpu.")],
    split: Annotated[str, one_of("train", "valid", "test")] = "valid",
    gbdt: Annotated[bool, option("Also train gradient-boosted trees on the train split, as a baseline.")] = True,
    by_program: Annotated[bool, option("Also print top-1 and top-5 error per program.")] = False,
    leave_one_out: Annotated[str | None, option("Also train this model once per program left out.")] = None,
    model_class: Annotated[
        str | None, option("Your own class, as package.module:Class, for models trained with it.")
    ] = None,
    plot: Annotated[Path | None, output_picture(help="Draw the table into this picture.")] = None,
    seed: Annotated[int, option("Seed of the random baseline and the bootstrap.")] = 0,
    fill: Fill = None,
    as_json: AsJson = False,
) -> None:
    """Compare models with chance, the default configuration, a formula and boosted trees, with intervals.

    Example: tilewise tiles evaluate h200 runs/ranker --split test --plot report.png
    """
    from tilewise.costmodel.data.columns import select_columns
    from tilewise.costmodel.data.dataset import load_dataset
    from tilewise.costmodel.evaluation import evaluate as evaluate_models
    from tilewise.costmodel.evaluation import leave_one_program_out
    from tilewise.tune.search.calibration import evaluate_claims

    data = load_dataset(collection)
    trained_models = {str(path): _model(path, model_class) for path in models}
    for trained_model in trained_models.values():
        data, _ = select_columns(data, trained_model.schema, _constants(fill))
    if gbdt and data.train.labelled:
        trees = _train_trees_if_possible(data, seed)
        trained_models |= {"GBDT": trees} if trees else {}
    evaluation = evaluate_models(trained_models, data, split, seed=seed)
    by_left_out_program = leave_one_program_out(data, leave_one_out, seed=seed) if leave_one_out else None
    if plot:
        draw_evaluation(evaluation, plot)
    if as_json:
        from tilewise.costmodel.models.file_writer import without_nans

        typer.echo(
            json.dumps(without_nans(evaluation.as_dict() | {"leave_one_program_out": by_left_out_program}), indent=1)
        )
        return
    _print_evaluation(evaluation, by_program)
    for path in models:
        cases, hyper = _tuner_cases(path, trained_models[str(path)], data, split)
        if hyper is not None:
            show(_reliability(evaluate_claims(cases, hyper), str(path)))
    if by_left_out_program:
        _print_programs("left out in training", by_left_out_program)


def _reliability(claims: Mapping[int, Mapping[str, float]], model: str) -> Any:
    """Build the table of how often a choice was claimed to be within 5 % of the fastest, and how often rightly."""
    rows = [
        (count, f"{row['said']:.0%}", f"{row['right']:.1%}" if "right" in row else "never said", f"{row['close']:.1%}")
        for count, row in claims.items()
    ]
    headings = ("measurements", "said", "right where said", "within 5 % in all")
    return table(headings, rows, f'{model}: "within 5 % of the fastest" (calibrated)')


def _constants(fill: list[str] | None) -> dict[str, float]:
    """Parse `--fill` options: the values of columns that a collection lacks."""
    constants = {}
    for text in fill or ():
        name, _, value = text.partition("=")
        try:
            constants[name] = float(value)
        except ValueError:
            raise ConfigurationError(f"--fill takes a column and its value, as in group=8, not {text!r}.") from None
    return constants


def _model(path: Path, model_class: str | None) -> Any:
    """Load a trained model from a file or folder, or a shipped one by name."""
    from tilewise.costmodel.models.scorer import load_scorer
    from tilewise.costmodel.models.trained import load_model

    needs_no_class = _is_shipped(path)
    return load_scorer(_model_file(path)) if needs_no_class else load_model(path, model_class=model_class)


def _is_shipped(model: Path) -> bool:
    """Tell whether a path is the name of a shipped model, and not of a file or folder here."""
    from tilewise.costmodel.models.files import shipped_names

    return str(model) in shipped_names() and not model.exists()


def _model_file(model: Path) -> Path:
    """Return the path of a model's file: a shipped model's by its name, else the one in a training run's folder."""
    from tilewise.costmodel.models.files import model_path, shipped_file

    return shipped_file(str(model)) if _is_shipped(model) else model_path(model)


def _tuner_cases(path: Path, model: Any, data: Dataset, split: str) -> tuple[list[Case], Hyperparameters | None]:
    """Return a split's kernels as tuning cases and the calibration of the model; ([], None) if it has none."""
    from tilewise.tune.search.calibration import make_case
    from tilewise.tune.search.confidence import load_calibration

    hyper = load_calibration(_model_file(path))
    # Records of another device than the model's: the bounds for such devices apply, or no claim is made.
    if hyper is not None and _is_shipped(path) and str(path) != "cpu" and not _is_measured_on(str(path), data):
        hyper = hyper.elsewhere()
    if hyper is None or not hyper.confidence_bounds:
        return [], None
    return [make_case(model, kernel, data.schema.config_features) for kernel in data.split(split)], hyper


def _is_measured_on(device: str, data: Dataset) -> bool:
    """Tell whether the schema of a collection names a device as the only one it was measured on."""
    extra = data.schema.extra
    names = [str(extra["hardware"])] if "hardware" in extra else list(extra.get("devices") or [""])
    return all(device in name.lower() for name in names)


def _train_trees_if_possible(data: Dataset, seed: int) -> Any:
    """Train gradient-boosted trees; without LightGBM, print why not and return None."""
    from tilewise.costmodel.models.gbdt import train_gbdt
    from tilewise.errors import UnavailableError

    try:
        return train_gbdt(data, seed)
    except UnavailableError as error:
        print(f"{error} The table goes without them.", file=sys.stderr)
        return None


def _print_evaluation(evaluation: Evaluation, by_program: bool) -> None:
    """Print the metrics of every model on a split, and the metrics per program if `by_program` is set."""
    configs = pluralize(evaluation.configs, "configuration")
    title = f"{evaluation.split}: {pluralize(evaluation.kernels, 'kernel')}, {configs}"
    if any(interval.low != interval.high for row in evaluation.rows for interval in row.metrics.values()):
        title += " (mean, 95 % interval)"
    _show_metrics("model", [(row.name, row.metrics) for row in evaluation.rows], title, evaluation.ceiling)
    if by_program:
        for row in evaluation.rows:
            _print_programs(row.name, row.by_program)


def _print_programs(title: str, programs: dict[str, dict[str, float]]) -> None:
    rows = [(program, f"{m['top1']:.2%}", f"{m['top5']:.2%}") for program, m in programs.items()]
    show(table(("program", "top-1 error", "top-5 error"), rows, title))


def _percent(interval: Any) -> str:
    """Format a mean with its interval; an en dash between the bounds keeps the cell on one line."""
    mean, low, high = (f"{value:.2%}" for value in (interval.mean, interval.low, interval.high))
    return mean if low == high else f"{mean} ({low}–{high})"


def predict(
    model: Annotated[Path, argument("A model file, the folder of a training run, or a shipped model: h200, cpu.")],
    collection: Collection,
    split: Annotated[str, one_of("train", "valid", "test")] = "test",
    out: Annotated[Path, output_file(help="The CSV to write.")] = Path("predictions_model_output.csv"),
    top: Annotated[int, option("Configurations per kernel.", min=1, max=1000)] = 5,
    fill: Fill = None,
    as_json: AsJson = False,
) -> None:
    """Rank every kernel of a split and write the best configurations, with the model's confidence. Needs no PyTorch.

    Example: tilewise tiles predict runs/ranker h200 --split test --out predictions.csv
    """
    from tilewise.costmodel.course.predictions import padding_note, write_predictions
    from tilewise.costmodel.data.columns import select_columns
    from tilewise.costmodel.data.dataset import load_dataset
    from tilewise.costmodel.data.shards import track
    from tilewise.costmodel.models.scorer import load_scorer
    from tilewise.costmodel.ranking import rank
    from tilewise.tune.search.confidence import Claim

    scorer = load_scorer(_model_file(model))
    data = load_dataset(collection)
    data, rows_of = select_columns(data, scorer.schema, _constants(fill))
    kernels = data.split(split)
    rankings = {k.name: rank(scorer, k) for k in track(kernels, "ranking", len(kernels))}
    first = {name: ranking.top(top) for name, ranking in rankings.items()}
    first |= {name: [int(rows[i]) for i in first[name]] for name, rows in rows_of.items() if name in first}
    padded_kernels = write_predictions(out, first, top)
    confidences = {
        name: ranking.confidence_top5 for name, ranking in rankings.items() if ranking.confidence_top5 is not None
    }
    cases, hyper = _tuner_cases(model, scorer, data, split)
    within = [case.name for case in cases if hyper is not None and Claim(case.process(hyper)).after(0)]
    if as_json:
        facts = {"out": str(out), "kernels": len(rankings), "padded": padded_kernels}
        facts |= {"sure_top5": confidences, "within5_top1": within}
        return typer.echo(json.dumps(facts, indent=1))
    typer.echo(f"{pluralize(len(rankings), 'kernel')} ranked into {out}.")
    if padded_kernels:
        typer.echo(padding_note(padded_kernels, top))
    if confidences:
        unsure = sum(p < 0.5 for p in confidences.values())
        mean = sum(confidences.values()) / len(confidences)
        typer.echo(
            f"Expected share with a top-5 configuration within 1 % of the best: {mean:.0%}; {unsure} look unsure. "
            f"The first choice is surely within 5 % for {pluralize(len(within), 'kernel')}."
        )


def export(
    model: Annotated[Path, argument("The folder of a training run, or a model file.")],
    out: Annotated[Path, output_file(help="The file to write.", declare=typer.Argument)],
    as_json: AsJson = False,
) -> None:
    """Write a trained model to one file that the NumPy scorer reads, checked by reading it back.

    Example: tilewise tiles export runs/ranker ranker.safetensors
    """
    from tilewise._atomic import write_atomic
    from tilewise._files import read_input
    from tilewise.costmodel.models.files import model_path
    from tilewise.costmodel.models.scorer import load_scorer

    scorer = load_scorer(model)
    content = read_input(model_path(model), 1 << 30)
    write_atomic(out, content)
    facts = {"out": str(out), "model": scorer.name, "bytes": len(content)}
    answer(as_json, facts, f"{scorer.name} written to {out} ({len(content) / 1e6:.2f} MB).")


def board(
    collections: Annotated[list[str], argument("Folders, or embedded collections: h200, cpu.")],
    models: Annotated[str, option("Separated by commas: names to train, model files, or shipped.")] = "shipped",
    out: Annotated[
        Path, output_file(help="The file of results; a model and collection in it are not evaluated again.")
    ] = Path("board.json"),
    split: Annotated[str, one_of("train", "valid", "test")] = "test",
    epochs: Annotated[int | None, option("Passes over the train split.")] = None,
    max_seconds: Annotated[float | None, option("Stop training a model after this many seconds.", min=0.1)] = None,
    seed: Annotated[int, option("Seed of every random choice.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Evaluate models and baselines on several collections; the same command continues an interrupted run.

    Example: tilewise tiles board h200 cpu --models shipped,GBDT --out board.json
    """
    from tilewise.costmodel.board import HEADINGS, board_lines, fill_board

    names = [name.strip() for name in models.split(",") if name.strip()]
    path = out.expanduser()
    rows = fill_board(path, collections, names, split=split, seed=seed, epochs=epochs, max_seconds=max_seconds)
    if as_json:
        return typer.echo(json.dumps({"board": rows}, indent=1))
    show(table(HEADINGS, board_lines(rows), f"{path} (mean over kernels, 95 % interval)", left_aligned=HEADINGS[:3]))
