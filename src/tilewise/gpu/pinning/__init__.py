"""Choosing GPU configurations without measuring, the same on every rank, boot and machine of a device.

- `patch.pin` makes every `triton.autotune` of the process and PyTorch's compiler choose without a benchmark.
- `choose.choose_config` chooses for a Triton kernel: from the lock file, else by the model, else the first that fits.
- `lock.LockFile` is the file `tilewise.lock` of all choices; `recompute.py` compares it with today's choices.

Importing this package imports neither PyTorch nor Triton.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from tilewise._late import late_names

if TYPE_CHECKING:
    from tilewise.gpu.pinning.patch import Pinned, pin, unpin

__all__ = ["Pinned", "pin", "startup_folder", "unpin"]


def startup_folder() -> str:
    """Return the folder whose `sitecustomize.py` pins a Python process that has it in its PYTHONPATH."""
    return str(Path(__file__).parent / "startup")


__getattr__ = late_names(__name__, {".patch": "Pinned pin unpin"})  # a decorated kernel needs none of the patches
