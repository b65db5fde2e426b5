"""Digits equal scikit-learn's; MNIST files are read exactly or refused in one sentence."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from tilewise import data
from tilewise.errors import FileFormatError, TilewiseError


def test_digits_and_their_split_equal_scikit_learns():
    datasets = pytest.importorskip("sklearn.datasets")
    selection = pytest.importorskip("sklearn.model_selection")
    x, y = datasets.load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = selection.train_test_split(x, y, test_size=0.2, stratify=y, random_state=0)
    ours = data.digits()
    for ours_x, want in ((ours.x_train, x_train), (ours.x_test, x_test)):
        np.testing.assert_array_equal(ours_x.reshape(-1, 64) * 16, want)
    np.testing.assert_array_equal(ours.y_train, y_train)
    np.testing.assert_array_equal(ours.y_test, y_test)
    assert ours.x_train.dtype == np.float32
    assert ours.flat().x_test.shape == (360, 64)


def idx(array: np.ndarray, kind: int = 8, magic: bytes = b"\0\0") -> bytes:
    return magic + bytes([kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(folder: Path, packed: bool = False, dot: str = "-") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {
        f"train-images{dot}idx3-ubyte": rng.integers(0, 256, (7, 28, 28), dtype=np.uint8),
        f"train-labels{dot}idx1-ubyte": rng.integers(0, 10, 7, dtype=np.uint8),
        f"t10k-images{dot}idx3-ubyte": rng.integers(0, 256, (3, 28, 28), dtype=np.uint8),
        f"t10k-labels{dot}idx1-ubyte": rng.integers(0, 10, 3, dtype=np.uint8),
    }
    for name, array in arrays.items():
        content = idx(array)
        (folder / (name + ".gz" * packed)).write_bytes(gzip.compress(content) if packed else content)
    return arrays


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dot", ["-", "."])
def test_mnist_files_are_read_packed_or_not(tmp_path, packed, dot):
    arrays = list(write_mnist(tmp_path, packed, dot).values())
    ours = data.mnist(tmp_path)
    np.testing.assert_allclose(ours.x_train[:, 0] * 255, arrays[0], atol=1e-4)
    np.testing.assert_array_equal(ours.y_train, arrays[1])
    assert ours.x_test.shape == (3, 1, 28, 28)
    assert ours.x_train.dtype == np.float32


PIXELS = np.zeros((3, 28, 28), np.uint8)
BAD = {
    "empty": b"",
    "wrong magic": idx(PIXELS, magic=b"PK"),
    "wrong type": idx(PIXELS, kind=13),
    "wrong dimensions": idx(PIXELS.reshape(3, -1)),
    "cut header": idx(PIXELS)[:9],
    "cut body": idx(PIXELS)[:-1],
    "tail": idx(PIXELS) + b"x",
    "2^60 pixels": b"\0\0\x08\x03" + struct.pack(">3I", 2**20, 2**20, 2**20) + b"x",
    "2^30 pixels and few bytes": b"\0\0\x08\x03" + struct.pack(">3I", 2**10, 2**10, 2**10) + b"x",
    "too few images": idx(PIXELS[:2]),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_costs_one_sentence_and_little_memory(tmp_path, name, packed):
    write_mnist(tmp_path, packed)
    path = tmp_path / ("t10k-images-idx3-ubyte" + ".gz" * packed)
    path.write_bytes(gzip.compress(BAD[name]) if packed else BAD[name])
    tracemalloc.start()
    with pytest.raises(FileFormatError) as caught:
        data.mnist(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert peak < 20_000_000


def test_a_broken_gzip_file_a_wrong_label_and_missing_files_get_one_sentence(tmp_path):
    write_mnist(tmp_path, packed=True)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    for content in (whole[:-9], b"not gzip", whole[:20] + b"\xff" * 8 + whole[28:]):
        path.write_bytes(content)
        with pytest.raises(FileFormatError):
            data.mnist(tmp_path)
    path.write_bytes(whole)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.full(7, 10, np.uint8))))
    with pytest.raises(FileFormatError, match="label 10"):
        data.mnist(tmp_path)
    path.unlink()
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(TilewiseError):
            data.mnist(folder)
