"""A small tensor framework made fast for real, and a learned cost model that picks its tile sizes."""

from tilewise import _tuned, backend, data, interop, models, nn, optim
from tilewise._threads import get_num_threads, set_num_threads
from tilewise.gradcheck import gradcheck
from tilewise.io import load, save
from tilewise.tensor import Tensor, cat, enable_grad, from_dlpack, is_grad_enabled, no_grad, stack, where

__version__ = "0.1.0"

backend.registry.start_with(_tuned.kept_chooser)

__all__ = [
    "Tensor",
    "backend",
    "cat",
    "data",
    "enable_grad",
    "from_dlpack",
    "get_num_threads",
    "gradcheck",
    "interop",
    "is_grad_enabled",
    "load",
    "models",
    "nn",
    "no_grad",
    "optim",
    "save",
    "set_num_threads",
    "stack",
    "where",
]
