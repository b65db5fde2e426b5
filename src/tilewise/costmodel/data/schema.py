"""Names of the feature columns of a TpuGraphs kernel: 140 node features, 24 tile features, 121 opcodes.

The tables are part of the file format (Phothilimthana et al. 2023, "TpuGraphs", appendix). Models take their input
sizes from these tables, not from the data, so that a model trained on ten kernels can read any other kernel. A
collection that was not measured on TPUs names its configuration columns in a ``schema.json`` beside ``train/``; without
that file the 24 TPU names apply.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewise._files import read_json_input
from tilewise.errors import FileFormatError

DIMENSIONS = 6  # columns per list of dimensions in TpuGraphs' files


def _numbered(stem: str, *suffixes: str, count: int = DIMENSIONS) -> Iterator[str]:
    """Yield the column names of a list of `count` entries, `stem_0` and so on, then its sum and product columns."""
    yield from (f"{stem}_{i}" for i in range(count))
    yield from (f"{stem}_{suffix}" for suffix in suffixes)


# XLA's primitive types in the order of the one-hot columns.
ELEMENT_TYPES = (
    "invalid_type", "pred", "s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64",
    "f16", "f32", "f64", "bf16", "c64", "c128", "tuple", "opaque_type", "token",
)  # fmt: skip
WINDOW_FIELDS = ("size", "stride", "padding_low", "padding_high", "window_dilation", "base_dilation")


def _node_features() -> Iterator[str]:
    """Yield the 140 node feature names in the order of the columns."""
    yield from ("is_root", "element_size_in_bits")
    yield from (f"shape_element_type_is_{name}" for name in ELEMENT_TYPES)
    yield from _numbered("shape_dimensions", "sum", "product")
    yield from ("shape_tuple_shapes_size", "parameter_number")
    yield from _numbered("dimensions")
    for window_field in WINDOW_FIELDS:
        # Every list is followed by its sum and product, as in TpuGraphs.
        yield from _numbered(f"window_{window_field}", "sum", "product")
    yield from _numbered("window_window_reversal", "true_count", "false_count")
    convolution = "convolution_dim_numbers"
    yield from (f"{convolution}_input_batch_dim", f"{convolution}_input_feature_dim")
    yield from _numbered(f"{convolution}_input_spatial_dims", count=4)
    yield from (f"{convolution}_kernel_input_feature_dim", f"{convolution}_kernel_output_feature_dim")
    yield from _numbered(f"{convolution}_kernel_spatial_dims", count=4)
    yield from (f"{convolution}_output_batch_dim", f"{convolution}_output_feature_dim")
    yield from ("feature_group_count", "batch_group_count")
    for stem in ("slice_dims_start", "slice_dims_stride", "slice_dims_limit", "dynamic_slice_sizes"):
        yield from _numbered(stem, "sum", "product", count=2)
    yield from _numbered("padding_config_edge_padding_low", "sum", "product", count=2)
    yield from _numbered("padding_config_edge_padding_high", "sum", "product", count=2)
    yield "is_stable"
    yield from _numbered("layout_minor_to_major")


NODE_FEATURES: tuple[str, ...] = tuple(_node_features())
TILE_FEATURES: tuple[str, ...] = tuple(
    name for stem in ("kernel_bounds", "output_bounds", "input_bounds") for name in _numbered(stem, "sum", "product")
)
LAYOUT_FEATURES: tuple[str, ...] = tuple(
    name for stem in ("output_layout", "input_layout", "kernel_layout") for name in _numbered(stem)
)
NODE_COLUMN: dict[str, int] = {name: column for column, name in enumerate(NODE_FEATURES)}

# The position in the tuple is the number in the files. 0 means unknown; 97 and 101 are no longer used by XLA.
OPCODES: tuple[str, ...] = (
    "unknown", "abs", "add", "add-dependency", "after-all", "all-reduce", "all-to-all", "atan2", "batch-norm-grad",
    "batch-norm-inference", "batch-norm-training", "bitcast", "bitcast-convert", "broadcast", "call", "ceil",
    "cholesky", "clamp", "collective-permute", "count-leading-zeros", "compare", "complex", "concatenate",
    "conditional", "constant", "convert", "convolution", "copy", "copy-done", "copy-start", "cosine", "custom-call",
    "divide", "domain", "dot", "dynamic-slice", "dynamic-update-slice", "exponential", "exponential-minus-one", "fft",
    "floor", "fusion", "gather", "get-dimension-size", "set-dimension-size", "get-tuple-element", "imag", "infeed",
    "iota", "is-finite", "log", "log-plus-one", "and", "not", "or", "xor", "map", "maximum", "minimum", "multiply",
    "negate", "outfeed", "pad", "parameter", "partition-id", "popcnt", "power", "real", "recv", "recv-done", "reduce",
    "reduce-precision", "reduce-window", "remainder", "replica-id", "reshape", "reverse", "rng",
    "rng-get-and-update-state", "rng-bit-generator", "round-nearest-afz", "rsqrt", "scatter", "select",
    "select-and-scatter", "send", "send-done", "shift-left", "shift-right-arithmetic", "shift-right-logical", "sign",
    "sine", "slice", "sort", "sqrt", "subtract", "tanh", "trace", "transpose", "triangular-solve", "tuple",
    "tuple-select", "while", "cbrt", "all-gather", "collective-permute-start", "collective-permute-done", "logistic",
    "dynamic-reshape", "all-reduce-start", "all-reduce-done", "reduce-scatter", "all-gather-start", "all-gather-done",
    "opt-barrier", "async-start", "async-update", "async-done", "round-nearest-even", "stochastic-convert", "tan",
)  # fmt: skip
N_OPCODES = len(OPCODES)
OPCODE_NUMBER: dict[str, int] = {name: number for number, name in enumerate(OPCODES)}

_MAX_CONFIG_FEATURES = 4096  # limit for untrusted files; TpuGraphs has 24


@dataclass(frozen=True)
class Schema:
    """Names of the configuration columns of a collection, and the other fields of its ``schema.json``."""

    config_features: tuple[str, ...] = TILE_FEATURES
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def width(self) -> int:
        return len(self.config_features)


def read_schema(root: Path) -> Schema:
    """Read the schema of the collection under `root`, or return the 24 TPU names if it has none."""
    path = root / "schema.json"
    return schema_from(read_json_input(path), path) if os.path.lexists(path) else Schema()


def schema_from(content: Any, path: Path) -> Schema:
    """Build a schema from a parsed ``schema.json``; `path` is named in error messages."""
    if not isinstance(content, dict):
        raise FileFormatError(f'{path} must contain an object such as {{"config_features": [...]}}.')
    extra = dict(content)
    names = extra.pop("config_features", list(TILE_FEATURES))
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise FileFormatError(f"{path}: config_features must be a list of names.")
    if not 0 < len(names) <= _MAX_CONFIG_FEATURES or len(set(names)) != len(names):
        raise FileFormatError(f"{path}: config_features must be 1 to {_MAX_CONFIG_FEATURES} different names.")
    return Schema(tuple(names), extra)
