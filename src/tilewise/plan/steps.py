"""One step of a plan, whatever runs it: the float plan, the integer plan, or plain operations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from tilewise.plan.trace import Node

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
Pair = tuple[int, int]


@dataclass
class Step:
    """One step: its kind, the values it reads, the numbers it needs. `shape` is the result's, as the trace saw it."""

    kind: str
    # conv, linear, max_pool, avg_pool, global_mean, add, sub, mul, affine (scale, shift and activation), concat, slice,
    # take (of channels), pixels (in another order or number), transpose (channels and pixels change places), upsample,
    # spread (channels over pixels), flatten, same (the value as it is), group_norm, layer_norm, attention (both over
    # tokens) or python; and input, where steps are a list
    inputs: tuple[int, ...]
    shape: Shape
    layer: str = ""
    activation: str = ""
    weight: Array | None = None
    bias: Array | None = None
    options: dict[str, Any] = field(default_factory=dict)
    node: Node | None = None  # of a python step
    algorithm: str = ""  # of a convolution: the one that it wants, or goes by
    gain: Array | None = None  # of a convolution's outputs: a norm's scale, which the weights do not have yet

    def folded(self) -> Array:
        """The weights times the gain: made when a layer is, so that no second copy of all weights is held."""
        assert self.weight is not None
        return self.weight if self.gain is None else self.weight * self.gain.reshape(-1, *(1,) * (self.weight.ndim - 1))

    @property
    def name(self) -> str:
        return self.layer

    @property
    def kernel(self) -> Pair:
        given: Pair = self.options.get("kernel", (1, 1))
        return (
            (self.weight.shape[2], self.weight.shape[3]) if self.kind == "conv" and self.weight is not None else given
        )

    @property
    def stride(self) -> Pair:
        given: Pair = self.options.get("stride", (1, 1))
        return given

    @property
    def padding(self) -> tuple[int, int, int, int]:
        """Top, left, bottom, right."""
        given: tuple[int, int, int, int] = self.options.get("padding", (0, 0, 0, 0))
        return given

    @property
    def groups(self) -> int:
        return int(self.options.get("groups", 1))

    @property
    def dilation(self) -> Pair:
        given: Pair = self.options.get("dilation", (1, 1))
        return given
