"""Text generation with a key/value cache.

The three most important names: `generate` (yields tokens), `KVCache` and `CachedAttention`.
"""

from typing import TYPE_CHECKING, Any

from tilewise.generate.cache import KVCache, LayerView
from tilewise.generate.engine import make_engine, new_cache
from tilewise.generate.generation import generate

if TYPE_CHECKING:
    from tilewise.generate.attention import CachedAttention
    from tilewise.generate.gpt2 import load_gpt, load_gpt2

__all__ = ["CachedAttention", "KVCache", "LayerView", "generate", "load_gpt", "load_gpt2", "make_engine", "new_cache"]


def __getattr__(name: str) -> Any:
    # Imported at first use: generating with a model that is loaded needs none of them.
    if name == "CachedAttention":
        from tilewise.generate.attention import CachedAttention

        return CachedAttention
    if name in ("load_gpt", "load_gpt2"):
        from tilewise.generate import gpt2

        return getattr(gpt2, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
