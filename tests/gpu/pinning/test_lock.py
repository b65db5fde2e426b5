"""The lock file: readable, sorted, merged between processes, and compared with today's choices."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tilewise.errors import FileFormatError, MissingFileError
from tilewise.gpu.inductor.templates import FAMILY
from tilewise.gpu.pinning.lock import LockedChoice, LockFile, format_lock, read_lock
from tilewise.gpu.pinning.recompute import LockVerdict, compare_lock
from tilewise.gpu.products.roofline import CUBLAS
from tilewise.store.problem import Config, Problem

TILES = tuple(
    Config.of(BLOCK_M=m, BLOCK_N=n, BLOCK_K=64, GROUP_M=8, num_warps=8, num_stages=3)
    for m in (16, 64, 128) for n in (32, 128, 256)
)  # fmt: skip


def choice(**changes: Any) -> LockedChoice:
    problem = Problem({"M": 4096, "N": 4096, "K": 1024, "dtype0": "torch.bfloat16"})
    first = LockedChoice("matmul_kernel:00ff", problem, "NVIDIA H200", TILES[0], 1.5, "h200 0", "a reason", TILES)
    return dataclasses.replace(first, **changes)


def test_a_file_comes_back_as_it_was_written_and_sorted(tmp_path: Path) -> None:
    choices = [choice(), choice(kernel='a "quoted" \x7f kernel\n'), choice(device="A", predicted=None, candidates=())]
    choices.append(choice(kernel="b", config=Config({"mode=ieee": 1, "BLOCK": 32}), predicted=2.0))
    path = tmp_path / "tilewise.lock"
    path.write_text(format_lock(choices))
    assert sorted(read_lock(path).values(), key=lambda one: one.identity) == list(LockFile(path))
    assert set(LockFile(path)) == set(choices)
    assert format_lock(reversed(choices)) == path.read_text() and tomllib.loads(path.read_text())["format"] == 1


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tilewise.lock"
    first, second = LockFile(path), LockFile(path)
    first.add(choice())
    second.add(choice(device="another"))
    assert len(LockFile(path)) == 2 and len(second) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["tilewise.lock"]


@pytest.mark.parametrize(
    "content", ["[[", "format = 2", "format = 1\nchoice = 3", "format = 1\n[[choice]]\nkernel = 1", "a = " + "[" * 9999]
)
def test_a_file_of_something_else_is_refused_in_one_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "other").write_text(content)
    with pytest.raises(FileFormatError, match=r"lock file|is damaged"):
        LockFile(tmp_path / "other")
    with pytest.raises(MissingFileError):
        LockFile(tmp_path / "nowhere", frozen=True)


def test_a_choice_of_the_same_model_cannot_change_and_others_are_made_again() -> None:
    from tilewise.gpu.pinning.choose import model_digest

    same = choice(model=model_digest())
    other_model, unknown = choice(), choice(kernel="norm:1", problem=Problem({"n": 3}), candidates=())
    product = Problem({"op": "mm", "batch": 1, "m": 256, "n": 512, "k": 128, "dtype": "bf16", "layout": "nt",
                       "epilogue": "none", "fuses": 0})  # fmt: skip
    template = Config({"block_m": 64, "block_n": 64, "block_k": 64, "warps": 4, "stages": 3, "group": 8, "tma": 0,
                       "persistent": 0, "parts": 1, "swapped": 0})  # fmt: skip
    compiled = choice(kernel=f"{FAMILY}.mm", problem=product, candidates=(CUBLAS, template), config=CUBLAS)
    own = Problem({"dtype": "bf16", "m": 64, "n": 64, "k": 64, "layout": "nt", "epilogue": "none"})
    first, second, third, fourth, fifth = compare_lock(
        [same, other_model, unknown, compiled, choice(kernel="product", problem=own)]
    )
    assert first.verdict is LockVerdict.SAME
    assert second.verdict is LockVerdict.CHANGED and second.today is not None and second.today.config in TILES[4:]
    assert third.verdict is LockVerdict.UNKNOWN and third.today is None
    assert fifth.today is not None and fifth.today.model.startswith("products")
    assert fourth.today is not None and fourth.today.config in (CUBLAS, template)
