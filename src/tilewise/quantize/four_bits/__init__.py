"""Linear layers with four-bit weights: `quantize(model, data, bits=4)`.

Weights are packed in blocks of 32 (blocks.py). Each row of inputs is quantized to int8 at run time, with one scale per
block of 32. The sums of a block are integers, so that every instruction set and NumPy produce the same floats. With
calibration data, weights are rounded by GPTQ (Frantar et al. 2023) with the second moments of the inputs. A file holds
arrays, no code: it is loaded into a model of the same architecture.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from tilewise._extension import native
from tilewise.errors import ConfigurationError, FileFormatError, ShapeError
from tilewise.io import load_arrays, save
from tilewise.nn import Module
from tilewise.nn import functional as F
from tilewise.quantize.block_linear import BlockLinear
from tilewise.quantize.calibration import check_model
from tilewise.quantize.dynamic import replace_linear_layers
from tilewise.quantize.four_bits.blocks import BLOCK, Blocks, round_blocks
from tilewise.tensor import Array, Tensor, no_grad

_MOST_MOMENTS = 1 << 28  # floats of second moments that are collected in one pass over the data


class FourBitLinear(BlockLinear):
    """Linear layer with four-bit weights: float input, float output."""

    def __init__(self, blocks: Blocks, bias: Array | None = None) -> None:
        make = NumpyInt4Weights if native is None else native.BlockMatrix.from_codes
        super().__init__(make(*blocks.arrays()), bias)

    def blocks(self) -> Blocks:
        """Unpack the weight into four-bit codes, scales and minimums."""
        return Blocks(*self.kernel.unpack())

    def __deepcopy__(self, memo: dict[int, Any]) -> FourBitLinear:
        return FourBitLinear(self.blocks(), self.float_bias)


class NumpyInt4Weights:
    """NumPy reference of the packed weights, used if the compiled kernels are missing and to test them."""

    def __init__(self, codes: Array, scales: Array, minimums: Array | None, column_scale: Array) -> None:
        """Pack codes two per byte, and store the scales of blocks and rows."""
        # (outputs, blocks * 32) codes, two per byte: the even one in the low half.
        padded = np.zeros((len(codes), scales.shape[1] * BLOCK), np.uint8)
        padded[:, : codes.shape[1]] = codes
        self._packed = padded[:, 0::2] | padded[:, 1::2] << 4
        self._inputs, self._scales, self._minimums, self._column_scale = codes.shape[1], scales, minimums, column_scale
        self.shape = codes.shape

    @property
    def nbytes(self) -> int:
        minimums = 0 if self._minimums is None else self._minimums.nbytes
        return int(self._packed.nbytes + self._scales.nbytes + minimums + self._column_scale.nbytes)

    def unpack(self) -> tuple[Array, Array, Array | None, Array]:
        return self._codes()[:, : self._inputs].copy(), self._scales, self._minimums, self._column_scale

    def rows(self, indices: Array) -> Array:
        """Dequantize the weight rows of the outputs `indices` (n,) to float32 (n, inputs)."""
        rows: Array = Blocks(*self.unpack()).dequantize()[indices]
        return rows

    def _codes(self) -> Array:
        """Unpack the 4-bit codes, two per byte with the lower one first, to one uint8 each."""
        codes = np.empty((len(self._packed), 2 * self._packed.shape[1]), np.uint8)
        codes[:, 0::2], codes[:, 1::2] = self._packed & 15, self._packed >> 4
        return codes

    def linear(self, x: Array) -> Array:
        """Compute x @ weight.T for float32 x (N, inputs) with exact integer sums per block."""
        q, row_scale, row_sum = quantize_row_blocks(x)
        codes = self._codes()
        out = np.zeros((len(x), len(codes)), np.float32)
        with np.errstate(all="ignore"):
            # Blocks are added in the order of the native kernel: float addition is not associative.
            for b in range(self._scales.shape[1]):
                block = slice(b * BLOCK, (b + 1) * BLOCK)
                sums = q[:, block].astype(np.int32) @ codes[:, block].T.astype(np.int32)  # (N, O)
                self._add_block(out, b, sums, row_scale[:, b : b + 1], row_sum[:, b : b + 1])
            return out * self._column_scale

    def _add_block(self, out: Array, block: int, sums: Array, row_scale: Array, row_sum: Array) -> None:
        """Add the products of one block of 32 inputs, dequantized, to `out` (N, O).

        `sums` (N, O) are integer sums of codes times inputs; `row_scale` and `row_sum` (N, 1) are the scale and the sum
        of each input row's block.
        """
        scale = self._scales[:, block].astype(np.float32) * row_scale
        if self._minimums is None:
            # Symmetric codes are stored with an offset of 8.
            out += (sums - 8 * row_sum).astype(np.float32) * scale
            return
        # Asymmetric codes: weight = scale * code + minimum, so the minimum multiplies the sum of the inputs.
        out += sums.astype(np.float32) * scale
        out += self._minimums[:, block].astype(np.float32) * (row_scale * row_sum.astype(np.float32))


def quantize_row_blocks(rows: Array) -> tuple[Array, Array, Array]:
    """Quantize float32 (N, K) to int8 (N, blocks * 32); return it with the scale and sum of each block (N, blocks).

    The number of blocks is even; the last ones are padded with zeros.
    """
    width = -(-rows.shape[1] // (2 * BLOCK)) * 2 * BLOCK
    padded = np.zeros((len(rows), width), np.float32)
    padded[:, : rows.shape[1]] = np.where(np.isnan(rows), np.float32(0), rows)
    blocks = padded.reshape(len(rows), -1, BLOCK)
    largest = np.abs(blocks).max(2)
    # A block of zeros, or of values so small that the inverse scale overflows, becomes zeros.
    with np.errstate(all="ignore"):
        inverse = np.float32(127) / largest
        inverse = np.where((largest > 0) & np.isfinite(inverse), inverse, np.float32(0))
        q = np.rint(np.nan_to_num(blocks * inverse[..., None])).astype(np.int8)
    return q.reshape(len(rows), width), largest / np.float32(127), q.sum(2, dtype=np.int32)


def quantize_four_bits(model: Module, data: Iterable[Any] | None = None, symmetric: bool = True) -> Module:
    """Return a copy of `model` with four-bit linear layers. `data`: calibration batches for GPTQ rounding."""
    check_model(model)
    batches = None if data is None else list(data)
    if batches is not None and not batches:
        raise ConfigurationError("the calibration data is empty: rounding by it needs at least one input")
    out = copy.deepcopy(model).eval()
    places = watch(out)
    if not places:
        raise ConfigurationError("this model has no linear layer whose weights could be four bits")
    # The second moments of all layers may exceed the memory: each pass over the data serves as many layers as fit.
    while places:
        now = _layers_within_memory(places)
        if batches is not None:
            _collect_moments(out, batches, [getattr(parent, name) for parent, name in now])
        for parent, name in now:
            watched: _MomentCollector = getattr(parent, name)
            blocks = round_blocks(watched.linear.weight.data, symmetric, watched.moments)
            bias = watched.linear.bias
            setattr(parent, name, FourBitLinear(blocks, None if bias is None else bias.data))
        places = places[len(now) :]
    return out


class _MomentCollector(Module):
    """Wrapper of a linear layer that accumulates the second moments of its inputs while `watching` is set."""

    plans_itself = False

    def __init__(self, linear: Any) -> None:
        self.linear = linear
        self.watching, self.row_count = False, 0
        self.moments: Array | None = None

    def forward(self, x: Tensor, activation: str | None = None, residual: Tensor | None = None) -> Tensor:
        """Apply the linear layer; while watching, add x^T x of its input rows to the moments."""
        if self.watching:
            # GPTQ needs E[x x^T] over all rows (tokens); `_collect_moments` divides by their number.
            rows = x.data.reshape(-1, x.shape[-1]).astype(np.float32, copy=False)
            new, self.row_count = rows.T @ rows, self.row_count + len(rows)  # (inputs, inputs)
            self.moments = new if self.moments is None else self.moments + new
        return F.linear(x, self.linear.weight, self.linear.bias, activation=activation, residual=residual)


def watch(module: Module) -> list[tuple[Module, str]]:
    """Wrap every linear layer in a `_MomentCollector`; return its (parent, attribute name), in model order."""
    return replace_linear_layers(module, _MomentCollector)


def _layers_within_memory(places: list[tuple[Module, str]]) -> list[tuple[Module, str]]:
    """Return the first of these layers (parent, attribute name) whose second moments fit into memory together."""
    total, count = 0, 0
    for parent, name in places:
        total += getattr(parent, name).linear.weight.shape[1] ** 2
        if count and total > _MOST_MOMENTS:
            break
        count += 1
    return places[:count]


def _model_input(batch: Any) -> Any:
    """Convert a calibration batch to a model's input: a Tensor for floats; integer token ids are unchanged."""
    values = batch.data if isinstance(batch, Tensor) else np.asarray(batch)
    if values.dtype.kind not in "fiu" or values.ndim < 2:
        raise ShapeError(f"a calibration batch is an array of inputs, not {values.dtype} of shape {values.shape}")
    return values if values.dtype.kind in "iu" else Tensor(values.astype(np.float32, copy=False))


def _collect_moments(model: Module, batches: list[Any], layers: list[_MomentCollector]) -> None:
    """Run the batches and set each layer's `moments` to the mean of x xᵀ over its input rows."""
    for layer in layers:
        layer.watching = True
    with no_grad():
        for batch in batches:
            model(_model_input(batch))
    for layer in layers:
        layer.watching = False
        if layer.moments is None:
            raise ConfigurationError("a linear layer of this model saw none of the calibration data")
        layer.moments = layer.moments / np.float32(layer.row_count)
        if not np.isfinite(layer.moments).all():
            raise ConfigurationError("the calibration data gives NaN or infinity inside the model")


# --- files: safetensors with two weights per byte, the scales of the blocks, and the float tensors ---

_FORMAT = "tilewise four-bit model 1"


def save_four_bits(model: Module, path: str | os.PathLike[str]) -> None:
    """Write a model that `quantize(model, bits=4)` returned; `load_four_bits` restores the same numbers."""
    arrays = {name: tensor.data for name, tensor in model.named_tensors()}
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, FourBitLinear)]
    if not layers:
        raise ConfigurationError("this model has no four-bit layer; tilewise.save writes float models")
    for name, layer in layers:
        arrays |= {f"{name}.{what}": array for what, array in _stored_arrays(layer).items()}
    save(arrays, path, {"format": _FORMAT})


def load_four_bits(model: Module, path: str | os.PathLike[str]) -> Module:
    """Return a copy of the float `model` with the four-bit layers and tensors of a file of `save_four_bits`.

    >>> from tilewise import models
    >>> from tilewise.quantize import quantize
    >>> save_four_bits(quantize(models.mlp(), bits=4), "/tmp/mlp4.safetensors")
    >>> load_four_bits(models.mlp(), "/tmp/mlp4.safetensors")(np.zeros((2, 64), np.float32)).shape
    (2, 10)
    """
    arrays, metadata = load_arrays(path)
    if metadata.get("format") != _FORMAT:
        raise FileFormatError(f"{path} does not hold a four-bit model")
    out = copy.deepcopy(model).eval()
    places = watch(out)
    names = {id(module): name for name, module in out.named_modules()}
    # Replace every linear layer by the four-bit layer of the file, then fill the tensors that stayed float.
    for parent, child in places:
        watched: Any = getattr(parent, child)
        layer_arrays = {what: arrays.pop(f"{names[id(watched)]}.{what}", None) for what in _PARTS}
        setattr(parent, child, FourBitLinear(*_read_layer(layer_arrays, watched.linear.weight.shape, path)))
    for name, tensor in out.named_tensors():
        array = arrays.pop(name, None)
        if array is None or array.shape != tensor.shape:
            raise FileFormatError(
                f"{path} holds a model of another architecture: {name} is missing or of another shape"
            )
        tensor.data = array.astype(tensor.data.dtype)
    # Arrays that nothing used belong to layers that this model does not have.
    if arrays:
        raise FileFormatError(
            f"{path} holds a model of another architecture: this one has no tensor {sorted(arrays)[0]}"
        )
    return out


_PARTS = ("codes", "scales", "minimums", "column_scale", "bias")


def _stored_arrays(layer: FourBitLinear) -> dict[str, Array]:
    """Return a layer's arrays as a file stores them, by name; codes are packed two per byte."""
    blocks = layer.blocks()
    even = np.pad(blocks.codes, ((0, 0), (0, blocks.codes.shape[1] % 2)))
    arrays = {
        "codes": even[:, 0::2] | even[:, 1::2] << 4,  # two per byte, the first in the low half
        "scales": blocks.scales,
        "minimums": blocks.minimums,
        "column_scale": blocks.column_scale,
        "bias": layer.float_bias,
    }
    return {name: array for name, array in arrays.items() if array is not None}


def _read_layer(
    arrays: dict[str, Array | None], shape: tuple[int, ...], path: str | os.PathLike[str]
) -> tuple[Blocks, Array | None]:
    """Build (blocks, bias) from the stored arrays of a layer whose weight has this shape (outputs, inputs).

    FileFormatError, which names `path`, if an array is missing, invalid or of another shape.
    """
    outputs, inputs = shape
    blocks = -(-inputs // BLOCK)
    expected = {
        "codes": (outputs, -(-inputs // 2)),
        "scales": (outputs, blocks),
        "minimums": (outputs, blocks),
        "column_scale": (outputs,),
        "bias": (outputs,),
    }
    # Symmetric layers have no minimums, and any layer may lack a bias.
    for name, array in arrays.items():
        missing = array is None and name not in ("minimums", "bias")
        if missing or (array is not None and (array.shape != expected[name] or not _is_valid_array(name, array))):
            raise FileFormatError(f"{path} holds a model of another architecture, or invalid {name}")
    packed = arrays["codes"]
    scales, minimums, unit, bias = (arrays[name] for name in _PARTS[1:])
    assert packed is not None and scales is not None and unit is not None
    codes = np.empty((outputs, 2 * packed.shape[1]), np.uint8)
    codes[:, 0::2], codes[:, 1::2] = packed & 15, packed >> 4
    halves = None if minimums is None else minimums.astype(np.float16)
    result = Blocks(np.ascontiguousarray(codes[:, :inputs]), scales.astype(np.float16), halves, unit.astype(np.float32))
    return result, None if bias is None else bias.astype(np.float32)


def _is_valid_array(name: str, array: Array) -> bool:
    """Tell whether a stored array has the dtype of its name (uint8 for codes, else float) and finite values."""
    return array.dtype == np.uint8 if name == "codes" else array.dtype.kind == "f" and bool(np.isfinite(array).all())
