"""Networks in and out as ONNX files: `load` makes a module of one, `save` writes a file that other runtimes run."""

from tilewise.onnx.network import Network, load
from tilewise.onnx.saving import save

__all__ = ["Network", "load", "save"]
