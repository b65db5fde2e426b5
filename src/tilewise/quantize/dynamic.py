"""Dynamic quantization of transformers: int8 weights in every linear layer, activations quantized row by row.

There is no calibration: a row's scale follows from its own largest value. Norms, softmax and attention scores stay in
float32.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection

from tilewise import nn
from tilewise.errors import ConfigurationError
from tilewise.nn import Module
from tilewise.nn.transformer import MultiHeadAttention
from tilewise.quantize.calibration import is_quantized
from tilewise.quantize.layers import QuantizedLinear
from tilewise.tensor import Tensor


class QuantizedAttention(MultiHeadAttention):
    """Attention whose projections are integer layers, int8 by default."""

    def __init__(self, attention: MultiHeadAttention) -> None:
        self._set_up(
            attention,
            QuantizedLinear.from_weights(attention.in_proj_weight.data, attention.in_proj_bias.data),
            QuantizedLinear.from_float(attention.out_proj),
        )

    @classmethod
    def around(cls, attention: MultiHeadAttention, in_proj: Module, out_proj: Module) -> QuantizedAttention:
        """Replace the projections of an attention layer by these two layers."""
        new = cls.__new__(cls)
        new._set_up(attention, in_proj, out_proj)
        return new

    def _set_up(self, attention: MultiHeadAttention, in_proj: Module, out_proj: Module) -> None:
        self.embed_dim, self.num_heads, self.head_dim = attention.embed_dim, attention.num_heads, attention.head_dim
        self.causal = attention.causal
        self.in_proj, self.out_proj = in_proj, out_proj  # type: ignore[assignment]

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
    _replace_linear_layers(out, "", keep_float)
    # An int8 layer has no gradient: without this every call would have to be made under no_grad().
    for tensor in out.parameters():
        tensor.requires_grad = False
    convolutions = [name for name, m in out.named_modules() if isinstance(m, nn.Conv2d)]
    if convolutions:
        warnings.warn(
            f"{_first_of(convolutions)} in float32: only linear layers of a transformer compute in INT8", stacklevel=3
        )
    return out.eval()


def _first_of(names: list[str]) -> str:
    """Name the first convolution, and count the others."""
    return f"{names[0]} stays" if len(names) == 1 else f"{names[0]} and {len(names) - 1} other convolutions stay"


def _replace_linear_layers(module: Module, prefix: str, keep_float: Collection[str]) -> None:
    """Replace the linear layers below a module in place; `prefix` is the path of the module with a dot."""
    for name, child in list(module.named_children()):
        path = f"{prefix}{name}"
        if path in keep_float:
            continue
        if isinstance(child, MultiHeadAttention):
            setattr(module, name, QuantizedAttention(child))
        elif isinstance(child, nn.Linear):
            setattr(module, name, QuantizedLinear.from_float(child))
        else:
            _replace_linear_layers(child, f"{path}.", keep_float)
