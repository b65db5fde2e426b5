"""What the course's commands share: their flags, the data they mean, and the files a run leaves.

A run is named by the MD5 of its arguments as JSON with sorted keys. The path of the results file is one of them and
carries a time stamp, so no two runs share a name. ``run_<hash>.jsonz`` is gzipped JSON that others read: its keys are
the course's.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tilewise._atomic import write_atomic
from tilewise._files import MAX_JSON_BYTES, gunzip, parse_json, read_input
from tilewise.costmodel.data.dataset import Dataset, load_dataset
from tilewise.costmodel.training.config import default_settings
from tilewise.errors import ConfigurationError, FileFormatError

DATA_ROOT = "~/data/tpugraphs/npz/tile/xla"
CACHE_DIR = "~/data/tpugraphs/cache/tile"
OUT_DIR = "~/out/tpugraphs_tiles"
TOY_FILES = 100
RESULTS_PER_KERNEL = 10
COURSE_MODELS = ("MLP", "EarlyJoinSAGE", "LateJoinSAGE", "EarlyJoinResGCN", "LateJoinResGCN")
# A pass over 100 kernels is ten steps: at the rate of 0.001, with ten configurations of each, a run ends before it has
# learned anything.
_TOY_SETTINGS: dict[str, Any] = {"epochs": 40, "learning_rate": 0.01, "configs": 60}
_MAX_RUN_BYTES = 1 << 30


@dataclass(frozen=True)
class TrainArgs:
    """The arguments that name a run, under the course's keys."""

    epochs: int
    eval_every: int
    batch_size: int
    configs: int
    early_stop: int
    losses: str
    learning_rate: float
    clip_norm: float | None
    model: str
    model_kwargs_json: str
    test_mode: str
    out_dir: str
    results_csv: str
    validate_batches: int
    run_id: str

    def compute_hash(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()

    @property
    def model_kwargs(self) -> dict[str, Any]:
        try:
            kwargs = json.loads(self.model_kwargs_json)
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"--model_kwargs_json is not JSON: {self.model_kwargs_json[:80]!r}.") from error
        if not isinstance(kwargs, dict):
            raise ConfigurationError('--model_kwargs_json must be an object such as {"hidden_dim": 64}.')
        return kwargs

    @property
    def folder(self) -> Path:
        return Path(self.out_dir).expanduser()

    @property
    def model_dir(self) -> Path:
        return self.folder / f"model_{self.compute_hash()}"

    @property
    def run_file(self) -> Path:
        return self.folder / f"run_{self.compute_hash()}.jsonz"


class Flags(argparse.ArgumentParser):
    """A parser that also takes its long flags with one dash, as the course's text types ``-dir``."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        flags = {flag for flag in self._option_string_actions if flag.startswith("--")}
        return super().parse_known_args(
            [f"-{word}" if f"-{word.partition('=')[0]}" in flags else word for word in words], namespace
        )


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the flags that all commands share: ``--name=value`` or ``--name value``, never abbreviated."""
    flags = Flags(description=description, allow_abbrev=False)
    flags.add_argument("--data_root", default=DATA_ROOT, help="folder with train, valid and test")
    flags.add_argument("--cache_dir", default=CACHE_DIR, help="where converted data is kept")
    add_bool(flags, "toy_data", f"only the first {TOY_FILES} files of each split")
    return flags


def add_bool(flags: argparse.ArgumentParser, name: str, help_text: str) -> None:
    """A flag that takes ``--name``, ``--name=True``, ``--name False`` and ``--noname``."""
    flags.add_argument(f"--{name}", type=_boolean, nargs="?", const=True, default=False, help=help_text)
    flags.add_argument(f"--no{name}", dest=name, action="store_false", help=argparse.SUPPRESS)


def train_parser() -> argparse.ArgumentParser:
    """The flags of tiles_train.py with the course's defaults, and three of ours: framework, seed, device."""
    flags = parser("Trains a model that ranks tile configurations.")
    add = flags.add_argument
    add("--epochs", type=int, help="passes over the train split (100; toy data 40)")
    add("--early_stop", type=int, help="epochs without a better validation OPA before stopping (20)")
    add("--eval_every", type=int, default=5, help="kept for the run's name; validation runs every epoch")
    add("--losses", help="names and weights (ListMLELoss:1,MSE:0.02)")
    add("--lr", type=float, help="learning rate of Adam (0.001; toy data 0.01)")
    add("--clip_norm", type=float, help="largest L2 norm of a tensor's gradient (0.001)")
    add("--configs", type=int, help="configurations sampled per kernel (10; toy data 60)")
    add("--batch", type=int, help="kernels per batch (10)")
    add("--model", default="EarlyJoinSAGE", help="a baseline, TileRanker, or package.module:Class of your own")
    add("--model_kwargs_json", default="{}", help="the model's keyword arguments as JSON")
    add("--test_mode", choices=("predictions", "metrics"), default="predictions", help="what to do with the test split")
    add("--out_dir", default=OUT_DIR, help="where runs go")
    add("--results_csv", default="", help="test predictions; empty: <out_dir>/results_<ms>.csv")
    add("--validate_batches", type=int, default=-1, help="batches to validate on each epoch; -1: all")
    add("--run_id", default="", help="a tag of your own")
    add("--framework", choices=("torch", "keras"), help="keras trains a class of course/models.py (default: torch, "
        "or keras where only models.py has the class)")  # fmt: skip
    add("--seed", type=int, default=0, help="decides sampling and initial weights")
    return flags


def train_args(options: argparse.Namespace) -> TrainArgs:
    """The run's arguments from parsed flags: what was not given has the model's default, which for the baselines is
    the course's; the results file is resolved."""
    is_toy = options.toy_data and options.model in COURSE_MODELS
    toy = _TOY_SETTINGS if is_toy else {}
    settings = default_settings(
        options.model,
        epochs=options.epochs if options.epochs is not None else toy.get("epochs"),
        early_stop=options.early_stop,
        losses=options.losses,
        learning_rate=options.lr if options.lr is not None else toy.get("learning_rate"),
        clip_norm=options.clip_norm,
        configs=options.configs if options.configs is not None else toy.get("configs"),
        batch=options.batch,
    )
    results = options.results_csv
    if not results:
        results = str(Path(options.out_dir).expanduser() / f"results_{int(time.time() * 1000)}.csv")
    return TrainArgs(
        settings.epochs,
        options.eval_every,
        settings.batch,
        settings.configs,
        settings.early_stop,
        settings.losses,
        settings.learning_rate,
        settings.clip_norm,
        options.model,
        options.model_kwargs_json,
        options.test_mode,
        options.out_dir,
        results,
        options.validate_batches,
        options.run_id,
    )


def has_files(folder: Path) -> bool:
    """Tell whether a folder exists and has files; an interrupted download leaves an empty one."""
    return folder.is_dir() and any(folder.iterdir())


def course_dataset(data_root: str, cache_dir: str | None, toy_data: bool, *, trained: bool = False) -> Dataset:
    """Load the dataset of a command: the folder, its first files for toy data, or synthetic kernels for want of files.

    Synthetic kernels are used only for toy data or with a `trained` model.
    """
    root = Path(data_root).expanduser()
    limit = TOY_FILES if toy_data else None
    if has_files(root):
        return load_dataset(root, cache_dir=cache_dir, limit=limit)
    if not (toy_data or trained):
        raise ConfigurationError(
            f"There is no dataset at {data_root}; fetch it with `python3 echo_download_commands.py | bash`, "
            "or use synthetic kernels with --toy_data=True."
        )
    kernels = f"using {TOY_FILES} synthetic kernels per split, with runtimes from a formula"
    print(f"There is no dataset at {data_root}; {kernels}.", file=sys.stderr, flush=True)
    # This file is `flags` for the commands beside it and `course.flags` for everyone else.
    synthetic_tiles = import_module(f"{__package__}.synthetic_tiles" if __package__ else "synthetic_tiles")
    dataset: Dataset = synthetic_tiles.synthetic_dataset(TOY_FILES, TOY_FILES, TOY_FILES)
    return dataset


def write_run(path: Path, run: Mapping[str, Any]) -> None:
    """Write ``run_<hash>.jsonz``; equal runs give equal bytes."""
    write_atomic(path, gzip.compress(json.dumps(run).encode(), mtime=0))


def read_run(path: Path) -> dict[str, Any]:
    """The content of a ``run_<hash>.jsonz``, with its arguments present and of the right types."""
    run = parse_json(gunzip(read_input(path, MAX_JSON_BYTES), path, MAX_JSON_BYTES), path)
    args = run.get("args") if isinstance(run, dict) else None
    types = {"model": str, "model_kwargs_json": str, "configs": int}
    if not isinstance(args, dict) or any(not isinstance(args.get(key), kind) for key, kind in types.items()):
        raise FileFormatError(f"{path} lacks the arguments of its run ({', '.join(types)}).")
    return dict(run)


def run_file_of(model_dir: Path) -> Path:
    """The run file that belongs to a ``model_<hash>`` folder."""
    return model_dir.with_name(model_dir.name.replace("model_", "run_", 1) + ".jsonz")


def find_model_dir(text: str, out_dir: str = OUT_DIR) -> Path:
    """A model folder by path or, as the course writes it, by its name under the output folder."""
    candidates = [Path(text).expanduser(), Path(out_dir).expanduser() / text]
    for path in candidates:
        if path.is_dir():
            return path
    raise ConfigurationError(f"There is no model folder {text}, here or under {out_dir}.")


def new_run(args: TrainArgs) -> dict[str, Any]:
    """The frame of a run file, before training."""
    curve: dict[str, list[float]] = {key: [] for key in ("epoch", "train_loss", "train_opa", "val_loss", "val_opa")}
    return {"train_curve": curve, "final_error": {}, "args": asdict(args)}


def test_predictions(rankings: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """The run file's ten best per kernel; a kernel with fewer is padded with configuration 0."""
    filled = {}
    for name, ranking in rankings.items():
        first = [int(index) for index in ranking[:RESULTS_PER_KERNEL]]
        filled[name] = first + [0] * (RESULTS_PER_KERNEL - len(first))
    return filled


def _boolean(text: str) -> bool:
    if text.lower() in ("true", "t", "1", "yes", "y"):
        return True
    if text.lower() in ("false", "f", "0", "no", "n"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
