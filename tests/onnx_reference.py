"""What ONNX Runtime computes from a file, on one thread and with the file's own integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest


def reference(path: Path, *inputs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The first output for inputs in their order."""
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", "1")  # without VNNI it saturates otherwise
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = runtime.InferenceSession(str(path), options)
    outputs: np.ndarray[Any, Any] = session.run(
        None, dict(zip((i.name for i in session.get_inputs()), inputs, strict=True))
    )[0]
    return outputs
