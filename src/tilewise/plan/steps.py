"""One step of a plan, whatever runs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from tilewise.plan.trace import Node

Array = npt.NDArray[Any]
Shape = tuple[int, ...]


@dataclass
class Step:
    """One step: its kind, the values it reads, the numbers it needs. `shape` is the result's, as the trace saw it."""

    kind: str
    # conv, linear, max_pool, avg_pool, global_mean, add, mul, affine (scale, shift and activation), concat, slice, take
    # (of channels), upsample, spread (channels over pixels), flatten, same (the value as it is) or python
    inputs: tuple[int, ...]
    shape: Shape
    layer: str = ""
    activation: str = ""
    weight: Array | None = None
    bias: Array | None = None
    options: dict[str, Any] = field(default_factory=dict)
    node: Node | None = None  # of a python step
