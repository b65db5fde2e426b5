"""safetensors files: what is written is what the format's own library reads, and hostile files cost one sentence."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tilewise as tw
from tilewise.errors import DtypeError, FileFormatError, TilewiseError
from tilewise.io import load_arrays

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "scalar": np.array(3.5),
    "empty": np.zeros((0, 4), np.float16),
    "ints": np.array([-1, 2], np.int64),
    "bytes": np.array([[1], [255]], np.uint8),
    "flags": np.array([True, False]),
    "strided": np.arange(12, dtype=np.float32).reshape(3, 4).T,
}


def test_what_is_saved_is_loaded(tmp_path):
    tw.save(ARRAYS, tmp_path / "x.safetensors", {"made": "here"})
    arrays, metadata = load_arrays(tmp_path / "x.safetensors")
    assert metadata == {"made": "here"}
    assert list(arrays) == list(ARRAYS)
    for name, value in ARRAYS.items():
        assert arrays[name].dtype == value.dtype
        np.testing.assert_array_equal(arrays[name], value)
        assert arrays[name].flags.writeable


def test_files_are_exchanged_with_the_formats_own_library(tmp_path):
    tw.save(ARRAYS, tmp_path / "ours")
    for name, value in safetensors.numpy.load_file(tmp_path / "ours").items():
        np.testing.assert_array_equal(value, ARRAYS[name])
    safetensors.numpy.save_file({k: np.ascontiguousarray(v) for k, v in ARRAYS.items()}, tmp_path / "theirs")
    for name, value in tw.load(tmp_path / "theirs").items():
        np.testing.assert_array_equal(value, ARRAYS[name])


def test_bfloat16_is_widened_to_float32(tmp_path):
    values = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    safetensors.torch.save_file({"x": values}, tmp_path / "x")
    np.testing.assert_array_equal(tw.load(tmp_path / "x")["x"], values.float())


def write(path: Path, header: object, body: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + body)
    return path


def entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4), **more: object) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


HOSTILE = {
    "2^60 elements": ({"x": entry(shape=[2**60], offsets=[0, 2**62])}, b"1234"),
    "2^60 elements in few bytes": ({"x": entry(shape=[2**60])}, b"1234"),
    "sizes whose product overflows": ({"x": entry(shape=[2**32, 2**32])}, b"1234"),
    "a negative size": ({"x": entry(shape=[-1, -1])}, b"1234"),
    "a size that is not an integer": ({"x": entry(shape=[1.0])}, b"1234"),
    "a size that is a bool": ({"x": entry(shape=[True])}, b"1234"),
    "overlapping offsets": ({"x": entry(), "y": entry()}, b"1234"),
    "a gap": ({"x": entry(offsets=[4, 8])}, b"12345678"),
    "a tail": ({"x": entry()}, b"123456"),
    "offsets backwards": ({"x": entry(shape=[0], offsets=[4, 0])}, b"1234"),
    "a body cut short": ({"x": entry()}, b"12"),
    "an unknown dtype": ({"x": entry(dtype="F8")}, b"1234"),
    "a dtype that is no string": ({"x": entry(dtype=["F32"])}, b"1234"),
    "a missing field": ({"x": {"dtype": "F32"}}, b""),
    "a foreign field": ({"x": entry(evil=1)}, b"1234"),
    "metadata with numbers": ({"__metadata__": {"a": 1}}, b""),
    "a list": ([1, 2], b""),
    "not JSON": (b"{not json", b""),
    "not UTF-8": (b"\xff\xfe{}", b""),
    "duplicate names": (b'{"x":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"x":1}', b"1234"),
    "very deep nesting": (b"[" * 100_000, b""),
    "a number with very many digits": (b'{"x":' + b"9" * 10_000 + b"}", b""),
    "too many dimensions": ({"x": entry(shape=[1] * 100)}, b"1234"),
    "an empty tensor too large for an array": ({"x": entry(shape=[2**62, 0], offsets=[0, 0])}, b""),
    "an empty tensor whose sizes overflow": ({"x": entry(shape=[2**40, 2**40, 0], offsets=[0, 0])}, b""),
    "an empty tensor of ten million rows": ({"x": entry(shape=[10**7, 0], offsets=[0, 0])}, b""),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_costs_one_sentence_and_little_memory(tmp_path, name):
    path = write(tmp_path / "x", *HOSTILE[name])
    tracemalloc.start()
    with pytest.raises(FileFormatError) as caught:
        tw.load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert peak < 20_000_000


@pytest.mark.parametrize("length", [2**63, 2**40, 100, 3])
def test_a_header_length_that_lies_is_refused(tmp_path, length):
    with pytest.raises(FileFormatError):
        tw.load(write(tmp_path / "x", {"x": entry()}, b"1234", length))


def test_every_truncation_is_refused(tmp_path):
    tw.save({"a": ARRAYS["a"], "ints": ARRAYS["ints"]}, tmp_path / "x")
    whole = (tmp_path / "x").read_bytes()
    for end in range(len(whole)):
        (tmp_path / "cut").write_bytes(whole[:end])
        with pytest.raises(FileFormatError):
            tw.load(tmp_path / "cut")


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200), honest_length=st.booleans())
def test_random_bytes_never_crash_the_reader(tmp_path, content, honest_length):
    path = tmp_path / "fuzz"
    path.write_bytes(len(content).to_bytes(8, "little") + content if honest_length else content)
    try:
        tw.load(path)
    except TilewiseError as error:
        assert "\n" not in str(error).replace(str(path), "")


def test_missing_files_folders_and_odd_types_get_one_sentence(tmp_path):
    with pytest.raises(TilewiseError):
        tw.load(tmp_path / "nowhere")
    with pytest.raises(TilewiseError):
        tw.load(tmp_path)
    with pytest.raises(TilewiseError):
        tw.save({"a": ARRAYS["a"]}, tmp_path)
    with pytest.raises(DtypeError):
        tw.save({"a": np.zeros(2, complex)}, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_header_of_a_million_names_is_refused_before_it_costs_anything(tmp_path):
    empty = entry(shape=[0], offsets=[0, 0])
    path = write(tmp_path / "x", {f"t{number}": empty for number in range(60_000)})
    with pytest.raises(FileFormatError, match="at most 50000"):
        tw.load(path)
    path = write(tmp_path / "x", b'{"x":' + b" " * (17 << 20) + b"1}")
    with pytest.raises(FileFormatError, match="header"):
        tw.load(path)


def test_a_flipped_bit_in_the_numbers_is_found(tmp_path):
    tw.save(ARRAYS, tmp_path / "x")
    content = bytearray((tmp_path / "x").read_bytes())
    content[-3] ^= 1
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(FileFormatError, match="is damaged"):
        tw.load(tmp_path / "x")


def test_a_file_without_a_checksum_is_read_as_before(tmp_path):
    safetensors.numpy.save_file({"a": ARRAYS["a"]}, tmp_path / "x", {"made": "there"})
    arrays, metadata = load_arrays(tmp_path / "x")
    np.testing.assert_array_equal(arrays["a"], ARRAYS["a"])
    assert metadata == {"made": "there"}


def test_equal_tensors_give_equal_files(tmp_path):
    for name in ("one", "two"):
        tw.save(ARRAYS, tmp_path / name, {"made": "here"})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_an_empty_tensor_that_cannot_be_read_back_is_not_written(tmp_path):
    with pytest.raises(TilewiseError, match="has no elements"):
        tw.save({"a": np.zeros((10**7, 0), np.float32)}, tmp_path / "x")
