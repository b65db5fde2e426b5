"""`matmul` and `linear`: matrix products of PyTorch tensors, run by the fastest of our kernels and cuBLAS.

A call finds what to do for its shapes, strides and dtypes in a table of records; the first call of each makes the
record. Where the kernels do not apply (another GPU, other dtypes, operands with gaps), the record calls PyTorch. Under
`torch.compile`, and where a gradient is needed, a call is one custom operator (`custom_op.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilewise.errors import ConfigurationError, UnavailableError
from tilewise.gpu import pinning
from tilewise.gpu.devices import model_collection
from tilewise.gpu.families.family import Operands
from tilewise.gpu.products.dispatch import CUBLAS_UNMEASURED, ProductDispatcher
from tilewise.gpu.products.family import workspace_sizes
from tilewise.gpu.products.roofline import is_cublas
from tilewise.gpu.products.runtime_model import shipped_runtime_model
from tilewise.store.problem import Config, Problem
from tilewise.tune.choose.cache import ChoiceFile

_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "tf32"}
_EPILOGUES = {None: "bias", "relu": "bias_relu", "gelu": "bias_gelu"}
_MAX_RECORDS = 8192  # arbitrary; a program with more distinct calls makes its records anew
Product = Callable[[Any, Any, Any, Any], Any]  # (a, b, bias, residual) to the result


@dataclass(frozen=True)
class CallRecord:
    """Record of how to run products of one combination of shapes, strides and dtypes."""

    run: Product
    is_final: bool


_records: dict[Any, CallRecord] = {}


def matmul(
    a: Any, b: Any, bias: Any = None, *, activation: str | None = None, residual: Any = None,
    measure: bool | str = False, batch_invariant: bool = False,
) -> Any:  # fmt: skip
    """Compute activation(a @ b + bias) or a @ b + residual for two bf16 or fp16 matrices on the GPU.

    float32 matrices are multiplied in tf32 if `torch.set_float32_matmul_precision` allows it, by cuBLAS unless
    measured. The first call of a shape takes the configuration that is predicted to be fastest; `measure=True` first
    times the most promising ones, `measure="background"` does so while the program goes on. An activation ("relu" or
    "gelu") needs a bias. All tensors may require gradients; inside `torch.compile` nothing is measured.

    With `batch_invariant`, the bits of a row of the result do not depend on the number of rows of `a`: the product of
    bf16 or fp16 matrices runs on a kernel that does not split k, and nothing is measured.
    """
    import torch

    if batch_invariant and measure:
        raise ConfigurationError("A batch-invariant product is chosen without measuring; leave measure out.")
    is_compiling = torch.compiler.is_compiling()
    tensors = (a, b, bias, residual)
    if is_compiling or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)):
        _epilogue(bias, activation, residual, measure)
        from tilewise.gpu.products.custom_op import product

        if measure and not is_compiling:
            with torch.no_grad():  # the measurement makes the record that the operator then uses
                _record(a, b, bias, residual, activation, measure=measure)
        return product(a, b, bias, residual, activation, batch_invariant)
    return run_product(a, b, bias, residual, activation, measure=measure, batch_invariant=batch_invariant)


def linear(
    x: Any, weight: Any, bias: Any = None, *, activation: str | None = None, measure: bool | str = False,
    batch_invariant: bool = False,
) -> Any:  # fmt: skip
    """Compute activation(x @ weight.T + bias), as `torch.nn.functional.linear`; x may have any number of dimensions.

    The options are those of `matmul`.
    """
    if x.dim() == 2:
        return matmul(x, weight.T, bias, activation=activation, measure=measure, batch_invariant=batch_invariant)
    rows = x.reshape(-1, x.shape[-1])  # (rows, in)
    out = matmul(rows, weight.T, bias, activation=activation, measure=measure, batch_invariant=batch_invariant)
    return out.view(*x.shape[:-1], weight.shape[0])


def run_product(
    a: Any, b: Any, bias: Any, residual: Any, activation: str | None, measure: bool | str = False,
    batch_invariant: bool = False,
) -> Any:  # fmt: skip
    """Compute activation(a @ b + bias) or a @ b + residual, without autograd."""
    record = _record(a, b, bias, residual, activation, measure=measure, batch_invariant=batch_invariant)
    return record.run(a, b, bias, residual)


def _record(
    a: Any, b: Any, bias: Any, residual: Any, activation: str | None, measure: bool | str, batch_invariant: bool = False
) -> CallRecord:  # fmt: skip
    """Return the cached `CallRecord` of these shapes; a new one for new shapes, or to measure."""
    key = (
        a.shape, b.shape, a.stride(), b.stride(), a.dtype, b.dtype, a.get_device(), activation, pinning.generation(),
        None if bias is None else (bias.shape, bias.stride(), bias.dtype),
        None if residual is None else (residual.shape, residual.stride(), residual.dtype),
        a.element_size() == 4 and _allows_tf32(), batch_invariant,
    )  # fmt: skip
    record = _records.get(key)
    if record is None or (measure and not record.is_final):
        if len(_records) >= _MAX_RECORDS:
            _records.clear()
        make = _make_invariant_record if batch_invariant else _make_record
        record = make(a, b, bias, residual, activation, measure)
        if measure != "background":  # the measurement that is under way will make another record
            _records[key] = record
    return record


def _epilogue(bias: Any, activation: str | None, residual: Any, measure: bool | str) -> str:
    """Return the name of the epilogue that these arguments ask for; raise if they cannot be combined."""
    if activation not in _EPILOGUES or measure not in (False, True, "background"):
        raise ConfigurationError(f"activation must be None, 'relu' or 'gelu', not {activation!r}; measure must be a "
                                 f"bool or 'background', not {measure!r}.")  # fmt: skip
    if (activation is not None and bias is None) or (bias is not None and residual is not None):
        raise ConfigurationError("An activation needs a bias, and a residual takes neither a bias nor an activation.")
    return "residual" if residual is not None else "none" if bias is None else _EPILOGUES[activation]


def _make_record(
    a: Any, b: Any, bias: Any, residual: Any, activation: str | None, measure: bool | str
) -> CallRecord:  # fmt: skip
    """Choose a configuration, or PyTorch, for these operands and prepare its launch."""
    epilogue = _epilogue(bias, activation, residual, measure)
    in_torch = _torch_product(activation)
    dispatcher, problem = _dispatcher(), problem_of(a, b, bias, residual, epilogue)
    if dispatcher is None or problem is None or not _is_on_gpu(a):
        return CallRecord(in_torch, True)
    try:
        choice = dispatcher.choose(problem, measure)
        if is_cublas(choice.config):
            return CallRecord(in_torch, choice.is_measured)
        kernel = _kernel_product(dispatcher, problem, choice.config, (a, b, bias, residual))
        if not dispatcher.torch.cuda.is_current_stream_capturing():  # a graph must not contain the trial
            kernel(a, b, bias, residual)
    except Exception:  # after any failure (kernel, driver, measurement) the caller must get the product
        dispatcher.choices[problem] = CUBLAS_UNMEASURED
        return CallRecord(in_torch, False)
    return CallRecord(kernel, choice.is_measured)


def _make_invariant_record(
    a: Any, b: Any, bias: Any, residual: Any, activation: str | None, measure: bool | str
) -> CallRecord:  # fmt: skip
    """Prepare the launch of a kernel that does not split k; UnavailableError where there is none."""
    epilogue = _epilogue(bias, activation, residual, measure)
    dispatcher, problem = _dispatcher(), problem_of(a, b, bias, residual, epilogue)
    if dispatcher is None or problem is None or problem.word("dtype") == "tf32" or not _is_on_gpu(a):
        raise UnavailableError("A batch-invariant product needs dense bf16 or fp16 matrices on a GPU with a model.")
    try:
        config = dispatcher.choose_invariant(problem)
    except LookupError as error:
        raise UnavailableError(f"There is no batch-invariant product of these matrices: {error}.") from error
    return CallRecord(_kernel_product(dispatcher, problem, config, (a, b, bias, residual), realign=True), True)


def _kernel_product(
    dispatcher: ProductDispatcher,
    problem: Problem,
    config: Config,
    example: tuple[Any, Any, Any, Any],
    *,
    realign: bool = False,
) -> Product:
    """Return a function that launches a kernel on operands of the same shapes and strides as `example`.

    Misaligned operands are multiplied by PyTorch, or copied to aligned memory with `realign`.
    """
    import torch

    in_torch = _torch_product(None if "_" not in (epilogue := problem.word("epilogue")) else epilogue.split("_")[1])
    m, n = problem.size("m"), problem.size("n")
    splits_k = workspace_sizes(problem, config)[1] > 0
    out = example[0].new_empty((m, n))
    prepared = dispatcher.prepare(problem, _operands(problem, *example, out), config)
    raw_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream

    def run(a: Any, b: Any, bias: Any, residual: Any) -> Any:
        """Launch the kernel on the current stream and return the result."""
        left, right = a.data_ptr(), b.data_ptr()
        bias_address = 0 if bias is None else bias.data_ptr()
        residual_address = 0 if residual is None else residual.data_ptr()
        if (left | right | bias_address | residual_address) & 15:  # binaries are compiled for aligned pointers
            return run(*map(_aligned, (a, b, bias, residual))) if realign else in_torch(a, b, bias, residual)
        out = a.new_empty((m, n))
        if prepared is None:
            dispatcher.run(problem, _operands(problem, a, b, bias, residual, out), config)
            return out
        stream, address = raw_stream(0), out.data_ptr()
        workspace = dispatcher.workspace_addresses(problem, config, stream, out) if splits_k else (address, address)
        # The kernel ignores the addresses of a bias and a residual that its epilogue does not have.
        prepared(left, right, (address, bias_address or address, residual_address or address, *workspace), stream)
        return out

    return run


def _aligned(tensor: Any) -> Any:
    """Copy a tensor, with its strides, into new memory, which PyTorch aligns."""
    return None if tensor is None else tensor.clone()


def _operands(problem: Problem, a: Any, b: Any, bias: Any, residual: Any, out: Any) -> Operands:
    """Collect the tensors in row-major form; the problem's layout tells which of them are transposed."""
    left, right = (x.T if side == "t" else x for x, side in zip((a, b), problem.word("layout"), strict=True))
    inputs = {"a": left, "b": right, "bias": out if bias is None else bias,
              "residual": out if residual is None else residual}  # fmt: skip
    return Operands(inputs, out, out)


@functools.cache
def _torch_product(activation: str | None) -> Product:
    """Return a function that computes the product with PyTorch's own operations."""
    import torch

    def run(a: Any, b: Any, bias: Any, residual: Any) -> Any:
        addend = residual if residual is not None else bias
        out = torch.matmul(a, b) if addend is None else torch.addmm(addend, a, b)
        return out if activation is None else getattr(torch.nn.functional, activation)(out)

    return run


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
    if None in layouts or not dense or min(m, n, k) < 1 or max(m * k, k * n, m * n) >= 2**31:
        return None
    if (bias is not None and tuple(bias.shape) != (n,)) or (residual is not None and tuple(residual.shape) != (m, n)):
        return None
    return Problem.of("product", dtype=dtype, m=m, n=n, k=k, layout="".join(map(str, layouts)), epilogue=epilogue)


def _is_on_gpu(tensor: Any) -> bool:
    """Tell whether a tensor is on the GPU that the dispatcher was created for."""
    return bool(tensor.get_device() == 0)


def _allows_tf32() -> bool:
    """Tell whether PyTorch may compute float32 products with TF32."""
    import torch

    return str(torch.get_float32_matmul_precision()) != "highest"


def _layout(matrix: Any) -> str | None:
    """Return "n" for a row-major matrix, "t" for a column-major one, None for one with gaps."""
    return "n" if matrix.is_contiguous() else "t" if matrix.T.is_contiguous() else None


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
    return ProductDispatcher(torch, model, ChoiceFile(None, machine), _records.clear)
