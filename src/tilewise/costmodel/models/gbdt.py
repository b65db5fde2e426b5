"""Gradient-boosted trees (LightGBM) on a table with one row per configuration: the strong tabular baseline.

A row holds TileRanker's features of the configuration and of the kernel, and the mean of the node features. The trees
are stored as LightGBM's text format inside our own file format, so no pickle is involved.

LightGBM's reader trusts its input: a missing child or a list that is too short crashes the process. So the text of a
model file is parsed here, every list is counted and every number checked, and a new text with only the fields needed
for prediction is written. Trees with categorical splits or linear leaves, which tilewise never trains, are rejected.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.dataset import Dataset
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import Schema
from tilewise.costmodel.features.inputs import ModelInputs, Preparation
from tilewise.costmodel.features.ranker import RankerFeatures
from tilewise.costmodel.features.ranker_fit import check_configs_differ
from tilewise.costmodel.models.file_writer import FileContents, file_contents, write_tensors
from tilewise.costmodel.models.files import ModelFile
from tilewise.costmodel.training.sampling import InputCache, prepared_inputs
from tilewise.errors import ConfigurationError, FileFormatError, TilewiseError, UnavailableError

DEFAULTS: dict[str, Any] = {
    "objective": "regression",
    "num_leaves": 31,
    "learning_rate": 0.08,
    "min_data_in_leaf": 20,
    "feature_fraction": 0.8,
    "bagging_fraction": 0.8,
    "bagging_freq": 1,
}
TREES = 300
MAX_ROWS = 2_000_000  # of the training table, to bound memory at about 1 GB
_MIN_ROWS_PER_KERNEL = 16
_MAX_GROUP_ROWS = 10_000  # LightGBM's limit for LambdaRank
_MAX_RELEVANCE = 31  # LambdaRank's label of the fastest configuration; LightGBM allows labels 0 to 31

MAX_TEXT_BYTES = 64 << 20  # shipped models have about 1 MiB
_MAX_FEATURES = 100_000
_MAX_LEAVES = 1 << 20
_OBJECTIVE = re.compile(r"[a-z_0-9]{1,40}( [a-z_0-9]{1,30}:[0-9.e+-]{1,30}){0,4}")
_DECISIONS = frozenset(
    {"0", "2", "4", "6", "8", "10"}
)  # bit field of numerical splits: default direction and missing-value type


_SPLIT_LISTS = ("split_feature", "threshold", "decision_type", "left_child", "right_child")


@dataclass(eq=False)
class GBDT:
    """Trained trees; they implement `ranking.Model`."""

    booster: Any
    preparation: Preparation
    schema: Schema
    record: dict[str, Any] = field(default_factory=dict)
    name: str = "GBDT"

    @property
    def calibration(self) -> dict[str, Any] | None:
        return self.record.get("calibration")

    def score(self, kernel: Kernel, rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float32]:
        """Return one score per configuration, or per configuration in `rows`; lower is faster."""
        # LambdaRank predicts relevance, where higher is better.
        sign = -1.0 if self.record.get("ranks") else 1.0
        try:
            table = tabular(self.preparation, kernel, rows)
            return np.asarray(sign * self.booster.predict(table), dtype=np.float32)
        except TilewiseError:
            raise
        except (LookupError, ValueError, TypeError, ArithmeticError, _lightgbm().basic.LightGBMError) as error:
            raise FileFormatError("The trees of this model do not fit its features; train it again.") from error

    def contents(self) -> FileContents:
        text = np.frombuffer(self.booster.model_to_string().encode(), dtype=np.uint8)
        return file_contents({"trees": text}, self.preparation, self.schema, self.record)

    def save(self, path: str | Path) -> None:
        write_tensors(Path(path), *self.contents())


def tabular(
    preparation: Preparation, kernel: Kernel, rows: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.float32]:
    """Return the table that the trees read: each configuration's inputs with the mean node inputs, (C, columns)."""
    return _joined(preparation.apply(kernel, rows))


def _joined(inputs: ModelInputs) -> npt.NDArray[np.float32]:
    # Trees read one row per configuration, so the graph enters as the mean of its nodes.
    mean = np.broadcast_to(inputs.node.mean(axis=0), (len(inputs.config), inputs.node.shape[1]))
    return np.hstack([inputs.config, mean])


def train_gbdt(
    dataset: Dataset,
    seed: int = 0,
    trees: int = TREES,
    threads: int = 0,
    *,
    max_seconds: float = 0.0,
    **parameters: Any,
) -> GBDT:
    """Fit trees to the order (LambdaRank, Burges 2010) or, with objective="regression", to log runtime.

    With `max_seconds`, the trees that are finished by then are used.
    """
    deadline = time.monotonic() + max_seconds if max_seconds else None
    if not dataset.train.labelled:
        raise ConfigurationError("Training needs a train split with runtimes; this collection has none.")
    settings = DEFAULTS | {"objective": "lambdarank"} | parameters
    ranks = settings["objective"] == "lambdarank"
    inputs = prepared_inputs(dataset.train, RankerFeatures.kind)
    preparation = inputs.preparation
    check_configs_differ(preparation)
    table, labels, groups = _training_table(inputs, seed, ranks)
    if ranks:
        # LightGBM's default gain 2^label would let the fastest configuration decide alone; a linear gain does not.
        settings["label_gain"] = list(range(_MAX_RELEVANCE + 1))
    booster = fit_trees(
        table,
        labels,
        trees,
        settings | {"seed": seed, "num_threads": threads},
        group=groups if ranks else None,
        deadline=deadline,
    )
    model = GBDT(
        booster, preparation, dataset.schema, {"model": "GBDT", "ranks": ranks, "settings": settings, "seed": seed}
    )
    if dataset.valid.labelled:
        from tilewise.costmodel.confidence_fit import calibrate

        model.record["calibration"] = calibrate(model, dataset.valid)
    return model


def fit_trees(
    table: Any,
    labels: Any,
    trees: int,
    settings: Mapping[str, Any],
    weight: Any = None,
    group: Any = None,
    deadline: float | None = None,
) -> Any:
    """Train a LightGBM booster deterministically; with a `deadline` of `time.monotonic`, adapt to it and stop there.

    `weight` are row weights, `group` the number of rows per kernel (for ranking objectives).
    """
    lightgbm = _lightgbm()
    # Histograms by rows in a fixed order make the result independent of the number of threads.
    fixed = {"deterministic": True, "force_row_wise": True, "verbose": -1}
    try:
        data = lightgbm.Dataset(table, labels, weight=weight, group=group)
        callbacks = None if deadline is None else [_finish_by(deadline, trees)]
        return lightgbm.train(DEFAULTS | dict(settings) | fixed, data, int(trees), callbacks=callbacks)
    except (lightgbm.basic.LightGBMError, ValueError, TypeError) as error:
        raise ConfigurationError(f"LightGBM refused these settings: {str(error).splitlines()[0]}.") from error


def _finish_by(deadline: float, trees: int, timed_trees: int = 5, max_rate: float = 0.3) -> Any:
    """Return a callback that ends the training after the first tree beyond the deadline.

    If fewer than `trees` will be finished by then, judging by the first `timed_trees`, it raises the learning rate, so
    that those learn as much together; at most to `max_rate`, XGBoost's default.
    """
    from lightgbm.callback import EarlyStopException

    finished: list[float] = []  # time of each tree

    def after_tree(environment: Any) -> None:
        """Raise LightGBM's early stopping if the deadline is over, and adapt the learning rate once."""
        finished.append(time.monotonic())
        if finished[-1] > deadline:
            raise EarlyStopException(environment.iteration, [])
        if len(finished) == timed_trees:
            # The first tree takes longer, because the table is sorted into histograms.
            seconds = (finished[-1] - finished[0]) / (timed_trees - 1)
            expected = timed_trees + (deadline - finished[-1]) / max(seconds, 1e-6)
            rate = environment.params["learning_rate"] * max(1.0, trees / expected)
            environment.model.reset_parameter({"learning_rate": min(rate, max_rate)})

    return after_tree


def _training_table(
    inputs: InputCache, seed: int, ranks: bool
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64], list[int]]:
    """Return the training table, its labels and the number of rows per kernel; large collections are subsampled.

    Labels are log slowdowns against the kernel's fastest or, with `ranks`, relevances that fall with the slowdown.
    """
    rng = np.random.default_rng(seed)
    limit = min(_MAX_GROUP_ROWS, max(_MIN_ROWS_PER_KERNEL, MAX_ROWS // max(1, len(inputs))))
    tables, labels = [], []
    for index in range(len(inputs)):
        # Every kernel contributes at most its share of the rows, so that a few large ones do not dominate.
        count = inputs.kernel(index).n_configs
        rows = np.arange(count) if count <= limit else np.sort(rng.choice(count, limit, replace=False))
        target = inputs.target(index, rows)
        slowdown = target / target.min()
        tables.append(_joined(inputs.rows(index, rows)))
        # Relevance falls with the slowdown: 31 for the fastest, 15 at twice its time.
        labels.append(np.floor(_MAX_RELEVANCE / slowdown) if ranks else np.log(slowdown))
    return np.concatenate(tables), np.concatenate(labels), [len(kernel_labels) for kernel_labels in labels]


def restore_gbdt(file: ModelFile) -> GBDT:
    """Rebuild the trees of a model file after checking their text."""
    lightgbm = _lightgbm()
    try:
        text = file.weights["trees"].tobytes().decode()
        booster = lightgbm.Booster(model_str=checked_trees(text))
    except (KeyError, ValueError, TypeError, lightgbm.basic.LightGBMError) as error:
        # A FileFormatError is a ValueError too; its message is already precise.
        if isinstance(error, FileFormatError):
            raise
        raise FileFormatError("The model file holds no trees that LightGBM can read; train it again.") from error
    return GBDT(booster, file.preparation, file.schema, file.record)


def _lightgbm() -> Any:
    """Import LightGBM; raise `UnavailableError` if it is not installed."""
    try:
        import lightgbm
    except ImportError as error:
        raise UnavailableError("GBDT needs LightGBM: pip install 'tilewise[train]'.") from error
    return lightgbm


def checked_trees(text: str) -> str:
    """Validate a booster's text from an untrusted file; return an equivalent text that is safe to load."""
    if len(text) > MAX_TEXT_BYTES:
        raise FileFormatError(f"The model file holds trees of more than {MAX_TEXT_BYTES >> 20} MiB; train it again.")
    try:
        # The text is a header and one section per tree; what follows the last tree is not needed.
        head, *trees = text.partition("\nend of trees")[0].split("\nTree=")
        header = _parse_fields(head)
        features = _parse_bounded_int(header["max_feature_idx"], _MAX_FEATURES) + 1
        # Only models with one output are supported.
        if (header["num_class"], header["num_tree_per_iteration"]) != ("1", "1"):
            raise ValueError("classes")
        if not _OBJECTIVE.fullmatch(header.get("objective", "regression")):
            raise ValueError("objective")
        sections = [_safe_header(header, features, "average_output" in head.splitlines())]
        sections += [
            f"Tree={number}\n{_safe_tree(_parse_fields(tree), features)}\n\n" for number, tree in enumerate(trees)
        ]
    except (ValueError, KeyError, IndexError) as error:
        raise FileFormatError("The model file holds no trees that LightGBM can read; train it again.") from error
    return "".join(sections) + "end of trees\n"


def _parse_fields(text: str) -> dict[str, str]:
    """Parse lines of the form name=value to a dict."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def _safe_header(header: dict[str, str], features: int, averages: bool) -> str:
    """Rewrite the header of LightGBM's text format, with only the fields that prediction needs."""
    names = " ".join(f"Column_{number}" for number in range(features))
    lines = [
        "tree", "version=v4", "num_class=1", "num_tree_per_iteration=1", "label_index=0",
        f"max_feature_idx={features - 1}", f"objective={header.get('objective', 'regression')}",
        *(["average_output"] if averages else []),
        f"feature_names={names}", f"feature_infos={' '.join(['none'] * features)}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n\n"


def _safe_tree(fields: dict[str, str], features: int) -> str:
    """Check one tree's fields and rewrite it, with placeholders for what prediction does not need."""
    leaves = _parse_bounded_int(fields["num_leaves"], _MAX_LEAVES, least=1)
    # tilewise trains neither; their extra lists would need further checks.
    if fields.get("num_cat", "0") != "0" or fields.get("is_linear", "0") != "0":
        raise ValueError("categories or linear leaves")
    # A binary tree with n leaves has n - 1 splits.
    splits = leaves - 1
    lists = {name: _numbers(fields, name, splits) for name in _SPLIT_LISTS}
    lists |= {"leaf_value": _numbers(fields, "leaf_value", leaves)}
    # Statistics that prediction does not need.
    lists |= {"split_gain": ["0"] * splits, "leaf_weight": ["1"] * leaves, "leaf_count": ["1"] * leaves}
    lists |= {f"internal_{name}": ["0"] * splits for name in ("value", "weight", "count")}
    # Every index must be in range, because LightGBM does not check it.
    for feature in lists["split_feature"]:
        _parse_bounded_int(feature, features - 1)
    if not _DECISIONS.issuperset(lists["decision_type"]):
        raise ValueError("decision")
    # Children must form a tree.
    for name in ("left_child", "right_child"):
        for node, child in enumerate(lists[name]):
            _check_child(int(child), node, splits, leaves)
    shrinkage = _checked_number(fields.get("shrinkage", "1"))
    body = "\n".join(f"{name}={' '.join(values)}" for name, values in lists.items())
    return f"num_leaves={leaves}\nnum_cat=0\n{body}\nis_linear=0\nshrinkage={shrinkage}\n"


def _check_child(child: int, node: int, splits: int, leaves: int) -> None:
    """Raise unless a child is valid: a later split, which excludes cycles, or leaf n, written as -n - 1."""
    if not (node < child < splits or 0 <= -child - 1 < leaves):
        raise ValueError("child")


def _numbers(fields: dict[str, str], name: str, count: int) -> list[str]:
    """Return the numbers of field `name` as strings; raise unless it has exactly `count` finite ones."""
    numbers = fields.get(name, "").split()
    if len(numbers) != count:
        raise ValueError(name)
    return [_checked_number(number) for number in numbers]


def _checked_number(text: str) -> str:
    """Return the text if it is a finite number in plain notation; raise `ValueError` otherwise."""
    if not math.isfinite(float(text)) or not re.fullmatch(r"[-+0-9.eE]{1,40}", text):
        raise ValueError(text)
    return text


def _parse_bounded_int(text: str, most: int, least: int = 0) -> int:
    """Parse an integer; raise `ValueError` unless it is between `least` and `most`."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise ValueError(text)
    return int(text)
