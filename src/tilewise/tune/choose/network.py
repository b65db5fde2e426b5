"""Tune a whole model: list the tiled kernels of its layers, tune each once, and time the model before and after."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tilewise._extension import native
from tilewise.backend.recording import running_layer
from tilewise.backend.registry import OptimizedBackend, use_backend
from tilewise.errors import ConfigurationError, UnavailableError
from tilewise.nn import Module
from tilewise.nn.describe import layer_names
from tilewise.profile import ProfilerContext
from tilewise.profile.targets import MODELS, Target, model_target
from tilewise.profile.timing.clock import time_interleaved
from tilewise.quantize.files import holds_quantized, load_quantized
from tilewise.quantize.layers import QuantizedConv2d
from tilewise.quantize.model import QuantizedModel
from tilewise.store.problem import Problem
from tilewise.tune.choose.cache import Decision
from tilewise.tune.choose.chooser import measurable, problem_of
from tilewise.tune.choose.tuned_table import Key, TunedTable
from tilewise.tune.choose.tuner import Tuned, Tuner
from tilewise.tune.measure.confirm import ConfirmedGain, gain_of

_CALLS = 21  # timed calls per variant; odd, so that the faster half has a middle


@dataclass(frozen=True)
class TunedModel:
    """Kernels of a tuned model, and the time of one call with the default tiles and with the tuned ones."""

    name: str
    # One dict per kernel: `layer` (its name), `op`, `shape`, `problem` (None: nothing to tune), `tuned` (the decision)
    layers: list[dict[str, Any]]
    before_ns: float
    after_ns: float
    seconds: float
    useful: list[Problem]  # problems whose tiles make the whole model faster
    dropped: list[Problem]  # problems whose tiles are faster in isolation but not in the model; not used

    @property
    def speedup(self) -> float:
        """Time of a call with the default tiles divided by that with the tuned ones."""
        return self.before_ns / self.after_ns


def tune_model(
    name: str,
    tuner: Tuner,
    *,
    batch: int | None = None,
    tokens: int = 128,
    seed: int = 0,
    make_inputs: Callable[[Any], list[Any]] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> TunedModel:
    """Tune every kernel that a model (by name, or a saved file) runs on a batch; see `model_target`."""
    if native is None:
        raise UnavailableError("tiles belong to tilewise's compiled kernels, which are not installed")
    start, target = time.perf_counter(), _load_target(name, batch, tokens, seed, make_inputs)
    layers = []
    done: dict[Problem, Tuned] = {}
    for layer in _model_kernels(target, native.num_threads()):
        problem = None if layer["problem"] is None else tuner.problem(dict(layer["problem"]))
        if problem is not None and problem not in done:
            report(f"{layer['layer']}: {layer['op']} {'x'.join(map(str, layer['shape']))}")
            done[problem] = tuner.tune(problem)
        layers.append({**layer, "tuned": None if problem is None else done[problem]})
    faster = [problem for problem, tuned in done.items() if tuned.config != tuner.device.default(problem)]
    useful, (before_ns, after_ns) = _useful_tiles(target.call, tuner, faster)
    dropped = [problem for problem in faster if problem not in useful]
    for problem in dropped:
        tuned = done[problem]
        runtime_ns = tuned.default_ns or tuned.runtime_ns or 1.0
        tuner.choices.put(replace(tuned, config=tuner.device.default(problem), runtime_ns=runtime_ns, sure=False))
    return TunedModel(
        name=name,
        layers=layers,
        before_ns=before_ns,
        after_ns=after_ns,
        seconds=time.perf_counter() - start,
        useful=useful,
        dropped=dropped,
    )


def _useful_tiles(
    call: Callable[[], Any], tuner: Tuner, faster: list[Problem]
) -> tuple[list[Problem], tuple[float, float]]:
    """Drop tuned tiles, one by one, that do not make the whole model faster.

    Returns the remaining problems (none if their joint gain may be noise) and the nanoseconds of a call with the
    default tiles and with these.
    """
    choices = {problem: choice for choice in tuner.choices.all() if (problem := choice.problem) in faster}
    useful = list(faster)
    for problem in faster if len(faster) > 1 else []:
        without = [other for other in useful if other != problem]
        gain, _ = _compare(call, [choices[p] for p in without], [choices[p] for p in useful])
        if gain.ratio < 1:
            useful = without
    gain, before_ns = _compare(call, [], [choices[p] for p in useful])
    if not useful or not gain.excludes_zero:
        return [], (before_ns, before_ns)
    return useful, (before_ns, before_ns / gain.ratio)


def _load_target(
    name: str, batch: int | None, tokens: int, seed: int, make_inputs: Callable[[Any], list[Any]] | None
) -> Target:
    """Load a model by name or file, with an input of `batch` images or `tokens` tokens."""
    is_reference_model = name.partition(":")[0] in MODELS  # takes precedence over a file of that name
    if is_reference_model or name.endswith(".onnx") or not (Path(name).is_file() and holds_quantized(name)):
        return model_target(name, batch, tokens=tokens, seed=seed, make_inputs=make_inputs)
    batch = 32 if batch is None else batch
    if batch < 1:
        raise ConfigurationError(f"batch must be at least 1, not {batch}")
    model = load_quantized(name)
    x = np.random.default_rng(seed).random((batch, *model.calibration.shapes[0]), dtype=np.float32)
    return Target(name, model, [x], lambda: model(x))


def _model_kernels(target: Target, threads: int) -> list[dict[str, Any]]:
    """List the tiled kernels that a model runs, each with its layer: float kernels, then integer ones."""
    labels = layer_names(target.model) if isinstance(target.model, Module) else {}
    kernels: list[dict[str, Any]] = [
        {"layer": labels.get(name, name), "op": key[0], "shape": key[1], "problem": problem_of(key, threads)}
        for name, key in kernels_of(target.call)
    ]
    if isinstance(target.model, QuantizedModel):
        kernels += _integer_layers(target.model, target.inputs[0])
    return kernels


def _integer_layers(model: QuantizedModel, x: Any) -> list[dict[str, Any]]:
    """List the integer layers of a quantized model; unequal chunks of a batch give one product per chunk size."""
    products = model.products(x)
    kernels: list[dict[str, Any]] = []
    for index, (step, layer) in enumerate(zip(model.graph.steps, model.integer, strict=True)):
        if isinstance(layer, QuantizedConv2d):
            image, filter_size = model.calibration.shapes[step.inputs[0]], layer.kernel.weights().shape[1:3]
            sizes = (len(x), *image, layer.out_channels, *filter_size)
            kernels.append({"layer": step.name, "op": "int8_conv2d", "shape": sizes, "problem": None})
        for p in products:
            if p.step != index:
                continue
            epilogue = "requantize" if layer.output is not None else "bias_relu" if layer.relu else "bias"
            spec = {"m": p.m, "n": p.n, "k": p.k, "epilogue": epilogue, "threads": p.threads}
            problem = measurable("int8_matmul", spec)
            kernels.append({"layer": step.name, "op": "int8_matmul", "shape": (p.m, p.n, p.k), "problem": problem})
    return kernels


def kernels_of(call: Callable[[], Any]) -> list[tuple[str, Key]]:
    """List the tiled float kernels that a call runs as (layer or operation name, backend key), in order."""
    kernels: list[tuple[str, Key]] = []

    def listen(op: str, shape: tuple[int, ...], dtype: str, layout: str, /) -> None:
        """Record the key of an operation that the backend reports."""
        kernels.append((running_layer() or op, (op, shape, dtype, layout)))

    with use_backend(OptimizedBackend(tile_chooser=listen)), ProfilerContext(memory=False):
        call()
    return kernels


def _compare(
    call: Callable[[], Any], before: Sequence[Decision], after: Sequence[Decision]
) -> tuple[ConfirmedGain, float]:
    """Time a call with two sets of choices, interleaved; return the second's gain, and ns with the first."""

    def run_with(backend: OptimizedBackend) -> None:
        with use_backend(backend):
            call()

    backends = [OptimizedBackend(tile_chooser=TunedTable(native, choices)) for choices in (before, after)]
    times = time_interleaved([functools.partial(run_with, backend) for backend in backends], _CALLS, warmup=2)
    gain = gain_of([math.log(first / second) for first, second in zip(*times, strict=True)])
    return gain, 1e9 * statistics.median(sorted(times[0])[: _CALLS // 2 + 1])
