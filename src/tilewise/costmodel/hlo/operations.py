"""The graphs of the operations that are measured: what the kernels compute, written as the instructions of HLO.

Products are accumulated in float32 and rounded once at the end, as the kernels do; operands of a tf32 product pass
through reduce-precision. A transposed operand keeps its logical shape and says so by its layout, so that a tile's
bounds stand beside the dimensions they cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.schema import DIMENSIONS, NODE_COLUMN
from tilewise.costmodel.hlo.graph import GraphBuilder, KernelGraph, Node, Shape, Window

_SHAPE = NODE_COLUMN["shape_dimensions_0"]
ELEMENT_TYPE = {"bf16": "bf16", "fp16": "f16", "fp32": "f32", "tf32": "f32"}


def matmul_graph(dtype: str, sizes: tuple[int, int, int, int], layout: str, epilogue: str) -> KernelGraph:
    """epilogue(a @ b) with `sizes` (batch, m, n, k); batch 0 is one product without a batch dimension."""
    return _of_sizes(_built_matmul, (sizes[0] or None, *sizes[1:]), dtype, layout, epilogue)


# Sizes are all that two kernels of a kind differ in, and graphs are wanted in passing: the graph of a kind is built
# once, with a number that stands for each size, and kept beside which size each dimension of each node is.
Structure = tuple[KernelGraph, npt.NDArray[np.int64]]


def _structure(graph: KernelGraph, stand_ins: Sequence[int]) -> Structure:
    shapes = graph.node_feat[:, _SHAPE : _SHAPE + DIMENSIONS, None]
    return graph, np.where((shapes > 0).any(axis=2), (shapes == np.array(stand_ins)).argmax(axis=2), len(stand_ins))


def _resized(structure: Structure, sizes: Sequence[int]) -> KernelGraph:
    graph, which = structure
    dimensions = np.array((*sizes, 0), np.int64)[which]  # (n, 6)
    feat = graph.node_feat.copy()
    feat[:, _SHAPE : _SHAPE + DIMENSIONS] = dimensions
    feat[:, _SHAPE + DIMENSIONS] = dimensions.sum(axis=1)
    feat[:, _SHAPE + DIMENSIONS + 1] = np.where(which == len(sizes), 1, dimensions).prod(axis=1)
    return graph._replace(node_feat=feat)


def _of_sizes(build: Callable[..., KernelGraph], sizes: tuple[int | None, ...], *kind: Any) -> KernelGraph:
    """`build(*sizes, *kind)`; a size that is None is not there, and 0 to `build`."""
    there = tuple(size is not None for size in sizes)
    return _resized(_structure_of(build, there, kind), [size or 0 for size in sizes])


@lru_cache(maxsize=256)
def _structure_of(build: Callable[..., KernelGraph], there: tuple[bool, ...], kind: tuple[Any, ...]) -> Structure:
    stand_ins = [prime if size else 0 for prime, size in zip((2, 3, 5, 7, 11, 13, 17), there, strict=False)]
    return _structure(build(*stand_ins, *kind), stand_ins)


def _built_matmul(batch: int, m: int, n: int, k: int, dtype: str, layout: str, epilogue: str) -> KernelGraph:
    lead = (batch,) if batch else ()
    element = ELEMENT_TYPE[dtype]
    g = GraphBuilder()
    a = g.parameter((*lead, m, k), element, transposed=layout[0] == "t")
    b = g.parameter((*lead, k, n), element, transposed=layout[1] == "t")
    if dtype == "tf32":
        a, b = g.unary("reduce-precision", a), g.unary("reduce-precision", b)
    out = g.add("dot", (*lead, m, n), "f32", a, b)
    add_epilogue(g, out, epilogue, element, channel=len(out.shape) - 1)
    return g.build()


def int8_matmul_graph(m: int, n: int, k: int, epilogue: str) -> KernelGraph:
    """Bytes times signed bytes, an offset added to the sums; then nothing, floats (bias, ReLU) or bytes again."""
    return _of_sizes(_built_int8_matmul, (m, n, k), epilogue)


def _built_int8_matmul(m: int, n: int, k: int, epilogue: str) -> KernelGraph:
    g = GraphBuilder()
    x, w = g.parameter((m, k), "u8"), g.parameter((k, n), "s8", transposed=True)
    out = g.add("dot", (m, n), "s32", x, w)
    out = g.binary("add", out, g.broadcast(g.parameter((n,), "s32"), out.shape, (1,)))
    if epilogue == "none":
        return g.build()
    out = g.convert(out, "f32")
    out = g.binary("multiply", out, g.broadcast(g.parameter((n,), "f32"), out.shape, (1,)))
    if epilogue == "requantize":
        out = g.binary("add", g.unary("round-nearest-even", out), g.spread(out.shape, "f32"))
        out = g.add("clamp", out.shape, "f32", g.constant("f32"), out, g.constant("f32"))
        g.convert(out, "u8")
        return g.build()
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
    """epilogue(conv2d(x, w)) in float32."""
    kernel = tuple(w_shape[2:])
    sizes = (*x_shape, *w_shape, *_outputs(x_shape[2:], kernel, stride, padding))
    return _resized(_conv_structure(kernel, tuple(stride), tuple(padding), groups, epilogue), sizes)


@lru_cache(maxsize=256)
def _conv_structure(
    kernel: Shape, stride: Sequence[int], padding: Sequence[int], groups: int, epilogue: str
) -> Structure:
    batch, channels, height, width, filters, per_group = 10007, 10009, 20011, 30011, 10037, 10039
    outputs = _outputs((height, width), kernel, stride, padding)
    g = GraphBuilder()
    x, w = g.parameter((batch, channels, height, width), "f32"), g.parameter((filters, per_group, *kernel), "f32")
    windows = [Window(kernel[i], stride[i], padding[i], padding[i]) for i in range(2)]
    out = g.convolution(x, w, (batch, filters, *outputs), windows, groups)
    add_epilogue(g, out, epilogue, "f32", channel=1)
    return _structure(g.build(), (batch, channels, height, width, filters, per_group, *kernel, *outputs))


def _outputs(extent: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> list[int]:
    return [(extent[i] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in range(2)]


def add_epilogue(g: GraphBuilder, out: Node, epilogue: str, element: str, channel: int) -> Node:
    """Bias along dimension `channel`, residual, activation (any of them, by the words in `epilogue`), rounding."""
    words = epilogue.split("_")
    if "bias" in words:
        bias = g.convert(g.parameter((out.shape[channel],), element), "f32")
        out = g.binary("add", out, g.broadcast(bias, out.shape, (channel,)))
    if "residual" in words:
        out = g.binary("add", out, g.convert(g.parameter(out.shape, element), "f32"))
    if "relu" in words:
        out = g.binary("maximum", out, g.spread(out.shape, "f32"))
    if "gelu" in words:
        out = _gelu(g, out)
    return g.convert(out, element)


def _gelu(g: GraphBuilder, x: Node) -> Node:
    """x / 2 * (1 + erf(x / sqrt 2)); HLO of that time had no erf, so it is a custom call."""
    inner = g.unary("custom-call", g.binary("multiply", x, g.spread(x.shape, "f32")))
    half = g.binary("multiply", x, g.spread(x.shape, "f32"))
    return g.binary("multiply", half, g.binary("add", inner, g.spread(x.shape, "f32")))


def softmax_graph(dtype: str, rows: int, cols: int) -> KernelGraph:
    return _of_sizes(_built_softmax, (rows, cols), dtype)


def _built_softmax(rows: int, cols: int, dtype: str) -> KernelGraph:
    g = GraphBuilder()
    x = g.parameter((rows, cols), ELEMENT_TYPE[dtype])
    g.convert(_softmax(g, g.convert(x, "f32")), x.dtype)
    return g.build()


def _softmax(g: GraphBuilder, x: Node) -> Node:
    last = len(x.shape) - 1
    kept = range(last)
    shifted = g.unary("exponential", g.binary("subtract", x, _along(g, g.reduce("maximum", x, (last,)), x, kept)))
    return g.binary("divide", shifted, _along(g, g.reduce("add", shifted, (last,)), x, kept))


def _along(g: GraphBuilder, x: Node, like: Node, dimensions: Sequence[int]) -> Node:
    return g.broadcast(x, like.shape, dimensions)


def norm_graph(dtype: str, rows: int, cols: int, *, rms: bool) -> KernelGraph:
    """Layer normalisation, or by the root of the mean square, with a weight and a bias (rms: a weight)."""
    return _of_sizes(_built_norm, (rows, cols), dtype, rms)


def _built_norm(rows: int, cols: int, dtype: str, rms: bool) -> KernelGraph:
    element = ELEMENT_TYPE[dtype]
    g = GraphBuilder()
    given = g.parameter((rows, cols), element)
    weight = g.parameter((cols,), element)
    bias = None if rms else g.parameter((cols,), element)
    x = g.convert(given, "f32")
    if not rms:
        x = g.binary("subtract", x, _along(g, _mean(g, x), x, (0,)))
    variance = _mean(g, g.binary("multiply", x, x))
    scale = g.unary("rsqrt", g.binary("add", variance, g.spread((rows,), "f32")))
    out = g.binary("multiply", x, _along(g, scale, x, (0,)))
    out = g.binary("multiply", out, _along(g, g.convert(weight, "f32"), x, (1,)))
    if bias is not None:
        out = g.binary("add", out, _along(g, g.convert(bias, "f32"), x, (1,)))
    g.convert(out, element)
    return g.build()


def _mean(g: GraphBuilder, x: Node) -> Node:
    total = g.reduce("add", x, (1,))
    return g.binary("multiply", total, g.spread(total.shape, "f32"))


def reduction_graph(dtype: str, rows: int, cols: int, axis: int, operation: str) -> KernelGraph:
    return _of_sizes(_built_reduction, (rows, cols), dtype, axis, operation)


def _built_reduction(rows: int, cols: int, dtype: str, axis: int, operation: str) -> KernelGraph:
    g = GraphBuilder()
    x = g.parameter((rows, cols), ELEMENT_TYPE[dtype])
    g.convert(g.reduce({"sum": "add", "max": "maximum"}[operation], g.convert(x, "f32"), (axis,)), x.dtype)
    return g.build()


def attention_graph(
    dtype: str, batch: int, heads: int, kv_heads: int, queries: int, keys: int, head: int, *, causal: bool
) -> KernelGraph:
    """softmax(q k^T / sqrt(head)) v; query heads that share key heads see them broadcast."""
    shared = heads // kv_heads if kv_heads != heads else None
    return _of_sizes(_built_attention, (batch, kv_heads, queries, keys, head, shared, heads), dtype, causal)


def _built_attention(
    batch: int, kv_heads: int, queries: int, keys: int, head: int, shared: int, heads: int, dtype: str, causal: bool
) -> KernelGraph:
    element = ELEMENT_TYPE[dtype]
    g = GraphBuilder()
    q = g.parameter((batch, heads, queries, head), element)
    k = _shared_heads(g, g.parameter((batch, kv_heads if shared else heads, keys, head), element), shared, heads)
    v = _shared_heads(g, g.parameter((batch, kv_heads if shared else heads, keys, head), element), shared, heads)
    scores = g.add("dot", (batch, heads, queries, keys), "f32", q, k)
    scores = g.binary("multiply", scores, g.spread(scores.shape, "f32"))
    if causal:
        row = g.add("iota", (queries, keys), "s32", dimensions=(0,))
        column = g.add("iota", (queries, keys), "s32", dimensions=(1,))
        seen = g.broadcast(g.add("compare", (queries, keys), "pred", row, column), scores.shape, (2, 3))
        scores = g.add("select", scores.shape, "f32", seen, scores, g.spread(scores.shape, "f32"))
    weights = g.convert(_softmax(g, scores), element)
    out = g.add("dot", (batch, heads, queries, head), "f32", weights, v)
    g.convert(out, element)
    return g.build()


def _shared_heads(g: GraphBuilder, x: Node, shared: int, heads: int) -> Node:
    if not shared:
        return x
    batch, kv_heads, keys, head = x.shape
    wide = g.broadcast(x, (batch, kv_heads, shared, keys, head), (0, 1, 3, 4))
    return g.add("reshape", (batch, heads, keys, head), x.dtype, wide)
