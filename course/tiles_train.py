"""Trains a model that ranks tile configurations, with the course's flags, and leaves the course's files.

    python tiles_train.py --model=MLP --toy_data=True

In `--out_dir`: ``model_<hash>/``, ``run_<hash>.jsonz`` and ``results_<ms>.csv`` (ten best per test kernel). A killed
run is taken up again by the same command with the same --results_csv. `--framework=keras` trains a class of
``models.py`` in the Keras environment; its folder can be handed in as it is.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _start
from flags import (
    RESULTS_PER_KERNEL,
    TrainArgs,
    course_dataset,
    new_run,
    test_predictions,
    train_args,
    train_parser,
    write_run,
)
from keras_env import hand_over, has_tensorflow, quiet_tensorflow

from tilewise.costmodel.baselines import random_errors
from tilewise.costmodel.course.predictions import padding_note, write_predictions
from tilewise.costmodel.data.dataset import Dataset
from tilewise.errors import ConfigurationError, UnavailableError

if TYPE_CHECKING:
    from tilewise.costmodel.models.trained import TrainedModel


def train_torch(args: TrainArgs, data: Dataset, seed: int) -> dict[str, Any]:
    """Train with PyTorch; the run file's content is returned."""
    from tilewise.costmodel.training.config import default_settings
    from tilewise.costmodel.training.loop import train

    settings = default_settings(args.model, **_settings(args, seed))
    model = train(data, settings, out_dir=args.model_dir)
    run = new_run(args)
    for row in model.record.get("curve", ()):  # trees have none
        if "val_opa" in row:
            for key in run["train_curve"]:
                run["train_curve"][key].append(row[key])
    _finish(run, args, data, model)
    write_run(args.run_file, run)
    return run


def _settings(args: TrainArgs, seed: int) -> dict[str, Any]:
    """The course's flags as tilewise's settings; validation follows every epoch, and OPA chooses."""
    return {
        "model_kwargs": args.model_kwargs,
        "epochs": args.epochs,
        "early_stop": args.early_stop if args.early_stop > 0 else args.epochs,
        "losses": args.losses,
        "learning_rate": args.learning_rate,
        "clip_norm": args.clip_norm,
        "configs": args.configs,
        "batch": args.batch_size,
        "validate_batches": args.validate_batches,
        "seed": seed,
    }


def _finish(run: dict[str, Any], args: TrainArgs, data: Dataset, model: TrainedModel) -> None:
    """Errors on the whole valid split, then test errors or test predictions."""
    from tilewise.costmodel.ranking import rank

    run["final_error"]["val"] = _errors(model, data.valid)
    if args.test_mode == "metrics":
        run["final_error"]["test"] = _errors(model, data.test)
        return
    rankings = {kernel.name: rank(model, kernel).order.tolist() for kernel in data.test}
    run["test_predictions"] = test_predictions(rankings)
    if rankings:
        short = write_predictions(Path(args.results_csv).expanduser(), rankings, RESULTS_PER_KERNEL)
        if note := padding_note(short, RESULTS_PER_KERNEL):
            print(note)


def _errors(model: TrainedModel, split: Any) -> dict[str, float]:
    import numpy as np

    from tilewise.costmodel.metrics import top_k_error

    if not split.labelled:
        raise ConfigurationError("The test split has no runtimes, so --test_mode=metrics cannot be computed.")
    scored = [(kernel.target, model.score(kernel)) for kernel in split]
    return {str(k): float(np.mean([top_k_error(t, s, k) for t, s in scored])) for k in (1, 5, 10)}


def framework_of(model: str) -> str:
    """keras for a class that models.py has and tilewise has not."""
    try:
        from tilewise.costmodel.models.torch import MODELS
    except ImportError:
        raise UnavailableError("Training needs PyTorch: pip install '.[train]' in the folder above.") from None

    if model in (*MODELS, "GBDT") or ":" in model:
        return "torch"
    tree = ast.parse(Path(__file__).with_name("models.py").read_text(encoding="utf-8"))
    own = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    if model in own:
        print(f"{model} is a class of models.py: training with Keras, as --framework=keras does.", flush=True)
        return "keras"
    return "torch"


def main() -> int:
    options = train_parser().parse_args()
    options.framework = options.framework or framework_of(options.model)
    if options.framework == "keras" and not has_tensorflow():
        return hand_over("--framework=keras")  # said there too: without PyTorch it could not be found out
    args = train_args(options)
    data = course_dataset(options.data_root, options.cache_dir, options.toy_data)
    if options.framework == "keras":
        quiet_tensorflow()
        from keras_training import Trainer

        run = Trainer(args, data, options.seed).fit()
    else:
        run = train_torch(args, data, options.seed)
    errors = ", ".join(f"top-{k} {100 * error:.2f} %" for k, error in run["final_error"]["val"].items())
    chance = random_errors(data.valid, (1, 5, 10))
    beside = ", ".join(f"top-{k} {100 * chance[f'top{k}'].mean():.2f} %" for k in (1, 5, 10))
    print(f"validation error: {errors} (how much slower the best of the model's first K is than the fastest)")
    print(f"chance would give: {beside}")
    ratio = run["final_error"]["val"]["5"] / max(float(chance["top5"].mean()), 1e-9)
    verdict = "clearly better than chance" if ratio <= 0.6 else "not clearly better than chance: try --model=TileRanker"
    print(f"The top-5 error is {ratio:.2f} of chance: {verdict}.")
    print(f"wrote {args.model_dir}\nwrote {args.run_file}")
    if args.test_mode == "predictions" and run.get("test_predictions"):
        print(f"wrote {args.results_csv}")
    return 0


if __name__ == "__main__":
    _start.run(main)
