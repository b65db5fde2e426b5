"""Text generation with a key/value cache.

The three most important names: `generate` (yields tokens), `KVCache` and `CachedAttention`.
"""

from typing import TYPE_CHECKING

from tilewise._late import late_names
from tilewise.generate.cache import KVCache, LayerView
from tilewise.generate.engine import make_engine, new_cache
from tilewise.generate.generation import generate

if TYPE_CHECKING:
    from tilewise.generate.attention import CachedAttention
    from tilewise.generate.gpt2 import load_gpt, load_gpt2

__all__ = ["CachedAttention", "KVCache", "LayerView", "generate", "load_gpt", "load_gpt2", "make_engine", "new_cache"]

__getattr__ = late_names(__name__, {".attention": "CachedAttention", ".gpt2": "load_gpt load_gpt2"})
