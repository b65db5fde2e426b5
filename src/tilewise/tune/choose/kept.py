"""The tiles that were tuned on this machine, as the framework's kernels look them up: the loop closed.

`tilewise tune` writes its choices into one file; the first operation of any later process reads that file, if it is
there, and hands the tiles to the compiled kernels' own table. No model is loaded and nothing of the tuner is imported.

A choice was measured at one thread count and holds there. A product must not change a bit with the number of threads,
and its bits depend on how the sum over k is cut: so a tile that cuts it otherwise than the default holds at every
thread count, shared out there as the default would be, and of two choices that disagree the later one holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewise import __version__
from tilewise._system import cores, cpu_name, machine_override_text
from tilewise.backend.tiled import TILED, tiled_op
from tilewise.backend.tiled.matmul import TileConfig, product_plan
from tilewise.store.problem import Problem
from tilewise.tune.choose.cache import Choices, Decision, cache_folder
from tilewise.tune.families.cpu.tiles import tile_for

Key = tuple[str, tuple[int, ...], str, str]  # what the backend asks with: operation, shape, dtype, layout
Situation = tuple[int, Key]  # threads and key
CALIBRATED = "calibration"  # the folder, beside the tuner's choices, of those of `tilewise calibrate`
_NEVER = 1 << 62  # multiplications


class KeptTiles:
    """A `TileChooser` that knows what was kept. For shapes that nothing was kept for it asks `otherwise`, once they
    have computed for `warm_up` multiplications; None is the default tile."""

    min_work, warm_up = 0, _NEVER

    def __init__(
        self, module: Any, choices: Sequence[Decision], otherwise: Callable[[Key], Any] = lambda key: None
    ) -> None:
        self._native, self._isa, self.choose = module, module.isa(), otherwise
        self.tiles = self._situations(choices)  # None where the default is the best that was found

    def __call__(self, op: str, shape: tuple[int, ...], dtype: str, layout: str, /) -> Any:
        kept, tile = self.find((op, shape, dtype, layout))
        return tile if kept else self.choose((op, shape, dtype, layout))

    def find(self, key: Key) -> tuple[bool, Any]:
        """Whether something was kept for a shape at the thread count in force, and what."""
        here = (self._native.num_threads(), key)
        if here not in self.tiles or self._native.isa() != self._isa:
            return False, None
        return True, self.tiles[here]

    def preload(self, table: Any) -> None:
        """Hand the tiles to the compiled kernels: they hold from the first call on."""
        if self._native.isa() != self._isa:
            return
        for (threads, (op, shape, _, layout)), tile in self.tiles.items():
            tiled_op(op).add_to_table(table, shape, layout, threads, tile)

    def _situations(self, choices: Sequence[Decision]) -> dict[Situation, Any]:
        found: dict[Situation, Any] = {}
        products: dict[Key, dict[int, TileConfig]] = {}
        for choice in choices:
            try:
                threads = choice.problem.size("threads")
                key = key_of(choice.problem, threads)
                tile = None if key is None else tile_for(key[0], choice.config)
                if key is None or threads < 1 or tile_problem(self._native, key, tile) is not None:
                    continue
            except (KeyError, ValueError, TypeError, IndexError, OverflowError):
                continue  # a line that says nothing to today's kernels
            if isinstance(tile, TileConfig):
                kept = products.setdefault(key, {})
                kept.pop(threads, None)
                kept[threads] = tile
            else:
                found[threads, key] = tile
        for key, kept in products.items():
            found |= {(threads, key): tile for threads, tile in self._product(key, kept).items()}
        return found

    def _product(self, key: Key, kept: dict[int, TileConfig]) -> dict[int, TileConfig | None]:
        """Tiles by thread count of one product, the last of `kept` being the latest choice."""
        last = next(reversed(kept.values()))
        order = _depth(last, key)
        plans = {t: product_plan(self._native, key[1], key[3], t) for t in self._thread_counts(kept)}
        one = plans[1]
        changes_sums = last != one[1] and (one[0] != "tiled" or order != _depth(one[1], key))
        tiles: dict[int, TileConfig | None] = {}
        for threads, (_, default) in plans.items():
            tile = kept.get(threads)
            if tile is not None and _depth(tile, key) != order:
                tile = None
            if tile is None and changes_sums:
                tile = replace(last, threads_m=default.threads_m, threads_n=default.threads_n)
            if (
                tile is None and default.threads_m * default.threads_n == 1
            ):  # too small to share: the same at every thread count
                tile = kept.get(1)
            if tile is not None:
                tiles[threads] = None if tile == default else tile
        return tiles

    def _thread_counts(self, kept: dict[int, TileConfig]) -> list[int]:
        most = max(cores(), self._native.num_threads())
        return sorted({*range(1, min(most, 64) + 1), *kept})


def _depth(tile: TileConfig, key: Key) -> int:
    return min(tile.kc, key[1][2])


def tile_problem(module: Any, key: Key, tile: Any) -> str | None:
    """Why today's kernels do not take a tile at a shape; None where they do."""
    op, shape, _, layout = key
    return tiled_op(op).infeasible_reason(module, tile, shape, layout)


def key_of(problem: Problem, threads: int) -> Key | None:
    """Where a tuned problem stands among the shapes the backend looks up; None if it does not.

    It looks up without the epilogue, so the problem of a shape that was tuned last speaks for all of them.
    """
    if problem.get("threads") != threads or problem.family not in TILED:
        return None
    key = tiled_op(problem.family).key(problem)
    return None if key is None else (problem.family, *key)


def machine_name(module: Any) -> str:
    """What choices and stores know this machine by: its processor and the instruction set in force."""
    played = machine_override_text()
    return f"{cpu_name()} ({module.isa()}{f', playing {played}' if played else ''})"


def read_kept(module: Any, folder: str | os.PathLike[str] | None = None) -> tuple[KeptTiles, list[str]]:
    """What was calibrated and tuned on this machine, and what is to be said about the rest of the files."""
    place = Path(folder).expanduser() if folder is not None else cache_folder()
    both = [Choices(one, machine_name(module), __version__) for one in (place / CALIBRATED, place)]
    return KeptTiles(module, [choice for one in both for choice in one.all()]), both[0].notes + both[1].notes
