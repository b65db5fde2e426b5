"""HLO graphs of the operations that tilewise measures.

Products are accumulated in float32 and rounded once at the end, as in the kernels. Operands of a tf32 product pass
through reduce-precision. A transposed operand keeps its logical shape and differs in its layout only, so that tile
bounds and dimensions have the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.schema import DIMENSIONS, NODE_COLUMN
from tilewise.costmodel.hlo.graph import GraphBuilder, HloNode, KernelGraph, Shape, Window

_SHAPE_COLUMN = NODE_COLUMN["shape_dimensions_0"]
# Sizes of a template graph. They must differ, so that each dimension shows which size it is.
_TEMPLATE_SIZES = (2, 3, 5, 7, 11, 13, 17)
ELEMENT_TYPE = {"bf16": "bf16", "fp16": "f16", "fp32": "f32", "tf32": "f32"}


def matmul_graph(dtype: str, sizes: tuple[int, int, int, int], layout: str, epilogue: str) -> KernelGraph:
    """Return the graph of epilogue(a @ b) with `sizes` (batch, m, n, k); batch 0 means no batch dimension."""
    return _graph_of_sizes(_build_matmul, (sizes[0] or None, *sizes[1:]), dtype, layout, epilogue)


# Two kernels of one operation differ in their sizes only, and graphs are needed while a program runs. So the graph of
# an operation is built once, with a distinct number for each size, and stored with the index of the size that each
# dimension of each node has: (n, 6), or the number of sizes where a node has no such dimension.
GraphTemplate = tuple[KernelGraph, npt.NDArray[np.int64]]


def _make_template(graph: KernelGraph, template_sizes: Sequence[int]) -> GraphTemplate:
    """Find out which of the distinct `template_sizes` each dimension of each node is."""
    shapes = graph.node_feat[:, _SHAPE_COLUMN : _SHAPE_COLUMN + DIMENSIONS, None]  # (n, 6, 1)
    size_index = (shapes == np.array(template_sizes)).argmax(axis=2)
    return graph, np.where((shapes > 0).any(axis=2), size_index, len(template_sizes))


def _fill_template(template: GraphTemplate, sizes: Sequence[int]) -> KernelGraph:
    """Return the template's graph with these sizes."""
    graph, size_index = template
    dimensions = np.array((*sizes, 0), np.int64)[size_index]  # (n, 6)
    feat = graph.node_feat.copy()
    feat[:, _SHAPE_COLUMN : _SHAPE_COLUMN + DIMENSIONS] = dimensions
    feat[:, _SHAPE_COLUMN + DIMENSIONS] = dimensions.sum(axis=1)
    # Absent dimensions are 0 in the columns and do not count in the product.
    feat[:, _SHAPE_COLUMN + DIMENSIONS + 1] = np.where(size_index == len(sizes), 1, dimensions).prod(axis=1)
    return graph._replace(node_feat=feat)


def _graph_of_sizes(build: Callable[..., KernelGraph], sizes: tuple[int | None, ...], *attributes: Any) -> KernelGraph:
    """Return `build(*sizes, *attributes)` by way of a cached template; `build` receives 0 for a size of None."""
    present = tuple(size is not None for size in sizes)
    return _fill_template(_cached_template(build, present, attributes), [size or 0 for size in sizes])


@lru_cache(maxsize=256)
def _cached_template(
    build: Callable[..., KernelGraph], present: tuple[bool, ...], attributes: tuple[Any, ...]
) -> GraphTemplate:
    sizes = [size if is_present else 0 for size, is_present in zip(_TEMPLATE_SIZES, present, strict=False)]
    return _make_template(build(*sizes, *attributes), sizes)


def _build_matmul(batch: int, m: int, n: int, k: int, dtype: str, layout: str, epilogue: str) -> KernelGraph:
    """Build the graph of a matrix product; `layout` has a letter per operand, t for transposed."""
    batch_shape = (batch,) if batch else ()
    element = ELEMENT_TYPE[dtype]
    g = GraphBuilder()
    a = g.parameter((*batch_shape, m, k), element, transposed=layout[0] == "t")
    b = g.parameter((*batch_shape, k, n), element, transposed=layout[1] == "t")
    if dtype == "tf32":
        a, b = g.unary("reduce-precision", a), g.unary("reduce-precision", b)
    out = g.add("dot", (*batch_shape, m, n), "f32", a, b)
    add_epilogue(g, out, epilogue, element, channel=len(out.shape) - 1)
    return g.build()


def int8_matmul_graph(m: int, n: int, k: int, epilogue: str) -> KernelGraph:
    """Return the graph of a uint8 x int8 product with an int32 offset.

    The epilogue is "none" (int32 result), a float epilogue (dequantize, bias, ReLU), or "requantize" (uint8 result).
    """
    return _graph_of_sizes(_build_int8_matmul, (m, n, k), epilogue)


def _build_int8_matmul(m: int, n: int, k: int, epilogue: str) -> KernelGraph:
    """Build the graph of x (m, k) uint8 times w (k, n) int8 plus an int32 bias (n,), and of the epilogue."""
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
    filter_size = tuple(w_shape[2:])
    sizes = (*x_shape, *w_shape, *_output_size(x_shape[2:], filter_size, stride, padding))
    return _fill_template(_conv_template(filter_size, tuple(stride), tuple(padding), groups, epilogue), sizes)


@lru_cache(maxsize=256)
def _conv_template(
    filter_size: Shape, stride: Sequence[int], padding: Sequence[int], groups: int, epilogue: str
) -> GraphTemplate:
    """Build the template of a convolution; stride and padding are attributes, so they are part of the cache key."""
    # Large distinct sizes: the output size depends on the input size and must not equal another size either.
    batch, channels, height, width, filters, per_group = 10007, 10009, 20011, 30011, 10037, 10039
    output_size = _output_size((height, width), filter_size, stride, padding)
    g = GraphBuilder()
    x = g.parameter((batch, channels, height, width), "f32")
    w = g.parameter((filters, per_group, *filter_size), "f32")
    windows = [Window(filter_size[i], stride[i], padding[i], padding[i]) for i in range(2)]
    out = g.convolution(x, w, (batch, filters, *output_size), windows, groups)
    add_epilogue(g, out, epilogue, "f32", channel=1)
    sizes = (batch, channels, height, width, filters, per_group, *filter_size, *output_size)
    return _make_template(g.build(), sizes)


def _output_size(
    input_size: Sequence[int], filter_size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> list[int]:
    return [(input_size[i] + 2 * padding[i] - filter_size[i]) // stride[i] + 1 for i in range(2)]


def add_epilogue(g: GraphBuilder, out: HloNode, epilogue: str, element: str, channel: int) -> HloNode:
    """Add the bias along dimension `channel`, residual and activation that `epilogue` names, and the final rounding.

    `epilogue` joins names by underscores, such as "bias_relu"; unknown names are ignored.
    """
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
    return _graph_of_sizes(_build_softmax, (rows, cols), dtype)


def _build_softmax(rows: int, cols: int, dtype: str) -> KernelGraph:
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
    return _graph_of_sizes(_build_norm, (rows, cols), dtype, rms)


def _build_norm(rows: int, cols: int, dtype: str, rms: bool) -> KernelGraph:
    """Build the graph of a normalization over the columns."""
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
    """Return the graph of a sum or maximum over one axis of a matrix."""
    return _graph_of_sizes(_build_reduction, (rows, cols), dtype, axis, operation)


def _build_reduction(rows: int, cols: int, dtype: str, axis: int, operation: str) -> KernelGraph:
    g = GraphBuilder()
    x = g.parameter((rows, cols), ELEMENT_TYPE[dtype])
    g.convert(g.reduce({"sum": "add", "max": "maximum"}[operation], g.convert(x, "f32"), (axis,)), x.dtype)
    return g.build()


def attention_graph(
    dtype: str, batch: int, heads: int, kv_heads: int, queries: int, keys: int, head: int, *, causal: bool
) -> KernelGraph:
    """Return the graph of softmax(q k^T / sqrt(head)) v; with grouped queries, key heads are broadcast."""
    shared = heads // kv_heads if kv_heads != heads else None
    return _graph_of_sizes(_build_attention, (batch, kv_heads, queries, keys, head, shared, heads), dtype, causal)


def _build_attention(
    batch: int, kv_heads: int, queries: int, keys: int, head: int, shared: int, heads: int, dtype: str, causal: bool
) -> KernelGraph:
    """Build the graph of attention; `shared` query heads use the same key head, 0 if each has its own."""
    element = ELEMENT_TYPE[dtype]
    g = GraphBuilder()
    q = g.parameter((batch, heads, queries, head), element)
    k = _repeat_heads(g, g.parameter((batch, kv_heads if shared else heads, keys, head), element), shared, heads)
    v = _repeat_heads(g, g.parameter((batch, kv_heads if shared else heads, keys, head), element), shared, heads)
    scores = g.add("dot", (batch, heads, queries, keys), "f32", q, k)
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
    """Repeat each key or value head for the `shared` query heads that use it."""
    if not shared:
        return x
    batch, kv_heads, keys, head = x.shape
    repeated = g.broadcast(x, (batch, kv_heads, shared, keys, head), (0, 1, 3, 4))
    return g.add("reshape", (batch, heads, keys, head), x.dtype, repeated)
