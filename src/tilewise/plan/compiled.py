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
from tilewise.plan.build import Layers, Part, Segment, images_at_once, only_a_batch, parts, resize
from tilewise.plan.idioms import recognised
from tilewise.plan.lower import Lowering
from tilewise.plan.trace import Value, run, trace
from tilewise.tensor import Tensor

Array = npt.NDArray[Any]

_SIZES = 8  # of input, whose plans are kept
_AGREES = 1e-2  # of the change: above rounding, far below another network's
# Shares of the largest result. Dynamic INT8 layers round to steps of 1/127 of a row: the last bits of a float operation
# before them may move a value by a step.
_FLOAT_ROUNDING, _INT8_ROUNDING = 1e-5, 2e-2


class Plan:
    """What `compile` gives. Call it with arrays or Tensors, as many as the module takes; it gives back the same kind.

    The weights are those of the moment the plan was made: compile again after training. An input of another size is
    traced when it comes.
    """

    def __init__(self, module: Module, examples: tuple[Any, ...]) -> None:
        self._module, self._layers = module, Layers()
        self._plans: dict[tuple[str, tuple[tuple[int, ...], ...]], _Sized] = {}  # by instruction set, shapes of inputs
        arrays = [np.ascontiguousarray(x.data if isinstance(x, Tensor) else x) for x in examples]
        self._dtypes = [array.dtype for array in arrays]
        self._at_once: dict[tuple[str, tuple[int, ...]], int] = {}  # images, by instruction set and shape of the input
        self._sized(self._parts_of(arrays)[0])

    def __call__(self, *inputs: Any) -> Any:
        wrapped = any(isinstance(x, Tensor) for x in inputs)
        arrays = [np.ascontiguousarray(x.data if isinstance(x, Tensor) else x) for x in inputs]
        given = [array.dtype for array in arrays]
        if given != self._dtypes:
            wanted = " and ".join(map(str, self._dtypes))
            raise DtypeError(f"this plan was made for {wanted}, not {' and '.join(map(str, given)) or 'nothing'}")
        out = self._run(arrays)
        return Tensor(out) if wrapped else out

    def _run(self, arrays: list[Array]) -> Array:
        found = [self._sized(some).run(some) for some in self._parts_of(arrays)]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _parts_of(self, arrays: list[Array]) -> list[list[Array]]:
        """The inputs, or as many images of a large batch at a time as go through all layers together."""
        if len(arrays) != 1 or arrays[0].ndim != 4 or len(arrays[0]) < 2:
            return [arrays]
        (images,) = arrays
        step = self._images_at_once(images)
        return [[images[i : i + step]] for i in range(0, len(images), step)]

    def _images_at_once(self, images: Array) -> int:
        assert native is not None
        key = (native.isa(), images.shape)
        if key not in self._at_once:
            made = _Sized(self._module, [images], self._layers, whole=False)
            self._at_once[key] = made.images
            self._keep((native.isa(), ((made.images, *images.shape[1:]),)), made)
            if len(self._at_once) > _SIZES:
                del self._at_once[next(iter(self._at_once))]
        return self._at_once[key]

    def _sized(self, arrays: list[Array]) -> _Sized:
        assert native is not None
        key = (native.isa(), tuple(array.shape for array in arrays))
        found = self._plans.pop(key, None) or _Sized(self._module, arrays, self._layers)
        self._keep(key, found)
        return found

    def _keep(self, key: tuple[str, tuple[tuple[int, ...], ...]], made: _Sized) -> None:
        self._plans[key] = made
        if len(self._plans) > _SIZES:
            del self._plans[next(iter(self._plans))]

    @property
    def algorithms(self) -> list[tuple[str, str]]:
        """Every convolution's layer and algorithm, for the size used last: "direct", "winograd" (F(4x4, 3x3)),
        "winograd2" (F(2x2, 3x3)) or "winograd_late" (F(4x4, 3x3), filters transformed as they are used)."""
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
    """The plan for one shape of every input or, if not `whole`, for as many images of a batch as go through all layers
    together.

    Two images say it all where a batch is only a batch: a network need not run on a large one to be planned.
    """

    parts: list[Part]

    def __init__(self, module: Module, examples: list[Array], layers: Layers, whole: bool = True) -> None:
        batch = len(examples) == 1 and examples[0].ndim == 4 and len(examples[0]) > 1
        self.images = len(examples[0]) if batch else 0
        with _nothing_kept():
            found = self._from_two(module, examples[0], whole) if batch else None
            seen, lowering = found or self._lowered(module, examples)
            self._make(module, seen, lowering, layers)

    def _from_two(self, module: Module, images: Array, whole: bool) -> tuple[_Seen, Lowering] | None:
        """None where the batch is more than a batch, or the module refuses another one than it was written for."""
        try:
            seen, lowering = self._lowered(module, [images[:2]])
        except Exception:  # whatever a module raises
            if len(images) == 2:
                raise
            return None
        if not only_a_batch(lowering, 2):
            return None if len(images) > 2 else (seen, lowering)
        self.images = len(images) if whole else images_at_once(lowering, 2, len(images))
        resize(lowering, self.images)
        return seen, lowering

    def _lowered(self, module: Module, examples: list[Array]) -> tuple[_Seen, Lowering]:
        assert native is not None
        traced = trace(module, *examples)
        if not isinstance(traced.result, Value):
            raise ConfigurationError(
                f"the result of {type(module).__name__} does not depend on its input through tensors"
            )
        seen = _Seen(module, examples, traced.outputs[""])
        native.give_back_memory()  # the module's results lay there; the plan has an arena
        return seen, Lowering(recognised(traced), tokens=True)

    def _make(self, module: Module, seen: _Seen, lowering: Lowering, layers: Layers) -> None:
        self.parts, self.result = parts(lowering, layers), lowering.find(lowering.result)
        self._constants = lowering.constants
        if not seen.agrees(self.run, lowering.shapes[0][:1]):
            raise ConfigurationError(
                f"{type(module).__name__} cannot be planned: for other inputs than the example it does something else"
            )

    def run(self, arrays: list[Array]) -> Array:
        values = {**self._constants, **dict(enumerate(arrays))}
        for part in self.parts:
            part.run(values)
        return values[self.result]


class _Seen:
    """What the module itself gives for other inputs than the example, taken before a plan has weights of its own:
    layers pack theirs for as long as they run, and both at once would be the most memory that is ever needed."""

    def __init__(self, module: Module, examples: list[Array], result: Array) -> None:
        self._before = result
        integers = any(getattr(m, "computes_in_int8", False) for m in module.modules())
        self._rounding = _INT8_ROUNDING if integers else _FLOAT_ROUNDING
        self._others = [_other(x) for x in examples]
        self._tells = any(not np.array_equal(a, b) for a, b in zip(examples, self._others, strict=True))
        if self._tells:
            self._want = run(module, *self._others).data

    def agrees(self, planned: Callable[[list[Array]], Array], images: tuple[int, ...]) -> bool:
        """Whether the plan gives the same: numbers that went around the tensors would be constants in it. A plan for
        another number of `images` gets these as often as it takes, and gives the same for the first."""
        if not self._tells:
            return True
        if self._others[0].shape[:1] == images:
            got, want, before = planned(self._others), self._want, self._before
        else:
            got = planned([np.resize(self._others[0], (*images, *self._others[0].shape[1:]))])
            least = min(len(got), len(self._want))
            got, want, before = got[:least], self._want[:least], self._before[:least]
        return want.shape == got.shape and _agree(want, got, before, self._rounding)


def _other(x: Array) -> Array:
    """Other numbers of the same kind; integers may be positions in something, and only change places."""
    turned = np.ascontiguousarray(x[..., ::-1]) if x.ndim else x
    return turned * np.float32(0.5) + np.float32(0.125) if x.dtype == np.float32 else turned


@contextmanager
def _nothing_kept() -> Iterator[None]:
    """The module runs here for its shapes alone: what its layers would keep to run faster the next time is memory for
    nothing, and so are its results that lie ready for others. Layers that other threads run keep what they like."""
    assert native is not None
    before, pooled = native.keep_weights_here(False), native.set_least_pooled(1 << 62)
    try:
        yield
    finally:
        native.keep_weights_here(before)
        native.set_least_pooled(pooled)


def _agree(want: Array, got: Array, before: Array, share: float) -> bool:
    """Within a share of what the other input changed: where that is little, a constant would come near too."""
    finite = np.isfinite(want) & np.isfinite(got) & np.isfinite(before)
    if not finite.all():
        return bool((np.isnan(want) == np.isnan(got)).all())
    change, rounding = np.abs(want - before).max(initial=0), share * np.abs(want).max(initial=0)
    return bool(np.abs(want - got).max(initial=0) <= _AGREES * change + rounding + 1e-30)


def compile(module: Module, example: Any, *more: Any) -> Plan:
    """A plan that computes what `module` does in eval mode, for inputs like these (arrays or Tensors).

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
    return Plan(module, (example, *more))
