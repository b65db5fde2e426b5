"""Compilation of a module for inference: traced once per input size, run in as few native calls as possible."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tilewise._events import value_readers
from tilewise._extension import native
from tilewise.errors import ConfigurationError, DtypeError, type_name
from tilewise.graph.executor import MAX_SPECIALIZATIONS, Call, NativeCall
from tilewise.graph.explain import PlanExplanation, explain
from tilewise.graph.ir import Array, Node, Trace, Value
from tilewise.graph.passes.lower import Lowering
from tilewise.graph.passes.partition import WeightCache, chunk_size, is_batch_independent, partition, set_batch
from tilewise.graph.passes.patterns import match_patterns
from tilewise.graph.trace import run, trace
from tilewise.nn.module import Module
from tilewise.nn.self_planning import is_own
from tilewise.tensor import Tensor

# A plan may deviate by this share of the change that the second input makes: above rounding, far below the
# difference of another network.
_CHANGE_TOLERANCE = 1e-2
# Deviations as shares of the largest result. Dynamic INT8 layers round to steps of 1/127 of a row: the last bits of a
# float operation before them may move a value by a step, and each layer adds to it. Noise of `_NOISE`, a few last bits
# of the input, shows by how much in this network; another path may differ by this many times as much.
_FLOAT_ROUNDING, _INT8_ROUNDING = 1e-5, 2e-2
_NOISE, _LARGEST_NOISE_RATIO = 1e-6, 3.0

Shapes = tuple[tuple[int, ...], ...]


class Plan:
    """The result of `compile`. Call it with arrays or Tensors like the module; it returns the kind it receives.

    A plan contains the weights of the moment it was made: compile again after training. An input of a new size is
    traced when it first appears.
    """

    def __init__(self, module: Module, examples: tuple[Any, ...]) -> None:
        """Compile the module for inputs like the examples."""
        self._module, self._weights = module, WeightCache()
        self._specializations: dict[tuple[str, Shapes], _Specialization] = {}  # by instruction set and input shapes
        self._chunk_sizes: dict[tuple[str, tuple[int, ...]], int] = {}  # by instruction set and input shape
        self._latest: _Specialization | None = None
        self._lock = threading.Lock()
        arrays = [np.ascontiguousarray(x.data if isinstance(x, Tensor) else x) for x in examples]
        self._dtypes = [array.dtype for array in arrays]
        self._specialize(self._chunks(arrays)[0])

    def __call__(self, *inputs: Any) -> Any:
        """Run the plan on inputs; a new shape is compiled first."""
        wrapped = any(isinstance(x, Tensor) for x in inputs)
        arrays = [np.ascontiguousarray(x.data if isinstance(x, Tensor) else x) for x in inputs]
        dtypes = [array.dtype for array in arrays]
        if dtypes != self._dtypes:
            expected, actual = " and ".join(map(str, self._dtypes)), " and ".join(map(str, dtypes)) or "nothing"
            raise DtypeError(f"this plan was made for {expected}, not {actual}")
        out = self._run(arrays)
        return Tensor(out) if wrapped else out

    def _run(self, arrays: list[Array]) -> Array:
        results = [self._specialize(chunk).run(chunk) for chunk in self._chunks(arrays)]
        return results[0] if len(results) == 1 else np.concatenate(results)

    def _chunks(self, arrays: list[Array]) -> list[list[Array]]:
        """Split a large batch into groups of images that go through all layers together."""
        if len(arrays) != 1 or arrays[0].ndim != 4 or len(arrays[0]) < 2:
            return [arrays]
        (images,) = arrays
        size = self._chunk_size(images)
        return [[images[i : i + size]] for i in range(0, len(images), size)]

    def _chunk_size(self, images: Array) -> int:
        """Return the number of images per chunk, computed once for each shape of an image."""
        assert native is not None
        key = (native.isa(), images.shape)
        if key not in self._chunk_sizes:
            specialization = _Specialization(self._module, [images], self._weights, whole=False)
            self._chunk_sizes[key] = specialization.images
            self._remember((native.isa(), ((specialization.images, *images.shape[1:]),)), specialization)
            if len(self._chunk_sizes) > MAX_SPECIALIZATIONS:
                del self._chunk_sizes[next(iter(self._chunk_sizes))]
        return self._chunk_sizes[key]

    def _specialize(self, arrays: list[Array]) -> _Specialization:
        """Return the compiled specialization for the shapes of these arrays; compile it if there is none."""
        assert native is not None
        key = (native.isa(), tuple(array.shape for array in arrays))
        entry = self._specializations.get(key)
        if entry is None:
            entry = _Specialization(self._module, arrays, self._weights)
        if entry is not self._latest:
            self._remember(key, entry)
        return entry

    def prepare(self, *arrays: Array) -> None:
        """Specialize the plan for inputs of these shapes without running them."""
        self._specialize(self._chunks(list(arrays))[0])

    def _remember(self, key: tuple[str, Shapes], entry: _Specialization) -> None:
        """Cache a specialization as the most recently used; evict the least recently used if there are too many."""
        with self._lock:  # other threads may run the same plan
            self._specializations.pop(key, None)
            self._specializations[key] = self._latest = entry
            # The first key is the least recently used one.
            if len(self._specializations) > MAX_SPECIALIZATIONS:
                del self._specializations[next(iter(self._specializations))]

    @property
    def _last_calls(self) -> list[Call]:
        assert self._latest is not None
        return self._latest.calls

    @property
    def algorithms(self) -> list[tuple[str, str]]:
        """Every convolution's layer and algorithm, for the size used last: "direct", "winograd" (F(4x4, 3x3)),
        "winograd2" (F(2x2, 3x3)), "winograd_late" (F(4x4, 3x3), filters transformed as they are used) or "sparse" (zero
        weights skipped). Linear layers are listed if they are sparse."""
        return [pair for call in self._last_calls if isinstance(call, NativeCall) for pair in call.algorithms()]

    @property
    def native_calls(self) -> int:
        """Number of native calls and operations outside them, for the size used last."""
        return len(self._last_calls)

    @property
    def operations_outside(self) -> int:
        """Number of operations that run in Python between native calls, for the size used last."""
        return sum(not isinstance(call, NativeCall) for call in self._last_calls)

    def explain(self) -> PlanExplanation:
        """Describe the ops, the memory and what runs outside the native call, for the size used last."""
        return explain(self._last_calls)

    @property
    def arena_bytes(self) -> int:
        """Memory of the activations, for the size used last."""
        return sum(call.plan.arena_bytes for call in self._last_calls if isinstance(call, NativeCall))


class SelfPlan(Plan):
    """A plan that belongs to its module (nn.self_planning): it refers to it weakly, so that both end at once."""

    @property
    def _module(self) -> Module:
        """Return the module that this plan belongs to; the plan holds only a weak reference."""
        module = self._module_reference()
        assert module is not None, "only the module itself calls its plan"
        return module

    @_module.setter
    def _module(self, module: Module) -> None:
        self._module_reference = weakref.ref(module)


class _Specialization:
    """The calls for one shape of every input or, if not `whole`, for one chunk of a batch.

    If images are independent, the module is traced with batch 2, so that it need not run on a large batch.
    """

    calls: list[Call]

    def __init__(self, module: Module, examples: list[Array], weights: WeightCache, whole: bool = True) -> None:
        """Trace, lower and partition the module for inputs like the examples, or a chunk of them."""
        batched = len(examples) == 1 and examples[0].ndim == 4 and len(examples[0]) > 1
        self.images = len(examples[0]) if batched else 0
        with _without_caches():
            result = self._trace_batch_of_two(module, examples[0], whole) if batched else None
            guard, lowering = result or self._lower(module, examples)
            self._build(module, guard, lowering, weights)

    def _trace_batch_of_two(self, module: Module, images: Array, whole: bool) -> tuple[_TraceGuard, Lowering] | None:
        """Trace and lower the module with two images, and set the batch size of the ops to the real one.

        None if images are not independent or the module refuses this batch size. The batch size is that of `images` or,
        unless `whole`, that of a chunk of them.
        """
        try:
            guard, lowering = self._lower(module, [images[:2]], [images[:3]])
        except Exception:  # a module may raise anything
            if len(images) == 2:
                raise
            return None
        if not guard.follows_batch or not is_batch_independent(lowering, 2):
            return None if len(images) > 2 else (guard, lowering)
        self.images = len(images) if whole else chunk_size(lowering, 2, len(images))
        set_batch(lowering, self.images)
        return guard, lowering

    def _lower(
        self, module: Module, examples: list[Array], checked: list[Array] | None = None
    ) -> tuple[_TraceGuard, Lowering]:
        """Trace the module, match patterns and lower it to ops; `checked` are the guard's inputs."""
        assert native is not None
        guard = _TraceGuard(module, examples, checked)
        native.give_back_memory()  # the module's results are freed; the plan has a separate arena
        return guard, Lowering(match_patterns(guard.trace), is_float=True)

    def _build(self, module: Module, guard: _TraceGuard, lowering: Lowering, weights: WeightCache) -> None:
        """Partition the ops into calls, and raise ConfigurationError if their results differ from the module's."""
        self.calls, self.result = partition(lowering, weights), lowering.resolve(lowering.result)
        self._constants = lowering.constants
        if not guard.accepts(self.run, lowering.shapes[0][:1]):
            reason = guard.rejection(lowering.trace)
            raise ConfigurationError(f"{type(module).__name__} cannot be planned: {reason}")

    def run(self, arrays: list[Array]) -> Array:
        """Run all calls on the inputs and return the network's result."""
        values = {**self._constants, **dict(enumerate(arrays))}
        for call in self.calls:
            call.run(values)
        return values[self.result]


class _TraceGuard:
    """Traces a module and checks that a plan agrees with it.

    Numbers that bypass the tensors are constants in the trace. So the plan must reproduce the module's result on
    another input than the traced one, unless the module reports such numbers: then the traced result is enough. A
    trace of two images is checked with three, because the module may contain the number 2.
    The module runs before the plan has weights: layers pack theirs while they run, and both at once would raise the
    peak of memory.
    """

    def __init__(self, module: Module, examples: list[Array], checked: list[Array] | None = None) -> None:
        """Trace the module on inputs like the examples; run it on `checked` inputs, by default the examples."""
        self._module, self._examples = module, examples if checked is None else checked
        traced = [_second_input(x) for x in examples]
        self._differs = any(not np.array_equal(a, b) for a, b in zip(examples, traced, strict=True))
        with _collected_readers() as readers:
            self.trace = trace(module, *traced)
        if not isinstance(self.trace.result, Value):
            raise ConfigurationError(
                f"the result of {type(module).__name__} does not depend on its input through tensors"
            )
        # The plan is run on `_inputs`. `_other` is the module's result on other inputs.
        self._inputs, self._expected = traced, self.trace.outputs[""]
        self._other: Array | None = None
        has_other_batch = checked is not None and len(checked[0]) != len(examples[0])
        if has_other_batch or (self._differs and (readers or not _reports_readers(module))):
            self._inputs, self._other = self._examples, self._expected
            self._expected = run(module, *self._examples).data
        self.follows_batch = self._expected.shape[:1] == self._inputs[0].shape[:1]

    def accepts(self, planned: Callable[[list[Array]], Array], images: tuple[int, ...]) -> bool:
        """Tell whether the plan reproduces the module's result.

        `images` is the batch size of the plan, as a shape; if it is another than the traced one, the input is repeated.
        """
        if not self._differs:
            return True
        inputs = self._inputs
        if inputs[0].shape[:1] != images:
            inputs = [np.resize(inputs[0], (*images, *inputs[0].shape[1:]))]
        actual, expected, other = planned(inputs), self._expected, self._other
        if inputs is not self._inputs:
            actual, expected = _shared_images(actual, expected)
        if actual.shape != expected.shape:
            return False
        if _agree(expected, actual, expected, _FLOAT_ROUNDING):
            return True
        if other is None:
            other = run(self._module, *self._examples).data
        expected, actual, other = _shared_images(expected, actual, other)
        return _agree(expected, actual, other, self._rounding())

    def _rounding(self) -> float:
        """Return the share of the largest result by which another path through the network may differ."""
        if not any(getattr(m, "computes_in_int8", False) for m in self._module.modules()):
            return _FLOAT_ROUNDING
        noisy = run(self._module, *map(_with_noise, self._inputs)).data
        deviation = np.abs(noisy - self._expected).max(initial=0)
        largest = max(np.abs(self._expected).max(initial=0), 1e-30)
        return _INT8_ROUNDING + _LARGEST_NOISE_RATIO * float(deviation / largest)

    def rejection(self, lowered: Trace) -> str:
        """Explain a mismatch: name the first layer whose trace depends on the input, or whose op is wrong."""
        # Of a batch, compare as many images as were traced.
        self._inputs = [x[: len(t)] if x.ndim else x for x, t in zip(self._inputs, self.trace.inputs, strict=True)]
        second = trace(self._module, *self._inputs)
        for a, b in zip(self.trace.nodes, second.nodes, strict=False):
            if a.operation is not b.operation or not all(map(_same_operand, a.inputs, b.inputs)):
                return f"{_describe(a)} depends on the values of the input, not through tensors"
        exact: list[Array] = list(self._inputs)
        for node in lowered.nodes:
            exact.append(node.evaluate(lambda value: exact[value.number]))
        result = lowered.result
        assert isinstance(result, Value)
        other = self._expected if self._other is None else self._other
        expected, recomputed, other = _shared_images(self._expected, exact[result.number], other)
        if not _agree(expected, recomputed, other, self._rounding()):
            return "its operations depend on the values of the input"
        # The trace is right, so the plan of it is wrong: bisect for the shortest prefix whose plan deviates.
        right, wrong = 0, len(lowered.nodes)
        while right + 1 < wrong:
            middle = (right + wrong) // 2
            right, wrong = (middle, wrong) if self._prefix_agrees(lowered, middle, exact) else (right, middle)
        return f"the native plan deviates at {_describe(lowered.nodes[wrong - 1])}; please report this"

    def _prefix_agrees(self, lowered: Trace, count: int, exact: list[Array]) -> bool:
        """Tell whether a plan of the first `count` nodes reproduces the result of the last of them."""
        last = Value(len(self._inputs) + count - 1)
        lowering = Lowering(Trace(lowered.inputs, lowered.nodes[:count], {"": last}), is_float=True)
        values = {**lowering.constants, **dict(enumerate(self._inputs))}
        for call in partition(lowering, WeightCache()):
            call.run(values)
        actual, expected = values[lowering.resolve(lowering.result)], exact[last.number]
        return _agree(expected, actual, np.zeros_like(expected), self._rounding())


def _shared_images(*results: Array) -> list[Array]:
    """Return the images that results for several batches have in common."""
    count = min(len(result) for result in results) if results[0].ndim else None
    return [result[:count] if count is not None else result for result in results]


def _describe(node: Node) -> str:
    """Describe a node by its operation and layer, for an error message."""
    return f"layer {node.layer!r} ({node.name})" if node.layer else f"operation {node.name}"


def _same_operand(a: Any, b: Any) -> bool:
    return a == b if isinstance(a, Value) or isinstance(b, Value) else np.array_equal(a, b, equal_nan=True)


def _second_input(x: Array) -> Array:
    """Return a different input of the same shape and dtype; integers, maybe indices, are only reordered."""
    reversed_x = np.ascontiguousarray(x[..., ::-1]) if x.ndim else x
    return reversed_x * np.float32(0.5) + np.float32(0.125) if x.dtype == np.float32 else reversed_x


def _with_noise(x: Array) -> Array:
    """Change floats in their last bits; integers stay as they are."""
    if x.dtype != np.float32:
        return x
    return x * np.random.default_rng(0).uniform(1 - _NOISE, 1 + _NOISE, x.shape).astype(np.float32)


def _reports_readers(module: Module) -> bool:
    """Tell whether every layer notes when it reads the numbers of a tensor."""
    return module.reports_readers and all(map(is_own, module.modules()))


@contextmanager
def _collected_readers() -> Iterator[list[str]]:
    """Collect the layers that read the numbers of a traced tensor, also for an outer collector."""
    outer, readers = value_readers.get(), list[str]()
    token = value_readers.set(readers)
    try:
        yield readers
    finally:
        value_readers.reset(token)
        if outer is not None:
            outer += readers


@contextmanager
def _without_caches() -> Iterator[None]:
    """Disable this thread's weight and result caches inside the block, where a module runs only to be traced.

    Packed weights and pooled results would otherwise stay in memory, for no use.
    """
    assert native is not None
    before, pooled = native.keep_weights_here(False), native.set_least_pooled(1 << 62)
    try:
        yield
    finally:
        native.keep_weights_here(before)
        native.set_least_pooled(pooled)


def _agree(expected: Array, actual: Array, first: Array, rounding: float) -> bool:
    """Tell whether `actual` equals `expected` within `rounding` times the change from `first`, another input's result.

    A result that is wrongly constant differs by the whole change.
    """
    # Infinities have no distance; compare where NaN occurs instead.
    finite = np.isfinite(expected) & np.isfinite(actual) & np.isfinite(first)
    if not finite.all():
        return bool((np.isnan(expected) == np.isnan(actual)).all())
    difference = np.abs(expected - first).max(initial=0)
    tolerance = _CHANGE_TOLERANCE * difference + rounding * np.abs(expected).max(initial=0) + 1e-30
    return bool(np.abs(expected - actual).max(initial=0) <= tolerance)


def compile(module: Module, example: Any, *more: Any) -> Plan:
    """Compile a module in eval mode for inputs like these (arrays or Tensors).

    >>> import numpy as np
    >>> from tilewise import models
    >>> plan = compile(models.resnet8(), np.zeros((1, 3, 32, 32), np.float32))
    >>> plan(np.ones((2, 3, 32, 32), np.float32)).shape
    (2, 10)
    """
    if not isinstance(module, Module):
        raise ConfigurationError(
            f"compile takes a module of tilewise, not a {type_name(module)}; export a network of another framework to "
            "ONNX and load it with tilewise.onnx.load"
        )
    if native is None:
        raise ConfigurationError(
            "a plan needs tilewise's compiled kernels, which are not installed; call the module itself"
        )
    return Plan(module, (example, *more))
