"""A small tensor framework made fast for real, and a learned cost model that picks its tile sizes."""

from tilewise import backend, models, nn
from tilewise._threads import get_num_threads, set_num_threads
from tilewise.gradcheck import gradcheck
from tilewise.tensor import Tensor, cat, enable_grad, from_dlpack, is_grad_enabled, no_grad, stack, where

__version__ = "0.1.0"

__all__ = [
    "Tensor",
    "backend",
    "cat",
    "enable_grad",
    "from_dlpack",
    "get_num_threads",
    "gradcheck",
    "is_grad_enabled",
    "models",
    "nn",
    "no_grad",
    "set_num_threads",
    "stack",
    "where",
]
