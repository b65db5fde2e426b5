"""GGUF files: models of llama.cpp's format, with their tokenizers."""

from tilewise.gguf.models import LoadedModel, load_gguf
from tilewise.gguf.reader import GGUFFile, read_gguf
from tilewise.gguf.streaming import TextStream
from tilewise.gguf.tokenizers import Tokenizer

__all__ = ["GGUFFile", "LoadedModel", "TextStream", "Tokenizer", "load_gguf", "read_gguf"]
