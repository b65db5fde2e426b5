"""The table of tiles tuned on this machine, in the form in which the framework's kernels look them up.

`tilewise tune` writes its choices to a file. The first operation of a later process reads that file, if it exists, and
preloads the tiles into the lookup table of the compiled kernels. No model is loaded and the tuner is not imported.

A choice applies to the thread count at which it was measured. Products have an additional constraint: their result must
be bitwise the same for every number of threads, and it depends on the block size of the sum over k (`kc`). A tile with
another `kc` than the default therefore applies to every thread count, with the default's split of the work over
threads. If two choices have different `kc`, the later one wins.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewise import __version__
from tilewise._system import cores, cpu_name, machine_override_text
from tilewise.backend.tiled import TILED, tiled_op
from tilewise.backend.tiled.matmul import TileConfig, product_plan
from tilewise.store.problem import Problem
from tilewise.tune.choose.cache import ChoiceFile, Decision, cache_folder
from tilewise.tune.families.cpu.family import tile_for

Key = tuple[str, tuple[int, ...], str, str]  # of a backend lookup: operation, shape, dtype, layout
Situation = tuple[int, Key]  # threads and key
CALIBRATED = "calibration"  # subfolder for the choices of `tilewise calibrate`
_NEVER = 1 << 62  # multiplications; more than any program computes


class TunedTable:
    """Tuned tiles by operation, shape and threads, as the backend looks them up; None is the default tile."""

    min_work, warm_up = 0, _NEVER  # the compiled kernels hold all tiles (`preload`) and never ask

    def __init__(self, module: Any, choices: Sequence[Decision]) -> None:
        self._native, self._isa = module, module.isa()
        self.tiles = self._tiles_by_situation(choices)  # None: the default is the fastest that was measured

    def __call__(self, op: str, shape: tuple[int, ...], dtype: str, layout: str, /) -> Any:
        if self._native.isa() != self._isa:
            return None
        return self.tiles.get((self._native.num_threads(), (op, shape, dtype, layout)))

    def preload(self, table: Any) -> None:
        """Add all tiles to the compiled kernels' own table, which they read at every call."""
        if self._native.isa() != self._isa:
            return
        for (threads, (op, shape, _, layout)), tile in self.tiles.items():
            tiled_op(op).add_to_table(table, shape, layout, threads, tile)

    def _tiles_by_situation(self, choices: Sequence[Decision]) -> dict[Situation, Any]:
        """Return tiles by shape and thread count; choices that the kernels do not support are skipped."""
        tiles: dict[Situation, Any] = {}
        products: dict[Key, dict[int, TileConfig]] = {}
        for choice in choices:
            try:
                threads = choice.problem.size("threads")
                key = key_of(choice.problem, threads)
                tile = None if key is None else tile_for(key[0], choice.config)
                if key is None or threads < 1:
                    continue
                op, shape, _, layout = key
                if tiled_op(op).infeasible_reason(self._native, tile, shape, layout) is not None:
                    continue
            except (KeyError, ValueError, TypeError, IndexError, OverflowError):
                continue  # a choice of a version with other families or fields
            if isinstance(tile, TileConfig):
                by_threads = products.setdefault(key, {})
                by_threads.pop(threads, None)
                by_threads[threads] = tile
            else:
                tiles[threads, key] = tile
        for key, by_threads in products.items():
            tiles |= {(threads, key): tile for threads, tile in self._product_tiles(key, by_threads).items()}
        return tiles

    def _product_tiles(self, key: Key, by_threads: dict[int, TileConfig]) -> dict[int, TileConfig | None]:
        """Return a product's tile (None: default) per thread count; one that changes how K is summed is for all."""
        last = next(reversed(by_threads.values()))
        depth = _effective_depth(last, key)
        # Thread counts that get an entry: up to the number of cores (at most 64), and those that were tuned.
        max_threads = min(max(cores(), self._native.num_threads()), 64)
        counts = sorted({*range(1, max_threads + 1), *by_threads})
        plans = {threads: product_plan(self._native, key[1], key[3], threads) for threads in counts}
        algorithm, default_one = plans[1]
        # A tile changes the result if it sums over k in other blocks than the default does.
        changes_sums = last != default_one and (algorithm != "tiled" or depth != _effective_depth(default_one, key))
        tiles: dict[int, TileConfig | None] = {}
        for threads, (_, default) in plans.items():
            tile = by_threads.get(threads)
            # The latest choice determines how the sum over k is split; older choices that differ are dropped.
            if tile is not None and _effective_depth(tile, key) != depth:
                tile = None
            # The result must not depend on the thread count, so a changed sum applies to all of them.
            if tile is None and changes_sums:
                tile = replace(last, threads_m=default.threads_m, threads_n=default.threads_n)
            if tile is None and default.threads_m * default.threads_n == 1:
                tile = by_threads.get(1)  # too small to split: one thread computes it at every thread count
            if tile is not None:
                tiles[threads] = None if tile == default else tile
        return tiles


def _effective_depth(tile: TileConfig, key: Key) -> int:
    """Return a tile's block size along k, at most k itself."""
    return min(tile.kc, key[1][2])


def key_of(problem: Problem, threads: int) -> Key | None:
    """Return the key under which the backend looks up a tuned problem; None if it never does.

    Keys do not contain the epilogue, so the problem of a shape that was tuned last applies to all epilogues.
    """
    if problem.get("threads") != threads or problem.family not in TILED:
        return None
    key = tiled_op(problem.family).key(problem)
    return None if key is None else (problem.family, *key)


def machine_name(module: Any) -> str:
    """Return the machine's name in choices and stores: its processor and the current instruction set."""
    override = machine_override_text()
    return f"{cpu_name()} ({module.isa()}{f', playing {override}' if override else ''})"


def load_tuned_table(module: Any, folder: str | os.PathLike[str] | None = None) -> tuple[TunedTable, list[str]]:
    """Load the tuned tiles of this machine; return the table, and notes about ignored lines."""
    path = Path(folder).expanduser() if folder is not None else cache_folder()
    # Calibrated choices come first: for the same shape, the tuner's own choice replaces them.
    calibrated, tuned = (ChoiceFile(source, machine_name(module), __version__) for source in (path / CALIBRATED, path))
    return TunedTable(module, calibrated.all() + tuned.all()), calibrated.notes + tuned.notes
