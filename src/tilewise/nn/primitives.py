"""Operations of neural networks, as `forward` and `backward` over arrays; the backend does the arithmetic.

Linear and Conv2d can fuse a ReLU, because its gradient needs only the result; GELU and residual are fused only when no
gradient is recorded. Shapes are checked here, once, so that kernels need no checks.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilewise.backend.registry import current_backend
from tilewise.errors import DtypeError, GradientError, ShapeError
from tilewise.ops.base import Array, Grads, Operation, silent

Pair = tuple[int, int]


def _check_trainable(inference_only: bool) -> None:
    """Raise `GradientError` if the forward pass used a fusion that has no gradient."""
    if inference_only:
        raise GradientError(
            "activation='gelu' and residual= have no gradient; apply them as separate operations to train"
        )


class Linear(Operation):
    """Linear layer with epilogue: activation(x @ weight.T + bias + residual), weight (out, in)."""

    inference_only = False

    def forward(
        self,
        x: Array,
        weight: Array,
        bias: Array | None = None,
        *,
        activation: str | None = None,
        residual: Array | None = None,
    ) -> Array:
        """Compute activation(x @ weight.T + bias + residual) for x (..., in): (..., out)."""
        if x.ndim == 0 or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
            raise ShapeError(f"a linear layer with weight {weight.shape} cannot take an input of shape {x.shape}")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ShapeError(f"the bias {bias.shape} does not belong to a weight {weight.shape}")
        self.x = x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        self.weight, self.shape = weight, x.shape
        if residual is not None:
            residual = residual.reshape(self.x.shape[0], weight.shape[0])
        # `weight.T` is a view; the kernel reads transposed operands without copying.
        y: Array = current_backend().dispatch(
            "matmul", self.x, weight.T, bias=bias, activation=activation, residual=residual
        )
        if activation == "gelu" or residual is not None:
            self.inference_only = True
        elif activation == "relu":
            self.saves_output, self.y = True, y
        return y if x.ndim == 2 else y.reshape((*x.shape[:-1], weight.shape[0]))

    def backward(self, grad: Array) -> Grads:
        """Return the gradients of input, weight and bias (if any); None for those not needed."""
        _check_trainable(self.inference_only)
        dispatch = current_backend().dispatch
        g = grad.reshape(self.x.shape[0], self.weight.shape[0])
        if self.saves_output:
            g = dispatch("relu_grad", self.y, g)
        gx = dispatch("matmul", g, self.weight).reshape(self.shape) if self.needs[0] else None
        gw = dispatch("matmul", g.T, self.x) if self.needs[1] else None
        return (gx, gw) if len(self.needs) == 2 else (gx, gw, dispatch("sum_rows", g) if self.needs[2] else None)

    def reads(self) -> tuple[int, ...]:
        return tuple(1 - i for i in (0, 1) if self.needs[i])


class Conv2d(Operation):
    """Convolution (cross-correlation) of (N, C, H, W) with filters (O, C/groups, kh, kw)."""

    inference_only = False

    def forward(
        self,
        x: Array,
        weight: Array,
        bias: Array | None = None,
        *,
        stride: Pair,
        padding: tuple[int, ...],
        groups: int,
        dilation: Pair = (1, 1),
        activation: str | None = None,
        residual: Array | None = None,
    ) -> Array:
        """Convolve images (N, C, H, W) with filters (O, C/groups, kh, kw) after checking the sizes."""
        (_, c, h, w), (o, i, kh, kw) = _four_sizes(x), _four_sizes(weight)
        is_even = len(padding) == 2 and dilation == (1, 1)
        if is_even:
            fits = c == i * groups and h + 2 * padding[0] >= kh > 0 and w + 2 * padding[1] >= kw > 0
            if groups < 1 or not fits or o % groups or min(stride) < 1 or min(padding) < 0:
                _raise_conv_error(x.shape, weight.shape, stride, padding, groups)
        else:
            _check_dilated(x.shape, weight.shape, stride, padding, dilation, groups)
        self.x, self.weight = x, weight
        self.stride, self.padding, self.groups, self.dilation = stride, padding, groups, dilation
        y: Array = current_backend().dispatch(
            "conv2d",
            x,
            weight,
            bias,
            stride=stride,
            padding=padding,
            groups=groups,
            activation=activation,
            residual=residual,
            **({} if is_even else {"dilation": dilation}),
        )
        if activation == "gelu" or residual is not None:
            self.inference_only = True
        elif activation == "relu":
            self.saves_output, self.y = True, y
        return y

    def backward(self, grad: Array) -> Grads:
        """Compute the gradients of the input, the weight and the bias, as far as they are needed."""
        _check_trainable(self.inference_only)
        dispatch = current_backend().dispatch
        grad = dispatch("relu_grad", self.y, grad) if self.saves_output else np.ascontiguousarray(grad)
        gx = gw = None
        if len(self.padding) != 2 or self.dilation != (1, 1):
            gx, gw = self._dilated_grads(grad)
        else:
            geometry = {"stride": self.stride, "padding": self.padding, "groups": self.groups}
            if self.needs[0]:
                gx = dispatch("conv2d_grad_input", grad, self.weight, self.x.shape, **geometry)
            if self.needs[1]:
                gw = dispatch("conv2d_grad_weight", grad, self.x, self.weight.shape, **geometry)
        return (gx, gw) if len(self.needs) == 2 else (gx, gw, dispatch("sum_channels", grad) if self.needs[2] else None)

    def _dilated_grads(self, grad: Array) -> tuple[Array | None, Array | None]:
        """Return the gradients of input and weight for dilation or asymmetric padding."""
        (dh, dw), dispatch = self.dilation, current_backend().dispatch
        top, left, bottom, right = self.padding if len(self.padding) == 4 else (*self.padding, *self.padding)
        h, w = self.x.shape[2:]
        padded = np.pad(self.x, ((0, 0), (0, 0), (top, bottom), (left, right)))
        o, i, kh, kw = self.weight.shape
        dilated = np.zeros((o, i, (kh - 1) * dh + 1, (kw - 1) * dw + 1), self.weight.dtype)
        dilated[:, :, ::dh, ::dw] = self.weight
        geometry = {"stride": self.stride, "padding": (0, 0), "groups": self.groups}
        gx = gw = None
        if self.needs[0]:
            gx = dispatch("conv2d_grad_input", grad, dilated, padded.shape, **geometry)
            gx = gx[:, :, top : top + h, left : left + w]
        if self.needs[1]:
            gw = dispatch("conv2d_grad_weight", grad, padded, dilated.shape, **geometry)[:, :, ::dh, ::dw]
        return gx, gw

    def reads(self) -> tuple[int, ...]:
        return tuple(1 - i for i in (0, 1) if self.needs[i])


def _check_dilated(
    x: tuple[int, ...], w: tuple[int, ...], stride: Pair, padding: tuple[int, ...], dilation: Pair, groups: int
) -> None:
    """Raise ShapeError unless these shapes allow a convolution with dilation or asymmetric padding."""
    top, left, bottom, right = padding if len(padding) == 4 else (*padding, *padding)
    if groups < 1 or x[1] != w[1] * groups or w[0] % groups or min(dilation) < 1 or min(stride) < 1 or min(padding) < 0:
        raise ShapeError(
            f"conv2d with {groups} group(s), stride {stride}, padding {padding} and dilation {dilation} cannot apply "
            f"weights {w} to an input of shape {x}"
        )
    window = ((w[2] - 1) * dilation[0] + 1, (w[3] - 1) * dilation[1] + 1)
    if min(w[2:]) < 1 or x[2] + top + bottom < window[0] or x[3] + left + right < window[1]:
        raise ShapeError(f"a window of {window} does not fit into an image of {x[2:]} with padding {padding}")


def _four_sizes(x: Array) -> tuple[int, int, int, int]:
    """Return the shape of a 4-D array; raise `ShapeError` for other ranks."""
    if x.ndim != 4:
        raise ShapeError(f"images and filters must have four dimensions, (N, C, H, W), not the shape {x.shape}")
    shape: tuple[int, int, int, int] = x.shape
    return shape


def _raise_conv_error(
    x: tuple[int, ...], w: tuple[int, ...], stride: Pair, padding: tuple[int, ...], groups: int
) -> None:
    """Raise a ShapeError that explains why x and w cannot be convolved with these settings."""
    if groups < 1 or x[1] != w[1] * groups or w[0] % groups:
        raise ShapeError(f"conv2d with {groups} group(s) cannot apply weights {w} to an input of shape {x}")
    _check_windows(x, (w[2], w[3]), stride, (padding[0], padding[1]))


def _check_windows(x: tuple[int, ...], kernel: Pair, stride: Pair, padding: Pair) -> None:
    """Raise `ShapeError` unless at least one window fits into padded images of shape x = (N, C, H, W)."""
    if min(stride) < 1 or min(padding) < 0 or min(kernel) < 1:
        raise ShapeError(f"kernel {kernel} and stride {stride} must be at least 1, padding {padding} at least 0")
    if x[2] + 2 * padding[0] < kernel[0] or x[3] + 2 * padding[1] < kernel[1]:
        raise ShapeError(f"a window of {kernel} does not fit into an image of {x[2:]} with padding {padding}")


def _check_pool(x: tuple[int, ...], kernel: Pair, stride: Pair, padding: Pair) -> None:
    """Raise `ShapeError` unless images of shape x = (N, C, H, W) can be pooled with these settings."""
    if len(x) != 4:
        raise ShapeError(f"pooling takes (N, C, H, W), not {x}")
    _check_windows(x, kernel, stride, padding)
    if 2 * padding[0] > kernel[0] or 2 * padding[1] > kernel[1]:
        raise ShapeError(f"pooling may pad by at most half its window: padding {padding}, window {kernel}")


class MaxPool2d(Operation):
    def forward(self, x: Array, *, kernel: Pair, stride: Pair, padding: Pair) -> Array:
        """Pool images (N, C, H, W) by the maximum, whose positions are saved for the gradient."""
        _check_pool(x.shape, kernel, stride, padding)
        self.shape = x.shape
        y, self.argmax = current_backend().dispatch("max_pool2d", x, kernel=kernel, stride=stride, padding=padding)
        out: Array = y
        return out

    def backward(self, grad: Array) -> Grads:
        return current_backend().dispatch("max_pool2d_grad", np.ascontiguousarray(grad), self.argmax, self.shape)


class AvgPool2d(Operation):
    def forward(self, x: Array, *, kernel: Pair, stride: Pair, padding: Pair) -> Array:
        """Average each window of images (N, C, H, W); padding counts as zeros."""
        _check_pool(x.shape, kernel, stride, padding)
        self.shape, self.geometry = x.shape, {"kernel": kernel, "stride": stride, "padding": padding}
        y: Array = current_backend().dispatch("avg_pool2d", x, **self.geometry)
        return y

    def backward(self, grad: Array) -> Grads:
        return current_backend().dispatch("avg_pool2d_grad", np.ascontiguousarray(grad), self.shape, **self.geometry)


class GlobalAvgPool(Operation):
    """Average pooling over the whole image: (N, C, H, W) to (N, C)."""

    def forward(self, x: Array) -> Array:
        """Average images (N, C, H, W) over their pixels, giving (N, C)."""
        self.shape = n, c, h, w = _four_sizes(x)
        if not h or not w:
            raise ShapeError(f"the mean of an image without pixels is undefined: {x.shape}")
        self.geometry: dict[str, Any] = {"kernel": (h, w), "stride": (1, 1), "padding": (0, 0)}
        y: Array = current_backend().dispatch("avg_pool2d", x, **self.geometry)
        return y.reshape(n, c)

    def backward(self, grad: Array) -> Grads:
        windows = np.ascontiguousarray(grad).reshape(*self.shape[:2], 1, 1)
        return current_backend().dispatch("avg_pool2d_grad", windows, self.shape, **self.geometry)


class LayerNorm(Operation):
    """Normalisation over the last `weight.ndim` axes."""

    saves = (0, 1)

    def forward(self, x: Array, weight: Array, bias: Array, *, eps: float) -> Array:
        """Normalize over the last dimensions, those of `weight`, then scale by weight and add bias."""
        if weight.ndim == 0 or x.shape[-weight.ndim :] != weight.shape or bias.shape != weight.shape:
            raise ShapeError(f"layer norm over {weight.shape} cannot take an input of shape {x.shape}")
        self.shape, self.weight = x.shape, weight
        self.x = x.reshape(math.prod(x.shape[: x.ndim - weight.ndim]), weight.size)
        y, self.mean, self.rstd = current_backend().dispatch("layer_norm", self.x, weight.ravel(), bias.ravel(), eps)
        out: Array = y.reshape(x.shape)
        return out

    def backward(self, grad: Array) -> Grads:
        """Return the gradients of input, weight and bias."""
        shape = self.weight.shape
        gx, gw, gb = current_backend().dispatch(
            "layer_norm_grad", grad.reshape(self.x.shape), self.x, self.weight.ravel(), self.mean, self.rstd
        )
        return gx.reshape(self.shape), gw.reshape(shape), gb.reshape(shape)


class BatchNorm(Operation):
    """Normalisation over all axes but the second, with the batch's mean and variance.

    Running statistics, if given, are updated in place (`running_var` with the unbiased variance).
    """

    saves = (0, 1)

    def forward(
        self,
        x: Array,
        weight: Array,
        bias: Array,
        *,
        running_mean: Array | None,
        running_var: Array | None,
        momentum: float,
        eps: float,
    ) -> Array:
        """Normalise each channel by the batch's statistics, and update the running ones with `momentum`."""
        _check_batch_norm(x.shape, weight.shape, bias.shape)
        count = math.prod(x.shape[:1] + x.shape[2:])
        if count < 2:
            raise ShapeError(f"batch norm needs more than one value per channel to train, not shape {x.shape}")
        y, self.mean, self.var = current_backend().dispatch("batch_norm", x, weight, bias, eps)
        self.x, self.weight, self.eps = x, weight, eps
        # Exponential moving averages, with the unbiased variance as in PyTorch.
        if running_mean is not None and running_var is not None:
            running_mean += momentum * (self.mean - running_mean)
            running_var += momentum * (self.var * (count / (count - 1)) - running_var)
        out: Array = y
        return out

    def backward(self, grad: Array) -> Grads:
        saved = (self.x, self.weight, self.mean, self.var, self.eps)
        return current_backend().dispatch("batch_norm_grad", grad, *saved)


class FixedNorm(Operation):
    """Batch norm with fixed statistics: a scale and a shift per channel."""

    saves = (0, 1)

    @silent
    def forward(self, x: Array, weight: Array, bias: Array, *, mean: Array, var: Array, eps: float) -> Array:
        """Normalize each channel (axis 1) by a constant mean and variance, then scale and shift by weight, bias."""
        _check_batch_norm(x.shape, weight.shape, bias.shape)
        self.channels = (slice(None),) + (None,) * (x.ndim - 2)  # indexes (C,) to broadcast against x
        self.x, self.weight, self.mean = x, weight, mean
        self.rstd = np.asarray(1 / np.sqrt(var + x.dtype.type(eps)))
        # weight · (x - mean) · rstd + bias as one multiplication and one addition.
        scale = self.rstd * weight
        return np.asarray(x * scale[self.channels] + (bias - mean * scale)[self.channels])

    def backward(self, grad: Array) -> Grads:
        """Return the gradients of input, weight and bias; mean and variance are constants."""
        axes = (0, *range(2, grad.ndim))
        normed = (self.x - self.mean[self.channels]) * self.rstd[self.channels]
        gx = grad * (self.weight * self.rstd)[self.channels]
        return gx, (grad * normed).sum(axis=axes), grad.sum(axis=axes)


def _check_batch_norm(x: tuple[int, ...], weight: tuple[int, ...], bias: tuple[int, ...]) -> None:
    if len(x) < 2 or weight != x[1:2] or bias != weight:
        raise ShapeError(f"batch norm with a weight of shape {weight} cannot take an input of shape {x}")


class Embedding(Operation):
    """Rows of a table, selected by integer ids."""

    def forward(self, weight: Array, *, ids: Array) -> Array:
        """Look up rows of the weight (rows, width) by integer ids; an id outside raises an error."""
        if ids.dtype.kind not in "iu":
            raise DtypeError(f"embedding ids must be integers, not {ids.dtype}")
        self.rows = weight.shape[0]
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= self.rows):
            raise ShapeError(
                f"an embedding of {self.rows} rows has no row {int(ids.max() if ids.min() >= 0 else ids.min())}"
            )
        self.ids = ids
        return weight[ids]

    def backward(self, grad: Array) -> Grads:
        rows = grad.reshape(self.ids.size, grad.shape[-1])
        return current_backend().dispatch("embedding_grad", rows, self.ids.reshape(-1), self.rows)


class Dropout(Operation):
    def forward(self, x: Array, *, p: float, rng: np.random.Generator) -> Array:
        """Set each element to 0 with probability p and divide the others by 1 - p."""
        self.mask = (rng.random(x.shape, dtype=np.float32) >= p).astype(x.dtype)
        if p < 1:
            self.mask /= 1 - p
        return np.asarray(x * self.mask)

    def backward(self, grad: Array) -> Grads:
        return grad * self.mask


class CrossEntropy(Operation):
    """Mean, sum or list of -log softmax(logits)[target] over (N, C); rows whose target is `ignore` have no loss."""

    saves = (0,)

    @silent
    def forward(self, logits: Array, *, targets: Array, reduction: str, ignore: int) -> Array:
        """Compute -log softmax(logits)[target] per row (N, C), reduced by "mean", "sum" or "none".

        Rows whose target is `ignore` are left out.
        """
        _check_targets(logits, targets, ignore)
        has_loss = targets != ignore
        self.logits, self.targets = logits, np.where(has_loss, targets, 0)
        losses, self.logsumexp = current_backend().dispatch("cross_entropy", logits, self.targets)
        losses = losses if has_loss.all() else np.where(has_loss, losses, losses.dtype.type(0))
        self.row_weights = has_loss.astype(logits.dtype)
        if reduction == "none":
            return np.asarray(losses)
        if reduction == "mean":
            self.row_weights /= self.row_weights.sum()  # NaN if all rows are ignored, as in PyTorch
            return np.asarray(losses.sum() / logits.dtype.type(has_loss.sum()))
        return np.asarray(losses.sum())

    def backward(self, grad: Array) -> Grads:
        row_weights = np.asarray(self.row_weights * grad)
        return current_backend().dispatch("cross_entropy_grad", self.logits, self.targets, self.logsumexp, row_weights)


def _check_targets(logits: Array, targets: Array, ignore: int) -> None:
    """Raise unless targets are integer class indices, one per row of logits, or `ignore`."""
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        raise ShapeError(f"cross entropy takes (N, C) logits and (N,) targets, not {logits.shape} and {targets.shape}")
    if targets.dtype.kind not in "iu":
        raise DtypeError(f"cross entropy targets are class numbers, not {targets.dtype}")
    wrong = targets[((targets < 0) | (targets >= logits.shape[1])) & (targets != ignore)]
    if wrong.size:
        raise ShapeError(f"there is no class {int(wrong[0])} among {logits.shape[1]}")


class Attention(Operation):
    """Attention softmax(q kᵀ · scale + mask) v over (B, H, T, D); a causal query t attends to keys up to S - T + t."""

    saves = (0, 1, 2)
    saves_output = True

    def forward(self, q: Array, k: Array, v: Array, *, causal: bool, mask: Array | None, scale: float | None) -> Array:
        """Compute attention of q (B, H, T, D) over k and v (B, H, S, D); causal, mask and scale as in PyTorch."""
        _check_attention(q.shape, k.shape, v.shape, mask)
        self.args, self.params = (q, k, v), {"causal": causal, "mask": mask, "scale": scale}
        self.out, self.logsumexp = current_backend().dispatch("attention", q, k, v, **self.params)
        out: Array = self.out
        return out

    def backward(self, grad: Array) -> Grads:
        return current_backend().dispatch("attention_grad", grad, *self.args, self.out, self.logsumexp, **self.params)


class PackedAttention(Operation):
    """Causal self-attention from the packed projection (B, T, 3·H·D) to (B, T, H·D).

    One operation replaces a split and four transposes; the gradients of q, k and v are written into one array.
    """

    saves = (0,)
    saves_output = True  # with one head or one token the result shares memory with `self.out`

    def forward(self, qkv: Array, *, heads: int) -> Array:
        """Compute causal self-attention of packed q, k, v (B, T, 3·H·D); returns (B, T, H·D)."""
        b, t, c3 = qkv.shape
        self.packed = (b, t, 3, heads, c3 // (3 * heads))
        self.qkv = qkv.reshape(self.packed).transpose(2, 0, 3, 1, 4)  # (3, B, H, T, D)
        self.out, self.logsumexp = current_backend().dispatch(
            "attention", *self.qkv, causal=True, mask=None, scale=None
        )
        return np.ascontiguousarray(self.out.transpose(0, 2, 1, 3)).reshape(b, t, c3 // 3)

    def backward(self, grad: Array) -> Grads:
        """Return the gradient of the packed q, k, v, of shape (B, T, 3·H·D)."""
        b, t, _, heads, d = self.packed
        g = grad.reshape(b, t, heads, d).transpose(0, 2, 1, 3)
        # The kernel writes the three gradients into views of one packed array (B, T, 3·H·D).
        gqkv = np.empty((b, t, 3 * heads * d), grad.dtype)
        into = tuple(gqkv.reshape(self.packed).transpose(2, 0, 3, 1, 4))
        saved = (*self.qkv, self.out, self.logsumexp)
        current_backend().dispatch("attention_grad", g, *saved, causal=True, mask=None, scale=None, into=into)
        return gqkv


def _check_attention(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], mask: Array | None) -> None:
    """Raise ShapeError unless the shapes of queries, keys, values and mask fit together."""
    if len(q) != 4 or len(k) != 4 or k[:3] != v[:3] or len(v) != 4 or q[:2] != k[:2] or q[3] != k[3]:
        raise ShapeError(f"attention takes q (B, H, T, D), k and v (B, H, S, D), not {q}, {k} and {v}")
    if mask is not None:
        try:
            fits = np.broadcast_shapes(mask.shape, (*q[:3], k[2])) == (*q[:3], k[2])
        except ValueError:
            fits = False
        if not fits:
            raise ShapeError(f"a mask of shape {mask.shape} does not broadcast to the scores {(*q[:3], k[2])}")
