"""`tilewise lock`: show, check and update a lock file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tilewise.gpu.pinning.lock import LockedChoice, format_lock
from tilewise.store.problem import Config, Problem

TILES = tuple(
    Config.of(BLOCK_M=m, BLOCK_N=n, BLOCK_K=64, GROUP_M=8, num_warps=8, num_stages=3)
    for m in (16, 64, 128) for n in (32, 128, 256)
)  # fmt: skip
PRODUCT = Problem({"M": 4096, "N": 4096, "K": 1024, "dtype0": "torch.bfloat16"})
CHOICES = [
    LockedChoice("matmul_kernel:00ff", PRODUCT, "NVIDIA H200", TILES[0], 1.5, "h200 0", "of another model", TILES),
    LockedChoice("norm:1", Problem({"n": 3}), "NVIDIA H200", TILES[0], None, "h200 0", "of another model"),
]


def test_check_exits_with_1_if_a_choice_would_change_and_update_renews_it(tmp_path: Path, typed: Any) -> None:
    path = tmp_path / "tilewise.lock"
    path.write_text(format_lock(CHOICES))
    assert len(json.loads(typed(["lock", "show", str(path), "--json"])[1])) == 2
    code, out, err = typed(["lock", "check", str(path)])
    assert (code, err) == (1, "") and "0 of 2 choices are those of this tilewise." in out and " -> " in out
    assert [row["verdict"] for row in json.loads(typed(["lock", "check", str(path), "--json"])[1])] == [
        "changed", "unknown",
    ]  # fmt: skip
    assert typed(["lock", "update", str(path)])[1] == f"1 choice changed, 1 removed, 1 in {path}.\n"
    assert typed(["lock", "check", str(path)])[0] == 0
    assert typed(["lock", "check", str(tmp_path / "nowhere")])[0] == 2
