"""A small, fast tensor framework, and a learned cost model that chooses its tile sizes.

The three most important names: `Tensor`, `nn` (layers) and `backend` (the kernels that operations dispatch to). Names
are imported on first use, so that `tilewise --help` does not load NumPy and the kernels.
"""

import os
from typing import TYPE_CHECKING

from tilewise._late import late_names

if TYPE_CHECKING:
    from tilewise import backend, data, interop, models, nn, onnx, optim
    from tilewise._threads import (
        batch_invariant,
        get_batch_invariant,
        get_num_threads,
        set_batch_invariant,
        set_num_threads,
    )
    from tilewise.gpu.pinning import pin, unpin
    from tilewise.io import load, save
    from tilewise.models.saved import load_model
    from tilewise.nn.self_planning import explain, get_self_planning, set_self_planning
    from tilewise.ops.gradcheck import gradcheck
    from tilewise.plan import compile
    from tilewise.tensor import Tensor, cat, enable_grad, from_dlpack, is_grad_enabled, no_grad, stack, where

__version__ = "0.1.0"

__all__ = [
    "Tensor",
    "backend",
    "batch_invariant",
    "cat",
    "compile",
    "data",
    "enable_grad",
    "explain",
    "from_dlpack",
    "get_batch_invariant",
    "get_num_threads",
    "get_self_planning",
    "gradcheck",
    "interop",
    "is_grad_enabled",
    "load",
    "load_model",
    "models",
    "nn",
    "no_grad",
    "onnx",
    "optim",
    "pin",
    "save",
    "set_batch_invariant",
    "set_num_threads",
    "set_self_planning",
    "stack",
    "unpin",
    "where",
]

__getattr__ = late_names(
    __name__,
    {
        ".ops.gradcheck": "gradcheck",
        "._threads": "batch_invariant get_batch_invariant get_num_threads set_batch_invariant set_num_threads",
        ".gpu.pinning": "pin unpin",
        ".io": "load save",
        ".models.saved": "load_model",
        ".nn.self_planning": "explain get_self_planning set_self_planning",
        ".plan": "compile",
        ".tensor": "Tensor cat enable_grad from_dlpack is_grad_enabled no_grad stack where",
        **{f".{package}": "" for package in ("backend", "data", "interop", "models", "nn", "onnx", "optim")},
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if os.environ.get("TILEWISE_PIN"):
    from tilewise.gpu.pinning.patch import pin_by_environment

    pin_by_environment()
