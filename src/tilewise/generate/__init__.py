"""Text generation with a key/value cache.

The three most important names: `generate` (yields tokens), `KVCache` and `CachedAttention`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tilewise.generate.cache import KVCache, LayerView
from tilewise.generate.engine import make_engine, new_cache
from tilewise.generate.generation import generate

if TYPE_CHECKING:
    from tilewise.generate.attention import CachedAttention
    from tilewise.generate.gpt2 import load_gpt, load_gpt2

__all__ = ["CachedAttention", "KVCache", "LayerView", "generate", "load_gpt", "load_gpt2", "make_engine", "new_cache"]


# Imported at first use: generating with a model that is loaded needs none of them.
_MODULES = {"CachedAttention": "attention", "load_gpt": "gpt2", "load_gpt2": "gpt2"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
