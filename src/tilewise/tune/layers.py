"""Tuning a whole model: which tiled kernels its layers run, each tuned once, and the model before and after."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tilewise._events import running_layer
from tilewise._extension import native
from tilewise.backend.registry import OptimizedBackend, use_backend
from tilewise.errors import ConfigurationError, UnavailableError
from tilewise.profile import ProfilerContext
from tilewise.profile.targets import MODELS, Target, model_target
from tilewise.quantize.convert import QuantizedModel
from tilewise.quantize.files import holds_quantized, load_quantized
from tilewise.quantize.layers import QuantizedConv2d
from tilewise.tune.chooser import Key, ModelChooser, measurable, problem_of
from tilewise.tune.problem import Problem
from tilewise.tune.tuner import Tuned, Tuner

_CALLS = 15


@dataclass(frozen=True)
class Layer:
    """One kernel of a model: where it runs, its problem (None where there is nothing to tune), what tuning it found."""

    name: str
    op: str
    shape: tuple[int, ...]
    problem: Problem | None
    tuned: Tuned | None = None


@dataclass(frozen=True)
class TunedModel:
    """A model's kernels, and the time of one call with the default tiles and with the tuned ones."""

    name: str
    layers: list[Layer]
    before_ns: float
    after_ns: float
    seconds: float

    @property
    def speedup(self) -> float:
        return self.before_ns / self.after_ns


def tune_model(
    name: str,
    tuner: Tuner,
    *,
    batch: int = 32,
    tokens: int = 128,
    seed: int = 0,
    report: Callable[[str], None] = lambda line: None,
) -> TunedModel:
    """Tune every kernel that a model (by name, or a saved file) runs on a batch."""
    if native is None:
        raise UnavailableError("tiles belong to tilewise's compiled kernels, which are not installed")
    start, target = time.perf_counter(), _target(name, batch, tokens, seed)
    layers: list[Layer] = []
    done: dict[Problem, Tuned] = {}
    for layer in _layers(target, native.num_threads()):
        problem = layer.problem
        if problem is not None and problem not in done:
            report(f"{layer.name}: {layer.op} {'x'.join(map(str, layer.shape))}")
            done[problem] = tuner.tune(problem)
        layers.append(layer if problem is None else replace(layer, tuned=done[problem]))
    before_ns, after_ns = _before_and_after(target.call, tuner)
    return TunedModel(name, layers, before_ns, after_ns, time.perf_counter() - start)


def _target(name: str, batch: int, tokens: int, seed: int) -> Target:
    """A reference model or a saved one, as it is profiled; or a quantized one, which only runs forward."""
    named = name.partition(":")[0] in MODELS  # whatever files there are
    if named or not (Path(name).is_file() and holds_quantized(name)):
        return model_target(name, batch, False, tokens, seed)
    if batch < 1:
        raise ConfigurationError(f"batch must be at least 1, not {batch}")
    model = load_quantized(name)
    x = np.random.default_rng(seed).random((batch, *model.calibration.shapes[0]), dtype=np.float32)
    return Target(name, model, x, lambda: model(x))


def _layers(target: Target, threads: int) -> list[Layer]:
    """The kernels that a model runs, yet untuned: in float, then in integers."""
    found = [Layer(name, key[0], key[1], problem_of(key, threads)) for name, key in kernels_of(target.call)]
    return found + (_integer_layers(target.model, target.input) if isinstance(target.model, QuantizedModel) else [])


def _integer_layers(model: QuantizedModel, x: Any) -> list[Layer]:
    """The integer layers of a quantized model; of a batch that is cut into unequal chunks, a product for each size."""
    products = model.products(x)
    found: list[Layer] = []
    for index, (step, layer) in enumerate(zip(model.graph.steps, model.integer, strict=True)):
        if isinstance(layer, QuantizedConv2d):
            sizes = (len(x), *model.calibration.shapes[step.inputs[0]], layer.out_channels, *step.kernel)
            found.append(Layer(step.name, "int8_conv2d", sizes, None))
        for p in products:
            if p.step != index:
                continue
            epilogue = "requantize" if layer.output is not None else "bias_relu" if layer.relu else "bias"
            spec = {"m": p.m, "n": p.n, "k": p.k, "epilogue": epilogue, "threads": p.threads}
            found.append(Layer(step.name, "int8_matmul", (p.m, p.n, p.k), measurable("int8_matmul", spec)))
    return found


def kernels_of(call: Callable[[], Any]) -> list[tuple[str, Key]]:
    """Every tiled kernel in float that a call runs, with its layer (outside any: the operation), in order."""
    found: list[tuple[str, Key]] = []

    def listen(op: str, shape: tuple[int, ...], dtype: str, layout: str, /) -> None:
        found.append((running_layer() or op, (op, shape, dtype, layout)))

    with use_backend(OptimizedBackend(tile_chooser=listen)), ProfilerContext(memory=False):
        call()
    return found


def _before_and_after(call: Callable[[], Any], tuner: Tuner) -> tuple[float, float]:
    """Median time of a call with default and with tuned tiles, taken in turns."""
    plain, tuned = OptimizedBackend(), OptimizedBackend(tile_chooser=ModelChooser(tuner.guide, tuner.choices))
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * _CALLS + 4):
        which = bool(number % 2)
        with use_backend(tuned if which else plain):
            start = time.perf_counter_ns()
            call()
            spent = float(time.perf_counter_ns() - start)
        if number >= 4:
            times[which].append(spent)
    return statistics.median(times[False]), statistics.median(times[True])
