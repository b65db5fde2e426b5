"""A small tensor framework made fast for real, and a learned cost model that picks its tile sizes.

Names are imported when they are first used, so that `tilewise --help` need not wait for NumPy and the kernels.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise import backend, data, interop, models, nn, onnx, optim
    from tilewise._gradcheck import gradcheck
    from tilewise._threads import get_num_threads, set_num_threads
    from tilewise.io import load, save
    from tilewise.tensor import Tensor, cat, enable_grad, from_dlpack, is_grad_enabled, no_grad, stack, where

__version__ = "0.1.0"

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
    "onnx",
    "optim",
    "save",
    "set_num_threads",
    "stack",
    "where",
]

_HOME = {
    "_threads": ("get_num_threads", "set_num_threads"),
    "_gradcheck": ("gradcheck",),
    "io": ("load", "save"),
    "tensor": ("Tensor", "cat", "enable_grad", "from_dlpack", "is_grad_enabled", "no_grad", "stack", "where"),
}


def __getattr__(name: str) -> Any:
    """Import a public name from the module it lives in, once."""
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module 'tilewise' has no attribute {name!r}")
    home = next((module for module, names in _HOME.items() if name in names), None)
    if home is None:
        return import_module(f"tilewise.{name}")
    globals()[name] = value = getattr(import_module(f"tilewise.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
