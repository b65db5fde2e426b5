"""Dynamic quantization of transformers: int8 weights in every linear layer, activations quantized row by row.

There is no calibration: a row's scale follows from its own largest value. Norms, softmax and attention scores stay in
float32.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection
from typing import Any

from tilewise import nn
from tilewise.errors import ConfigurationError
from tilewise.nn import Module
from tilewise.nn.transformer import MultiHeadAttention
from tilewise.quantize.calibration import is_quantized
from tilewise.quantize.layers import QuantizedLinear
from tilewise.tensor import Tensor


class QuantizedAttention(MultiHeadAttention):
    """Multi-head attention with each projection replaced by `make(projection)`, by default an int8 layer."""

    def __init__(
        self, attention: MultiHeadAttention, make: Callable[[Any], Module] = QuantizedLinear.from_float
    ) -> None:
        self.embed_dim, self.num_heads, self.head_dim = attention.embed_dim, attention.num_heads, attention.head_dim
        self.causal = attention.causal
        self.in_proj, self.out_proj = make(attention.in_layer()), make(attention.out_proj)  # type: ignore[assignment]

    def project(self, x: Tensor) -> Tensor:
        out: Tensor = self.in_proj(x)
        return out

    def in_layer(self) -> Module:
        return self.in_proj


def quantize_dynamic(model: Module, keep_float: Collection[str] = ()) -> Module:
    """Return a copy of `model` whose linear layers compute in int8, apart from those named in `keep_float`."""
    if is_quantized(model):
        raise ConfigurationError("this model is quantized already")
    names = [name for name, m in model.named_modules() if isinstance(m, MultiHeadAttention | nn.Linear)]
    unknown = set(keep_float) - set(names)
    if unknown:
        raise ConfigurationError(f"there is no linear layer {sorted(unknown)[0]!r} to keep in float")
    out = copy.deepcopy(model)
    replace_linear_layers(out, QuantizedLinear.from_float, keep_float)
    # An int8 layer has no gradient: without this every call would have to be made under no_grad().
    for tensor in out.parameters():
        tensor.requires_grad = False
    convolutions = [name for name, m in out.named_modules() if isinstance(m, nn.Conv2d)]
    if convolutions:
        others = f" and {len(convolutions) - 1} other convolutions stay" if len(convolutions) > 1 else " stays"
        message = f"{convolutions[0]}{others} in float32: only linear layers of a transformer compute in INT8"
        warnings.warn(message, stacklevel=3)
    return out.eval()


def replace_linear_layers(
    module: Module, make: Callable[[Any], Module], keep_float: Collection[str] = (), prefix: str = ""
) -> list[tuple[Module, str]]:
    """Replace every linear layer below `module` by `make(layer)`, except those named in `keep_float`.

    Return the (parent, attribute name) of each replaced layer, in model order. `prefix` is the path of `module` in
    names, with a dot at the end.
    """
    places: list[tuple[Module, str]] = []
    for name, child in list(module.named_children()):
        path = f"{prefix}{name}"
        if path in keep_float:
            continue
        if isinstance(child, MultiHeadAttention):
            attention = QuantizedAttention(child, make)
            setattr(module, name, attention)
            places += [(attention, "in_proj"), (attention, "out_proj")]
        elif isinstance(child, nn.Linear):
            setattr(module, name, make(child))
            places.append((module, name))
        else:
            places += replace_linear_layers(child, make, keep_float, f"{path}.")
    return places
