"""Rank the configurations of any Triton kernel by the work in its intermediate representation, without running them.

An analytic estimate (`work_features.py`) comes first. Two sets of regression trees correct it: one predicts the ratio
of the runtime to the estimate, the other how a configuration compares with the list's average. Two further sets also
read the machine code of compiled configurations (`machine_code.py`). All were trained on kernels that were timed on an
H200 (`tools/ship_ranker.py`). Scores are logarithms of runtimes, up to a constant per list. Prediction needs NumPy
alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tilewise._safetensors import load_arrays
from tilewise.errors import FileFormatError
from tilewise.gpu.devices import Device
from tilewise.gpu.pinning.machine_code import MachineWork, machine_features
from tilewise.gpu.pinning.work_features import Numbers, RankedCandidate, features, is_too_large, relative

RANKER = "ranker"  # the first word of its name in lock files
FILE = Path(__file__).parent / "h200_ranker.safetensors"
SETS = ("ratio", "relative")  # of trees
COMPILED = "compiled_"  # prefix of the sets that also read machine code
_CHUNK_ROWS = 128  # rows that the trees read at once: some 25,000 nodes stay in the cache
TOO_LARGE = 10.0  # added to the score: behind all others


class Trees:
    """Regression trees as flat arrays: inner nodes compare a feature with a threshold, leaves hold a value."""

    def __init__(self, arrays: dict[str, npt.NDArray[np.generic]], name: str) -> None:
        """Read the arrays `name.feature`, `name.threshold`, `name.left`, `name.right`, `name.value`, `name.root`."""
        indices = (arrays[f"{name}.{column}"] for column in ("feature", "left", "right", "root"))
        self._feature, self._left, self._right, self._root = (array.astype(np.int64) for array in indices)
        self._threshold, self._value = (arrays[f"{name}.{part}"].astype(np.float64) for part in ("threshold", "value"))
        nodes = len(self._feature)
        children = np.stack([self._left, self._right])
        inner = self._feature >= 0
        # Children come behind their parent, so that a walk ends.
        if not (children[:, inner] > np.flatnonzero(inner)).all() or (children >= nodes).any():
            raise ValueError("trees whose nodes are in order")

    def predict(self, rows: Numbers) -> Numbers:
        """Return, for each row of features, the sum of all trees' predictions."""
        # Splits on columns that are equal in all rows are decided once: `skip` leads from a node past such splits.
        nodes, is_equal = np.arange(len(self._feature)), (rows == rows[:1]).all(axis=0)
        inner, feature = self._feature >= 0, np.maximum(self._feature, 0)
        first = rows[0, feature] if len(rows) else np.zeros(len(nodes))
        child = np.where(first <= self._threshold, self._left, self._right)
        skip = np.where(inner & is_equal[feature], child, nodes)
        while not np.array_equal(skip, further := skip[skip]):
            skip = further
        left, right = skip[self._left], skip[self._right]
        roots = skip[self._root]
        totals = np.empty(len(rows))
        for start in range(0, len(rows), _CHUNK_ROWS):
            chunk = np.ascontiguousarray(rows[start : start + _CHUNK_ROWS])
            node = np.tile(roots, len(chunk))  # (rows x trees,)
            offset = np.repeat(np.arange(len(chunk)) * chunk.shape[1], len(roots))
            flat, active = chunk.ravel(), np.flatnonzero(inner[node])
            while len(active):
                here = node[active]
                goes_left = flat[offset[active] + feature[here]] <= self._threshold[here]
                node[active] = there = np.where(goes_left, left[here], right[here])
                active = active[inner[there]]
            totals[start : start + len(chunk)] = self._value[node].reshape(len(chunk), len(roots)).sum(axis=1)
        return totals


class KernelRanker:
    """Ranks configurations of any Triton kernel by trained regression trees."""

    def __init__(self, path: Path = FILE) -> None:
        """Read the trees from a model file."""
        arrays, _ = load_arrays(path)
        self.name = f"{RANKER} {hashlib.sha256(path.read_bytes()).hexdigest()[:8]}"
        try:
            self._trees, self._compiled_trees = (
                [Trees(arrays, f"{prefix}{name}") for name in SETS] for prefix in ("", COMPILED)
            )
        except (KeyError, ValueError) as error:
            raise FileFormatError(f"{path} is not a ranker of kernels: it lacks {error}.") from error

    def scores(
        self, candidates: Sequence[RankedCandidate], device: Device, compiled: Sequence[MachineWork] | None = None
    ) -> Numbers:
        """Return one score per candidate, a logarithm of its runtime up to a constant; lower is faster.

        `compiled` describes the machine code of all candidates, if they were compiled.
        """
        rows, estimate = features(candidates, device)
        ratio, compared = self._trees
        if compiled is not None:
            rows, (ratio, compared) = (
                np.hstack([rows, machine_features(candidates, compiled, device)]),
                self._compiled_trees,
            )
        by_ratio = ratio.predict(rows) + np.log(estimate)
        scores = (by_ratio - by_ratio.mean() + compared.predict(relative(rows))) / 2
        scores = scores + TOO_LARGE * np.array([is_too_large(candidate, device) for candidate in candidates])
        # Rounding keeps the order the same on machines whose logarithms differ in the last bit.
        return np.asarray(np.round(scores, 6))


@lru_cache(maxsize=1)
def shipped_ranker() -> KernelRanker | None:
    """Load the ranker that is installed with tilewise; None if the file is missing."""
    return KernelRanker() if FILE.is_file() else None
