"""Text generation with a key/value cache.

The three most important names: `generate` (yields tokens), `KVCache` and `CachedAttention`.
"""

from tilewise.generate.attention import CachedAttention
from tilewise.generate.cache import KVCache
from tilewise.generate.engine import make_engine, new_cache
from tilewise.generate.generation import generate
from tilewise.generate.gpt2 import load_gpt, load_gpt2
from tilewise.generate.view import LayerView

__all__ = ["CachedAttention", "KVCache", "LayerView", "generate", "load_gpt", "load_gpt2", "make_engine", "new_cache"]
