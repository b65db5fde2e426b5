"""Which activations need 16 bits: as few as keep a model's results within an error.

Every activation is rounded alone, with the weights that read it, and what that does to the result is kept: such errors
add up like independent noise. Those that do most harm for the time that 16 bits would cost are widened first, until the
rest is expected to stay within the bound; the model that comes out is then run beside the float one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.plan.steps import Step
from tilewise.quantize.calibration import Calibration
from tilewise.quantize.forms import KEEPS, families, shared_parameters
from tilewise.quantize.graph import Graph
from tilewise.quantize.layers import corrected_bias, rounded_conv_weights
from tilewise.quantize.magnify import Factors, factors, magnify
from tilewise.quantize.parameters import INT8Quantizer
from tilewise.tensor import no_grad

Array = npt.NDArray[Any]
Wide = dict[int, str]  # by the first step of a family: why it has 16 bits
_ROOM = 0.85  # of the bound that calibration images may use: others differ
# So many images are run, of so many activations together; of so many every activation is looked at; at least one
_IMAGES, _RUN, _LOOKED_AT = 8, 1 << 25, 1 << 22
# What 16 bits cost, in steps of a processor with AVX2, about: a product, one of a layer in groups, a number to store
_PRODUCT, _GROUPED, _NUMBER = 1 / 60, 1 / 8, 1 / 16


@dataclass(frozen=True)
class Harm:
    """What an activation in bytes does: how far results are off by it alone, the mean square of that, and the time that
    16 bits take."""

    family: int
    share: float
    error: float
    cost: float


def off_by(result: Array, exact: Array) -> float:
    """The largest error as a share of the largest result: the one there is, or the one that as many would have if they
    were spread like a bell, whichever is larger."""
    error = (result - exact).astype(np.float64)
    usual = np.sqrt(np.square(error).mean() * 2 * np.log(max(error.size, 3))) if error.size else 0.0
    largest = max(float(usual), float(np.abs(error).max(initial=0)))
    return largest / max(float(np.abs(exact).max(initial=0)), 1e-30)


def _first(calibration: Calibration, x: Array, most: int) -> Array:
    """As many images of a batch as have `most` activations."""
    numbers = sum(int(np.prod(shape)) for shape in calibration.shapes)
    return x[: max(1, min(_IMAGES, most // max(numbers, 1)))]


def choose_wide(
    graph: Graph,
    calibration: Calibration,
    kept: dict[str, str],
    x: Array,
    bound: float,
    build: Callable[[Wide], Any],
) -> Any:
    """The model, by `build`, with the fewest activations in 16 bits whose results on `x` are off by `bound` at most.

    `graph` is left as it is; `build` is given the activations to widen.
    """
    model = build({})
    seen = _first(calibration, x, _RUN)
    exact = graph.run(seen)
    error = off_by(model.run(seen), exact)
    if error <= bound or not np.isfinite(error):
        return model
    few = _first(calibration, seen, _LOOKED_AT)
    harms = sorted(_harms(graph, calibration, kept, few, exact[: len(few)]), key=lambda h: -h.error / h.cost)
    least, most = 0, len(harms)  # too little, and enough where anything is
    while least + 1 < most:
        count = (least + most) // 2
        tried = build(_reasons(graph, harms[:count], error))
        least, most = (least, count) if off_by(tried.run(seen), exact) <= _ROOM * bound else (count, most)
    return build(_reasons(graph, harms[:most], error))


def _reasons(graph: Graph, chosen: list[Harm], error: float) -> Wide:
    off = f"results would be off by {100 * error:.2f} % in bytes"
    return closed(graph, {h.family: f"{off}, {100 * h.share:.2f} % by it alone" for h in chosen})


def closed(graph: Graph, wide: Wide) -> Wide:
    """With what must be wide along: the result of a layer that takes a sum along, where what is added has 16 bits."""
    family_of, found = families(graph), dict(wide)
    for index, step in enumerate(graph.steps):
        if step.kind == "conv" and len(step.inputs) > 1 and family_of[step.inputs[1]] in found:
            found.setdefault(family_of[index], f"it takes along {graph.steps[step.inputs[1]].name}, in 16 bits")
    return found


def _harms(graph: Graph, calibration: Calibration, kept: dict[str, str], x: Array, exact: Array) -> list[Harm]:
    trial = _Trial(graph, calibration, kept, x)
    last = len(graph.steps) - 1
    costs = _costs(graph, calibration)
    out = []
    for family in sorted(costs):
        moved = trial.result(family)
        error = 0.0 if moved is None else float(np.square(moved - exact).mean(dtype=np.float64))
        if error > 0 and not (family == last and graph.steps[last].kind == "linear"):
            assert moved is not None
            out.append(Harm(family, off_by(moved, exact), error, costs[family]))
    return out


def _costs(graph: Graph, calibration: Calibration) -> dict[int, float]:
    family_of = families(graph)
    costs = dict.fromkeys(family_of, 1.0)
    for index, step in enumerate(graph.steps):
        numbers = float(np.prod(calibration.shapes[index]))
        if step.kind not in KEEPS:
            costs[family_of[index]] += _NUMBER * numbers
        if step.kind in ("conv", "linear") and step.weight is not None:
            grouped = step.kind == "conv" and step.groups > 1
            products = numbers * step.weight[0].size
            costs[family_of[step.inputs[0]]] += (_GROUPED if grouped else _PRODUCT) * products
            costs[family_of[index]] += _GROUPED * products if grouped else 0.0  # which multiply 16 bits to give them
    return costs


class _Trial:
    """The model in float, run again from where one activation is rounded to bytes."""

    def __init__(self, graph: Graph, calibration: Calibration, kept: dict[str, str], x: Array) -> None:
        self.graph = Graph([replace(step) for step in graph.steps], graph.batch)
        self.parameters, self.kept = shared_parameters(graph, calibration), kept
        self.factors: Factors = [np.ones(shape[:1]) for shape in calibration.shapes]
        if calibration.spans:
            self.factors = factors(graph, calibration, self.parameters, kept)
            magnify(self.graph, self.factors)
        self.calibration, self.family_of = calibration, families(graph)
        self.exact: list[Array] = []
        with no_grad():
            for index, step in enumerate(self.graph.steps):
                reads = [self.exact[i] for i in step.inputs]
                self.exact.append(x if step.kind == "input" else self._run(index, step, reads))

    def result(self, family: int) -> Array | None:
        """The model's result where this family is in bytes and its readers' weights too; None where it is as before."""
        moved: dict[int, Array] = {}
        with no_grad():
            for index, step in enumerate(self.graph.steps):
                mine = self.family_of[index] == family and step.name not in self.kept
                reads_it = step.kind in ("conv", "linear") and self.family_of[step.inputs[0]] == family
                if any(i in moved for i in step.inputs) or (reads_it and step.name not in self.kept):
                    reads = [moved.get(i, self.exact[i]) for i in step.inputs]
                    moved[index] = self._run(index, self._rounded(step) if reads_it else step, reads)
                if mine and step.kind not in (*KEEPS, "concat"):
                    value = moved.get(index, self.exact[index])
                    p = self.parameters[index]
                    moved[index] = p.dequantize(p.quantize(value))
        return moved.get(len(self.graph.steps) - 1)

    def _run(self, index: int, step: Step, reads: list[Array]) -> Array:
        if step.activation != "relu6":
            return self.graph.run_float(step, reads)
        most = np.asarray(6 * self.factors[index], np.float32)  # of magnified channels, 6 is as much larger
        made = self.graph.run_float(replace(step, activation="relu"), reads)
        return np.minimum(made, most.reshape(-1, *(1,) * (made.ndim - 2)) if most.size == made.shape[1] else 6)

    def _rounded(self, step: Step) -> Step:
        assert step.weight is not None
        linear = step.kind == "linear"
        rounded = (
            INT8Quantizer().quantize_weights(step.weight) if linear else rounded_conv_weights(step.weight, step.groups)
        ).dequantize()
        source = step.inputs[0]
        means, bias = self.calibration.mean_of(source), step.bias
        if means is not None:
            bias = corrected_bias(
                step.weight, rounded, bias, means * self.factors[source], 1 if linear else step.groups
            )
        return replace(step, weight=rounded, bias=bias)
