"""Tensor: a NumPy array that remembers how it was computed, and can therefore compute gradients.

Every operation goes through `apply`, which runs the operation's `forward` and, if a gradient may be needed, stores the
operation in the result. Operations are numbered in the order they run, so visiting them from the highest number down
reaches each one after everything that used its result: `backward` is that traversal (autograd.py). The operations
themselves are in ops/.

>>> x = Tensor([1.0, 2.0, 3.0], requires_grad=True)
>>> (x * x).sum().backward()
>>> x.grad
Tensor([2., 4., 6.])
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ContextDecorator
from contextvars import ContextVar, Token
from typing import Any, SupportsIndex, cast

import numpy as np
import numpy.typing as npt

from tilewise import ops
from tilewise._events import recorders, tracers
from tilewise.autograd import walk_back
from tilewise.backend.registry import current_backend
from tilewise.errors import DtypeError, GradientError, ShapeError, UnavailableError

Array = npt.NDArray[Any]
Axis = int | tuple[int, ...] | None
TensorLike = Any  # a Tensor, an ndarray, a number or nested lists of numbers

_recording: ContextVar[bool] = ContextVar("recording", default=True)
_order = itertools.count(1)


class no_grad(ContextDecorator):
    """Context manager and decorator that disables recording, so that nothing is saved for a backward pass."""

    _token: Token[bool]
    _value = False

    def __enter__(self) -> None:
        self._token = _recording.set(self._value)

    def __exit__(self, *_exc: object) -> None:
        _recording.reset(self._token)

    def _recreate_cm(self) -> no_grad:
        return type(self)()


class enable_grad(no_grad):
    """Context manager and decorator that enables recording inside a `no_grad` block."""

    _value = True


def is_grad_enabled() -> bool:
    return _recording.get()


def apply(operation: type[ops.Operation], *inputs: Tensor, **params: Any) -> Tensor:
    """Run one operation on tensors. Every operation of the framework goes through this function."""
    step = operation()
    try:
        if recorders:
            data = recorders.hooks.record_forward(step, [t._array for t in inputs], params)
        else:
            data = step.forward(*[t._array for t in inputs], **params)
    except (ShapeError, DtypeError):
        raise
    except AttributeError:
        others = [value for value in inputs if not isinstance(value, Tensor)]
        if not others:
            raise
        if all(
            isinstance(value, np.ndarray | list) for value in others
        ):  # converted here, where it costs tensors nothing
            return apply(
                operation, *(value if isinstance(value, Tensor) else Tensor(value) for value in inputs), **params
            )
        raise DtypeError(f"{operation.__name__} takes Tensors, not a {type(others[0]).__name__}") from None
    except ValueError as error:
        shapes = ", ".join(str(t.shape) for t in inputs)
        raise ShapeError(f"{operation.__name__} cannot work on shapes {shapes}: {error}") from None
    out = _wrap(data)
    if step.is_view:
        inputs[0]._expose()
        out._version = inputs[0]._version
        out._made_at = out._version[0]
    if _recording.get():
        for t in inputs:
            if t.requires_grad:
                _record(step, inputs, out)
                break
    return out


def _wrap(data: Array) -> Tensor:
    """Create a tensor from an array without the checks of the constructor."""
    out = Tensor.__new__(Tensor)
    out._array = data if type(data) is np.ndarray else np.asarray(data)
    out.grad = out._step = None
    out.requires_grad = False
    out._version = [0]
    out._made_at = 0
    return out


def _record(step: ops.Operation, inputs: tuple[Tensor, ...], out: Tensor) -> None:
    """Add an operation to the graph, with the version counters of the values it needs for its gradient."""
    if out._array.dtype.kind != "f":
        return
    for t in inputs:
        if t._step is not None and t._made_at != t._version[0]:
            raise GradientError(
                "a tensor was changed in place through another tensor that shares its memory; use a copy, or an "
                "operation that returns a new tensor"
            )
    step.inputs, step.order = inputs, next(_order)
    step.needs = tuple([t.requires_grad for t in inputs])
    counters = [inputs[i]._version for i in step.reads()]
    if step.saves_output:
        counters.append(out._version)
    step.saved = tuple([(counter, counter[0]) for counter in counters])
    out._step, out.requires_grad = step, True


class Tensor:
    """An n-dimensional array of numbers with gradients, float32 by default.

    `numpy.asarray(t)` and `t.data` are the array itself, not a copy. Writes to it bypass the check for in-place
    changes, so change tensors that take part in a gradient through their own methods.
    """

    __slots__ = ("__weakref__", "_array", "_made_at", "_step", "_version", "grad", "requires_grad")
    __array_priority__ = 1000  # ndarray + Tensor is Tensor.__radd__

    _array: Array  # read directly by internal code that does not expose it
    grad: Tensor | None
    requires_grad: bool
    _step: ops.Operation | None  # the operation that computed this tensor; None for a leaf
    _version: list[int]  # counts in-place changes; shared by all tensors on the same memory
    _made_at: int  # the counter's value when this tensor entered the graph

    def __init__(self, data: TensorLike, requires_grad: bool = False, dtype: npt.DTypeLike | None = None) -> None:
        """Convert data to an array; float64 numbers become float32 unless a dtype is given."""
        self._array = _as_array(data, dtype)
        self.grad = self._step = None
        self.requires_grad = False
        self._version = data._version if isinstance(data, Tensor) and data._array is self._array else [0]
        self._made_at = self._version[0]
        if requires_grad:
            self.requires_grad_()

    # --- properties ---

    @property
    def data(self) -> Array:
        """Return the underlying array, not a copy."""
        if tracers:
            recorders.hooks.note_read(self._array)
        return self._array

    @data.setter
    def data(self, array: Array) -> None:
        self._array = array

    def _expose(self) -> None:
        """Note that somebody may now write to this tensor's array."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._array.dtype

    @property
    def ndim(self) -> int:
        return self._array.ndim

    @property
    def size(self) -> int:
        return self._array.size

    @property
    def is_leaf(self) -> bool:
        return self._step is None

    def __len__(self) -> int:
        return len(self._array)

    def __iter__(self) -> Iterator[Tensor]:
        """Iterate over the first axis; each item is part of the graph, like `self[i]`."""
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        text = np.array2string(self._array, separator=", ", prefix="Tensor(")
        dtype = "" if self.dtype in (np.float32, np.int64, np.bool_) else f", dtype={self.dtype}"
        return f"Tensor({text}{dtype}{', requires_grad=True' if self.requires_grad else ''})"

    def __bool__(self) -> bool:
        return bool(self.data)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return cast(SupportsIndex, self.item()).__index__()

    def item(self) -> Any:
        """Return the only element as a Python number."""
        if self._array.size != 1:
            raise ShapeError(f"item() needs a tensor with one element, not shape {self.shape}")
        return self.data.item()

    def tolist(self) -> Any:
        return self.data.tolist()

    # --- sharing memory with NumPy and DLPack ---

    def numpy(self) -> Array:
        """Return the underlying array, not a copy."""
        return self.data

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        if dtype is None or np.dtype(dtype) == self.data.dtype:
            return self.data.copy() if copy else self.data
        if copy is False:
            raise ValueError(f"a tensor of {self.dtype} cannot be converted to {np.dtype(dtype)} without copying")
        return self.data.astype(dtype)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.data.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.data.__dlpack_device__()

    # --- gradients ---

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Set whether `backward` computes a gradient for this tensor, and return it."""
        if requires_grad and self.dtype.kind != "f":
            raise DtypeError(f"only floating-point tensors can require a gradient, not {self.dtype}")
        if not requires_grad and self._step is not None:
            raise GradientError("only leaves can stop requiring a gradient; use detach()")
        self.requires_grad = requires_grad
        return self

    def detach(self) -> Tensor:
        """Return a tensor on the same memory that is not part of the graph."""
        out = _wrap(self.data)
        out._version, out._made_at = self._version, self._version[0]
        return out

    def retain_grad(self) -> Tensor:
        """Store this tensor's gradient in `.grad` even if it is not a leaf."""
        if not self.requires_grad:
            raise GradientError("retain_grad() needs a tensor that requires a gradient")
        if self._step is not None:
            self._step.retain = weakref.ref(self)
        return self

    def backward(self, grad: TensorLike = None, retain_graph: bool = False) -> None:
        """Add d(self)/d(leaf) to `.grad` of every leaf this tensor was computed from."""
        if not self.requires_grad:
            raise GradientError("backward() needs a tensor that was computed from one with requires_grad=True")
        if grad is None:
            if self.size != 1:
                raise GradientError(f"backward() without an argument needs a single number, not shape {self.shape}")
            seed: Array = np.ones(self.shape, self.dtype)
        else:
            seed = _as_array(grad, self.dtype)
            if seed.shape != self.shape:
                raise ShapeError(f"the gradient has shape {seed.shape}, the tensor {self.shape}")
        with np.errstate(all="ignore"):
            walk_back(self, seed, retain_graph)

    def accumulate_grad(self, g: Array, owned: bool) -> None:
        """Add to `.grad`; an `owned` array, which has no other users, becomes `.grad` without a copy."""
        if self.grad is None:
            self.grad = _wrap(g if owned and g.flags.writeable else g.copy())
        else:
            current_backend().dispatch("add_in_place", self.grad.data, g)

    # --- changes in place ---

    def _in_place(self, operation: type[ops.Operation], other: TensorLike, **params: Any) -> Tensor:
        """Compute out of place, copy the result into this tensor's memory, and put this tensor into the graph."""
        if _recording.get() and self.requires_grad and (self._step is None or self._step.is_view):
            kind = "leaf" if self._step is None else "view"
            raise GradientError(
                f"a {kind} that requires a gradient cannot be changed in place; use no_grad() or a copy"
            )
        before = _wrap(self.data)
        before._version, before._made_at = self._version, self._made_at
        before._step, before.requires_grad = self._step, self.requires_grad
        result = apply(operation, before, _operand(other, self), **params)
        if result.shape != self.shape:
            raise ShapeError(f"a tensor of shape {self.shape} cannot hold a result of shape {result.shape} in place")
        self.data[...] = result.data
        self._version[0] += 1
        self._made_at = self._version[0]
        if result.requires_grad:
            self._step, self.requires_grad = result._step, True
        return self

    def add_(self, other: TensorLike) -> Tensor:
        return self._in_place(ops.Add, other)

    def sub_(self, other: TensorLike) -> Tensor:
        return self._in_place(ops.Sub, other)

    def mul_(self, other: TensorLike) -> Tensor:
        return self._in_place(ops.Mul, other)

    def div_(self, other: TensorLike) -> Tensor:
        return self._in_place(ops.Div, other)

    __iadd__, __isub__, __imul__, __itruediv__ = add_, sub_, mul_, div_

    def __setitem__(self, index: Any, value: TensorLike) -> None:
        """Write elements in place; recorded if a gradient is involved."""
        if self.requires_grad or (isinstance(value, Tensor) and value.requires_grad):
            self._in_place(ops.SetItem, value, index=_as_index(index))
            return
        try:
            self.data[_as_index(index)] = value.data if isinstance(value, Tensor) else value
        except (IndexError, ValueError) as error:
            raise ShapeError(f"cannot write to this index of a tensor of shape {self.shape}: {error}") from None
        self._version[0] += 1
        self._made_at = self._version[0]

    def copy_(self, other: TensorLike) -> Tensor:
        self[...] = other
        return self

    def fill_(self, value: float) -> Tensor:
        self[...] = value
        return self

    def zero_(self) -> Tensor:
        return self.fill_(0)

    # --- arithmetic ---

    def __add__(self, other: TensorLike) -> Tensor:
        return apply(ops.Add, self, _operand(other, self))

    def __sub__(self, other: TensorLike) -> Tensor:
        return apply(ops.Sub, self, _operand(other, self))

    def __mul__(self, other: TensorLike) -> Tensor:
        return apply(ops.Mul, self, _operand(other, self))

    def __truediv__(self, other: TensorLike) -> Tensor:
        return apply(ops.Div, self, _operand(other, self))

    def __pow__(self, other: TensorLike) -> Tensor:
        return apply(ops.Pow, self, _operand(other, self))

    def __matmul__(self, other: TensorLike) -> Tensor:
        return apply(ops.MatMul, self, _operand(other, self))

    def __rsub__(self, other: TensorLike) -> Tensor:
        return apply(ops.Sub, _operand(other, self), self)

    def __rtruediv__(self, other: TensorLike) -> Tensor:
        return apply(ops.Div, _operand(other, self), self)

    def __rpow__(self, other: TensorLike) -> Tensor:
        return apply(ops.Pow, _operand(other, self), self)

    def __rmatmul__(self, other: TensorLike) -> Tensor:
        return apply(ops.MatMul, _operand(other, self), self)

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Tensor:
        return apply(ops.Neg, self)

    def __abs__(self) -> Tensor:
        return apply(ops.Abs, self)

    def exp(self) -> Tensor:
        return apply(ops.Exp, self)

    def log(self) -> Tensor:
        return apply(ops.Log, self)

    def sqrt(self) -> Tensor:
        return apply(ops.Sqrt, self)

    def tanh(self) -> Tensor:
        return apply(ops.Tanh, self)

    def sigmoid(self) -> Tensor:
        return apply(ops.Sigmoid, self)

    def sin(self) -> Tensor:
        return apply(ops.Sin, self)

    def cos(self) -> Tensor:
        return apply(ops.Cos, self)

    def relu(self) -> Tensor:
        return apply(ops.Relu, self)

    def gelu(self) -> Tensor:
        return apply(ops.Gelu, self)

    def clip(self, low: float | None = None, high: float | None = None) -> Tensor:
        return apply(ops.Clip, self, low=low, high=high)

    def maximum(self, other: TensorLike) -> Tensor:
        return apply(ops.Maximum, self, _operand(other, self))

    def minimum(self, other: TensorLike) -> Tensor:
        return apply(ops.Maximum, self, _operand(other, self), sign=-1)

    abs, pow, matmul, clamp = __abs__, __pow__, __matmul__, clip

    # --- comparisons: tensors of bool, never recorded ---

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]
        return _wrap(np.equal(self.data, _operand(other, self).data))

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]
        return _wrap(np.not_equal(self.data, _operand(other, self).data))

    def __lt__(self, other: TensorLike) -> Tensor:
        return _wrap(self.data < _operand(other, self).data)

    def __le__(self, other: TensorLike) -> Tensor:
        return _wrap(self.data <= _operand(other, self).data)

    def __gt__(self, other: TensorLike) -> Tensor:
        return _wrap(self.data > _operand(other, self).data)

    def __ge__(self, other: TensorLike) -> Tensor:
        return _wrap(self.data >= _operand(other, self).data)

    __hash__ = object.__hash__

    # --- reductions ---

    def sum(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        return apply(ops.Sum, self, axis=axis, keepdims=keepdims)

    def mean(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        return apply(ops.Mean, self, axis=axis, keepdims=keepdims)

    def var(self, axis: Axis = None, keepdims: bool = False, correction: int = 1) -> Tensor:
        return apply(ops.Var, self, axis=axis, keepdims=keepdims, correction=correction)

    def std(self, axis: Axis = None, keepdims: bool = False, correction: int = 1) -> Tensor:
        return self.var(axis, keepdims, correction).sqrt()

    def max(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        return apply(ops.Max, self, axis=axis, keepdims=keepdims)

    def min(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        return apply(ops.Max, self, axis=axis, keepdims=keepdims, sign=-1)

    def argmax(self, axis: int | None = None, keepdims: bool = False) -> Tensor:
        return _wrap(_checked(np.argmax, self.data, axis=axis, keepdims=keepdims))

    def argmin(self, axis: int | None = None, keepdims: bool = False) -> Tensor:
        return _wrap(_checked(np.argmin, self.data, axis=axis, keepdims=keepdims))

    def cumsum(self, axis: int) -> Tensor:
        return apply(ops.CumSum, self, axis=axis)

    def softmax(self, axis: int = -1) -> Tensor:
        return apply(ops.Softmax, self, axis=axis)

    def log_softmax(self, axis: int = -1) -> Tensor:
        return apply(ops.Softmax, self, axis=axis, log=True)

    # --- shapes and indexing ---

    def reshape(self, *shape: Any) -> Tensor:
        return apply(ops.Reshape, self, shape=_as_shape(shape))

    view = reshape

    def flatten(self, start: int = 0) -> Tensor:
        leading = self.shape[: start % max(self.ndim, 1)]
        return self.reshape(*leading, int(np.prod(self.shape[len(leading) :])))

    def permute(self, *axes: Any) -> Tensor:
        return apply(ops.Permute, self, axes=_as_shape(axes))

    def transpose(self, axis0: int = -2, axis1: int = -1) -> Tensor:
        """Swap two axes, by default the last two."""
        order = list(range(self.ndim))
        first, second = ops.reduced_axes((axis0, axis1), self.ndim)
        order[first], order[second] = second, first
        return apply(ops.Permute, self, axes=tuple(order))

    @property
    def T(self) -> Tensor:
        return apply(ops.Permute, self, axes=tuple(range(self.ndim))[::-1])

    def unsqueeze(self, axis: int) -> Tensor:
        axis = axis % (self.ndim + 1)
        return self.reshape(*self.shape[:axis], 1, *self.shape[axis:])

    def squeeze(self, axis: Axis = None) -> Tensor:
        axes = ops.reduced_axes(axis, self.ndim)
        return self.reshape(*[n for i, n in enumerate(self.shape) if n != 1 or i not in axes])

    def expand(self, *shape: Any) -> Tensor:
        """Broadcast to a shape without copying; -1 keeps the size of an axis."""
        sizes = _as_shape(shape)
        new = len(sizes) - self.ndim  # axes in front of the tensor's own
        full = [self.shape[i - new] if n == -1 and i >= new >= 0 else n for i, n in enumerate(sizes)]
        return apply(ops.Expand, self, shape=tuple(full))

    broadcast_to = expand

    def split(self, size: int | Sequence[int], axis: int = 0) -> list[Tensor]:
        """Split along an axis into tensors of `size` (the last may be smaller), or of the sizes in a list."""
        (axis,) = ops.reduced_axes(axis, self.ndim)
        total = self.shape[axis]
        sizes = [min(size, total - i) for i in range(0, max(total, 1), size)] if isinstance(size, int) else list(size)
        if sum(sizes) != total:
            raise ShapeError(f"the sizes {sizes} do not add up to {total}, the size of axis {axis}")
        ends = list(itertools.accumulate(sizes))
        before = (slice(None),) * axis
        return [self[(*before, slice(end - n, end))] for n, end in zip(sizes, ends, strict=True)]

    def pad(self, widths: Sequence[tuple[int, int]], value: float = 0.0) -> Tensor:
        """Pad each axis with `(before, after)` entries of `value`, like `numpy.pad`."""
        return apply(ops.Pad, self, widths=tuple((int(b), int(a)) for b, a in widths), value=value)

    def gather(self, axis: int, indices: TensorLike) -> Tensor:
        return apply(ops.TakeAlongAxis, self, indices=_as_array(indices), axis=axis)

    def masked_fill(self, mask: TensorLike, value: float) -> Tensor:
        return where(mask, _operand(value, self), self)

    def __getitem__(self, index: Any) -> Tensor:
        return apply(ops.GetItem, self, index=_as_index(index))

    def astype(self, dtype: npt.DTypeLike) -> Tensor:
        return self if np.dtype(dtype) == self.dtype else apply(ops.Cast, self, dtype=dtype)

    def to(self, target: npt.DTypeLike | str) -> Tensor:
        """Convert to a dtype. The device "cpu" is accepted and returns the tensor itself; there is no other device."""
        if target == "cpu":
            return self
        if isinstance(target, str) and target.partition(":")[0] in ("cuda", "mps", "xpu"):
            raise UnavailableError(f"tilewise tensors are on the CPU; there is no device {target!r}")
        return self.astype(target)

    def float(self) -> Tensor:
        return self.astype(np.float32)

    def double(self) -> Tensor:
        return self.astype(np.float64)

    def clone(self) -> Tensor:
        return apply(ops.Copy, self)

    def contiguous(self) -> Tensor:
        return self if self._array.flags.c_contiguous else self.clone()


# --- functions of several tensors ---


def cat(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Concatenate tensors along an existing axis."""
    return apply(ops.Cat, *tensors, axis=axis)


def stack(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Stack tensors of equal shape along a new axis."""
    return cat([t.unsqueeze(axis) for t in tensors], axis=axis)


def where(condition: TensorLike, a: TensorLike, b: TensorLike) -> Tensor:
    """Select elements of `a` where the condition is true, of `b` elsewhere."""
    like = a if isinstance(a, Tensor) else b if isinstance(b, Tensor) else Tensor(a)
    return apply(ops.Where, _operand(a, like), _operand(b, like), condition=_as_array(condition))


def from_dlpack(array: Any) -> Tensor:
    """Create a tensor on the memory of any CPU array that supports DLPack: NumPy, PyTorch, JAX, ..."""
    try:
        return Tensor(np.from_dlpack(array))
    except (BufferError, RuntimeError, TypeError, AttributeError) as error:
        raise DtypeError(f"this object cannot be shared through DLPack: {error}") from None


# --- converting arguments to arrays ---


def _as_array(data: TensorLike, dtype: npt.DTypeLike | None = None) -> Array:
    """Convert to an array. Arrays keep their dtype; Python floats become float32 unless `dtype` is given."""
    if isinstance(data, Tensor):
        data = data.data
    if isinstance(data, np.ndarray | np.generic):
        array = np.asarray(data, dtype)
    else:
        try:
            array = np.asarray(data)
        except ValueError as error:
            raise ShapeError(f"these values do not form an array: {error}") from None
        target = dtype if dtype is not None else np.float32 if array.dtype == np.float64 else array.dtype
        array = array.astype(target, copy=False) if array.dtype.kind in "fiub" else array
    if array.dtype.kind not in "fiub":
        raise DtypeError(f"a tensor contains numbers, not {array.dtype}")
    return array


def _operand(value: TensorLike, like: Tensor) -> Tensor:
    """Convert the other operand to a tensor; Python numbers take the dtype of `like`."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool | int) or (isinstance(value, float) and like._array.dtype.kind == "f"):
        return _wrap(np.array(value, like._array.dtype if like._array.dtype != bool else None))
    return _wrap(_as_array(value))


def _as_index(index: Any) -> Any:
    """Convert an index expression for NumPy: tensors to arrays, lists to integer or boolean arrays."""
    if isinstance(index, tuple):
        return tuple(_as_index(part) for part in index)
    if isinstance(index, Tensor):
        return index._array
    return np.asarray(index, dtype=np.intp if not index else None) if isinstance(index, list) else index


def _as_shape(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes


def _checked(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a NumPy function; its `ValueError` becomes a `ShapeError`."""
    try:
        return function(*args, **kwargs)
    except ValueError as error:
        raise ShapeError(str(error)) from None
