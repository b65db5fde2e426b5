"""`matmul` and `linear` on a GPU: choose between our kernels and cuBLAS for each problem, then run the choice.

The first call of a shape chooses without measuring: the runtimes of all configurations and of cuBLAS are predicted, and
a kernel is chosen only if it is ahead by more than the uncertainty of the predictions. Measuring is optional, at once
or in the background: the most promising kernels are checked against float32, timed interleaved with cuBLAS, and the
winner is stored for later processes. Everything that cannot be launched (another GPU, other dtypes, strided operands,
a kernel that does not compile) goes to cuBLAS.
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
from tilewise.gpu.devices import model_collection
from tilewise.gpu.families.family import Binary, Operands
from tilewise.gpu.measure.compiler import compile_binary
from tilewise.gpu.products.config_fields import CUBLAS, is_cublas
from tilewise.gpu.products.family import (
    MAX_PARTIAL_SUMS,
    ProductFamily,
    as_16_bit,
    cublas_call,
    supports_tma,
    workspace_sizes,
)
from tilewise.gpu.products.roofline import Numbers, columns, fits, sustained_rates
from tilewise.gpu.products.runtime_model import Prediction, RuntimeModel, required_gain, shipped_runtime_model
from tilewise.profile.timing.cuda_graphs import DriverGraphs
from tilewise.store.problem import Config, Problem
from tilewise.tune.choose.cache import ChoiceFile, Decision
from tilewise.tune.choose.decide import decide
from tilewise.tune.choose.scores import FixedScores
from tilewise.tune.search.gaussian_process import Hyperparameters

KERNELS_TO_MEASURE = 4  # timed interleaved with cuBLAS
_ROUNDS = 7  # timed rounds; the median counts
_UNIT_SECONDS = 4e-4  # target length of one timed CUDA graph: long beside the events' half microsecond
_MAX_GRAPH_LAUNCHES = 64
_L2_BYTES = 128 << 20  # over twice the L2 cache of an H200: operand sets rotate through it
_MAX_SPILLED_BYTES = 16  # registers spilled per thread; kernels with more are many times slower
_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "tf32"}
_EPILOGUES = {None: "bias", "relu": "bias_relu", "gelu": "bias_gelu"}
_LOG_SECONDS = Hyperparameters(coefficient=1.0)  # scores are logarithms of seconds: a difference is a gain
Run = Callable[[], Any]


@dataclass(frozen=True)
class ProductChoice:
    """The configuration chosen for a problem, whether it was measured, and its gain: cuBLAS's time over its own."""

    config: Config
    is_measured: bool
    gain: float


_CUBLAS_UNMEASURED = ProductChoice(CUBLAS, False, 1.0)


def choose_unmeasured(model: RuntimeModel, problem: Problem, shared_bytes: int) -> ProductChoice:
    """Choose by predictions alone. tf32 products always go to cuBLAS: no data exists to set a margin by."""
    if problem.word("dtype") == "tf32":
        return _CUBLAS_UNMEASURED
    configs, kernels = rank_kernels(model, problem, shared_bytes, 1)
    if not configs:
        return _CUBLAS_UNMEASURED
    cublas = model.predict_cublas(problem)
    gain = math.log(cublas.seconds[0] / kernels.seconds[0])
    margin = required_gain(supports_tma(problem), math.hypot(kernels.deviation[0], cublas.deviation[0]))
    scores = FixedScores(_LOG_SECONDS, np.array([gain, 0.0]), margin)  # log seconds above the best kernel's
    config = decide(problem, [CUBLAS, configs[0]], scores).config
    return _CUBLAS_UNMEASURED if is_cublas(config) else ProductChoice(config, False, math.exp(gain))


def rank_kernels(
    model: RuntimeModel, problem: Problem, shared_bytes: int, count: int
) -> tuple[list[Config], Prediction]:
    """Return the `count` kernels that fit and are predicted fastest, in that order, with their predictions."""
    configs = ProductFamily().configs(problem)
    # tf32 is predicted as the 16-bit product that moves as many bytes.
    problem_16_bit, k_factor = as_16_bit(problem)
    of = _kernel_columns(configs)
    of = {**of, "block_k": k_factor * of["block_k"]}
    fitting = np.flatnonzero(fits(problem_16_bit, of, shared_bytes, MAX_PARTIAL_SUMS))
    prediction = model.predict_kernels(problem_16_bit, {name: column[fitting] for name, column in of.items()})
    first = np.argsort(prediction.seconds, kind="stable")[:count]
    ranking = [configs[1 + int(fitting[i])] for i in first]  # configs[0] is cuBLAS
    return ranking, Prediction(prediction.seconds[first], prediction.deviation[first])


_column_cache: list[tuple[Sequence[Config], dict[str, Numbers]]] = []


def _kernel_columns(configs: Sequence[Config]) -> dict[str, Numbers]:
    """Return the kernels of a search space as columns, cached by identity: there are a handful of spaces."""
    for space, of in _column_cache:
        if space is configs:
            return of
    _column_cache.append((configs, columns(configs[1:])))
    return _column_cache[-1][1]


class ProductDispatcher:
    """Chooses and runs the matrix products of one GPU."""

    def __init__(self, torch: Any, model: RuntimeModel, choices: ChoiceFile) -> None:
        """Read the GPU's properties; `choices` are the measured choices of earlier processes."""
        self.torch, self.model, self.stored_choices = torch, model, choices
        self.family = ProductFamily()
        properties = torch.cuda.get_device_properties(0)
        self.shared_bytes = int(properties.shared_memory_per_block_optin)
        self.capability = int(properties.major) * 10 + int(properties.minor)
        self.multiprocessors = int(properties.multi_processor_count)
        self.choices: dict[Problem, ProductChoice] = {}
        self._kernels: dict[str, Any] = {}  # by the binary's key; False for one that cannot be loaded
        self._workspaces: dict[int, dict[str, Any]] = {}  # by stream
        self._measuring = threading.Lock()

    def choose(self, problem: Problem, measure: bool | str = False) -> ProductChoice:
        """Return the choice for a problem: the stored one, else a prediction; `measure` asks for a measurement."""
        choice = self.choices.get(problem)
        if choice is None:
            stored = self.stored_choices.get(problem)
            choice = self._predict(problem) if stored is None else ProductChoice(stored.config, True, 1.0)
            self.choices[problem] = choice
        if measure and not choice.is_measured:
            if measure == "background":
                threading.Thread(target=self.measure, args=(problem,), daemon=True).start()
            else:
                choice = self.measure(problem)
        return choice

    def _predict(self, problem: Problem) -> ProductChoice:
        choice = choose_unmeasured(self.model, problem, self.shared_bytes)
        return choice if self._kernel(problem, choice.config) is not False else _CUBLAS_UNMEASURED

    def run(self, problem: Problem, operands: Operands, config: Config, *, allocate: bool = True) -> None:
        """Start the product on the current stream; without `allocate` the operands already have a workspace."""
        if is_cublas(config):
            cublas_call(problem, operands)()
            return
        stream = self.torch.cuda.current_stream().cuda_stream
        if allocate:
            operands.scratch |= self._workspace(problem, config, stream)
        launch = self.family.launch(problem, config, operands)
        kernel = self._kernel(problem, config)
        # Compile-time constants take no run-time argument; the others are consumed in order.
        values = iter(v.data_ptr() if hasattr(v, "data_ptr") else v for v in launch.arguments)
        constants = dict(kernel.binary.constants)
        arguments = [constants[name] if name in constants else next(values) for name in kernel.src.fn.arg_names]
        # Triton's launcher: grid, stream, function, metadata, then three hooks that are not used.
        prefix = (*launch.grid, stream, kernel.function, kernel.packed_metadata, None, None, None)
        kernel.run(*prefix, *arguments)

    def _kernel(self, problem: Problem, config: Config) -> Any:
        """Return the compiled kernel; None for cuBLAS, False for a kernel that does not compile or fit."""
        if is_cublas(config):
            return None
        binary = self.family.binary(problem, config)
        if binary.key not in self._kernels:
            self._kernels[binary.key] = self._load(binary)
        return self._kernels[binary.key]

    def _load(self, binary: Binary) -> Any:
        """Compile a kernel and load it onto the GPU; False if that fails or if it spills registers."""
        try:
            kernel = compile_binary(binary, self.capability)
            kernel._init_handles()
            kernel.binary = binary
            if kernel.n_spills > _MAX_SPILLED_BYTES:
                return False
        except Exception:  # Triton raises many types; a kernel that cannot be loaded is not a candidate
            return False
        return kernel

    def _workspace(self, problem: Problem, config: Config, stream: int) -> dict[str, Any]:
        """Return partial sums and counters for a launch.

        Each stream has its own, kept between calls; a CUDA graph under capture gets buffers of its own.
        """
        torch = self.torch
        sizes = dict(zip(("partial_sums", "counters"), workspace_sizes(problem, config), strict=True))
        dtypes = {"partial_sums": torch.float32, "counters": torch.int32}
        capturing = torch.cuda.is_current_stream_capturing()
        buffers: dict[str, Any] = {} if capturing else self._workspaces.setdefault(stream, {})
        for name, size in sizes.items():
            if name not in buffers or buffers[name].numel() < size:
                allocate = torch.zeros if name == "counters" else torch.empty
                buffers[name] = allocate(max(size, 1), dtype=dtypes[name], device="cuda")
        return {**buffers, "multiprocessors": self.multiprocessors}

    # Measuring

    def measure(self, problem: Problem) -> ProductChoice:
        """Time the most promising kernels interleaved with cuBLAS and store the fastest correct one."""
        with self._measuring, self.torch.no_grad():
            configs = [CUBLAS, *rank_kernels(self.model, problem, self.shared_bytes, KERNELS_TO_MEASURE)[0]]
            stream = self.torch.cuda.Stream()
            with self.torch.cuda.stream(stream):
                times = self._times(problem, configs, stream)
            best = min(times, key=times.__getitem__)
            choice = ProductChoice(best, True, times[CUBLAS] / times[best])
            self.choices[problem] = choice
            best_ns, count = times[best] * 1e9, len(times)
            self.stored_choices.put(
                Decision(problem, best, "measured", runtime_ns=best_ns, measurements=count, sure=True)
            )
            return choice

    def _times(self, problem: Problem, configs: Sequence[Config], stream: Any) -> dict[Config, float]:
        """Measure the seconds of every configuration that compiles and computes the right result, interleaved."""
        torch, family = self.torch, self.family
        generator = torch.Generator(device="cuda").manual_seed(0)
        footprint = family.bytes_moved(problem)
        set_count = min(max(1, math.ceil(_L2_BYTES / footprint)), 8)
        operand_sets = [family.operands(problem, torch, "cuda", generator) for _ in range(set_count)]
        # Graphs store addresses, so the workspace must reach its final size before the first capture.
        for config in configs:
            for operands in operand_sets:
                operands.scratch |= self._workspace(problem, config, stream.cuda_stream)
        rates = sustained_rates(self.model.device)
        estimate = max(rates.launch_seconds, footprint / rates.memory_bandwidth)  # seconds, memory-bound
        launches = max(set_count, round(_UNIT_SECONDS / estimate) // set_count * set_count)
        launches = min(launches, _MAX_GRAPH_LAUNCHES)
        graphs = self._capture(problem, configs, operand_sets, stream, launches)
        times: dict[Config, list[float]] = {config: [] for config in graphs}
        for turn in range(_ROUNDS + 1):
            for config, graph in graphs.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph()
                end.record()
                end.synchronize()
                if turn:  # the first round lets the clocks rise
                    times[config].append(start.elapsed_time(end) * 1e-3)
        return {config: statistics.median(seconds) / launches for config, seconds in times.items()}

    def _capture(
        self, problem: Problem, configs: Sequence[Config], operand_sets: Sequence[Operands], stream: Any, launches: int
    ) -> dict[Config, Run]:
        """Capture a CUDA graph of `launches` runs for every configuration that computes the right result."""
        first, sets = operand_sets[0], len(operand_sets)
        expected = self.family.expected(problem, self.torch, first)
        driver, graphs = DriverGraphs(stream.cuda_stream), {}
        for config in configs:
            if self._kernel(problem, config) is False:
                continue
            # NaN shows elements that a kernel does not write.
            first.out.fill_(math.nan)
            runs = [functools.partial(self.run, problem, operands, config, allocate=False) for operands in operand_sets]
            for run in runs:
                run()
            is_right = ((first.out - expected.value).abs() <= expected.bound).all()
            if is_cublas(config) or bool(is_right):
                graphs[config] = driver.capture([runs[i % sets] for i in range(launches)])
        return graphs


@functools.lru_cache(maxsize=1)
def _dispatcher() -> ProductDispatcher | None:
    """Return the dispatcher of this process's GPU; None if there is no GPU with a model."""
    import torch

    model = shipped_runtime_model()
    if model is None or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(0)
    if model_collection(major * 10 + minor) is None:
        return None
    machine = f"{torch.cuda.get_device_name(0)}, PyTorch {torch.__version__}"
    return ProductDispatcher(torch, model, ChoiceFile(None, machine))


def matmul(
    a: Any, b: Any, bias: Any = None, *, activation: str | None = None, residual: Any = None,
    measure: bool | str = False,
) -> Any:  # fmt: skip
    """Compute activation(a @ b + bias) or a @ b + residual for two bf16 or fp16 matrices on the GPU.

    float32 matrices are multiplied in tf32 if `torch.set_float32_matmul_precision` allows it, by cuBLAS unless
    measured. The first call of a shape takes the configuration that is predicted to be fastest; `measure=True` first
    times the most promising ones, `measure="background"` does so while the program goes on. An activation ("relu" or
    "gelu") needs a bias.
    """
    if activation not in _EPILOGUES or measure not in (False, True, "background"):
        raise ConfigurationError(f"activation must be None, 'relu' or 'gelu', not {activation!r}; measure must be a "
                                 f"bool or 'background', not {measure!r}.")  # fmt: skip
    if (activation is not None and bias is None) or (bias is not None and residual is not None):
        raise ConfigurationError("An activation needs a bias, and a residual takes neither a bias nor an activation.")
    epilogue = "residual" if residual is not None else "none" if bias is None else _EPILOGUES[activation]
    dispatcher, problem = _dispatcher(), problem_of(a, b, bias, residual, epilogue)
    if dispatcher is None or problem is None or (a.requires_grad or b.requires_grad):
        return _torch_matmul(a, b, bias, activation, residual)
    out = a.new_empty((a.shape[0], b.shape[1]))
    # Kernels take operands as they are stored; the layout says which one is transposed.
    left, right = (x.T if side == "t" else x for x, side in zip((a, b), problem.word("layout"), strict=True))
    inputs = {
        "a": left,
        "b": right,
        "bias": out if bias is None else bias,
        "residual": out if residual is None else residual,
    }
    operands = Operands(inputs, out, out)
    try:
        dispatcher.run(problem, operands, dispatcher.choose(problem, measure).config)
    except Exception:  # whatever failed (kernel, driver, measurement), the caller must get the product
        dispatcher.choices[problem] = _CUBLAS_UNMEASURED
        dispatcher.run(problem, operands, CUBLAS)
    return out


def linear(x: Any, weight: Any, bias: Any = None, *, activation: str | None = None, measure: bool | str = False) -> Any:
    """Compute activation(x @ weight.T + bias), as `torch.nn.functional.linear`; x may have any number of dimensions."""
    rows = x.reshape(-1, x.shape[-1])  # (rows, in)
    out = matmul(rows, weight.T, bias, activation=activation, measure=measure)
    return out.view(*x.shape[:-1], weight.shape[0])


def problem_of(a: Any, b: Any, bias: Any, residual: Any, epilogue: str) -> Problem | None:
    """Describe a product as a problem of the kernels; None if they do not support its dtypes, shapes or strides."""
    dtype = _DTYPES.get(str(a.dtype))
    if dtype == "tf32" and not _allows_tf32():
        return None
    if dtype is None or a.dim() != 2 or b.dim() != 2 or a.dtype != b.dtype or a.shape[1] != b.shape[0]:
        return None
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    layouts = [_layout(a), _layout(b)]
    extras = [x for x in (bias, residual) if x is not None]
    dense = all(x.is_contiguous() and x.dtype == a.dtype for x in extras)
    # Binaries are compiled for 16-byte aligned pointers.
    aligned = all(x.data_ptr() % 16 == 0 for x in (a, b, *extras))
    if None in layouts or not dense or not aligned or min(m, n, k) < 1 or max(m * k, k * n, m * n) >= 2**31:
        return None
    if (bias is not None and tuple(bias.shape) != (n,)) or (residual is not None and tuple(residual.shape) != (m, n)):
        return None
    return Problem.of("product", dtype=dtype, m=m, n=n, k=k, layout="".join(map(str, layouts)), epilogue=epilogue)


def _allows_tf32() -> bool:
    import torch

    return str(torch.get_float32_matmul_precision()) != "highest"


def _layout(matrix: Any) -> str | None:
    """Return "n" for a row-major matrix, "t" for a column-major one, None for one with gaps."""
    return "n" if matrix.is_contiguous() else "t" if matrix.T.is_contiguous() else None


def _torch_matmul(a: Any, b: Any, bias: Any, activation: str | None, residual: Any) -> Any:
    import torch

    addend = residual if residual is not None else bias
    out = a @ b if addend is None else torch.addmm(addend, a, b)
    return out if activation is None else getattr(torch.nn.functional, activation)(out)
