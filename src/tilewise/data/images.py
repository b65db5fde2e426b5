"""Labelled images: the 8×8 digits shipped with the package, and MNIST from its files.

Pixels are float32 between 0 and 1, images (N, 1, H, W). The digits are the 1,797 of the UCI "Optical recognition of
handwritten digits" test set (CC BY 4.0, as shipped by scikit-learn), with a stratified fifth held out.

MNIST comes in the IDX format: two zero bytes, a type, the number of dimensions, the sizes, then the data. The header is
not trusted: memory grows with the data that is read, and a gzip file is decompressed no further than the size in its
header.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from tilewise._files import open_input
from tilewise.errors import FileFormatError, UnavailableError

Images = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]

_UNSIGNED_BYTE = 8  # type code of the format
_MAX_BYTES = 256 << 20  # five times the largest MNIST file
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class ImageData:
    """Training images and held-out test images, with their labels."""

    x_train: Images  # (N, 1, H, W), or (N, H·W) after flat()
    y_train: Labels  # (N,)
    x_test: Images
    y_test: Labels

    def flat(self) -> ImageData:
        """Flatten the images to vectors, for the mlp."""
        return self.for_model("mlp")

    def for_model(self, name: str) -> ImageData:
        """Convert the images to the inputs of a reference model; see `model_inputs`."""
        return replace(self, x_train=model_inputs(name, self.x_train), x_test=model_inputs(name, self.x_test))


def model_inputs(model_name: str, images: Images) -> Images:
    """Convert grey images (N, 1, H, W) to the inputs of a reference model.

    The mlp receives vectors; resnet8 and vgg6 receive three equal channels of 32×32 pixels (nearest neighbour).
    """
    if model_name == "mlp":
        return images.reshape(len(images), -1)
    if model_name not in ("resnet8", "vgg6"):
        return images
    rows, columns = (np.arange(32) * size // 32 for size in images.shape[2:])
    enlarged = images[:, :, rows[:, None], columns]  # (N, 1, 32, 32)
    return np.ascontiguousarray(np.broadcast_to(enlarged, (len(images), 3, 32, 32)))


def digits() -> ImageData:
    """Load 1,797 handwritten digits of 8×8 pixels; a stratified fifth is held out for testing.

    >>> digits().x_test.shape
    (360, 1, 8, 8)
    """
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as stored:
        pixels, labels = stored["pixels"], stored["labels"].astype(np.int64)
        train, test = stored["train"].astype(np.int64), stored["test"].astype(np.int64)
    images = (pixels.astype(np.float32) / np.float32(16)).reshape(-1, 1, 8, 8)
    return ImageData(images[train], labels[train], images[test], labels[test])


def digits_folds(count: int = 5, seed: int = 0) -> Iterator[ImageData]:
    """Yield `count` splits of all 1,797 digits for cross-validation; each image is a test image of one split.

    >>> sum(len(fold.x_test) for fold in digits_folds())
    1797
    """
    whole = digits()
    x, y = np.concatenate([whole.x_train, whole.x_test]), np.concatenate([whole.y_train, whole.y_test])
    order = np.random.default_rng(seed).permutation(len(x))
    order = order[np.argsort(y[order], kind="stable")]  # neighbours have the same class, so folds are stratified
    for fold in range(count):
        test = np.arange(len(order)) % count == fold
        train, held_out = order[~test], order[test]
        yield ImageData(x[train], y[train], x[held_out], y[held_out])


def mnist(path: str | Path) -> ImageData:
    """Load MNIST (or Fashion-MNIST) from a folder with the four IDX files, compressed with gzip or not."""
    folder = Path(path)
    if not folder.is_dir():
        raise UnavailableError(f"{folder} is not a folder; give the folder with the four MNIST files")
    data = ImageData(
        _images(_find_idx_file(folder, "train-images")),
        _labels(_find_idx_file(folder, "train-labels")),
        _images(_find_idx_file(folder, "t10k-images")),
        _labels(_find_idx_file(folder, "t10k-labels")),
    )
    for kind, images, labels in (("train", data.x_train, data.y_train), ("t10k", data.x_test, data.y_test)):
        if len(images) != len(labels) or not len(images):
            raise FileFormatError(f"{folder} has {len(images)} {kind} images and {len(labels)} labels")
    if data.x_train.shape[1:] != data.x_test.shape[1:]:
        raise FileFormatError(
            f"{folder} has training images of {data.x_train.shape[2:]} and test images of {data.x_test.shape[2:]}"
        )
    return data


def _find_idx_file(folder: Path, stem: str) -> Path:
    """Return the path of an MNIST file, by any of its usual names, in a folder."""
    kind = "idx3" if "images" in stem else "idx1"
    names = [f"{stem}{dot}{kind}-ubyte{end}" for dot in "-." for end in ("", ".gz")]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise UnavailableError(f"{folder} has no {names[0]} (nor {names[1]}); MNIST consists of four such files")


def _images(path: Path) -> Images:
    """Read an IDX file of images as float32 in [0, 1], of shape (N, 1, H, W)."""
    pixels = read_idx(path, dimensions=3)
    images: Images = pixels.astype(np.float32)[:, None]
    images /= np.float32(255)
    return images


def _labels(path: Path) -> Labels:
    """Read an IDX file of labels as int64; a label above 9 is an error."""
    labels: npt.NDArray[Any] = read_idx(path, dimensions=1).astype(np.int64)
    if labels.size and int(labels.max()) > 9:
        raise FileFormatError(f"{path} has a label {int(labels.max())}; labels must be from 0 to 9")
    return labels


def read_idx(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """Read the array of unsigned bytes in an IDX file; it must have this number of dimensions."""
    try:
        with open_input(path, _MAX_BYTES) as file:
            stream = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            shape = _read_shape(stream, path, dimensions)
            body = _read_exactly(stream, math.prod(shape), path)
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise UnavailableError(f"{path} cannot be read: {error.strerror}") from None
        raise FileFormatError(f"{path} is not a complete gzip file") from None
    return np.frombuffer(body, np.uint8).reshape(shape)


def _read_shape(stream: gzip.GzipFile | IO[bytes], path: Path, dimensions: int) -> tuple[int, ...]:
    """Read an IDX file's header and return the array's shape; FileFormatError if it is invalid."""
    head = stream.read(4)
    if len(head) < 4 or head[:2] != b"\0\0":
        raise FileFormatError(f"{path} is not an IDX file: it does not start with its magic number")
    if head[2] != _UNSIGNED_BYTE or head[3] != dimensions:
        raise FileFormatError(
            f"{path} contains type {head[2]} in {head[3]} dimensions; expected unsigned bytes (8) in {dimensions}"
        )
    sizes = stream.read(4 * dimensions)
    if len(sizes) < 4 * dimensions:
        raise FileFormatError(f"{path} ends inside its header")
    shape: tuple[int, ...] = struct.unpack(f">{dimensions}I", sizes)
    if math.prod(shape) > _MAX_BYTES:
        size = " × ".join(map(str, shape))
        raise FileFormatError(f"{path} claims {size} bytes, more than the limit of {_MAX_BYTES}")
    return shape


def _read_exactly(stream: gzip.GzipFile | IO[bytes], count: int, path: Path) -> bytearray:
    """Read `count` bytes; FileFormatError if the stream has fewer or more."""
    body = bytearray()
    while len(body) < count:  # in chunks, so that memory grows with the file and not with its header
        chunk = stream.read(min(_CHUNK_BYTES, count - len(body)))
        if not chunk:
            raise FileFormatError(f"{path} ends after {len(body)} of the {count} bytes its header claims")
        body += chunk
    if stream.read(1):
        raise FileFormatError(f"{path} continues after the {count} bytes its header claims")
    return body
