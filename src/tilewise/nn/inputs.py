"""Calls of a module with inputs that are not Tensors: NumPy arrays, PyTorch tensors, lists of numbers.

Such inputs become Tensors. Floating-point numbers take the dtype of the module's weights, because NumPy computes in
float64 by default. A module returns Tensors (`numpy.asarray` of one is its array), except that in eval mode it answers
PyTorch tensors with PyTorch tensors, which have no gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewise._events import recorders
from tilewise.errors import DtypeError, GradientError
from tilewise.nn.self_planning import infer
from tilewise.tensor import Tensor

if TYPE_CHECKING:
    from tilewise.nn.module import Module


def needs_conversion(value: Any) -> bool:
    """Tell whether a value is an array of another library, or a list of numbers."""
    if isinstance(value, np.ndarray):
        return True
    if isinstance(value, Tensor):
        return False
    while isinstance(value, list) and value:
        value = value[0]
        if isinstance(value, int | float):
            return True
    return hasattr(value, "__array__")


def call_with_arrays(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module whose first input is not a Tensor; in eval mode PyTorch tensors give PyTorch tensors."""
    dtype = next((p.dtype for p in module.parameters() if p.dtype.kind == "f"), None)
    tensors = [_as_tensor(module, value, dtype) for value in args]
    keywords = {name: _as_tensor(module, value, dtype) for name, value in kwargs.items()}
    is_inference = not (module.training or recorders)
    result = infer(module, tuple(tensors), keywords) if is_inference else module(*tensors, **keywords)
    from_torch = not module.training and any(map(_is_torch, (*args, *kwargs.values())))
    return _as_torch(result) if from_torch else result


def _as_tensor(module: Module, value: Any, dtype: npt.DTypeLike | None) -> Any:
    """Convert an array or list to a Tensor; return other values unchanged."""
    if not needs_conversion(value):
        return value
    if _is_torch(value):
        value = _as_array(value)
    try:
        tensor = Tensor(value)
    except DtypeError:
        raise DtypeError(f"{type(module).__name__} takes numbers, not {np.asarray(value).dtype}") from None
    if tensor.dtype.kind == "f" and dtype is not None and tensor.dtype != dtype:
        return Tensor(tensor.data.astype(dtype))
    return tensor


def _is_torch(value: Any) -> bool:
    return type(value).__module__.startswith("torch") and hasattr(value, "detach")


def _as_array(tensor: Any) -> npt.NDArray[Any]:
    """Return the array of a PyTorch tensor, which shares its memory."""
    if not tensor.is_cpu:
        raise DtypeError(f"this PyTorch tensor is on {tensor.device}, and tilewise computes on the CPU; pass x.cpu()")
    if tensor.requires_grad:
        raise GradientError("gradients do not flow from tilewise to PyTorch; pass x.detach()")
    try:
        array: npt.NDArray[Any] = tensor.numpy()
    except (TypeError, RuntimeError):  # bfloat16, sparse and quantized tensors
        raise DtypeError(f"NumPy has no {tensor.dtype} of this layout; pass x.float() as a dense tensor") from None
    return array


def _as_torch(result: Any) -> Any:
    """Convert all Tensors in a result to PyTorch tensors that share their memory."""
    import torch

    if isinstance(result, Tensor):
        return torch.from_numpy(np.ascontiguousarray(result.data))
    if isinstance(result, dict):
        return {name: _as_torch(value) for name, value in result.items()}
    return type(result)(map(_as_torch, result)) if type(result) in (tuple, list) else result
