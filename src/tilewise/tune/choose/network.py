"""Tuning a whole model: which tiled kernels its layers run, each tuned once, and the model before and after."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tilewise._events import running_layer
from tilewise._extension import native
from tilewise.backend.registry import OptimizedBackend, use_backend
from tilewise.errors import ConfigurationError, UnavailableError
from tilewise.nn import Module
from tilewise.nn.describe import layer_names
from tilewise.profile import ProfilerContext
from tilewise.profile.targets import MODELS, Target, model_target
from tilewise.profile.timing.interleave import time_interleaved
from tilewise.quantize.convert import QuantizedModel
from tilewise.quantize.files import holds_quantized, load_quantized
from tilewise.quantize.layers import QuantizedConv2d
from tilewise.store.problem import Problem
from tilewise.tune.choose.cache import Decision
from tilewise.tune.choose.chooser import measurable, problem_of
from tilewise.tune.choose.kept import KeptTiles, Key
from tilewise.tune.choose.tuner import Tuned, Tuner

_CALLS = 21
_WORTH = 0.003  # less than this over the default tiles is not told from noise


@dataclass(frozen=True)
class TunedModel:
    """A model's kernels, and the time of one call with the default tiles and with the tuned ones."""

    name: str
    # A kernel each: `layer` (where it runs), `op`, `shape`, `problem` (None: nothing to tune), `tuned` (what was found)
    layers: list[dict[str, Any]]
    before_ns: float
    after_ns: float
    seconds: float
    kept: list[Problem]  # whose tiles make the whole faster
    dropped: list[Problem]  # whose tiles were faster alone, and are not used

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
    layers = []
    done: dict[Problem, Tuned] = {}
    for layer in _layers(target, native.num_threads()):
        problem = None if layer["problem"] is None else tuner.problem(dict(layer["problem"]))
        if problem is not None and problem not in done:
            report(f"{layer['layer']}: {layer['op']} {'x'.join(map(str, layer['shape']))}")
            done[problem] = tuner.tune(problem)
        layers.append({**layer, "tuned": None if problem is None else done[problem]})
    faster = [problem for problem, tuned in done.items() if tuned.config != tuner.device.default(problem)]
    kept, (before_ns, after_ns) = _that_help(target.call, tuner, faster)
    dropped = [problem for problem in faster if problem not in kept]
    for problem in dropped:
        tuned = done[problem]
        took = tuned.default_ns or tuned.runtime_ns or 1.0
        tuner.choices.put(replace(tuned, config=tuner.device.default(problem), runtime_ns=took, sure=False))
    return TunedModel(name, layers, before_ns, after_ns, time.perf_counter() - start, kept, dropped)


def _that_help(
    call: Callable[[], Any], tuner: Tuner, faster: list[Problem]
) -> tuple[list[Problem], tuple[float, float]]:
    """Of the problems whose tiles are faster alone, those that make the whole faster; and its time before and after."""
    choices = {problem: choice for choice in tuner.choices.all() if (problem := choice.problem) in faster}
    kept = list(faster)
    for problem in faster if len(faster) > 1 else []:
        without = [other for other in kept if other != problem]
        with_ns, without_ns = _in_turns(call, [[choices[p] for p in some] for some in (kept, without)])
        if without_ns < with_ns:
            kept = without
    before_ns, after_ns = _in_turns(call, [[], [choices[p] for p in kept]])
    if not kept or after_ns > before_ns * (1 - _WORTH):
        return [], (before_ns, before_ns)
    return kept, (before_ns, after_ns)


def _target(name: str, batch: int, tokens: int, seed: int) -> Target:
    """A reference model or a saved one, as it is profiled; or a quantized one, which only runs forward."""
    named = name.partition(":")[0] in MODELS  # whatever files there are
    if named or name.endswith(".onnx") or not (Path(name).is_file() and holds_quantized(name)):
        return model_target(name, batch, False, tokens, seed)
    if batch < 1:
        raise ConfigurationError(f"batch must be at least 1, not {batch}")
    model = load_quantized(name)
    x = np.random.default_rng(seed).random((batch, *model.calibration.shapes[0]), dtype=np.float32)
    return Target(name, model, x, lambda: model(x))


def _layers(target: Target, threads: int) -> list[dict[str, Any]]:
    """The kernels that a model runs, yet untuned: in float, then in integers."""
    labels = layer_names(target.model) if isinstance(target.model, Module) else {}
    kernels = [(labels.get(name, name), key) for name, key in kernels_of(target.call)]
    found = [_layer(label, key[0], key[1], problem_of(key, threads)) for label, key in kernels]
    return found + (_integer_layers(target.model, target.input) if isinstance(target.model, QuantizedModel) else [])


def _layer(name: str, op: str, shape: tuple[int, ...], problem: Problem | None) -> dict[str, Any]:
    return {"layer": name, "op": op, "shape": shape, "problem": problem}


def _integer_layers(model: QuantizedModel, x: Any) -> list[dict[str, Any]]:
    """The integer layers of a quantized model; of a batch that is cut into unequal chunks, a product for each size."""
    products = model.products(x)
    found = []
    for index, (step, layer) in enumerate(zip(model.graph.steps, model.integer, strict=True)):
        if isinstance(layer, QuantizedConv2d):
            sizes = (
                len(x),
                *model.calibration.shapes[step.inputs[0]],
                layer.out_channels,
                *layer.kernel.weights().shape[1:3],
            )
            found.append(_layer(step.name, "int8_conv2d", sizes, None))
        for p in products:
            if p.step != index:
                continue
            epilogue = "requantize" if layer.output is not None else "bias_relu" if layer.relu else "bias"
            spec = {"m": p.m, "n": p.n, "k": p.k, "epilogue": epilogue, "threads": p.threads}
            found.append(_layer(step.name, "int8_matmul", (p.m, p.n, p.k), measurable("int8_matmul", spec)))
    return found


def kernels_of(call: Callable[[], Any]) -> list[tuple[str, Key]]:
    """Every tiled kernel in float that a call runs, with its layer (outside any: the operation), in order."""
    found: list[tuple[str, Key]] = []

    def listen(op: str, shape: tuple[int, ...], dtype: str, layout: str, /) -> None:
        found.append((running_layer() or op, (op, shape, dtype, layout)))

    with use_backend(OptimizedBackend(tile_chooser=listen)), ProfilerContext(memory=False):
        call()
    return found


def _in_turns(call: Callable[[], Any], choices: Sequence[Sequence[Decision]]) -> list[float]:
    """Time of a call with each of several sets of choices; in turns; the median of the faster half counts."""

    def run_with(backend: OptimizedBackend) -> None:
        with use_backend(backend):
            call()

    backends = [OptimizedBackend(tile_chooser=KeptTiles(native, some)) for some in choices]
    times = time_interleaved([functools.partial(run_with, backend) for backend in backends], _CALLS, warmup=2)
    return [1e9 * statistics.median(sorted(own)[: _CALLS // 2 + 1]) for own in times]
