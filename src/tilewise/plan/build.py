"""From steps to native plans: runs of steps that the native plan knows become one call each."""

from __future__ import annotations

import copy
import hashlib
import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise import _events
from tilewise._extension import native
from tilewise.backend.registry import current_backend
from tilewise.plan.layouts import image_of
from tilewise.plan.lower import Lowering
from tilewise.plan.steps import Shape, Step
from tilewise.plan.trace import Value

Array = npt.NDArray[Any]


class Layers:
    """Native layers, which hold the only copy of their weights, shared by the plans of one module for several sizes of
    input."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[tuple[Any, ...], Any]] = {}  # what it was made of, and the layer

    def get(self, number: int, step: Step) -> Any:
        assert step.weight is not None
        found, weight = self._kept.get(number), np.ascontiguousarray(step.folded(), np.float32)
        made_of = (step.kind, step.activation, *step.options.values(), _digest(weight), _digest(step.bias))
        points = len(step.shape) != 2
        if found and found[0] == made_of:
            if points:
                found[1].restore(weight)
            return found[1]
        made = _layer(step, weight)
        self._kept[number] = (made_of, made)
        return made


class _Outlines(Layers):
    """Layers without weights: of them a plan can be made, to see how it lies in memory, and not run."""

    def get(self, number: int, step: Step) -> Any:
        return _layer(step, None)


def _layer(step: Step, weight: Array | None) -> Any:
    assert native is not None and step.weight is not None
    bias = None if step.bias is None else np.ascontiguousarray(step.bias, np.float32)
    if len(step.shape) == 2:
        return native.PlanLinear(weight, bias, step.activation, step.weight.shape)
    shape = (*step.weight.shape[:2], *step.kernel)
    filters = None if weight is None else weight.reshape(shape)
    return native.PlanConv(filters, bias, activation=step.activation, outline=shape, **(step.options or _POINT))


_POINT = {"stride": (1, 1), "padding": (0, 0, 0, 0), "dilation": (1, 1), "groups": 1}


def _digest(array: Array | None) -> bytes:
    """Tells two weights apart without keeping them."""
    return b"" if array is None else hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=16).digest()


def _outline(step: Step) -> Step:
    """The step with the shapes of its weights and none of their numbers."""
    weight = None if step.weight is None else np.broadcast_to(np.float32(0), step.weight.shape)
    return replace(step, weight=weight)


_KERNELS = {"conv": "conv2d", "linear": "matmul", "max_pool": "max_pool2d", "avg_pool": "avg_pool2d", "concat": "cat"}
_KERNELS |= {"layer_norm": "layer_norm", "attention": "attention"}
_KERNELS |= {"global_mean": "mean", "slice": "get_item", "take": "get_item", "flatten": "reshape", "same": "reshape"}


@dataclass(frozen=True)
class _InPlan:
    """Who ran a step, as a profile names it."""

    op: str
    name: str = "plan"
    describe: None = None


@dataclass
class Segment:
    """A native plan: the values it reads, those it gives with their shapes, and the step of each of its values."""

    plan: Any
    sources: list[int]
    results: list[tuple[int, Shape]]
    steps: dict[int, tuple[Step, list[Shape]]] = field(default_factory=dict)

    def algorithms(self) -> list[tuple[str, str]]:
        """Of every convolution: its layer, and how it is computed."""
        return [(s.layer, s.algorithm) for s, _ in self.steps.values() if s.kind == "conv"]

    def run(self, values: dict[int, Array]) -> None:
        given = [np.ascontiguousarray(values[i], np.float32) for i in self.sources]
        arrays = self._recorded(given) if _events.recorders else self.plan.run(given)
        for (number, shape), array in zip(self.results, arrays, strict=True):
            values[number] = array.reshape(shape)

    def _recorded(self, given: list[Array]) -> Any:
        times = np.zeros(self.plan.values, np.int64)
        start = _events.now()
        arrays = self.plan.run(given, times)
        ends = start + np.cumsum(times)
        _events.record_timed_kernels(
            (
                _KERNELS.get(step.kind, step.kind),
                step.layer,
                int(ends[v] - times[v]),
                int(ends[v]),
                *_operands(step, shapes),
            )
            for v, (step, shapes) in self.steps.items()
            if times[v]
        )
        return arrays


def _operands(step: Step, shapes: list[Shape]) -> tuple[list[Any], list[Any], Any]:
    """A step's arrays and options as a kernel's record has them."""
    read = list(shapes[:1] if step.kind in ("conv", "linear") else shapes)
    if step.kind == "attention":
        read = [(s[0], step.options["heads"], s[1], step.options["dim"]) for s in shapes[:3]]
        read[2] = (*read[2][:3], step.options["value_dim"])
    if step.weight is not None and step.kind not in ("affine", "layer_norm"):
        read.append(step.weight.shape if step.kind == "conv" else step.weight.shape[::-1])
    options = {"activation": step.activation or None, "kernel": step.options.get("kernel")}
    options |= {"bias": step.bias is not None or None, "residual": len(shapes) > 1 or None}
    kind = np.dtype(np.float32)
    return [part for s in read for part in (s, kind)], [step.shape, kind], (_InPlan(step.kind), options, None)


@dataclass(frozen=True)
class Call:
    """An operation called from Python."""

    number: int
    step: Step
    lowering: Lowering

    def run(self, values: dict[int, Array]) -> None:
        node = self.step.node
        assert node is not None

        def known(value: Any) -> Any:
            return values[self.lowering.find(value)] if isinstance(value, Value) else value

        params = {name: known(value) for name, value in node.params.items()}
        values[self.number] = np.asarray(node.operation().forward(*[known(v) for v in node.inputs], **params))


Part = Segment | Call


def parts(lowering: Lowering, layers: Layers) -> list[Part]:
    """The steps in order, native ones next to each other in one segment."""
    _bound_filters(lowering)
    return _parts(lowering, layers)


def _parts(lowering: Lowering, layers: Layers) -> list[Part]:
    found: list[Part] = []
    run: list[int] = []
    for number, step in lowering.steps.items():
        if step.kind != "python":
            run.append(number)
            continue
        if run:
            found.append(_segment(lowering, run, layers))
            run = []
        found.append(Call(number, step, lowering))
    if run:
        found.append(_segment(lowering, run, layers))
    return found


def _segment(lowering: Lowering, run: list[int], layers: Layers) -> Segment:
    assert native is not None
    plan, steps, inside = native.FloatPlan(), lowering.steps, set(run)
    sources = sorted({i for n in run for i in steps[n].inputs} - inside)
    values = {
        i: plan.input(*image_of(lowering.shapes[i], lowering.comes_last(i)), lowering.comes_last(i)) for i in sources
    }
    made: dict[int, tuple[Step, list[Shape]]] = {}
    for number in run:
        values[number] = _add(plan, number, steps[number], values, layers, lowering)
        steps[number] = _outline(steps[number])  # the layer has the numbers now
        if steps[number].kind == "conv":
            steps[number].algorithm = plan.algorithm(values[number])
        made[values[number]] = (steps[number], [lowering.shapes[i] for i in steps[number].inputs])
    outside = {i for n, step in steps.items() if n not in inside for i in step.inputs}
    last = lowering.find(lowering.result)
    results = [(n, lowering.shapes[n]) for n in run if n in outside or n == last]
    for number, _ in results:
        plan.output(values[number], lowering.comes_last(number))
    plan.finish()
    return Segment(plan, sources, results, made)


def _tuned_algorithm(step: Step, x: Shape) -> str:
    """The algorithm that was measured to be the fastest for this convolution here, if one was; "" is the default's.
    Only 3x3 filters that move by one pixel have a choice."""
    chooser, (top, left, bottom, right) = current_backend().tile_chooser, step.padding
    plain = step.kernel == (3, 3) and step.stride == step.dilation == (1, 1) and (top, left) == (bottom, right)
    if chooser is None or not plain or len(x) != 4 or x[0] == 0:
        return ""
    tile = chooser("conv2d", (*x, step.shape[1], 3, 3, 1, 1, top, left, step.groups), "float32", "nchw")
    return str(getattr(tile, "algorithm", ""))


def _add(plan: Any, number: int, step: Step, values: dict[int, int], layers: Layers, lowering: Lowering) -> int:
    reads, options = [values[i] for i in step.inputs], step.options
    made: int
    if step.kind == "conv" or (step.kind == "linear" and len(step.shape) != 2):
        layer = layers.get(number, step)
        wanted = step.algorithm or _tuned_algorithm(step, lowering.shapes[step.inputs[0]])
        made = plan.conv(layer, *reads, algorithm=wanted)
        layer.release()  # packed by now
    elif step.kind == "linear":
        made = plan.linear(layers.get(number, step), *reads)
    elif step.kind in ("max_pool", "avg_pool"):
        made = plan.pool(reads[0], mean=step.kind == "avg_pool", **options)
    elif step.kind == "global_mean":
        made = plan.global_mean(reads[0])
    elif step.kind in ("add", "sub", "mul"):
        made = plan.binary(step.kind, *reads, step.activation)
    elif step.kind == "affine":
        scale = [] if step.weight is None else step.weight.tolist()
        made = plan.affine(reads[0], scale, [] if step.bias is None else step.bias.tolist(), step.activation)
    elif step.kind == "concat":
        made = plan.concat(reads)
    elif step.kind == "slice":
        made = plan.slice(reads[0], options["first"], options["count"])
    elif step.kind == "take":
        made = plan.take(reads[0], options["channels"])
    elif step.kind == "pixels":
        made = plan.pixels(reads[0], options["index"], step.shape[0], *options["size"])
    elif step.kind == "transpose":
        made = plan.transpose(reads[0])
    elif step.kind == "upsample":
        made = plan.upsample(reads[0], *options["by"])
    elif step.kind == "spread":
        made = plan.spread(reads[0], *options["by"])
    elif step.kind == "flatten":
        made = plan.flatten(reads[0])
    elif step.kind == "layer_norm":
        assert step.weight is not None and step.bias is not None
        made = plan.layer_norm(reads[0], step.weight.tolist(), step.bias.tolist(), options["eps"])
    elif step.kind == "group_norm":
        assert step.weight is not None and step.bias is not None
        made = plan.group_norm(reads[0], options["groups"], step.weight.tolist(), step.bias.tolist(), options["eps"])
    elif step.kind == "attention":
        made = plan.attention(reads, **options)
    else:
        made = reads[0]
    return made


def _outlined(lowering: Lowering) -> tuple[list[Part], dict[int, Step]]:
    """The parts without weights, and their steps, which say how they would go."""
    outlined = copy.copy(lowering)
    outlined.steps = {number: _outline(step) for number, step in lowering.steps.items()}
    return _parts(outlined, _Outlines()), outlined.steps


_HELD = {"winograd": 4.0, "winograd2": 16 / 9}  # as much as the filters
_MORE = 16 << 20  # bytes that transformed filters may take besides half as many again as the weights of convolutions


def _bound_filters(lowering: Lowering) -> None:
    """Winograd's filters are transformed as they are used where a plan would hold too many of them transformed. A byte
    saved costs the same time in any layer, so the largest filters come first."""
    _, steps = _outlined(lowering)
    sizes = {n: s.weight.nbytes for n, s in steps.items() if s.kind == "conv" and s.weight is not None}
    more = sum(size * (_HELD.get(steps[n].algorithm, 1) - 1) for n, size in sizes.items())
    for number in sorted(sizes, key=lambda n: -sizes[n]):
        if more <= _MORE + sum(sizes.values()) / 2:
            return
        if steps[number].algorithm == "winograd":
            lowering.steps[number].algorithm = "winograd_late"
            more -= 3 * sizes[number]


def images_at_once(lowering: Lowering, planned: int, images: int) -> int:
    """How many of a batch's images go through all layers before the next, by the steps for `planned` of them: as many
    as keep what lies between the layers in this core's part of the last cache. It costs reading the weights once a
    chunk; where that is more, as many as make it an eighth of what the images themselves move.

    The steps of a native plan treat images one by one, so the numbers are the same.
    """
    assert native is not None
    (segment,), cache = _outlined(lowering)[0], int(native.l3_share())
    assert isinstance(segment, Segment)
    fit = max(1, cache * planned // max(1, int(segment.plan.arena_bytes)))
    chunks = -(-images // fit)
    steps = [step for step, _ in segment.steps.values()]
    weights = sum(step.weight.nbytes for step in steps if step.weight is not None)
    between = sum(2 * 4 * math.prod(step.shape) for step in steps) * images // planned
    if weights > cache and (chunks - 1) * weights >= between:
        chunks = -(-between // (8 * weights))
    return -(-images // chunks)


def only_a_batch(lowering: Lowering, planned: int) -> bool:
    """Whether the steps for `planned` images are those for any number: every one is native, which treats images one by
    one, and reads nothing but the images and other steps."""
    steps = lowering.steps
    known = all(step.kind != "python" and step.shape[0] == planned for step in steps.values())
    inside = all(i in steps or i == 0 for step in steps.values() for i in step.inputs)
    return known and inside and lowering.find(lowering.result) in steps


def resize(lowering: Lowering, images: int) -> None:
    """Makes the steps those for another number of images."""
    steps = lowering.steps
    for number in (0, *steps):
        lowering.shapes[number] = (images, *lowering.shapes[number][1:])
    for step in steps.values():
        step.shape = (images, *step.shape[1:])
