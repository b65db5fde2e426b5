"""Every way to compute a program's result, compared with the module in float64 on NumPy.

Eager float32 on NumPy and on the compiled kernels, the float plan, ONNX files written here and by `tilewise.onnx.save`,
and ONNX Runtime must be within 1e-5 of the largest result. An INT8 model must keep the error it was asked for, and its
integers must not depend on the kernels, the threads, the batch or whether it was saved and loaded.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import tilewise.onnx
from tests.programs import onnx_file
from tests.programs.network import NUMPY, FusedNetwork, Network, amplification, root_mean_square, run_eagerly
from tests.programs.program import Array, Program
from tilewise import nn
from tilewise._environment import MachineOverride, machine_override
from tilewise._extension import emulate_machine, native
from tilewise.errors import AccuracyError, TilewiseError
from tilewise.plan import compile
from tilewise.quantize import QuantizedModel, convert, load_quantized, quantize, save_quantized
from tilewise.quantize.calibration import trace_and_calibrate
from tilewise.quantize.convert import is_transformer
from tilewise.quantize.graph import trace
from tilewise.quantize.lowering import tied_values
from tilewise.quantize.mixed_precision import with_int16_residuals

FLOAT_ERROR = 1e-5  # of the largest result
BOUND = 0.01  # of INT8: what `quantize` promises by default
NEAR = 0.05  # of INT8 without a bound: noise that is far above a byte's rounding, and far below a fault's
FAR = 0.01  # of the traced steps in float, on images of another size, where norms may divide by almost nothing
_MACHINES = (
    None,
    None,
    # Smaller than any: programs are small too, and a batch shall be cut into chunks, stages and tile groups.
    MachineOverride(l1=8 << 10, l2=16 << 10, l3=1 << 20),
    MachineOverride(l1=32 << 10, l2=1 << 20, l3=0),
    MachineOverride(l1=4 << 10, l2=8 << 10, l3=1 << 20),  # consecutive layers become tile groups with line buffers
    MachineOverride(l1=1 << 10, l2=2 << 10, l3=0, cores=1),  # most chunks have one image, and small layers are stages
)
_MOST_IMAGES = 9  # of a batch in INT8: more than one chunk, also on three threads
_IN_MEMORY = Path("/dev/shm")


class Mismatch(AssertionError):
    """One way to compute a program's result disagrees; `oracle` names it."""

    def __init__(self, oracle: str, reason: str) -> None:
        super().__init__(f"{oracle}: {reason}")
        self.oracle = oracle


@dataclass(frozen=True)
class Conditions:
    """How a program is run besides what it computes. All follow from its seed, so that a failure can be repeated."""

    isa: str | None
    threads: int
    machine: MachineOverride | None
    fused: bool  # the plan, INT8 and ONNX start from Sequentials
    max_error: float | None  # of INT8
    int8_of_file: bool  # INT8 starts from the network that was loaded from the ONNX file
    own_onnx: bool  # the file is written by tilewise, and else by `onnx_file`
    runtime: bool  # ONNX Runtime runs the file too
    sparse: bool  # plans skip zero weights, even where multiplying them costs less
    integers: bool  # INT8 is compared with NumPy, other threads and instruction sets, and a saved model
    int16_share: float  # of the activations, where INT8 has no bound; which ones is drawn

    @classmethod
    def of(cls, program: Program) -> Conditions:
        rng = np.random.default_rng((program.seed, 1))
        isas = native.supported_isas() if native is not None else [None]
        return cls(
            isa=isas[-1] if rng.random() < 0.6 else isas[rng.integers(len(isas))],
            threads=int(rng.choice([1, 1, 2, 3])),
            machine=_MACHINES[rng.integers(len(_MACHINES))],
            fused=bool(rng.random() < 0.5),
            max_error=[None, None, None, BOUND, 3e-3][rng.integers(5)],
            own_onnx=bool(rng.random() < 0.5),
            runtime=bool(rng.random() < 0.1),
            integers=bool(rng.random() < 0.3),
            int8_of_file=bool(rng.random() < 0.25),
            int16_share=[0.0, 0.0, 0.5, 1.0][rng.integers(4)],
            sparse=any("zeros" in op.settings for op in program.ops),
        )


@contextmanager
def applied(conditions: Conditions) -> Iterator[None]:
    """The kernels under these conditions; afterwards as they were."""
    if native is None:
        yield
        return
    isa, threads = native.isa(), native.num_threads()
    native.set_isa(conditions.isa)
    native.set_num_threads(conditions.threads)
    native.prefer_sparse(conditions.sparse)
    emulate_machine(native, conditions.machine or machine_override())
    try:
        yield
    finally:
        native.prefer_sparse(False)
        native.set_isa(isa)
        native.set_num_threads(threads)
        emulate_machine(native, machine_override())


class Run:
    """One program with its input, its modules and the exact result."""

    def __init__(self, program: Program) -> None:
        self.program, self.conditions = program, Conditions.of(program)
        self.network = Network(program)
        self.x = program.example()
        self.exact = run_eagerly(self.network, self.x.astype(np.float64), NUMPY)
        self.loaded: nn.Module | None = None  # from the ONNX file, once it is written

    @cached_property
    def fused(self) -> FusedNetwork:
        return FusedNetwork(self.network)

    @property
    def module(self) -> nn.Module:
        return self.fused if self.conditions.fused else self.network

    def compare(self, oracle: str, result: Array, images: slice | Array = slice(None)) -> None:
        """Refuse a result of these images that is further from the exact one than float32 explains."""
        exact = self.exact[images]
        if result.shape != exact.shape:
            raise Mismatch(oracle, f"the shape is {result.shape}, not {exact.shape}")
        error = np.abs(result - exact).max(initial=0) / np.abs(self.exact).max()
        if not error <= FLOAT_ERROR:
            raise Mismatch(oracle, f"off by {error:.2e} of the largest result")


# --- float ---


def eager(run: Run) -> None:
    run.compare("eager NumPy", run_eagerly(run.network, run.x, NUMPY))
    run.compare("eager", run_eagerly(run.network, run.x))
    run.compare("eager, fused", run_eagerly(run.fused, run.x))


def float_plan(run: Run) -> None:
    if native is None:
        return
    plan = compile(run.module, run.x)
    run.compare("plan", plan(run.x))
    run.compare("plan, run again", plan(run.x))
    if not run.program.mixes_batch:
        images = np.arange(len(run.x) + 2) % len(run.x)
        run.compare("plan, other batch", plan(run.x[images]), images)
        run.compare("plan, one image", plan(run.x[-1:]), images[len(run.x) - 1 : len(run.x)])


@contextmanager
def temporary_file(name: str) -> Iterator[Path]:
    """A path in memory, where the system has such files: programs are small, and writing to a disk takes longer."""
    with tempfile.TemporaryDirectory(dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None) as folder:
        yield Path(folder) / name


def onnx_round_trip(run: Run) -> None:
    with temporary_file("program.onnx") as path:
        if run.conditions.own_onnx or not onnx_file.can_be_written(run.program):
            oracle = "ONNX, saved and loaded"
            tilewise.onnx.save(run.module, path, run.x, dynamic=not run.program.mixes_batch)
        else:
            oracle = "ONNX, loaded"
            onnx_file.write(run.program, run.network, path)
        network = run.loaded = tilewise.onnx.load(path)
        run.compare(oracle, run_eagerly(network, run.x))
        if native is not None:
            run.compare(f"{oracle}, planned", compile(network, run.x)(run.x))
        if run.conditions.runtime:
            run.compare(f"{oracle}, by ONNX Runtime", _onnx_runtime(path, run.x))


def _onnx_runtime(path: Path, x: Array) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    # Its optimizer merges a border of zeros into a max pool, which then pads with -infinity.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"input": x})[0]


# --- INT8 ---


def int8(run: Run) -> None:
    if run.program.mixes_batch:  # integer models take any batch, image by image
        return
    bound = run.conditions.max_error
    try:
        model = _quantized(run, bound)
    except AccuracyError:  # the bound is out of reach: without one, the same layers must come near
        bound, model = None, _quantized(run, None)
    result = run_eagerly(model, run.x)
    if result.shape != run.exact.shape:
        raise Mismatch("INT8", f"the shape is {result.shape}, not {run.exact.shape}")
    if not isinstance(model, QuantizedModel):  # a transformer: scales by row, and no bound
        results = [result] if native is None else [result, compile(model, run.x)(run.x)]
        if not all(_is_near(run, r) for r in results):
            raise Mismatch("INT8, dynamic", "far from the module's result")
        if run.conditions.integers:
            _saved(run, model, result)
        return
    _integers(run, model, result)
    if _is_near(run, result) if bound is None else _largest_error(run, result) <= bound:
        return
    # Bytes may be too coarse for this program, and a tight bound out of reach of 32-bit sums; the default is kept.
    error = _largest_error(run, result if bound == BOUND else _quantized(run, BOUND).run(run.x))
    if not error <= BOUND:
        raise Mismatch("INT8", f"off by {100 * error:.2f} % of the largest result with max_error={BOUND}")


def _largest_error(run: Run, result: Array) -> float:
    return float(np.abs(result - run.exact).max() / np.abs(run.exact).max())


def _quantized(run: Run, bound: float | None) -> Any:
    # Warnings say which layers stay in float, and what was timed: nothing that is checked here.
    with warnings.catch_warnings(), mock.patch.object(convert, "warn_if_slower"):
        warnings.simplefilter("ignore", UserWarning)
        module = run.loaded if run.conditions.int8_of_file and run.loaded is not None else run.module
        if bound is None and run.conditions.int16_share > 0 and not is_transformer(module):
            return _with_drawn_int16(run, module)
        return quantize(module, [run.x], max_error=bound)


def _with_drawn_int16(run: Run, module: nn.Module) -> QuantizedModel:
    """An INT8 model in which some activations have int16, wherever they are: `quantize` chooses the sensitive ones."""
    graph, calibration, *_ = trace_and_calibrate(module, [run.x])
    rng = np.random.default_rng((run.program.seed, 2))
    int16_groups = {g: "drawn" for g in sorted(set(tied_values(graph))) if rng.random() < run.conditions.int16_share}
    return QuantizedModel(graph, calibration, {}, int16_reasons=with_int16_residuals(graph, int16_groups))


def _is_near(run: Run, result: Array) -> bool:
    """Whether the error is no more than what noise on every value would do."""
    error = root_mean_square(result - run.exact) / root_mean_square(run.exact)
    return error <= NEAR * (1 + amplification(run.network, run.x, run.exact, NEAR))


def _integers(run: Run, model: QuantizedModel, result: Array) -> None:
    """The same numbers, bit by bit, however the model is run."""
    _same(result, _step_by_step(model, run.x), "step by step")
    in_float = any(step.form == "float32" for step in model.report())  # where kernels differ in the last bits
    if not in_float:
        _same(result[-1:], model.run(run.x[-1:]), "one image")
    if run.conditions.integers and not in_float:
        _saved(run, model, result)
    rng = np.random.default_rng((run.program.seed, 3))
    x = rng.standard_normal((rng.integers(2, _MOST_IMAGES + 1), *run.x.shape[1:]), dtype=np.float32)
    expected = _step_by_step(model, x)
    _same(expected, model.run(x), f"{len(x)} images")
    _other_size(run, model, rng)
    if run.conditions.integers and not in_float and native is not None:
        for isa in native.supported_isas():
            for threads in (1, 3):
                native.set_isa(isa)
                native.set_num_threads(threads)
                _same(expected, model.run(x), f"{isa} on {threads} threads")


def _step_by_step(model: QuantizedModel, x: Array) -> Array:
    return model.run(x, lambda _step, _value: None)


def _other_size(run: Run, model: QuantizedModel, rng: np.random.Generator) -> None:
    """On images of another size than those of calibration: the network's result, or an error of either."""
    if run.x.ndim != 4:
        return
    height, width = rng.integers(1, 2 * np.array(run.x.shape[2:]) + 1)
    tiled = np.tile(run.x, (1, 1, 2, 2))[..., :height, :width]
    how = f"images of {height}x{width}"
    try:
        expected = _step_by_step(model, tiled)
        _same(expected, model.run(tiled), how)
        exact = run_eagerly(run.network, tiled.astype(np.float64), NUMPY)
    except TilewiseError:
        return
    if expected.shape != exact.shape:
        raise Mismatch(f"INT8, {how}", f"the shape is {expected.shape}, not {exact.shape}")
    # The integers may saturate: an image of another size has other values. The steps in float may not.
    largest = max(np.abs(exact).max(initial=0), np.abs(run.exact).max())
    error = np.abs(trace(run.module, run.x).run(tiled) - exact).max(initial=0) / largest
    if not error <= FAR:
        raise Mismatch(f"traced, {how}", f"off by {100 * error:.2f} % of the result")


def _saved(run: Run, model: nn.Module, result: Array) -> None:
    with temporary_file("program.int8") as path:
        save_quantized(model, path)
        _same(result, run_eagerly(load_quantized(path), run.x), "saved and loaded")
        if isinstance(model, QuantizedModel):
            with without_kernels():
                _same(result, load_quantized(path).run(run.x), "NumPy")


def _same(expected: Array, result: Array, how: str) -> None:
    if not np.array_equal(expected, result):
        raise Mismatch(f"INT8, {how}", f"{np.abs(expected - result).max():.3g} from the planned result")


@contextmanager
def without_kernels() -> Iterator[None]:
    """INT8 layers that are built here are NumPy's."""
    modules = [m for name, m in sys.modules.items() if name.startswith("tilewise.quantize") and hasattr(m, "native")]
    before = [module.native for module in modules]
    for module in modules:
        module.native = None
    try:
        yield
    finally:
        for module, kernels in zip(modules, before, strict=True):
            module.native = kernels


ORACLES: tuple[Callable[[Run], None], ...] = (eager, float_plan, onnx_round_trip, int8)


def check(program: Program) -> None:
    """Run a program in every way; raises Mismatch where one disagrees or cannot run it."""
    run = Run(program)
    with applied(run.conditions):
        for oracle in ORACLES:
            try:
                oracle(run)
            except Mismatch:
                raise
            except Exception as error:
                raise Mismatch(f"{oracle.__name__}, {type(error).__name__}", str(error)) from error


def failure_of(program: Program) -> Mismatch | None:
    try:
        check(program)
    except Mismatch as mismatch:
        return mismatch
    return None
