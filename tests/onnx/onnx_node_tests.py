"""The onnx package's own tests of single operations, run here: a network, inputs and expected outputs each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from onnx.backend.test.loader import load_model_tests

import tilewise.onnx
from tilewise.errors import TilewiseError
from tilewise.onnx.operators import TABLE


def operations(model: Any) -> set[str]:
    nodes = model.graph.node
    return {node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}" for node in nodes}


def cases() -> Iterator[Any]:
    """The cases whose operations are all supported, without the ones that spell an operation out in others."""
    for case in sorted(load_model_tests(kind="node"), key=lambda case: case.name):
        if operations(case.model) <= set(TABLE) and not case.name.endswith("_expanded"):
            yield case


def outcome(case: Any, folder: Path) -> str:
    """ "ok", what was refused in a sentence, or how far off the results are."""
    path = folder / "model.onnx"
    path.write_bytes(case.model.SerializeToString())
    inputs, expected = case.data_sets[0]
    try:
        output = tilewise.onnx.load(path)(*inputs)
    except TilewiseError as error:
        return f"refused: {error}"
    results = list(output.values()) if isinstance(output, dict) else [output]
    return compare([r.data for r in results], [np.asarray(e) for e in expected])


def compare(results: list[Any], expected: list[Any]) -> str:
    for output, want in zip(results, expected, strict=True):
        if output.shape != want.shape:
            return f"shape {output.shape}, not {want.shape}"
        wide = want.astype(np.float32) if want.dtype.itemsize == 2 and want.dtype.kind not in "iu" else want
        if output.dtype != wide.dtype:
            return f"{output.dtype}, not {want.dtype}"
        loose = 1e-2 if wide is not want else 1e-3
        if not np.allclose(output, wide, rtol=loose, atol=loose if wide is not want else 1e-6, equal_nan=True):
            return f"off by {np.abs(output.astype(np.float64) - wide).max():.3g}"
    return "ok"
