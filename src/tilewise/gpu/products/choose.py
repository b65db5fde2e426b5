"""Matrix products on a GPU by whatever is fastest: `matmul` and `linear`, the library's call among the choices.

The first call of a shape decides without measuring: every configuration's runtime is predicted, the library's too, and
a kernel is taken only where it is ahead by more than the predictions' doubt. Measuring is for those who ask, at once or
in the background: the most promising kernels in turns with the library, checked against float32 first; the winner is
remembered for later processes. Whatever cannot be launched (no such GPU, other number types, odd strides, a kernel that
does not compile) is the library's.
"""

from __future__ import annotations

import functools
import math
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewise.errors import ConfigurationError
from tilewise.gpu.families.family import Binary, Operands
from tilewise.gpu.measure.compiling import compile_binary
from tilewise.gpu.measure.gpu import HOPPER
from tilewise.gpu.products.family import (
    LIBRARY,
    MOST_SUMS,
    Product,
    in_sixteen_bits,
    library_call,
    takes_descriptors,
    workspace,
)
from tilewise.gpu.products.roofline import Numbers, columns, fits
from tilewise.gpu.products.runtimes import Predicted, Runtimes, shipped_runtimes
from tilewise.profile.timing.cuda_graphs import DriverGraphs
from tilewise.store.problem import Config, Problem
from tilewise.tune.choose.cache import Choices, Decision

# A kernel is taken unmeasured where it is predicted to save so much, and so many standard deviations of the predictions
# beside. On shapes held out of training (`tools.ship_products`) no such choice was slower than 0.95 of the library.
# Predictions are further off where rows are no whole number of wide loads, and the margin is wider there.
MARGIN, MARGIN_PLAIN, DOUBTS = 0.12, 0.24, 3.0
MEASURED = 4  # kernels that are timed in turns with the library
_ROUNDS, _UNIT_SECONDS, _L2_BYTES = 7, 4e-4, 128 << 20
_MOST_SPILLS = 16  # bytes a thread keeps in memory for want of registers; more of them makes a kernel many times slower
_NAMES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "tf32"}
_ACTIVATIONS = {None: "bias", "relu": "bias_relu", "gelu": "bias_gelu"}
Run = Callable[[], Any]


@dataclass(frozen=True)
class Decided:
    """The configuration for a problem; measured or not; what it is predicted, or was measured, to gain."""

    config: Config
    measured: bool
    gain: float  # the library's time over its own


def decide(model: Runtimes, problem: Problem, shared_bytes: int) -> Decided:
    """The choice without measuring. For tf32 it is the library's: nothing was collected to hold a margin against."""
    if problem.word("dtype") == "tf32":
        return Decided(LIBRARY, False, 1.0)
    configs, found = ranked(model, problem, shared_bytes, 1)
    if not configs:
        return Decided(LIBRARY, False, 1.0)
    library = model.library(problem)
    gain = math.log(library.seconds[0] / found.seconds[0])
    if gain < needed(problem, math.hypot(found.deviation[0], library.deviation[0])):
        return Decided(LIBRARY, False, 1.0)
    return Decided(configs[0], False, math.exp(gain))


def needed(problem: Problem, doubt: float) -> float:
    """The predicted gain, a logarithm, from which on a kernel is taken unmeasured."""
    return (MARGIN if takes_descriptors(problem) else MARGIN_PLAIN) + DOUBTS * doubt


def ranked(model: Runtimes, problem: Problem, shared_bytes: int, count: int) -> tuple[list[Config], Predicted]:
    """The `count` kernels that fit and are predicted to be fastest, in that order, with their seconds."""
    configs = Product().configs(problem)
    alike, times = in_sixteen_bits(problem)
    of = _columns(configs)
    of = {**of, "block_k": times * of["block_k"]}
    fitting = np.flatnonzero(fits(alike, of, shared_bytes, MOST_SUMS))
    found = model.kernels(alike, {name: column[fitting] for name, column in of.items()})
    first = np.argsort(found.seconds, kind="stable")[:count]
    chosen = [configs[1 + int(fitting[place])] for place in first]
    return chosen, Predicted(found.seconds[first], found.deviation[first])


_spaces: list[tuple[Sequence[Config], dict[str, Numbers]]] = []


def _columns(configs: Sequence[Config]) -> dict[str, Numbers]:
    """The kernels of a space as columns, worked out once; there are a handful of spaces, each one tuple."""
    for known, of in _spaces:
        if known is configs:
            return of
    _spaces.append((configs, columns(configs[1:])))
    return _spaces[-1][1]


class Products:
    """Decides and runs the products of one GPU."""

    def __init__(self, torch: Any, model: Runtimes, choices: Choices) -> None:
        self.torch, self.model, self.choices = torch, model, choices
        self.family = Product()
        properties = torch.cuda.get_device_properties(0)
        self.shared_bytes = int(properties.shared_memory_per_block_optin)
        self.multiprocessors = int(properties.multi_processor_count)
        self.decided: dict[Problem, Decided] = {}
        self._loaded: dict[str, Any] = {}
        self._scratch: dict[int, dict[str, Any]] = {}
        self._busy = threading.Lock()

    def decision(self, problem: Problem, measure: bool | str = False) -> Decided:
        """What runs a problem: remembered, else decided; measured where that is asked for."""
        found = self.decided.get(problem)
        if found is None:
            kept = self.choices.get(problem)
            found = Decided(kept.config, True, 1.0) if kept is not None else self._first(problem)
            self.decided[problem] = found
        if measure and not found.measured:
            if measure == "background":
                threading.Thread(target=self.measure, args=(problem,), daemon=True).start()
            else:
                found = self.measure(problem)
        return found

    def _first(self, problem: Problem) -> Decided:
        found = decide(self.model, problem, self.shared_bytes)
        return found if self._kernel(problem, found.config) is not False else Decided(LIBRARY, False, 1.0)

    def run(self, problem: Problem, operands: Operands, config: Config, *, scratch: bool = True) -> None:
        """Start the product on the current stream; without `scratch` its workspace is there already."""
        if "library" in config:
            library_call(problem, operands)()
            return
        stream = self.torch.cuda.current_stream().cuda_stream
        if scratch:
            operands.scratch |= self._workspace(problem, config, stream)
        launch = self.family.launch(problem, config, operands)
        kernel = self._kernel(problem, config)
        given = iter(v.data_ptr() if hasattr(v, "data_ptr") else v for v in launch.arguments)
        constants = dict(kernel.binary.constants)
        arguments = [constants[n] if n in constants else next(given) for n in kernel.src.fn.arg_names]
        kernel.run(*launch.grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *arguments)

    def _kernel(self, problem: Problem, config: Config) -> Any:
        """The compiled kernel; None for the library and False for what does not compile or fit."""
        if "library" in config:
            return None
        binary = self.family.binary(problem, config)
        if binary.key not in self._loaded:
            self._loaded[binary.key] = self._load(binary)
        return self._loaded[binary.key]

    def _load(self, binary: Binary) -> Any:
        try:
            kernel = compile_binary(binary, HOPPER)
            kernel._init_handles()
            kernel.binary = binary
            if kernel.n_spills > _MOST_SPILLS:
                return False
        except Exception:  # Triton raises many kinds; a kernel that cannot be had is no choice
            return False
        return kernel

    def _workspace(self, problem: Problem, config: Config, stream: int) -> dict[str, Any]:
        """Sums and counters: a stream's own, kept between calls; in a graph under capture, the graph's own."""
        torch = self.torch
        sizes = dict(zip(("partial", "arrived"), workspace(problem, config), strict=True))
        kinds = {"partial": torch.float32, "arrived": torch.int32}
        capturing = torch.cuda.is_current_stream_capturing()
        kept: dict[str, Any] = {} if capturing else self._scratch.setdefault(stream, {})
        for name, size in sizes.items():
            if name not in kept or kept[name].numel() < size:
                make = torch.zeros if name == "arrived" else torch.empty
                kept[name] = make(max(size, 1), dtype=kinds[name], device="cuda")
        return {**kept, "multiprocessors": self.multiprocessors}

    # Measuring

    def measure(self, problem: Problem) -> Decided:
        """The most promising kernels in turns with the library; the fastest that is right is kept."""
        with self._busy, self.torch.no_grad():
            configs = [LIBRARY, *ranked(self.model, problem, self.shared_bytes, MEASURED)[0]]
            stream = self.torch.cuda.Stream()
            with self.torch.cuda.stream(stream):
                times = self._times(problem, configs, stream)
            best = min(times, key=times.__getitem__)
            found = Decided(best, True, times[LIBRARY] / times[best])
            self.decided[problem] = found
            self.choices.put(Decision(problem, best, "measured", times[best] * 1e9, None, len(times), True))
            return found

    def _times(self, problem: Problem, configs: Sequence[Config], stream: Any) -> dict[Config, float]:
        """Seconds of each that compiles and computes the right thing, in turns."""
        torch, family = self.torch, self.family
        generator = torch.Generator(device="cuda").manual_seed(0)
        count = min(max(1, math.ceil(_L2_BYTES / family.bytes_moved(problem))), 8)
        sets = [family.operands(problem, torch, "cuda", generator) for _ in range(count)]
        expected = family.expected(problem, torch, sets[0])
        graphs, units = DriverGraphs(stream.cuda_stream), {}
        for config in configs:  # the workspace is as large as any of them wants before the first graph points to it
            for operands in sets:
                operands.scratch |= self._workspace(problem, config, stream.cuda_stream)
        launches = max(count, round(_UNIT_SECONDS / max(2e-6, family.bytes_moved(problem) / 4e12)) // count * count)
        for config in configs:
            if self._kernel(problem, config) is False:
                continue
            sets[0].out.fill_(math.nan)
            runs = [functools.partial(self.run, problem, operands, config, scratch=False) for operands in sets]
            for run in runs:
                run()
            near = ((sets[0].out - expected.value).abs() <= expected.bound).all()
            if "library" in config or bool(near):
                units[config] = graphs.capture([runs[i % count] for i in range(min(launches, 64))])
        taken: dict[Config, list[float]] = {config: [] for config in units}
        for turn in range(_ROUNDS + 1):
            for config, unit in units.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                unit()
                end.record()
                end.synchronize()
                if turn:
                    taken[config].append(start.elapsed_time(end) * 1e-3)
        return {config: statistics.median(times) / min(launches, 64) for config, times in taken.items()}


@functools.lru_cache(maxsize=1)
def _gpu() -> Products | None:
    """The products of this process's GPU; None where there is no GPU that a model is for."""
    import torch

    model = shipped_runtimes()
    if model is None or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(0)
    if major * 10 + minor != HOPPER:
        return None
    return Products(torch, model, Choices(None, f"{torch.cuda.get_device_name(0)}, PyTorch {torch.__version__}"))


def matmul(
    a: Any, b: Any, bias: Any = None, *, activation: str | None = None, residual: Any = None,
    measure: bool | str = False,
) -> Any:  # fmt: skip
    """activation(a @ b + bias) or a @ b + residual, of two bf16 or fp16 matrices on the GPU; float32 ones in tf32 where
    PyTorch may multiply them so (`torch.set_float32_matmul_precision`), by the library unless measured.

    The first call of a shape takes what is predicted to be fastest; with `measure=True` the most promising are timed
    first, with `measure="background"` while the program goes on. An activation ("relu", "gelu") needs a bias.
    """
    if activation not in _ACTIVATIONS or measure not in (False, True, "background"):
        raise ConfigurationError(f"activation is None, 'relu' or 'gelu' and not {activation!r}; measure a bool or "
                                 f"'background' and not {measure!r}.")  # fmt: skip
    if (activation is not None and bias is None) or (bias is not None and residual is not None):
        raise ConfigurationError("An activation needs a bias, and a residual takes neither a bias nor an activation.")
    epilogue = "residual" if residual is not None else "none" if bias is None else _ACTIVATIONS[activation]
    products, problem = _gpu(), problem_of(a, b, bias, residual, epilogue)
    if products is None or problem is None or (a.requires_grad or b.requires_grad):
        return _by_library(a, b, bias, activation, residual)
    out = a.new_empty((a.shape[0], b.shape[1]))
    left, right = (x.T if side == "t" else x for x, side in zip((a, b), problem.word("layout"), strict=True))
    inputs = {
        "a": left,
        "b": right,
        "bias": out if bias is None else bias,
        "residual": out if residual is None else residual,
    }
    operands = Operands(inputs, out, out)
    try:
        products.run(problem, operands, products.decision(problem, measure).config)
    except Exception:  # whatever a kernel, the driver or a measurement ran into, the product is owed
        products.decided[problem] = Decided(LIBRARY, False, 1.0)
        products.run(problem, operands, LIBRARY)
    return out


def linear(x: Any, weight: Any, bias: Any = None, *, activation: str | None = None, measure: bool | str = False) -> Any:
    """activation(x @ weight.T + bias), as `torch.nn.functional.linear`; x may have any number of dimensions."""
    rows = x.reshape(-1, x.shape[-1])
    found = matmul(rows, weight.T, bias, activation=activation, measure=measure)
    return found.view(*x.shape[:-1], weight.shape[0])


def problem_of(a: Any, b: Any, bias: Any, residual: Any, epilogue: str) -> Problem | None:
    """What two matrices ask for; None where the kernels do not take them as they lie in memory."""
    dtype = _NAMES.get(str(a.dtype))
    if dtype == "tf32" and not _tf32_allowed():
        return None
    if dtype is None or a.dim() != 2 or b.dim() != 2 or a.dtype != b.dtype or a.shape[1] != b.shape[0]:
        return None
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    sides = [_side(a), _side(b)]
    extras = [x for x in (bias, residual) if x is not None]
    whole = all(x.is_contiguous() and x.dtype == a.dtype for x in extras)
    aligned = all(x.data_ptr() % 16 == 0 for x in (a, b, *extras))
    if None in sides or not whole or not aligned or min(m, n, k) < 1 or max(m * k, k * n, m * n) >= 2**31:
        return None
    if (bias is not None and tuple(bias.shape) != (n,)) or (residual is not None and tuple(residual.shape) != (m, n)):
        return None
    return Problem.of("product", dtype=dtype, m=m, n=n, k=k, layout="".join(map(str, sides)), epilogue=epilogue)


def _tf32_allowed() -> bool:
    import torch

    return str(torch.get_float32_matmul_precision()) != "highest"


def _side(matrix: Any) -> str | None:
    """n as written, t transposed in memory, None with gaps."""
    return "n" if matrix.is_contiguous() else "t" if matrix.T.is_contiguous() else None


def _by_library(a: Any, b: Any, bias: Any, activation: str | None, residual: Any) -> Any:
    import torch

    added = residual if residual is not None else bias
    out = a @ b if added is None else torch.addmm(added, a, b)
    return out if activation is None else getattr(torch.nn.functional, activation)(out)
