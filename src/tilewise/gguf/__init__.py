"""GGUF files, the format of llama.cpp: models with their tokenizers.

The three most important names: `load_gguf` (model and tokenizer), `read_gguf` (metadata and tensors) and `TextStream`.
"""

from tilewise.gguf.models import LoadedModel, load_gguf
from tilewise.gguf.reader import GGUFFile, read_gguf
from tilewise.gguf.tokenizers import TextStream, Tokenizer

__all__ = ["GGUFFile", "LoadedModel", "TextStream", "Tokenizer", "load_gguf", "read_gguf"]
