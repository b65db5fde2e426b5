"""Runs a model as it is validated and timed: one `answer(inputs)` for accuracy and speed alike.

A runner holds the model, the backend its operations go through, and how text is generated. It also measures
storage: the arrays that would go into its file, and the bytes it holds in memory. Both are read from the arrays
themselves, not from what a layer reports.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.backend import OptimizedBackend, current_backend, use_backend
from tilewise.bench.events import Event
from tilewise.errors import Rejected
from tilewise.generate import generate
from tilewise.nn import GPT, Linear, Module
from tilewise.prune import SparseLinear
from tilewise.quantize import INT8Quantizer, QuantizedLinear, QuantizedModel
from tilewise.tensor import Tensor, no_grad

Array = npt.NDArray[Any]
_CHUNK = 360


@dataclass
class Runner:
    """A model of an event as it is validated and timed: an entry, or the baseline."""

    event: Event
    model: Module
    backend: OptimizedBackend
    use_cache: bool = False
    cache_dtype: str = "float32"
    decoder_weights: str = "float32"

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use this runner's backend for operations inside the block, and record no gradients."""
        with use_backend(self.backend), no_grad():
            yield

    def call(self, inputs: Array) -> Array:
        """Run one timed call, inside `active`: logits (B, classes) of images, or the new tokens of a prompt."""
        if self.event.kind == "images":
            result: Tensor = self.model(Tensor(inputs))
            return result.data
        assert isinstance(self.model, GPT)
        options: dict[str, Any] = {"use_cache": self.use_cache}
        if self.use_cache:
            options |= {"weights": self.decoder_weights, "cache_dtype": self.cache_dtype}
        return np.fromiter(generate(self.model, inputs, self.event.new_tokens, **options), np.int64)

    def answer(self, inputs: Array) -> Array:
        """Return the answers to any number of images or prompts, computed call by call."""
        with self.active():
            if self.event.kind == "images":
                chunks = [self.call(inputs[i : i + _CHUNK]) for i in range(0, len(inputs), _CHUNK)]
                return np.concatenate(chunks)
            return np.stack([self.call(prompt) for prompt in inputs])

    # --- storage ---

    def stored_arrays(self) -> dict[str, Array]:
        """Return the arrays that a file of this entry contains, by name."""
        if self.decoder_weights == "int8":
            return _int8_decoder_arrays(self.model)
        return dict(_stored_entries(self.model, ""))

    @property
    def bytes_held(self) -> int:
        """Bytes of all weights in memory, including packed copies in layers."""
        total = _bytes_in_memory(self.model)
        if self.decoder_weights == "int8":  # the decoder keeps int8 copies in addition to the float model
            total += sum(a.nbytes for name, a in self.stored_arrays().items() if name.endswith((".q", ".scale")))
        return total

    def fingerprint(self) -> str:
        """Return a hash of all stored numbers, which must not change during validation and timing."""
        seal = hashlib.sha256()
        for name, array in sorted(self.stored_arrays().items()):
            seal.update(f"{name} {array.dtype} {array.shape}".encode())
            seal.update(np.ascontiguousarray(array).view(np.uint8).data)
        return seal.hexdigest()


def baseline(event: Event) -> Runner:
    """Create the baseline: the shipped model on the NumPy backend, in float32 and without a cache."""
    return Runner(event, event.model(), OptimizedBackend(only="numpy"))


def runner_for(model: Module, event: Event) -> Runner:
    """Create the runner of an unchanged model on the current backend."""
    return Runner(event, model, current_backend(), use_cache=False)


# --- storage of each kind of layer ---


def _stored_entries(module: Module, prefix: str) -> Iterator[tuple[str, Array]]:
    """Yield (name, array) of everything that a module and its submodules store."""
    if isinstance(module, QuantizedModel):
        yield from _quantized_model_arrays(module, prefix)
    elif isinstance(module, QuantizedLinear):
        yield from _with_prefix(prefix, _quantized_linear_arrays(module))
    elif isinstance(module, SparseLinear):
        yield from _with_prefix(prefix, _sparse_arrays(module))
    else:
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield prefix + name, value.data
        for name, child in module.named_children():
            yield from _stored_entries(child, f"{prefix}{name}.")


def _with_prefix(prefix: str, arrays: dict[str, Array]) -> Iterator[tuple[str, Array]]:
    return ((prefix + name, array) for name, array in arrays.items())


def _quantized_model_arrays(model: QuantizedModel, prefix: str) -> Iterator[tuple[str, Array]]:
    """Yield (name, array) of every weight and constant of a quantized model; names start with `prefix`."""
    from tilewise.quantize.files import model_arrays

    for index, (step, layer) in enumerate(zip(model.graph.steps, model.integer, strict=True)):
        arrays = model_arrays(step, layer)
        if layer is not None and "q" in arrays:
            check_int8(arrays["q"], f"{prefix}{step.name}")
        yield from _with_prefix(f"{prefix}{index}.", arrays)
        yield from _with_prefix(f"{prefix}{index}.", _node_constants(step))


def _node_constants(step: Any) -> dict[str, Array]:
    """Return the constant arrays of a quantized model's operator that runs as a traced operation."""
    if step.node is None:
        return {}
    constants = dict(enumerate(step.node.inputs)) | step.node.params
    return {str(name): value for name, value in constants.items() if isinstance(value, np.ndarray)}


def _quantized_linear_arrays(layer: QuantizedLinear) -> dict[str, Array]:
    """Return the int8 weights, the scales and the bias (if any) of a quantized linear layer."""
    q = layer.kernel.weights()[:, 0, 0]
    arrays = {"q": check_int8(q, "a quantized linear layer"), "scale": layer.weight_scale}
    return arrays if layer.float_bias is None else arrays | {"bias": layer.float_bias}


def _sparse_arrays(layer: SparseLinear) -> dict[str, Array]:
    """Return a sparse layer's arrays by name: bit mask, nonzero values, bias if it has one."""
    dense = layer.to_dense()
    weight = dense.weight.data
    arrays = {"mask": np.packbits(weight != 0), "values": weight[weight != 0]}
    return arrays if dense.bias is None else arrays | {"bias": dense.bias.data}


def _int8_decoder_arrays(model: Module) -> dict[str, Array]:
    """Return the matrices of a GPT as int8 with scales, as its decoder reads them, and the rest in float32."""
    arrays: dict[str, Array] = {}
    matrices = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, Linear)}
    for name, tensor in model.named_tensors():
        if name in matrices or name.endswith("in_proj_weight"):
            quantized = INT8Quantizer().quantize_weights(tensor.data)
            arrays[f"{name}.q"] = check_int8(quantized.q, name)
            arrays[f"{name}.scale"] = quantized.scale
        else:
            arrays[name] = tensor.data
    return arrays


def check_int8(array: Array, where: str) -> Array:
    """Return the array; reject it, naming `where` it is, unless its dtype is int8."""
    if array.dtype != np.int8:
        raise Rejected(
            "false dtype", f"{where} is declared int8 but stores {array.dtype}, {array.dtype.itemsize} bytes per weight"
        )
    return array


def _bytes_in_memory(module: Module) -> int:
    """Count the bytes of a module's weights in memory; an array that is shared counts once."""
    if isinstance(module, QuantizedModel):
        floats = {id(a): a.nbytes for s in module.graph.steps for a in _node_constants(s).values()}
        plain = sum(a.nbytes for s in module.graph.steps for a in (s.weight, s.bias) if a is not None)
        layers = sum(int(layer.nbytes) for layer in module.integer if hasattr(layer, "nbytes"))
        return layers + int(plain) + sum(floats.values())
    if isinstance(module, QuantizedLinear | SparseLinear):
        return int(module.nbytes)
    own = {id(v.data): v.data.nbytes for v in vars(module).values() if isinstance(v, Tensor)}
    return sum(own.values()) + sum(_bytes_in_memory(child) for child in module.children())
