"""A module compiled for inference: traced once for every size of input, run in as few native calls as can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.errors import ConfigurationError, DtypeError
from tilewise.nn.module import Module
from tilewise.plan.build import Layers, Part, Segment, images_at_once, parts
from tilewise.plan.lower import Lowering
from tilewise.plan.trace import Value, run, trace
from tilewise.tensor import Tensor

Array = npt.NDArray[Any]

_SIZES = 8  # of input, whose plans are kept
_AGREES = 1e-2  # of the change: above rounding, far below another network's


class Plan:
    """What `compile` gives. Call it with an array or a Tensor; it gives back the same kind.

    The weights are those of the moment the plan was made: compile again after training. An input of another size is
    traced when it comes.
    """

    def __init__(self, module: Module, example: Any) -> None:
        self._module, self._layers = module, Layers()
        self._plans: dict[tuple[str, tuple[int, ...]], _Sized] = {}  # by instruction set and shape of input
        self._dtype = np.asarray(example).dtype
        self._sized(np.ascontiguousarray(example))

    def __call__(self, x: Any) -> Any:
        wrapped = isinstance(x, Tensor)
        array = np.ascontiguousarray(x.data if wrapped else x)
        if array.dtype != self._dtype:
            raise DtypeError(f"this plan was made for {self._dtype}, not {array.dtype}")
        out = self._run(array)
        return Tensor(out) if wrapped else out

    def _run(self, array: Array) -> Array:
        sized = self._sized(array)
        step = sized.images_at_once
        if step >= len(array):
            return sized.run(array)
        return np.concatenate([self._run(array[i : i + step]) for i in range(0, len(array), step)])

    def _sized(self, array: Array) -> _Sized:
        assert native is not None
        key = (native.isa(), array.shape)
        found = self._plans.pop(key, None)
        if found is None:
            found = _Sized(self._module, array, self._layers)
        self._plans[key] = found
        if len(self._plans) > _SIZES:
            del self._plans[next(iter(self._plans))]
        return found

    @property
    def algorithms(self) -> list[tuple[str, str]]:
        """Every convolution's layer and algorithm, for the size used last: "direct", "winograd" (F(4x4, 3x3)) or
        "winograd2" (F(2x2, 3x3))."""
        last = next(reversed(self._plans.values()))
        return [found for part in last.parts if isinstance(part, Segment) for found in part.algorithms()]

    @property
    def native_calls(self) -> int:
        """Native calls and operations called from Python that the size used last takes."""
        return len(next(reversed(self._plans.values())).parts)

    @property
    def arena_bytes(self) -> int:
        """Memory between the layers, for the size used last."""
        last = next(reversed(self._plans.values()))
        return sum(part.plan.arena_bytes for part in last.parts if isinstance(part, Segment))


class _Sized:
    """The plan for one shape of input."""

    parts: list[Part]

    def __init__(self, module: Module, example: Array, layers: Layers) -> None:
        with _nothing_kept():
            self._make(module, example, layers)

    def _make(self, module: Module, example: Array, layers: Layers) -> None:
        assert native is not None
        traced = trace(module, example)
        if not isinstance(traced.result, Value):
            raise ConfigurationError(
                f"the result of {type(module).__name__} does not depend on its input through tensors"
            )
        seen = _Seen(module, example, traced.output)
        native.clear_array_pool()  # the module's results lay there; the plan has an arena
        lowering = Lowering(traced, tokens=True)
        self.parts, self.result = parts(lowering, layers), lowering.find(traced.result)
        self.images_at_once = images_at_once(self.parts, len(example)) if example.ndim == 4 else len(example)
        if not seen.agrees(self.run):
            raise ConfigurationError(
                f"{type(module).__name__} cannot be planned: for other inputs than the example it does something else"
            )

    def run(self, x: Array) -> Array:
        values: dict[int, Array] = {0: x}
        for part in self.parts:
            part.run(values)
        return values[self.result]


class _Seen:
    """What the module itself gives for another input than the example, taken before a plan has weights of its own:
    layers pack theirs for as long as they run, and both at once would be the most memory that is ever needed."""

    def __init__(self, module: Module, example: Array, result: Array) -> None:
        self._before, self._other = result, None
        if example.size and example.dtype == np.float32:
            self._other = np.ascontiguousarray(example[..., ::-1] * np.float32(0.5) + np.float32(0.125))
            self._want = run(module, self._other).data

    def agrees(self, planned: Callable[[Array], Array]) -> bool:
        """Whether the plan gives the same: numbers that went around the tensors would be constants in it."""
        if self._other is None:
            return True
        got = planned(self._other)
        return self._want.shape == got.shape and _agree(self._want, got, self._before)


@contextmanager
def _nothing_kept() -> Iterator[None]:
    """The module runs here for its shapes alone: what its layers would keep to run faster the next time is memory for
    nothing. Layers that other threads run keep what they like."""
    assert native is not None
    before = native.keep_weights_here(False)
    try:
        yield
    finally:
        native.keep_weights_here(before)


def _agree(want: Array, got: Array, before: Array) -> bool:
    """Within a share of what the other input changed: where that is little, a constant would come near too."""
    finite = np.isfinite(want) & np.isfinite(got) & np.isfinite(before)
    if not finite.all():
        return bool((np.isnan(want) == np.isnan(got)).all())
    change, rounding = np.abs(want - before).max(initial=0), 1e-5 * np.abs(want).max(initial=0)
    return bool(np.abs(want - got).max(initial=0) <= _AGREES * change + rounding + 1e-30)


def compile(module: Module, example: Any) -> Plan:
    """A plan that computes what `module` does in eval mode, for inputs like `example` (an array or a Tensor).

    >>> import numpy as np
    >>> from tilewise import models
    >>> plan = compile(models.resnet8(), np.zeros((1, 3, 32, 32), np.float32))
    >>> plan(np.ones((2, 3, 32, 32), np.float32)).shape
    (2, 10)
    """
    if native is None:
        raise ConfigurationError(
            "a plan needs tilewise's compiled kernels, which are not installed; call the module itself"
        )
    return Plan(module, example.data if isinstance(example, Tensor) else example)
