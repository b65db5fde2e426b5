"""Networks in and out as ONNX files: `load` makes a module of one, `save` writes a file that other runtimes run."""

from typing import TYPE_CHECKING

from tilewise._late import late_names
from tilewise.onnx.network import Network, load

if TYPE_CHECKING:
    from tilewise.onnx.saving import save

__all__ = ["Network", "load", "save"]

__getattr__ = late_names(
    __name__,
    {
        ".saving": "save",
    },
)
