"""What the sparse layers share: sparse or dense by measurement, what follows the product, and their files.

A product that skips zeros is not always the faster one, and where the line lies depends on the machine, the shape and
the pattern. So a layer runs both a few times when it meets a new size, keeps the faster, and can say why.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tilewise.backend import current_backend
from tilewise.errors import FileFormatError, GradientError
from tilewise.io import load_arrays, save
from tilewise.nn import Module
from tilewise.nn.layers import fusable_activation
from tilewise.nn.module import Fusing
from tilewise.prune.bits import packed_arrays
from tilewise.tensor import Tensor, is_grad_enabled

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Choice:
    sparse_s: float
    dense_s: float
    at: str

    @property
    def dense(self) -> bool:
        return self.dense_s < self.sparse_s

    def __str__(self) -> str:
        chosen = "dense" if self.dense else "sparse"
        return f"{chosen}: sparse {self.sparse_s * 1e6:.0f} µs, dense {self.dense_s * 1e6:.0f} µs at {self.at}"


def measured(sparse: Callable[[], Any], dense: Callable[[], Any], at: str) -> Choice:
    """Time both, taking turns; the quickest of a few calls counts."""
    from tilewise.profile.timing.interleave import time_interleaved

    sparse_s, dense_s = (min(times) for times in time_interleaved((sparse, dense), 5))
    return Choice(sparse_s, dense_s, at)


def refuse_gradient(x: Any) -> None:
    if isinstance(x, Tensor) and x.requires_grad and is_grad_enabled():
        raise GradientError("a sparse layer has no gradient; run it under no_grad()")


class SparseLayer(Fusing):
    """A layer that keeps the weights that are not zero in `_kernel`, and a dense form only where that is faster."""

    called: str  # in sentences
    format: str  # of its file
    sizes: tuple[int, ...]  # batches up to each of these, and larger ones, are timed apart
    _kernel: Any
    _dense: Any

    def __init__(self, weight: Array, bias: Array | None, always_sparse: bool) -> None:
        self.float_bias = None if bias is None else np.ascontiguousarray(bias, np.float32)
        self.nonzeros, self._size, self.always_sparse = int(np.count_nonzero(weight)), weight.size, always_sparse
        self._dense = None
        self._choices: dict[Any, Choice] = {}

    @property
    def sparsity(self) -> float:
        return 1 - self.nonzeros / self._size if self._size else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes the weights and bias take; a dense copy kept because it is faster counts too."""
        parts = (self._kernel, self._dense, self.float_bias)
        return int(sum(part.nbytes for part in parts if part is not None))

    def explain(self) -> dict[str, str]:
        """For each size of input met so far: "sparse" or "dense", and the times that decided it."""
        names = [f"up to {n}" for n in self.sizes] + [f"above {self.sizes[-1]}"]
        return {names[size]: str(why) for size, why in sorted(self._choices.items())}

    def forward_with(self, x: Tensor, layers: list[Module]) -> tuple[Tensor, int]:
        activation = fusable_activation(layers[1:2])
        return self(x, activation=activation), 2 if activation else 1

    def _size_of(self, batch: int) -> int:
        return int(np.searchsorted(self.sizes, batch))

    def _choose(self, key: Any, sparse: Callable[[], Any], dense: Callable[[], Any], at: str) -> bool:
        """Whether the dense product is the one to use at this size; both are timed the first time."""
        if key not in self._choices:
            kept = self._dense
            self._choices[key] = measured(sparse, dense, at)
            if not self._choices[key].dense:
                self._dense = kept
        return self._choices[key].dense

    @staticmethod
    def _finished(out: Array, activation: str | None, residual: Any, fused: bool) -> Tensor:
        """A product with what follows it, as far as that was not `fused` into it."""
        if residual is not None:
            out += np.asarray(residual.data if isinstance(residual, Tensor) else residual)
        if activation is not None and not fused:
            out = current_backend().dispatch(activation, out)
        return Tensor(out)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Non-zero values and one bit per weight, as safetensors."""
        bias = {} if self.float_bias is None else {"bias": self.float_bias}
        save(packed_arrays(self._weights()) | self._beside() | bias, path, {"format": self.format})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        arrays, metadata = load_arrays(path)
        try:
            floats = [arrays[name] for name in ("bias", "scale") if name in arrays]
            if metadata.get("format") != cls.format or any(array.dtype != np.float32 for array in floats):
                raise ValueError
            return cls._restored(arrays)
        except (KeyError, ValueError, TypeError):
            raise FileFormatError(f"{path} does not hold {cls.called}") from None

    def _weights(self) -> Array:
        """All of them, zeros included."""
        raise NotImplementedError

    def _beside(self) -> dict[str, Array]:
        """What its file holds beside weights and bias."""
        return {}

    @classmethod
    def _restored(cls, arrays: dict[str, Array]) -> Self:
        raise NotImplementedError
