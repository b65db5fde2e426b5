"""Logits of the next positions of several sequences, over a cache: the native decoder, or the model itself.

Both take the same flat list of rows (token, sequence, position), so prompts of different lengths are prefilled together
without padding. The native decoder does a whole model in one call and reads float32 weights where they lie; int8
weights are copies, a quarter of the size. What it prepares (int8 copies, large pages) is kept with the model.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.errors import ConfigurationError
from tilewise.generate.cache import KVCache
from tilewise.nn import GPT
from tilewise.tensor import no_grad

Array = npt.NDArray[Any]


class Engine(Protocol):
    """What `generate` drives."""

    def run(self, rows: Array, cache: KVCache, wanted: Array) -> Array:
        """Rows (n, 3) of token, sequence, position are stored; logits (len(wanted), vocabulary) of those named."""
        ...


def new_cache(model: GPT, batch: int, length: int | None = None, dtype: str = "float32") -> KVCache:
    """A cache of the shape this model needs."""
    return KVCache(
        length or model.context,
        model.heads,
        model.token_embedding.weight.shape[1] // model.heads,
        n_layers=len(model.blocks),
        batch_size=batch,
        dtype=dtype,
    )


def make_engine(model: GPT, weights: str = "float32") -> Engine:
    """The fastest engine for this model: native where the extension is built and the weights are float32 arrays.

    A native engine stays with its model, so the next call has it at once; it is made anew when a parameter was replaced
    or, behind int8 copies, changed.
    """
    if weights not in ("float32", "int8"):
        raise ConfigurationError(f'weights must be "float32" or "int8", not {weights!r}')
    parameters = [p.data for p in model.parameters()]
    if native is not None and all(p.dtype == np.float32 and p.flags.c_contiguous for p in parameters):
        return _kept_engines(model).get(model, weights, parameters)
    if weights == "int8":
        raise ConfigurationError("int8 weights need the compiled kernels and a float32 model")
    return ModelEngine(model)


class NativeEngine:
    """The decoder of the compiled extension."""

    def __init__(self, model: GPT, weights: str = "float32") -> None:
        assert native is not None
        self.settings = _settings(model)
        try:
            self._decoder = native.Decoder(
                model.token_embedding.weight.data,
                model.position_embedding.weight.data,
                [_block_arrays(block) for block in model.blocks],
                [model.norm.weight.data, model.norm.bias.data, model.head.weight.data],
                *self.settings,
                weights == "int8",
            )
        except ValueError as error:
            raise ConfigurationError(str(error)) from None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices that every token reads."""
        return int(self._decoder.weight_bytes)

    def fresh(self) -> bool:
        """Whether int8 copies are still those of the weights; that costs reading these once."""
        return bool(self._decoder.fresh())

    def products(self) -> None:
        """The matrix products of one token and nothing else: what reading the weights once is compared with."""
        self._decoder.products()

    def run(self, rows: Array, cache: KVCache, wanted: Array) -> Array:
        logits: Array = self._decoder.run(rows, cache.keys, cache.values, cache.key_scales, cache.value_scales, wanted)
        np.maximum.at(cache.lengths.T, rows[:, 1], rows[:, 2:] + 1)
        return logits


def _settings(model: GPT) -> tuple[int, float, bool]:
    return model.heads, model.norm.eps, model.approximate == "tanh"


def _block_arrays(block: Any) -> list[Array]:
    attention = block.self_attn
    layers = (block.norm1, attention.out_proj, block.norm2, block.linear1, block.linear2)
    norm1, out, norm2, up, down = ([layer.weight.data, layer.bias.data] for layer in layers)
    return [*norm1, attention.in_proj_weight.data, attention.in_proj_bias.data, *out, *norm2, *up, *down]


class KeptEngines:
    """The native engines of one model, an attribute of it. A copy of the model starts without any."""

    def __init__(self) -> None:
        self._engines: dict[str, tuple[NativeEngine, list[Array]]] = {}

    def __reduce__(self) -> tuple[type[KeptEngines], tuple[()]]:
        return KeptEngines, ()

    def get(self, model: GPT, weights: str, parameters: list[Array]) -> NativeEngine:
        kept = self._engines.get(weights)
        if kept is not None and self._fits(*kept, model, parameters):
            return kept[0]
        self._engines.pop(weights, None)  # before the new one is made: two would take twice the memory
        kept = self._engines[weights] = (NativeEngine(model, weights), parameters)
        return kept[0]

    @staticmethod
    def _fits(engine: NativeEngine, arrays: list[Array], model: GPT, parameters: list[Array]) -> bool:
        same = len(arrays) == len(parameters) and all(a is b for a, b in zip(arrays, parameters, strict=True))
        return same and engine.settings == _settings(model) and engine.fresh()


def _kept_engines(model: GPT) -> KeptEngines:
    return cast(KeptEngines, vars(model).setdefault("_engines", KeptEngines()))


class ModelEngine:
    """The model's own layers: a prompt at a time, then all sequences together, a token each."""

    def __init__(self, model: GPT) -> None:
        self.model = model

    def run(self, rows: Array, cache: KVCache, wanted: Array) -> Array:
        one_each = len(rows) == cache.batch_size and bool((rows[:, 1] == np.arange(len(rows))).all())
        with no_grad():
            if one_each:
                views = [cache.layer(i) for i in range(cache.n_layers)]
                logits: Array = self.model(rows[:, :1], views, rows[:, 2]).data[:, 0]
                return logits[wanted]
            return self._prompts(rows, cache)[wanted]

    def _prompts(self, rows: Array, cache: KVCache) -> Array:
        out = np.empty((len(rows), self.model.vocab), self.model.head.weight.dtype)
        for index in np.unique(rows[:, 1]):
            mine = rows[:, 1] == index
            views = [cache.sequence(layer, int(index)).layer(0) for layer in range(cache.n_layers)]
            out[mine] = self.model(rows[mine, 0][None], views, int(rows[mine, 2][0])).data[0]
        return out
