"""Files of quantized models: statically quantized ones (`models`) and traced ones (`traced`)."""

from tilewise.quantize.files.models import holds_quantized, load_quantized, model_arrays, save_quantized

__all__ = ["holds_quantized", "load_quantized", "model_arrays", "save_quantized"]
