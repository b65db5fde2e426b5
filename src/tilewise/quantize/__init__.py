"""Quantization: int8 weights and products, int16 where int8 is too coarse, four-bit weights of linear layers.

The three most important names: `quantize` (converts a model), `calibrate` (observes its ranges) and `QuantizedModel`.
"""

from typing import TYPE_CHECKING

from tilewise._late import late_names

if TYPE_CHECKING:
    from tilewise.quantize.calibration import Calibration, calibrate
    from tilewise.quantize.convert import quantize
    from tilewise.quantize.dynamic import quantize_dynamic
    from tilewise.quantize.files import load_quantized, save_quantized
    from tilewise.quantize.four_bits import FourBitLinear, load_four_bits, save_four_bits
    from tilewise.quantize.layers import QuantizedConv2d, QuantizedLinear
    from tilewise.quantize.model import QuantizedModel, StepReport
    from tilewise.quantize.parameters import (
        AffineParameters,
        INT8Quantizer,
        QuantizedArray,
        QuantizedWeights,
        quantize_array,
    )

__all__ = [
    "AffineParameters",
    "Calibration",
    "FourBitLinear",
    "INT8Quantizer",
    "QuantizedArray",
    "QuantizedConv2d",
    "QuantizedLinear",
    "QuantizedModel",
    "QuantizedWeights",
    "StepReport",
    "calibrate",
    "load_four_bits",
    "load_quantized",
    "quantize",
    "quantize_array",
    "quantize_dynamic",
    "save_four_bits",
    "save_quantized",
]

__getattr__ = late_names(
    __name__,
    {
        ".calibration": "Calibration calibrate",
        ".convert": "quantize",
        ".dynamic": "quantize_dynamic",
        ".files": "load_quantized save_quantized",
        ".four_bits": "FourBitLinear load_four_bits save_four_bits",
        ".layers": "QuantizedConv2d QuantizedLinear",
        ".model": "QuantizedModel StepReport",
        ".parameters": "AffineParameters INT8Quantizer QuantizedArray QuantizedWeights quantize_array",
    },
)
