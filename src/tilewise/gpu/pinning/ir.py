"""Read a Triton kernel's intermediate representation: what one program loads, stores, multiplies and reduces.

Triton's front end lowers a kernel to TTIR on any machine, without a GPU. Its text names every operation with the shapes
of its tensors, so that work can be counted: loads and stores by bytes, products by multiply-adds, other operations by
elements, each times the trip counts of the loops around it. Trip counts follow from the arguments of the call by
evaluating the scalar operations. `lower` makes the text, `summarize` counts.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

_TENSOR = re.compile(r"tensor<((?:\d+x)*)(!tt\.ptr<[^>]*>|[a-z0-9A-Z]+)")
_RESULT = re.compile(r"^(%[\w#]+)(?::\d+)? = (.*)$")
_LOOP = re.compile(r"scf\.for (%\w+) = (\S+) to (\S+) step (\S+)")
_OPERATION = re.compile(r'^"?([a-z_]+\.[a-z_0-9.]+)"?')
_UNKNOWN_TRIPS = 8  # assumed where a trip count depends on loaded data; arbitrary
_MAX_TEXT = 4 << 20  # characters; longer kernels are not analysed
# Scalar operations on integers that trip counts are made of.
_SCALAR: dict[str, Callable[[int, int], float]] = {
    "arith.addi": lambda a, b: a + b,
    "arith.subi": lambda a, b: a - b,
    "arith.muli": lambda a, b: a * b,
    "arith.divsi": lambda a, b: int(a / b) if b else 0,
    "arith.divui": lambda a, b: a // b if b else 0,
    "arith.ceildivsi": lambda a, b: -(-a // b) if b else 0,
    "arith.remsi": lambda a, b: math.fmod(a, b) if b else 0,
    "arith.remui": lambda a, b: a % b if b else 0,
    "arith.minsi": min,
    "arith.maxsi": max,
    "arith.minui": min,
    "arith.maxui": max,
}
# What scalar operations return of the grid's sizes; programs are numbered by that in the middle.
_GRID_VALUES: dict[str, Callable[[int], int]] = {
    "tt.get_program_id": lambda size: size // 2,
    "tt.get_num_programs": lambda size: size,
}
_LOOPS_WITHOUT_COUNT = ("scf.while",)
_CASTS = ("arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast")


@dataclass
class WorkSummary:
    """The work of one program of a Triton kernel, and the resources it needs."""

    loaded_bytes: float = 0.0
    stored_bytes: float = 0.0
    dot_flops: float = 0.0
    elementwise: float = 0.0  # elements of arithmetic operations
    special: float = 0.0  # elements of exponentials, logarithms, roots and divisions
    reduced: float = 0.0  # elements that are reduced or scanned
    reductions: float = 0.0  # executed reductions: each one is a chain of exchanges between threads
    trips: float = 0.0  # executed iterations of the innermost loops
    chained_loads: float = 0.0  # loads one after the other, if those of an iteration overlap
    loop_load_bytes: float = 0.0  # of one iteration: what can be in flight
    first_load_bytes: float = 0.0  # outside of loops
    dot_operand_bytes: float = 0.0  # per iteration, staged in shared memory
    accumulators: float = 0.0  # elements that loops carry: they stay in registers
    dot_results: float = 0.0  # elements of all products' results: they are in registers as well
    fresh_dot_results: float = 0.0  # of products that do not accumulate: they need further registers
    largest_tensor: float = 0.0  # elements
    dot_m: float = 0.0  # of the largest product
    dot_n: float = 0.0
    dot_k: float = 0.0
    dot_bits: float = 0.0
    loop_stages: float = 0.0  # pipeline stages that a loop asks for itself
    atomics: float = 0.0
    wgmma_flops: float = 0.0  # of products with 64 rows or more, which a warp group of Hopper can compute
    uses_tma: bool = False
    has_unknown_trips: bool = False  # of a loop whose bounds depend on loaded data
    shapes: list[tuple[int, ...]] = field(default_factory=list)  # of loads and stores


_PER_TRIP = ("loaded_bytes", "stored_bytes", "dot_flops", "wgmma_flops", "elementwise", "special", "reduced",
             "reductions", "trips", "chained_loads", "atomics")  # fmt: skip


def with_equal_totals(works: Sequence[WorkSummary], programs: Sequence[int]) -> list[WorkSummary]:
    """Scale the work of configurations whose trip counts depend on data: in total, all do the same products or loads.

    Without that, a larger tile would appear to do more work.
    """
    if not any(work.has_unknown_trips for work in works):
        return list(works)
    amounts = [(w.dot_flops or w.loaded_bytes) * count for w, count in zip(works, programs, strict=True)]
    factors = [max(amounts) / amount if amount else 1.0 for amount in amounts]
    return [
        replace(work, **{name: getattr(work, name) * factor for name in _PER_TRIP})
        for work, factor in zip(works, factors, strict=True)
    ]


@dataclass(frozen=True)
class _Tensor:
    """A tensor type in TTIR text: element count, shape, and bits per element."""

    elements: int
    shape: tuple[int, ...]
    bits: int


def summarize(text: str, arguments: Mapping[str, int], grid: Sequence[int] = (1, 1, 1)) -> WorkSummary:
    """Count the work of the program in the middle of the grid, from TTIR text (Triton's intermediate representation).

    `arguments` are the call's integer arguments by name.
    """
    if len(text) > _MAX_TEXT:
        raise ValueError("the kernel is too long")
    summary = WorkSummary()
    values: dict[str, float] = {f"%{name}": value for name, value in arguments.items()}
    # A stack of (trip count of all enclosing loops, whether it is a loop); braces open and close its levels.
    stack: list[tuple[float, bool]] = [(1.0, False)]
    function_seen = False
    for raw in text.splitlines():
        line = raw.split(" loc(")[0].strip()
        if line.startswith("tt.func"):
            if function_seen and "public" not in line:
                break  # functions that were not inlined are counted as nothing
            function_seen = True
        if not line or line.startswith(("#", "//", "^", "module", "tt.func")):
            continue
        if line.startswith("}"):
            stages = re.search(r"tt\.num_stages = (\d+)", line)
            summary.loop_stages = max(summary.loop_stages, float(stages[1]) if stages else 0.0)
            closed = stack.pop() if len(stack) > 1 else stack[0]
            if line.endswith("{"):  # "} else {" of a branch, "} do {" of a while loop
                stack.append(closed)
            continue
        match = _RESULT.match(line)
        name, body = (match[1], match[2]) if match else ("", line)
        loop = _LOOP.search(body)
        if loop is not None:
            first, last, step = (values.get(loop[i], _constant_value(loop[i])) for i in (2, 3, 4))
            if first is None or last is None or not step:
                trips, summary.has_unknown_trips = float(_UNKNOWN_TRIPS), True
            else:
                trips = max(0.0, math.ceil((last - first) / step))
            values[loop[1]] = first or 0
            stack.append((stack[-1][0] * trips, True))
            carried = body.rpartition("->")[2] if "iter_args" in body else ""
            summary.accumulators = max(
                summary.accumulators, sum(t.elements for t in _tensors(carried) if t.elements > 1)
            )
            summary.trips += stack[-1][0]
            continue
        operation = _OPERATION.match(body)
        kind = operation[1] if operation else ""
        if kind in _LOOPS_WITHOUT_COUNT:
            stack.append((stack[-1][0] * _UNKNOWN_TRIPS, True))
            summary.has_unknown_trips = True
            continue
        _count(summary, kind, body, stack[-1][0], stack[-1][1])
        _evaluate(values, name, kind, body, grid)
        if body.endswith(("{", "({")):
            stack.append((stack[-1][0] * (0.0 if kind in ("tt.reduce", "tt.scan") else 1.0), stack[-1][1]))
    return summary


def _constant_value(token: str) -> float | None:
    match = re.fullmatch(r"%c(-?\d+)(?:_i(?:32|64))?(?:_\d+)?", token)
    return float(match[1]) if match else None


def _tensors(text: str) -> list[_Tensor]:
    """Parse the tensor types (shape and element type) in a piece of TTIR text."""
    tensors = []
    for dimensions, element in _TENSOR.findall(text):
        shape = tuple(int(n) for n in dimensions.split("x") if n)
        pointee = re.search(r"ptr<(\w+)", element)
        # The name of an element says its size, as in `bf16`, `f8E4M3FN` or `i1`; in memory it takes a byte at least.
        match = re.match(r"[a-z]+(\d+)", pointee[1] if pointee else element)
        tensors.append(_Tensor(math.prod(shape), shape, max(int(match[1]), 8) if match else 32))
    return tensors


def _count(summary: WorkSummary, kind: str, body: str, trips: float, in_loop: bool) -> None:
    """Add one TTIR operation, executed `trips` times, to `summary`; `body` is its text after the name."""
    types = _tensors(body.partition(" : ")[2] or body)
    if kind in ("tt.load", "tt.descriptor_load", "tt.experimental_descriptor_load"):
        tensor = types[-1] if types else _Tensor(1, (), 32)
        size = tensor.elements * tensor.bits / 8
        summary.loaded_bytes += size * trips
        summary.chained_loads += 0.0 if not types else trips
        summary.uses_tma |= "descriptor" in kind
        summary.shapes.append(tensor.shape)
        if in_loop:
            summary.loop_load_bytes += size
        else:
            summary.first_load_bytes += size
    elif kind in ("tt.store", "tt.descriptor_store", "tt.experimental_descriptor_store"):
        tensor = types[-1] if types and "descriptor" in kind else types[0] if types else _Tensor(1, (), 32)
        summary.stored_bytes += tensor.elements * tensor.bits / 8 * trips
        summary.shapes.append(tensor.shape)
    elif kind in ("tt.dot", "tt.dot_scaled"):
        left, right, result = types[0], types[1], types[-1]
        m, n, k = result.shape[-2], result.shape[-1], left.shape[-1]
        summary.dot_flops += 2.0 * math.prod(result.shape) * k * trips
        summary.wgmma_flops += 2.0 * math.prod(result.shape) * k * trips if m >= 64 else 0.0
        summary.dot_results += result.elements
        if re.match(r"\S+ %\w+, %\w+, %cst", body):
            summary.fresh_dot_results += result.elements
        summary.dot_operand_bytes += (left.elements * left.bits + right.elements * right.bits) / 8
        if m * n * k > summary.dot_m * summary.dot_n * summary.dot_k:
            summary.dot_m, summary.dot_n, summary.dot_k, summary.dot_bits = (
                float(m),
                float(n),
                float(k),
                float(left.bits),
            )
    elif kind in ("tt.reduce", "tt.scan"):
        summary.reductions += trips
        summary.reduced += trips * max((t.elements for t in types), default=summary.largest_tensor)
    elif kind.startswith("tt.atomic"):
        summary.atomics += trips * max((t.elements for t in types), default=1)
    elif kind.startswith(("arith.", "math.")) and types and "constant" not in kind:
        elements = types[-1].elements
        is_special = kind.startswith("math.") or kind in ("arith.divf", "arith.remf")
        if is_special:
            summary.special += elements * trips
        else:
            summary.elementwise += elements * trips
    for tensor in types:
        summary.largest_tensor = max(summary.largest_tensor, float(tensor.elements))


def _evaluate(values: dict[str, float], name: str, kind: str, body: str, grid: Sequence[int]) -> None:
    """Evaluate a scalar TTIR operation and store its integer result as `values[name]`, if its operands are known."""
    if not name or "tensor<" in body:
        return
    operands = re.findall(r"%\w+", body)
    operand_values = [values[o] if o in values else _constant_value(o) for o in operands]
    if kind == "arith.constant":
        match = re.match(r"arith\.constant (-?\d+) : i", body)
        if match:
            values[name] = float(match[1])
    elif kind in _GRID_VALUES:
        values[name] = float(_GRID_VALUES[kind](grid["xyz".index(body.split()[1])]))
    elif kind in _CASTS and operand_values and operand_values[0] is not None:
        values[name] = operand_values[0]
    elif kind in _SCALAR and len(operand_values) == 2 and None not in operand_values:
        values[name] = float(_SCALAR[kind](int(operand_values[0] or 0), int(operand_values[1] or 0)))


# Lowering


def lower(function: Any, arguments: Mapping[str, Any], settings: Mapping[str, Any], capability: int) -> str:
    """Lower a jitted function to TTIR text for a call's arguments and a configuration's compile-time values."""
    return lower_source(function, *_signature(function, arguments, settings), capability)


def lower_source(
    function: Any, signature: dict[str, str], constants: dict[str, Any], attributes: Any, capability: int
) -> str:
    """Lower a jitted function to TTIR text, for argument types, compile-time constants and divisibilities."""
    compiler: Any = importlib.import_module("triton.compiler")
    target: Any = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    ir: Any = importlib.import_module("triton._C.libtriton").ir
    backend: Any = importlib.import_module("triton.compiler.compiler").make_backend(target)
    source = compiler.ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    code = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, code, backend.get_module_map(), context)
    return str(backend.make_ttir(module, {}, options, capability))


def _signature(
    function: Any, arguments: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], Any]]:
    """Return a call's argument types, constants and divisibility by 16 in the form of Triton's compiler."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for number, parameter in enumerate(function.params):
        name = parameter.name
        value = settings[name] if name in settings else arguments.get(name, parameter.default)
        if parameter.is_constexpr or name in settings or value is None:
            types[name], constants[name] = "constexpr", value
        elif hasattr(value, "block_shape"):
            types[name] = f"tensordesc<{_element(value.base)}[{','.join(map(str, value.block_shape))}]>"
        elif hasattr(value, "dtype"):
            types[name], attributes[(number,)] = f"*{_element(value)}", [["tt.divisibility", 16]]
        elif isinstance(value, bool):
            types[name] = "i1"
        elif isinstance(value, int):
            types[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(number,)] = [["tt.divisibility", 16]]
        else:
            types[name] = "fp32"
    return types, constants, attributes


def _element(tensor: Any) -> str:
    """Return Triton's name of a tensor's dtype, such as "fp16"."""
    name = str(tensor.dtype).removeprefix("torch.")
    short = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "bool": "i1",
             "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5"}  # fmt: skip
    return short.get(name) or name.replace("uint", "u").replace("int", "i")
