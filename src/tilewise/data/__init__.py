"""Data to train on: the digits that come with the package, MNIST files, text; and loaders that resume exactly."""

from tilewise.data.images import ImageData, digits, mnist
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
    "encode",
    "mnist",
    "text",
]
