"""HLO graphs of the operations that tilewise measures.

Products are accumulated in float32 and rounded once at the end, as in the kernels. Operands of a tf32 product pass
through reduce-precision. A transposed operand keeps its logical shape and differs in its layout only, so that tile
bounds and dimensions have the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.costmodel.hlo.graph import GraphBuilder, HloNode, KernelGraph, Shape, Window

ELEMENT_TYPE = {"bf16": "bf16", "fp16": "f16", "fp32": "f32", "tf32": "f32"}


def matmul_graph(dtype: str, sizes: tuple[int, int, int, int], layout: str, epilogue: str) -> KernelGraph:
    """Return the graph of epilogue(a @ b) with `sizes` (batch, m, n, k); batch 0 means no batch dimension.

    `layout` has a letter per operand, t for transposed.
    """
    batch, m, n, k = sizes
    batch_shape = (batch,) if batch else ()
    element = ELEMENT_TYPE[dtype]
    g = GraphBuilder()
    a = g.parameter((*batch_shape, m, k), element, transposed=layout[0] == "t")
    b = g.parameter((*batch_shape, k, n), element, transposed=layout[1] == "t")
    # Tensor cores round the operands of a tf32 product before they multiply.
    if dtype == "tf32":
        a, b = g.unary("reduce-precision", a), g.unary("reduce-precision", b)
    out = g.add("dot", (*batch_shape, m, n), "f32", a, b)
    add_epilogue(g, out, epilogue, element, channel=len(out.shape) - 1)
    return g.build()


def int8_matmul_graph(m: int, n: int, k: int, epilogue: str) -> KernelGraph:
    """Return the graph of a uint8 x int8 product of (m, k) and (k, n) with an int32 offset (n,).

    The epilogue is "none" (int32 result), a float epilogue (dequantize, bias, ReLU), or "requantize" (uint8 result).
    """
    g = GraphBuilder()
    x, w = g.parameter((m, k), "u8"), g.parameter((k, n), "s8", transposed=True)
    out = g.add("dot", (m, n), "s32", x, w)
    out = g.binary("add", out, g.broadcast(g.parameter((n,), "s32"), out.shape, (1,)))
    if epilogue == "none":
        return g.build()
    # One scale per output channel.
    out = g.convert(out, "f32")
    out = g.binary("multiply", out, g.broadcast(g.parameter((n,), "f32"), out.shape, (1,)))
    if epilogue == "requantize":
        # Round, add the zero point, clamp to the range of uint8.
        out = g.binary("add", g.unary("round-nearest-even", out), g.full(out.shape, "f32"))
        out = g.add("clamp", out.shape, "f32", g.constant("f32"), out, g.constant("f32"))
        g.convert(out, "u8")
        return g.build()
    # One scale per row of x, as in dynamic quantization.
    out = g.binary("multiply", out, g.broadcast(g.parameter((m,), "f32"), out.shape, (0,)))
    add_epilogue(g, out, epilogue, "f32", channel=1)
    return g.build()


def conv_graph(
    x_shape: Shape,
    w_shape: Shape,
    stride: Sequence[int],
    padding: Sequence[int],
    groups: int,
    epilogue: str,
) -> KernelGraph:
    """Return the graph of epilogue(conv2d(x, w)) in float32; x is (N, C, H, W), w (out, C / groups, height, width)."""
    # Rows and columns have a window each, with equal padding on both sides.
    windows = [Window(w_shape[2 + i], stride[i], padding[i], padding[i]) for i in range(2)]
    sizes = [(x_shape[2 + i] + 2 * padding[i] - w_shape[2 + i]) // stride[i] + 1 for i in range(2)]
    g = GraphBuilder()
    x, w = g.parameter(x_shape, "f32"), g.parameter(w_shape, "f32")
    out = g.convolution(x, w, (x_shape[0], w_shape[0], *sizes), windows, groups)
    add_epilogue(g, out, epilogue, "f32", channel=1)
    return g.build()


def add_epilogue(g: GraphBuilder, out: HloNode, epilogue: str, element: str, channel: int) -> HloNode:
    """Add the operations that `epilogue` names, such as "bias_relu", and the conversion to dtype `element`.

    Return the result.

    Names are joined by underscores; unknown ones are ignored. The bias is along dimension `channel`.
    """
    # In the order of the kernels: everything in float32, and one rounding at the end.
    words = epilogue.split("_")
    if "bias" in words:
        bias = g.convert(g.parameter((out.shape[channel],), element), "f32")
        out = g.binary("add", out, g.broadcast(bias, out.shape, (channel,)))
    if "residual" in words:
        out = g.binary("add", out, g.convert(g.parameter(out.shape, element), "f32"))
    if "relu" in words:
        out = g.binary("maximum", out, g.full(out.shape, "f32"))
    if "gelu" in words:
        out = _gelu(g, out)
    return g.convert(out, element)


def _gelu(g: GraphBuilder, x: HloNode) -> HloNode:
    """Add x / 2 * (1 + erf(x / sqrt 2)); TpuGraphs has no opcode for erf, so it is a custom call."""
    erf = g.unary("custom-call", g.binary("multiply", x, g.full(x.shape, "f32")))
    half = g.binary("multiply", x, g.full(x.shape, "f32"))
    return g.binary("multiply", half, g.binary("add", erf, g.full(x.shape, "f32")))


def softmax_graph(dtype: str, rows: int, cols: int) -> KernelGraph:
    """Return the graph of a softmax over the columns."""
    g = GraphBuilder()
    x = g.parameter((rows, cols), ELEMENT_TYPE[dtype])
    g.convert(_softmax(g, g.convert(x, "f32")), x.dtype)
    return g.build()


def _softmax(g: GraphBuilder, x: HloNode) -> HloNode:
    """Add a softmax over the last dimension; the maximum is subtracted first, as in every stable softmax."""
    last = len(x.shape) - 1
    others = range(last)
    maximum = g.broadcast(g.reduce("maximum", x, (last,)), x.shape, others)
    exponential = g.unary("exponential", g.binary("subtract", x, maximum))
    return g.binary("divide", exponential, g.broadcast(g.reduce("add", exponential, (last,)), x.shape, others))


def norm_graph(dtype: str, rows: int, cols: int, *, rms: bool) -> KernelGraph:
    """Return the graph of a layer normalization with weight and bias, or of an RMS normalization with a weight."""
    element = ELEMENT_TYPE[dtype]
    g = GraphBuilder()
    argument = g.parameter((rows, cols), element)
    weight = g.parameter((cols,), element)
    bias = None if rms else g.parameter((cols,), element)
    x = g.convert(argument, "f32")
    if not rms:
        x = g.binary("subtract", x, g.broadcast(_mean(g, x), x.shape, (0,)))
    # The constant that is added to the variance is epsilon.
    variance = _mean(g, g.binary("multiply", x, x))
    scale = g.unary("rsqrt", g.binary("add", variance, g.full((rows,), "f32")))
    out = g.binary("multiply", x, g.broadcast(scale, x.shape, (0,)))
    out = g.binary("multiply", out, g.broadcast(g.convert(weight, "f32"), x.shape, (1,)))
    if bias is not None:
        out = g.binary("add", out, g.broadcast(g.convert(bias, "f32"), x.shape, (1,)))
    g.convert(out, element)
    return g.build()


def _mean(g: GraphBuilder, x: HloNode) -> HloNode:
    total = g.reduce("add", x, (1,))
    return g.binary("multiply", total, g.full(total.shape, "f32"))


def reduction_graph(dtype: str, rows: int, cols: int, axis: int, operation: str) -> KernelGraph:
    """Return the graph of a sum or maximum (`operation`) of a (rows, cols) matrix along one axis."""
    g = GraphBuilder()
    x = g.parameter((rows, cols), ELEMENT_TYPE[dtype])
    g.convert(g.reduce({"sum": "add", "max": "maximum"}[operation], g.convert(x, "f32"), (axis,)), x.dtype)
    return g.build()


def attention_graph(
    dtype: str, batch: int, heads: int, kv_heads: int, queries: int, keys: int, head: int, *, causal: bool
) -> KernelGraph:
    """Return the graph of softmax(q k^T / sqrt(head)) v; with grouped queries, key heads are broadcast."""
    shared = heads // kv_heads if kv_heads != heads else 0  # query heads that use the same key head
    element = ELEMENT_TYPE[dtype]
    g = GraphBuilder()
    q = g.parameter((batch, heads, queries, head), element)
    k = _repeat_heads(g, g.parameter((batch, kv_heads, keys, head), element), shared, heads)
    v = _repeat_heads(g, g.parameter((batch, kv_heads, keys, head), element), shared, heads)
    scores = g.add("dot", (batch, heads, queries, keys), "f32", q, k)
    # The constant is 1 / sqrt(head).
    scores = g.binary("multiply", scores, g.full(scores.shape, "f32"))
    if causal:
        # The mask is computed from row and column indices; masked scores become a constant.
        row = g.add("iota", (queries, keys), "s32", dimensions=(0,))
        column = g.add("iota", (queries, keys), "s32", dimensions=(1,))
        mask = g.broadcast(g.add("compare", (queries, keys), "pred", row, column), scores.shape, (2, 3))
        scores = g.add("select", scores.shape, "f32", mask, scores, g.full(scores.shape, "f32"))
    weights = g.convert(_softmax(g, scores), element)
    out = g.add("dot", (batch, heads, queries, head), "f32", weights, v)
    g.convert(out, element)
    return g.build()


def _repeat_heads(g: GraphBuilder, x: HloNode, shared: int, heads: int) -> HloNode:
    """Repeat each key or value head of `x` for the `shared` query heads that use it."""
    if not shared:
        return x
    batch, kv_heads, keys, head = x.shape
    repeated = g.broadcast(x, (batch, kv_heads, shared, keys, head), (0, 1, 3, 4))
    return g.add("reshape", (batch, heads, keys, head), x.dtype, repeated)
