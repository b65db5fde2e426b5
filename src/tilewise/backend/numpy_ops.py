"""Every operation of the framework in NumPy: the reference, the float64 path, and the fallback without the extension.

These functions define the operations; the native kernels are tested against them and against PyTorch. Convolution is
one matrix product over unfolded patches (im2col); its gradients are the transposed products, folded back (col2im). NaN
and infinity propagate without warnings, as in PyTorch.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from tilewise.backend.registry import implements
from tilewise.errors import ShapeError

Array = npt.NDArray[Any]
Pair = tuple[int, int]
Activation = Literal["relu", "gelu"] | None

_silent = np.errstate(all="ignore")


# --- elementwise ---


@cache
def _erf_polynomial(degree: int) -> tuple[float, ...]:
    """Return coefficients of a polynomial p with erf(x) = 1 - exp(-x²) p(s), s = 2/(1 + x/2) - 1.

    It is fitted at Chebyshev points.
    """
    angles = np.pi * (np.arange(200) + 0.5) / 200
    scaled = [_scaled_erfc(x) for x in 4 / (np.cos(angles) + 1) - 2]
    # Chebyshev polynomials are orthogonal at these points, so the least-squares fit needs only sums. numpy.polynomial
    # would load LAPACK, which takes 9 MB of memory.
    previous, current = np.eye(2, degree + 1)  # T0 and T1, lowest power first
    coefficients = previous * np.mean(scaled)
    for n in range(1, degree + 1):
        coefficients += current * 2 * np.mean(scaled * np.cos(n * angles))
        previous, current = current, 2 * np.roll(current, 1) - previous  # T(n+1) = 2 s T(n) - T(n-1)
    return tuple(coefficients.tolist())


def _scaled_erfc(x: float) -> float:
    """Compute exp(x²) erfc(x); from 25 on by its asymptotic series, because exp(x²) overflows."""
    if x < 25:
        return math.erfc(x) * math.exp(x * x)
    return (1 - 1 / (2 * x**2) + 3 / (4 * x**4) - 15 / (8 * x**6)) / (x * math.sqrt(math.pi))


def erf(x: Array) -> Array:
    """Compute the error function, with errors up to 2e-8 in float32 and 1e-14 in float64."""
    coefficients = _erf_polynomial(10 if x.dtype == np.float32 else 24)
    size = np.abs(x)
    s = 2 / (1 + size / 2) - 1
    # Horner's scheme, highest power first.
    p = np.full_like(x, coefficients[-1])
    for c in coefficients[-2::-1]:
        p *= s
        p += c
    p *= np.exp(-size * size)
    return np.asarray(np.copysign(1 - p, x))


@implements("gelu", "numpy")
@_silent
def gelu(x: Array) -> Array:
    return np.asarray(x * _normal_cdf(x))


@implements("gelu_grad", "numpy")
@_silent
def gelu_grad(x: Array, gy: Array) -> Array:
    """Return the gradient of GELU with respect to x, given that of the result."""
    density = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    weighted = np.where(np.isinf(x), x.dtype.type(0), x * density)  # the limit at infinity is 0, not NaN
    return np.asarray(gy * (_normal_cdf(x) + weighted))


def _normal_cdf(x: Array) -> Array:
    return 0.5 * (1 + erf(x * (1 / math.sqrt(2))))


@implements("relu", "numpy")
def relu(x: Array) -> Array:
    return np.asarray(np.maximum(x, 0))


@implements("relu_grad", "numpy")
def relu_grad(y: Array, gy: Array) -> Array:
    return np.asarray(np.where(y <= 0, gy.dtype.type(0), gy))


def apply_epilogue(y: Array, bias: Array | None, residual: Array | None, activation: Activation) -> Array:
    """Apply the epilogue of a product: bias, residual, activation, in that order."""
    if bias is not None:
        y += bias
    if residual is not None:
        y += residual
    if activation == "relu":
        np.maximum(y, 0, out=y)
    elif activation == "gelu":
        y = gelu(y)
    return y


# --- products ---


@implements("matmul", "numpy")
@_silent
def matmul(
    a: Array, b: Array, *, bias: Array | None = None, activation: Activation = None, residual: Array | None = None
) -> Array:
    """Compute activation(a @ b + bias + residual) with NumPy; see `apply_epilogue` for the shapes."""
    return apply_epilogue(np.asarray(np.matmul(a, b)), bias, residual, activation)


def output_size(size: int, kernel: int, stride: int, padding: int) -> int:
    """Return the number of windows along one side; raise ShapeError if none fits."""
    if size + 2 * padding < kernel:
        raise ShapeError(f"a window of {kernel} does not fit into {size} with padding {padding}")
    return (size + 2 * padding - kernel) // stride + 1


def _padded(x: Array, padding: Pair, value: float = 0.0) -> Array:
    """Pad images (N, C, H, W) on all four sides by `padding` = (height, width) pixels of `value`."""
    if padding == (0, 0):
        return x
    ph, pw = padding
    return np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)), constant_values=value)


def _windows(x: Array, kernel: Pair, stride: Pair) -> Array:
    """View (N, C, H, W) as windows (N, C, Ho, Wo, kh, kw), without copying."""
    return sliding_window_view(x, kernel, axis=(2, 3))[:, :, :: stride[0], :: stride[1]]


def _unfold(x: Array, kernel: Pair, stride: Pair, padding: Pair, groups: int) -> Array:
    """Copy all windows into columns (im2col): (groups, C/groups*kh*kw, N*Ho*Wo)."""
    windows = _windows(_padded(x, padding), kernel, stride)
    n, c, ho, wo, kh, kw = windows.shape
    return windows.transpose(1, 4, 5, 0, 2, 3).reshape(groups, c // groups * kh * kw, n * ho * wo)


def _by_group(y: Array, groups: int) -> Array:
    """Rearrange (N, C, H, W) to (groups, C/groups, N*H*W)."""
    n, c, h, w = y.shape
    return y.transpose(1, 0, 2, 3).reshape(groups, c // groups, n * h * w)


@implements("conv2d", "numpy")
@_silent
def conv2d(
    x: Array,
    w: Array,
    bias: Array | None = None,
    *,
    stride: Pair = (1, 1),
    padding: tuple[int, ...] = (0, 0),
    groups: int = 1,
    activation: Activation = None,
    residual: Array | None = None,
    dilation: Pair = (1, 1),
) -> Array:
    """Convolve x (N, C, H, W) with w (O, C/G, kh, kw): one matrix product over unfolded patches.

    `padding` is (height, width), or (top, left, bottom, right).
    """
    if len(padding) == 4:
        top, left, bottom, right = padding
        x, padding = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right))), (0, 0)
    if dilation != (1, 1):  # a dilated filter is a larger filter with zeros between its taps
        (dh, dw), taps = dilation, w
        w = np.zeros((*w.shape[:2], (w.shape[2] - 1) * dh + 1, (w.shape[3] - 1) * dw + 1), w.dtype)
        w[:, :, ::dh, ::dw] = taps
    padding = (padding[0], padding[1])
    n, o = x.shape[0], w.shape[0]
    ho = output_size(x.shape[2], w.shape[2], stride[0], padding[0])
    wo = output_size(x.shape[3], w.shape[3], stride[1], padding[1])
    columns = _unfold(x, (w.shape[2], w.shape[3]), stride, padding, groups)
    y = w.reshape(groups, o // groups, math.prod(w.shape[1:])) @ columns  # (G, O/G, N*Ho*Wo)
    y = np.ascontiguousarray(y.reshape(o, n, ho, wo).transpose(1, 0, 2, 3))
    return apply_epilogue(y, None if bias is None else bias[:, None, None], residual, activation)


@implements("conv2d_grad_input", "numpy")
@_silent
def conv2d_grad_input(
    gy: Array, w: Array, x_shape: tuple[int, ...], *, stride: Pair, padding: Pair, groups: int
) -> Array:
    """Return the gradient of a convolution's input, of shape `x_shape`, from that of its output gy (N, O, Ho, Wo)."""
    o, _, kh, kw = w.shape
    n, c = x_shape[:2]
    w_columns = w.reshape(groups, o // groups, math.prod(w.shape[1:])).transpose(0, 2, 1)
    patches = w_columns @ _by_group(gy, groups)  # (G, C/G*kh*kw, N*Ho*Wo)
    return _fold(
        patches.reshape(c, kh, kw, n, gy.shape[2], gy.shape[3]).transpose(3, 0, 4, 5, 1, 2), x_shape, stride, padding
    )


def _fold(patches: Array, x_shape: tuple[int, ...], stride: Pair, padding: Pair) -> Array:
    """Add overlapping patches (N, C, Ho, Wo, kh, kw) into an image of shape `x_shape` (col2im)."""
    n, c, h, w = x_shape
    (sh, sw), (ph, pw) = stride, padding
    ho, wo, kh, kw = patches.shape[2:]
    image = np.zeros((n, c, h + 2 * ph, w + 2 * pw), patches.dtype)
    # One addition per filter tap: within a tap, patches do not overlap.
    for i in range(kh):
        for j in range(kw):
            image[:, :, i : i + sh * ho : sh, j : j + sw * wo : sw] += patches[..., i, j]
    return np.ascontiguousarray(image[:, :, ph : ph + h, pw : pw + w])


@implements("conv2d_grad_weight", "numpy")
@_silent
def conv2d_grad_weight(
    gy: Array, x: Array, w_shape: tuple[int, ...], *, stride: Pair, padding: Pair, groups: int
) -> Array:
    """Compute the gradient of a convolution's filters, of shape `w_shape`, from its output's gradient and its input."""
    columns = _unfold(x, (w_shape[2], w_shape[3]), stride, padding, groups)
    return np.asarray((_by_group(gy, groups) @ columns.transpose(0, 2, 1)).reshape(w_shape))


# --- pooling ---


@implements("max_pool2d", "numpy")
def max_pool2d(x: Array, *, kernel: Pair, stride: Pair, padding: Pair) -> tuple[Array, Array]:
    """Return the maximum of each window and its index in the (H, W) plane, both (N, C, Ho, Wo)."""
    n, c, h, w = x.shape
    ho = output_size(h, kernel[0], stride[0], padding[0])
    wo = output_size(w, kernel[1], stride[1], padding[1])
    windows = _windows(_padded(x, padding, -math.inf), kernel, stride).reshape(n, c, ho, wo, kernel[0] * kernel[1])
    best = windows.argmax(axis=-1)
    y = np.take_along_axis(windows, best[..., None], axis=-1)[..., 0]
    # In a window of only -inf the maximum may be in the padding; the clip moves its index into the image.
    row = (np.arange(ho)[:, None] * stride[0] - padding[0] + best // kernel[1]).clip(0, h - 1)
    column = (np.arange(wo) * stride[1] - padding[1] + best % kernel[1]).clip(0, w - 1)
    return y, (row * w + column).astype(np.int32)


@implements("max_pool2d_grad", "numpy")
def max_pool2d_grad(gy: Array, argmax: Array, x_shape: tuple[int, ...]) -> Array:
    """Add each output gradient to the input pixel that was the maximum of its window."""
    n, c, h, w = x_shape
    gx = np.zeros(n * c * h * w, gy.dtype)
    # `argmax` is an index within a plane; windows may overlap, so gradients are added.
    plane_start = np.arange(n * c).reshape(n, c, 1, 1) * (h * w)
    np.add.at(gx, (argmax + plane_start).ravel(), gy.ravel())
    return gx.reshape(x_shape)


@implements("avg_pool2d", "numpy")
@_silent
def avg_pool2d(x: Array, *, kernel: Pair, stride: Pair, padding: Pair) -> Array:
    """Average each window of (N, C, H, W); zeros of the padding count."""
    output_size(x.shape[2], kernel[0], stride[0], padding[0])
    output_size(x.shape[3], kernel[1], stride[1], padding[1])
    return np.asarray(_windows(_padded(x, padding), kernel, stride).mean(axis=(-2, -1)))


@implements("avg_pool2d_grad", "numpy")
def avg_pool2d_grad(gy: Array, x_shape: tuple[int, ...], *, kernel: Pair, stride: Pair, padding: Pair) -> Array:
    share = gy / gy.dtype.type(kernel[0] * kernel[1])
    return _fold(np.broadcast_to(share[..., None, None], share.shape + kernel), x_shape, stride, padding)


# --- softmax, norms and losses, row by row ---


def _row_max(x: Array) -> Array:
    """Return the maximum along the last axis, which stays with size 1; -inf for empty rows."""
    return np.asarray(x.max(axis=-1, keepdims=True, initial=-math.inf))


def _logsumexp(x: Array) -> Array:
    """Compute log(sum(exp(x))) over the last axis without overflow; the axis stays with size 1."""
    row_max = _row_max(x)
    # A row of only -inf would give -inf - -inf = NaN.
    row_max = np.where(np.isneginf(row_max), x.dtype.type(0), row_max)
    return np.asarray(row_max + np.log(np.exp(x - row_max).sum(axis=-1, keepdims=True)))


@implements("softmax", "numpy")
@_silent
def softmax(x: Array) -> Array:
    """Return the softmax along the last axis."""
    y = np.exp(x - _row_max(x))
    y /= y.sum(axis=-1, keepdims=True)
    return np.asarray(y)


@implements("softmax_grad", "numpy")
@_silent
def softmax_grad(y: Array, gy: Array) -> Array:
    return np.asarray(y * (gy - (y * gy).sum(axis=-1, keepdims=True)))


@implements("log_softmax", "numpy")
@_silent
def log_softmax(x: Array) -> Array:
    shifted = x - _row_max(x)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


@implements("log_softmax_grad", "numpy")
@_silent
def log_softmax_grad(y: Array, gy: Array) -> Array:
    return np.asarray(gy - np.exp(y) * gy.sum(axis=-1, keepdims=True))


@implements("layer_norm", "numpy")
@_silent
def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
    """Normalise over the last axis; also return each row's mean and reciprocal standard deviation."""
    if not x.shape[-1]:
        undefined = np.full(x.shape[:-1], np.nan, x.dtype)  # the mean of an empty row
        return x.copy(), undefined, undefined.copy()
    mean = x.mean(axis=-1, keepdims=True)
    centred = x - mean
    rstd = 1 / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + x.dtype.type(eps))
    return centred * rstd * weight + bias, mean[..., 0], rstd[..., 0]


@implements("layer_norm_grad", "numpy")
@_silent
def layer_norm_grad(gy: Array, x: Array, weight: Array, mean: Array, rstd: Array) -> tuple[Array, Array, Array]:
    """Return the gradients of x, weight and bias from that of the result, gy; mean and rstd are the forward's."""
    rows = tuple(range(x.ndim - 1))
    normed = (x - mean[..., None]) * rstd[..., None]
    # The mean and the variance depend on x as well: subtract the components of g along 1 and along `normed`.
    g = gy * weight
    gx = g - g.mean(axis=-1, keepdims=True) - normed * (g * normed).mean(axis=-1, keepdims=True)
    return gx * rstd[..., None], (gy * normed).sum(axis=rows), gy.sum(axis=rows)


@implements("cross_entropy", "numpy")
@_silent
def cross_entropy(logits: Array, targets: Array) -> tuple[Array, Array]:
    total = _logsumexp(logits)[:, 0]
    return total - logits[np.arange(len(logits)), targets], total


@implements("cross_entropy_grad", "numpy")
@_silent
def cross_entropy_grad(logits: Array, targets: Array, logsumexp: Array, row_weights: Array) -> Array:
    """Return the gradient of the weighted cross-entropy with respect to the logits (rows, classes)."""
    g = np.exp(logits - logsumexp[:, None])
    g[np.arange(len(logits)), targets] -= 1
    g *= row_weights[:, None]
    return np.asarray(g)


@implements("embedding_grad", "numpy")
def embedding_grad(gout: Array, ids: Array, rows: int) -> Array:
    """Sum the gradients of looked-up rows, (ids, width), into a table of `rows` rows."""
    g = np.zeros((rows, gout.shape[1]), gout.dtype)
    np.add.at(g, ids, gout)
    return g


# --- attention ---


def _attention_scores(q: Array, k: Array, causal: bool, mask: Array | None, scale: float) -> Array:
    """Return scaled, masked attention scores (B, H, T, S); causal queries are aligned to the last keys."""
    scores = (q @ k.swapaxes(-1, -2)) * q.dtype.type(scale)  # (B, H, T, S)
    t, s = scores.shape[-2:]
    if causal:
        scores[..., ~np.tri(t, s, s - t, dtype=bool)] = -math.inf
    if mask is not None:
        scores = np.where(mask, scores, scores.dtype.type(-math.inf)) if mask.dtype == bool else scores + mask
    return np.asarray(scores, q.dtype)


def _attention_weights(scores: Array, logsumexp: Array) -> Array:
    """Return the attention weights exp(score - logsumexp); zeros in rows where every key is masked."""
    all_masked = np.isneginf(logsumexp)[..., None]
    return np.asarray(np.where(all_masked, scores.dtype.type(0), np.exp(scores - logsumexp[..., None])))


@implements("attention", "numpy")
@_silent
def attention(
    q: Array, k: Array, v: Array, *, causal: bool, mask: Array | None = None, scale: float | None = None
) -> tuple[Array, Array]:
    """Compute attention of q (B, H, T, D) over k, v (B, H, S, D); also return the log-sum-exp of scores (B, H, T)."""
    scores = _attention_scores(q, k, causal, mask, _default_scale(q, scale))
    logsumexp = _logsumexp(scores)[..., 0]
    return _attention_weights(scores, logsumexp) @ v, logsumexp


@implements("attention_grad", "numpy")
@_silent
def attention_grad(
    gout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    logsumexp: Array,
    *,
    causal: bool,
    mask: Array | None = None,
    scale: float | None = None,
    into: tuple[Array, Array, Array] | None = None,
) -> tuple[Array, Array, Array]:
    """Compute the gradients of q, k and v by recomputing the attention weights (Dao et al. 2022, section 3.1)."""
    scale = _default_scale(q, scale)
    p = _attention_weights(_attention_scores(q, k, causal, mask, scale), logsumexp)
    # Row sums of p * (gout @ vᵀ), computed from the output: sum_j p_j (gout · v_j) = gout · out.
    delta = (gout * out).sum(axis=-1, keepdims=True)
    gscores = p * (gout @ v.swapaxes(-1, -2) - delta) * q.dtype.type(scale)
    grads = gscores @ k, gscores.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ gout
    if into is None:
        return grads
    for target, g in zip(into, grads, strict=True):
        target[...] = g
    return into


def _default_scale(q: Array, scale: float | None) -> float:
    return scale if scale is not None else 1 / math.sqrt(max(q.shape[-1], 1))


# --- optimizer ---


@implements("adam_step", "numpy")
@_silent
def adam_step(
    param: Array,
    grad: Array,
    m: Array,
    v: Array,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    step: int,
) -> None:
    """Update param in place by Adam, with its moments m and v; `decoupled` weight decay makes it AdamW."""
    if weight_decay and decoupled:
        param *= 1 - lr * weight_decay
    elif weight_decay:
        grad = grad + weight_decay * param
    m += (1 - beta1) * (grad - m)
    v *= beta2
    v += (1 - beta2) * grad * grad
    # Both bias corrections, with PyTorch's order of operations.
    root = np.sqrt(v)
    root /= math.sqrt(1 - beta2**step)
    root += eps
    param -= (lr / (1 - beta1**step)) * (m / root)
