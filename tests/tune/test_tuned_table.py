"""What was tuned is used: by the next process, at the thread counts where it applies, and by nobody else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tilewise._extension import native
from tilewise.backend.registry import OptimizedBackend
from tilewise.backend.tiled.matmul import TileConfig, operand_views
from tilewise.backend.tuned import tuned_chooser
from tilewise.store.problem import Problem
from tilewise.tune.choose.cache import FILE, ChoiceFile, Decision

pytestmark = pytest.mark.skipif(native is None, reason="the compiled kernels are not built")
if native is not None:
    from tilewise.tune.choose.tuned_table import TunedTable, machine_name
    from tilewise.tune.families.cpu.family import get_family, product_config

SHAPE = (130, 150, 140)
SAYS_TILE = """
import json, numpy as np, tilewise
from tilewise.backend import current_backend
a, b = np.ones((130, 140), np.float32), np.ones((140, 150), np.float32)
backend = current_backend()
assert (backend.dispatch("matmul", a, b) == 140).all()
print(json.dumps({"tile": backend.explain("matmul", a, b).tile.as_dict(), "chooser": backend.tile_chooser is not None}))
"""


def product(threads: int, shape: tuple[int, int, int] = SHAPE, layout: str = "nn") -> Problem:
    spec = {"family": "matmul", **dict(zip("mnk", shape, strict=True)), "threads": threads, "layout": layout}
    return get_family("matmul").problem(spec)


def default_tile(threads: int, shape: tuple[int, int, int] = SHAPE, layout: str = "nn") -> TileConfig:
    return TileConfig(*native.matmul_plan(*operand_views(shape, layout), threads)[1])


def choice(threads: int, tile: TileConfig, shape: tuple[int, int, int] = SHAPE) -> Decision:
    return Decision(product(threads, shape), product_config(tile), "measured", 1000.0, None, 3, False)


def python(code: str, cache: Path, **environment: str) -> dict:
    variables = {**os.environ, "TILEWISE_CACHE": str(cache), "TILEWISE_TUNED": "1", **environment}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def keep(cache: Path, *choices: Decision, machine: str | None = None, version: str | None = None) -> Path:
    words = (version,) if version else ()
    choice_file = ChoiceFile(cache / "tune", machine or machine_name(native), *words)
    for one in choices:
        choice_file.put(one)
    return choice_file.path


def test_what_one_process_tunes_the_next_one_uses(tmp_path: Path):
    variables = {**os.environ, "TILEWISE_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "tilewise", "tune", "matmul", "130x150x140", "--budget", "2", "--json"]
    tuned = json.loads(subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout)
    output = python(SAYS_TILE, tmp_path)
    assert output["tile"] == tuned["config"]


def test_a_kept_tile_is_used_unless_it_is_switched_off_or_of_another_instruction_set(tmp_path: Path):
    threads = native.num_threads()
    tile = replace(default_tile(threads), mr=2)
    keep(tmp_path, choice(threads, tile))
    assert python(SAYS_TILE, tmp_path)["tile"] == tile.as_dict()
    assert python(SAYS_TILE, tmp_path, TILEWISE_TUNED="0") == {
        "tile": default_tile(threads).as_dict(),
        "chooser": False,
    }
    assert not python(SAYS_TILE, tmp_path, TILEWISE_ISA="portable")["chooser"] or native.isa() == "portable"


@pytest.mark.parametrize("other", ["machine", "version"])
def test_choices_of_another_machine_or_version_are_left_alone_and_said(tmp_path: Path, other: str):
    threads = native.num_threads()
    path = keep(tmp_path, choice(threads, replace(default_tile(threads), mr=2)), **{other: "elsewhere"})
    assert not python(SAYS_TILE, tmp_path)["chooser"]
    notes = ChoiceFile(path.parent, machine_name(native)).notes
    assert len(notes) == 1 and f"another {other}" in notes[0]


@pytest.mark.parametrize("line", ["null", "[]", "3", '"x"', "{}", "{", '{"check": 1}', "\x00", "[" * 100000])
def test_a_damaged_line_costs_that_line_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str):
    threads = native.num_threads()
    tile = replace(default_tile(threads), mr=2)
    path = keep(tmp_path, choice(threads, tile))
    path.write_text(line + "\n" + path.read_text())
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    monkeypatch.setenv("TILEWISE_TUNED", "1")
    chooser = tuned_chooser()
    assert chooser is not None and chooser("matmul", SHAPE, "float32", "nn") == tile
    assert "1 damaged line" in ChoiceFile(path.parent, machine_name(native)).notes[0]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"half a line", b"\xff\xfe\n", b"null"])
def test_a_file_with_nothing_in_it_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes):
    (tmp_path / "tune").mkdir()
    (tmp_path / "tune" / FILE).write_bytes(content)
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    monkeypatch.setenv("TILEWISE_TUNED", "1")
    assert tuned_chooser() is None


def test_a_folder_in_the_files_place_ends_nothing(tmp_path: Path):
    (tmp_path / "tune" / FILE).mkdir(parents=True)
    assert not python(SAYS_TILE, tmp_path)["chooser"]


def test_a_pipe_in_the_files_place_is_not_waited_for(tmp_path: Path):
    (tmp_path / "tune").mkdir()
    os.mkfifo(tmp_path / "tune" / FILE)
    assert not python(SAYS_TILE, tmp_path)["chooser"]


def test_importing_reads_nothing_of_the_tuner(tmp_path: Path):
    keep(tmp_path, choice(native.num_threads(), replace(default_tile(native.num_threads()), mr=2)))
    code = "import json, sys, tilewise; print(json.dumps({'loaded': [m for m in sys.modules if '.tune' in m]}))"
    assert python(code, tmp_path)["loaded"] == []
    used = SAYS_TILE + "import sys; sys.stdout.flush(); assert 'tilewise.costmodel' not in sys.modules"
    assert python(used, tmp_path)["chooser"]


def test_a_product_too_small_to_share_has_one_key(settings_restored):
    shape = (40, 64, 50)
    assert default_tile(2, shape).threads_m * default_tile(2, shape).threads_n == 1
    tile = replace(default_tile(1, shape), mr=2)
    native.set_num_threads(2)  # also where there is one core
    table = TunedTable(native, [choice(1, tile, shape)])
    for threads in (1, 2):
        native.set_num_threads(threads)
        assert table("matmul", shape, "float32", "nn") == tile


@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("tuned_on", [1, 2])
def test_tuned_tiles_keep_the_promise_that_threads_change_no_bit(settings_restored, tuned_on: int, layout: str):
    shape = (130, 150, 700)
    rng = np.random.default_rng(0)
    a = rng.standard_normal((130, 700), dtype=np.float32)
    b = rng.standard_normal((700, 150) if layout == "nn" else (150, 700), dtype=np.float32)
    b = b if layout == "nn" else b.T
    other = replace(default_tile(tuned_on, shape, layout), kc=64, pack_b=True)
    decision = Decision(product(tuned_on, shape, layout), product_config(other), "measured", 1.0, None, 1, False)
    native.set_num_threads(2)
    backend = OptimizedBackend(tile_chooser=TunedTable(native, [decision]))
    tiles = []
    for threads in (1, 2):
        native.set_num_threads(threads)
        tiles.append(backend.dispatch("matmul", a, b))
        assert backend.explain("matmul", a, b).tile.kc == 64
    np.testing.assert_array_equal(tiles[0], tiles[1])


def test_of_two_choices_that_sum_in_another_order_the_later_one_holds(settings_restored):
    shape = (130, 150, 700)
    native.set_num_threads(2)
    first, second = (replace(default_tile(t, shape), kc=kc) for t, kc in ((1, 64), (2, 128)))
    table = TunedTable(native, [choice(1, first, shape), choice(2, second, shape)])
    assert {tile.kc for tile in table.tiles.values()} == {128}


def test_a_tile_that_sums_as_the_default_does_holds_at_its_own_thread_count(settings_restored):
    native.set_num_threads(2)
    table = TunedTable(native, [choice(2, replace(default_tile(2), mr=2))])
    assert [threads for threads, _ in table.tiles] == [2]
