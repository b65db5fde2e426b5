"""Training data, and loaders that resume exactly.

The three most important names: `digits` (images shipped with the package), `mnist` (IDX files) and `text` (token ids).
"""

from tilewise.data.images import ImageData, digits, digits_folds, mnist, model_inputs
from tilewise.data.loader import BatchLoader, DataLoader, TextLoader
from tilewise.data.text import VOCABULARY, TextData, decode, encode, text

__all__ = [
    "VOCABULARY",
    "BatchLoader",
    "DataLoader",
    "ImageData",
    "TextData",
    "TextLoader",
    "decode",
    "digits",
    "digits_folds",
    "encode",
    "mnist",
    "model_inputs",
    "text",
]
