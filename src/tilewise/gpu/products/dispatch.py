"""Choose between our kernels and cuBLAS for each matrix product, and run the choice.

The first call of a shape chooses without measuring: the runtimes of all configurations and of cuBLAS are predicted, and
a kernel is chosen only if it is ahead by more than the uncertainty of the predictions. Measuring is optional, at once
or in the background: the most promising kernels are checked against float32, timed interleaved with cuBLAS, and the
winner is stored for later processes. A kernel that does not compile or fit is replaced by cuBLAS. Under
`tilewise.pin()` nothing is measured, and nothing that was measured earlier is used.
"""

from __future__ import annotations

import functools
import importlib
import math
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from tilewise.gpu.families.family import Binary, Launch, Operands
from tilewise.gpu.measure.compiler import compile_binary
from tilewise.gpu.pinning import active_lock, is_unmeasured
from tilewise.gpu.pinning.lock import LockedChoice
from tilewise.gpu.products.family import (
    MAX_PARTIAL_SUMS,
    ProductFamily,
    as_16_bit,
    cublas_call,
    supports_tma,
    workspace_sizes,
)
from tilewise.gpu.products.roofline import CUBLAS, TRANSPOSED, Numbers, columns, fits, is_cublas, sustained_rates
from tilewise.gpu.products.runtime_model import Prediction, RuntimeModel, required_gain
from tilewise.profile.timing.gpu import DriverGraphs
from tilewise.store.problem import Config, Problem
from tilewise.tune.choose.cache import ChoiceFile, Decision
from tilewise.tune.choose.decide import Scores, decide
from tilewise.tune.search.gaussian_process import Hyperparameters

KERNELS_TO_MEASURE = 4  # timed interleaved with cuBLAS
_ROUNDS = 7  # timed rounds; the median counts
_UNIT_SECONDS = 4e-4  # target length of one timed CUDA graph: long compared with the events' half microsecond
_MAX_GRAPH_LAUNCHES = 64
_L2_BYTES = 128 << 20  # over twice the L2 cache of an H200: operand sets rotate through it
_MAX_SPILLED_BYTES = 16  # registers spilled per thread; kernels with more are many times slower
_RESERVED_COUNTERS = 1 << 18  # zeroed int32 values for launches inside of CUDA graphs: 1 MiB
_LOG_SECONDS = Hyperparameters(coefficient=1.0)  # scores are logarithms of seconds: a difference is a gain
LOCK_KERNEL = "product"  # the name under which lock files keep these choices
Run = Callable[[], Any]
_column_cache: list[tuple[Sequence[Config], dict[str, Numbers]]] = []


@dataclass(frozen=True)
class ProductChoice:
    """The configuration chosen for a product.

    `gain` is cuBLAS's time divided by its time, measured or predicted.
    """

    config: Config
    is_measured: bool
    gain: float


CUBLAS_UNMEASURED = ProductChoice(CUBLAS, False, 1.0)


def choose_unmeasured(model: RuntimeModel, problem: Problem, shared_bytes: int) -> ProductChoice:
    """Choose a configuration by predicted time; tf32 always uses cuBLAS, as there is no data on its margin."""
    if problem.word("dtype") == "tf32":
        return CUBLAS_UNMEASURED
    configs, kernels = rank_kernels(model, problem, shared_bytes, 1)
    if not configs:
        return CUBLAS_UNMEASURED
    cublas = model.predict_cublas(problem)
    gain = math.log(cublas.seconds[0] / kernels.seconds[0])
    margin = required_gain(supports_tma(problem), math.hypot(kernels.deviation[0], cublas.deviation[0]))
    scores = Scores(_LOG_SECONDS, np.array([gain, 0.0]), margin)  # log seconds above the best kernel's
    config = decide(problem, [CUBLAS, configs[0]], scores).config
    return CUBLAS_UNMEASURED if is_cublas(config) else ProductChoice(config, False, math.exp(gain))


def rank_kernels(
    model: RuntimeModel, problem: Problem, shared_bytes: int, count: int, *, whole_k: bool = False
) -> tuple[list[Config], Prediction]:
    """Return the `count` configurations with the shortest predicted runtimes, fastest first, and the predictions.

    Configurations that cannot run, such as those that need more than `shared_bytes` of shared memory, are left out; so
    are, with `whole_k`, those that split the sum over k.
    """
    configs = ProductFamily().configs(problem)
    # tf32 is predicted as the 16-bit product that moves as many bytes.
    problem_16_bit, k_factor = as_16_bit(problem)
    # The kernels of a search space as columns, cached by identity: there are a handful of spaces.
    of = next((of for space, of in _column_cache if space is configs), None)
    if of is None:
        of = columns(configs[1:])
        _column_cache.append((configs, of))
    of = {**of, "block_k": k_factor * of["block_k"]}
    can_run = fits(problem_16_bit, of, shared_bytes, MAX_PARTIAL_SUMS)
    if whole_k:
        can_run &= (of["split_k"] == 1) & (of["stream_k"] == 0)
    fitting = np.flatnonzero(can_run)
    prediction = model.predict_kernels(problem_16_bit, {name: column[fitting] for name, column in of.items()})
    first = np.argsort(prediction.seconds, kind="stable")[:count]
    ranking = [configs[1 + int(fitting[i])] for i in first]  # configs[0] is cuBLAS
    return ranking, Prediction(prediction.seconds[first], prediction.deviation[first])


class ProductDispatcher:
    """Chooses and runs the matrix products of one GPU."""

    def __init__(
        self, torch: Any, model: RuntimeModel, choices: ChoiceFile, on_measured: Callable[[], None] = lambda: None
    ) -> None:
        """Read the GPU's properties; `choices` are those that earlier processes measured.

        `on_measured` is called after every new measurement.
        """
        self.torch, self.model, self.stored_choices, self._on_measured = torch, model, choices, on_measured
        self.family = ProductFamily()
        properties = torch.cuda.get_device_properties(0)
        self.shared_bytes = int(properties.shared_memory_per_block_optin)
        self.capability = int(properties.major) * 10 + int(properties.minor)
        self.multiprocessors = int(properties.multi_processor_count)
        self.choices: dict[Problem, ProductChoice] = {}
        self._kernels: dict[str, Any] = {}  # by the binary's key; False for one that cannot be loaded
        self._workspaces: dict[int, dict[str, Any]] = {}  # by stream
        self._counters: Any = None  # zeroed counters, divided among captured launches
        self._used_counters = 0
        self._measuring = threading.Lock()

    def choose(self, problem: Problem, measure: bool | str = False) -> ProductChoice:
        """Return the choice for a problem: a stored one, else by prediction, else measured if `measure` asks for it."""
        if is_unmeasured():
            return self._choose_pinned(problem)
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

    def choose_invariant(self, problem: Problem) -> Config:
        """Choose a kernel whose rows have the same bits for every number of rows: one that does not split k.

        On an H200 all such kernels gave equal bits, whatever their tile; so did cuBLASLt without split-K. LookupError
        if none can run.
        """
        configs, _ = rank_kernels(self.model, problem, self.shared_bytes, KERNELS_TO_MEASURE, whole_k=True)
        for config in configs:
            if self._kernel(problem, config) is not False:
                return config
        raise LookupError("no kernel can run the product")

    def _predict(self, problem: Problem) -> ProductChoice:
        choice = choose_unmeasured(self.model, problem, self.shared_bytes)
        return choice if self._kernel(problem, choice.config) is not False else CUBLAS_UNMEASURED

    def _choose_pinned(self, problem: Problem) -> ProductChoice:
        """Return the lock file's choice, or a predicted one, which is then added to the lock file."""
        lock, device = active_lock(), str(self.torch.cuda.get_device_name(0))
        key = Problem({name: value for name, value in problem.items() if name != "family"})
        locked = None if lock is None else lock.find(LOCK_KERNEL, key, device)
        if locked is not None:
            return ProductChoice(locked.config, False, 1.0)
        choice = self._predict(problem)
        if lock is not None:
            reason = "cuBLAS" if is_cublas(choice.config) else f"{choice.gain:.2f} of cuBLAS's speed"
            lock.add(
                LockedChoice(
                    kernel=LOCK_KERNEL,
                    problem=key,
                    device=device,
                    config=choice.config,
                    predicted=None,
                    model=f"products {self.model.digest}",
                    reason=f"{reason} by the cost model",
                )
            )
        return choice

    def run(self, problem: Problem, operands: Operands, config: Config, *, allocate: bool = True) -> None:
        """Launch a matrix product on the current CUDA stream; `allocate` gives its operands a new workspace."""
        if is_cublas(config):
            cublas_call(problem, operands)()
            return
        stream = self.torch.cuda.current_stream().cuda_stream
        if allocate:
            operands.scratch |= self._workspace(problem, config, stream, operands.out)
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
        """Return the compiled kernel; None for cuBLAS, False if it fails to compile or does not fit."""
        if is_cublas(config):
            return None
        binary = self.family.binary(problem, config)
        if binary.key not in self._kernels:
            self._kernels[binary.key] = self._load(binary)
        return self._kernels[binary.key]

    def _load(self, binary: Binary) -> Any:
        """Compile a kernel and load it onto the GPU; False if that fails or registers spill."""
        try:
            kernel = compile_binary(binary, self.capability)
            kernel._init_handles()
            kernel.binary = binary
            if kernel.n_spills > _MAX_SPILLED_BYTES:
                return False
        except Exception:  # Triton raises many types; a kernel that cannot be loaded is not a candidate
            return False
        return kernel

    def prepare(self, problem: Problem, operands: Operands, config: Config) -> PreparedLaunch | None:
        """Prepare a kernel's launch for operands of these shapes; None if only Triton's launcher can run it."""
        operands.scratch |= self._workspace(problem, config, self.torch.cuda.current_stream().cuda_stream, operands.out)
        try:
            launch = self.family.launch(problem, config, operands)
            return PreparedLaunch(self._kernel(problem, config), launch, bool(config.size(TRANSPOSED)))
        except (AttributeError, LookupError, TypeError):  # another version of Triton
            return None

    def workspace_addresses(self, problem: Problem, config: Config, stream: int, out: Any) -> tuple[int, int]:
        """Return the addresses of the partial sums and of the counters for a launch on `stream`."""
        buffers = self._workspace(problem, config, stream, out)
        return buffers["partial_sums"].data_ptr(), buffers["counters"].data_ptr()

    def _workspace(self, problem: Problem, config: Config, stream: int, out: Any) -> dict[str, Any]:
        """Return the buffers for partial sums and counters of a launch, or `out` for a kernel that does not split K.

        Each stream has its own, kept between calls. A launch inside of a CUDA graph gets buffers of its own, since the
        graph may run beside other work. Counters must be zero before a launch, and the kernel leaves them at zero.
        """
        torch = self.torch
        sums, counters = workspace_sizes(problem, config)
        if not counters:
            return {"partial_sums": out, "counters": out, "multiprocessors": self.multiprocessors}
        capturing = torch.cuda.is_current_stream_capturing()
        if self._counters is None and not capturing:
            self._counters = torch.zeros(_RESERVED_COUNTERS, dtype=torch.int32, device="cuda")
        buffers: dict[str, Any] = {} if capturing else self._workspaces.setdefault(stream, {})
        if "partial_sums" not in buffers or buffers["partial_sums"].numel() < sums:
            buffers["partial_sums"] = torch.empty(sums, dtype=torch.float32, device="cuda")
        start = self._used_counters
        if capturing and self._counters is not None and start + counters <= _RESERVED_COUNTERS:
            # Zeroed counters from the reserve, so that the graph fills nothing.
            self._used_counters += counters
            buffers["counters"] = self._counters[start : start + counters]
        elif "counters" not in buffers or buffers["counters"].numel() < counters:
            buffers["counters"] = torch.zeros(counters, dtype=torch.int32, device="cuda")
        return {**buffers, "multiprocessors": self.multiprocessors}

    # Measuring

    def measure(self, problem: Problem) -> ProductChoice:
        """Time the most promising kernels and cuBLAS interleaved; store and return the fastest correct one."""
        with self._measuring, self.torch.no_grad():
            configs = [CUBLAS, *rank_kernels(self.model, problem, self.shared_bytes, KERNELS_TO_MEASURE)[0]]
            stream = self.torch.cuda.Stream()
            with self.torch.cuda.stream(stream):
                times = self._time_configs(problem, configs, stream)
            best = min(times, key=times.__getitem__)
            choice = ProductChoice(best, True, times[CUBLAS] / times[best])
            self.choices[problem] = choice
            self._on_measured()
            best_ns, count = times[best] * 1e9, len(times)
            self.stored_choices.put(
                Decision(problem, best, "measured", runtime_ns=best_ns, measurements=count, sure=True)
            )
            return choice

    def _time_configs(self, problem: Problem, configs: Sequence[Config], stream: Any) -> dict[Config, float]:
        """Time configurations interleaved; return the seconds of those that compile and compute the right result."""
        torch, family = self.torch, self.family
        generator = torch.Generator(device="cuda").manual_seed(0)
        footprint = family.bytes_moved(problem)
        set_count = min(max(1, math.ceil(_L2_BYTES / footprint)), 8)
        operand_sets = [family.operands(problem, torch, "cuda", generator) for _ in range(set_count)]
        # Graphs store addresses, so the workspace must reach its final size before the first capture.
        for config in configs:
            if workspace_sizes(problem, config)[1] == 0:
                continue
            for operands in operand_sets:
                operands.scratch |= self._workspace(problem, config, stream.cuda_stream, operands.out)
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
        """Capture `launches` runs of each configuration into a CUDA graph; those with a wrong result are left out."""
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


# A launch of a few microseconds must not spend more on the host. Grid, sizes and compile-time constants are fixed when
# the launch is prepared; Triton's compiled launcher is called directly; TMA descriptors are kept by address, because
# weights stay where they are and the allocator returns the same activations again and again.
_TENSORS = 7  # leading arguments of the kernel that are addresses: a, b, c, bias, residual, partial sums, counters
_MAX_DESCRIPTORS = 256  # per operand; arbitrary, far above the addresses that a program alternates between


class PreparedLaunch:
    """A kernel launch with everything fixed except the addresses of its operands."""

    def __init__(self, kernel: Any, launch: Launch, transposed: bool) -> None:
        """Prepare a launch of `ProductFamily.launch`; LookupError if this version of Triton is unsupported."""
        self.transposed = transposed
        launcher = kernel.run
        if getattr(launcher, "global_scratch_size", 0) or getattr(launcher, "profile_scratch_size", 0):
            raise LookupError("the kernel needs scratch memory")
        self._launch = _compiled_launcher(launcher.launch)
        self._grid = launch.grid
        # Triton's launcher takes the function, two launch modes, two scratch buffers, the metadata and three hooks.
        self._settings = (kernel.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None,
                          kernel.packed_metadata, None, None, None)  # fmt: skip
        constants, integers = dict(kernel.binary.constants), iter(launch.arguments[_TENSORS:])
        names = kernel.src.fn.arg_names[_TENSORS:]
        self._sizes_and_constants = tuple(constants[name] if name in constants else next(integers) for name in names)
        descriptors = [argument for argument in launch.arguments[:2] if hasattr(argument, "block_shape")]
        self._descriptors = [
            _DescriptorCache(descriptor, meta)
            for descriptor, meta in zip(descriptors, _descriptor_metadata(kernel, len(descriptors)), strict=True)
        ]

    def __call__(self, left: int, right: int, outputs: Sequence[int], stream: int) -> None:
        """Launch the kernel on a stream; all other arguments are addresses.

        `outputs` are those of c, bias, residual, partial sums and counters.
        """
        first, second = (right, left) if self.transposed else (left, right)
        if self._descriptors:
            operands = (*self._descriptors[0](first), *self._descriptors[1](second))
        else:
            operands = (first, second)
        self._launch(*self._grid, stream, *self._settings, *operands, *outputs, *self._sizes_and_constants)


class _DescriptorCache:
    """Caches the launcher's arguments for one TMA operand by the operand's address."""

    def __init__(self, descriptor: Any, metadata: Any) -> None:
        """Store an example descriptor of the operand and the compiler's metadata for it."""
        self._fields = {"shape": descriptor.shape, "strides": descriptor.strides,
                        "padding": getattr(descriptor, "padding", "zero")}  # fmt: skip
        self._metadata = metadata
        self._arguments: dict[int, tuple[Any, ...]] = {}

    def __call__(self, address: int) -> tuple[Any, ...]:
        """Return the launcher's arguments for an operand at this address."""
        arguments = self._arguments.get(address)
        if arguments is None:
            if len(self._arguments) >= _MAX_DESCRIPTORS:
                self._arguments.clear()
            driver: Any = importlib.import_module("triton.backends.nvidia.driver")
            base = SimpleNamespace(data_ptr=lambda: address)
            arguments = tuple(driver.make_tensordesc_arg(SimpleNamespace(base=base, **self._fields), self._metadata))
            self._arguments[address] = arguments
        return arguments


def _compiled_launcher(launch: Any) -> Callable[..., Any]:
    """Return the C function of Triton's launcher, to skip its slow Python wrapper."""
    closure = getattr(launch, "__closure__", None)
    if not closure:
        return launch  # type: ignore[no-any-return]
    variables = dict(zip(launch.__code__.co_freevars, closure, strict=True))
    return variables["launcher"].cell_contents  # type: ignore[no-any-return]


def _descriptor_metadata(kernel: Any, count: int) -> list[Any]:
    """Return the compiler's swizzling and block shape for each of the `count` TMA operands."""
    metadata = getattr(kernel.metadata, "tensordesc_meta", None)
    if count and (metadata is None or len(metadata) != count):
        raise LookupError("the compiler kept no metadata of TMA descriptors")
    return list(metadata or ())[:count]
