"""The tile of a matrix product without measuring: a small network that was taught by the clock how tiles compare with
the default.

The ranking model orders tiles among each other, and on a CPU the best few lie within a per cent or two; what decides
whether to leave the default is how the default itself runs, which often is no tile at all (inner products, transposed
products, a separate tail of columns). So this one predicts exactly that: the logarithm of a tile's time over the
default's, from the product's sizes and layout, the way the default takes, and the tile. Several members vote; a tile is
taken where their mean, plus a share of their disagreement, promises more than a margin. `benchmarks/ship_chooser.py`
measures, trains, and sets margin and share on products that it did not train on.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewise.backend.tiles import TileConfig, tile_blocks
from tilewise.errors import FileFormatError
from tilewise.io import load_arrays, save
from tilewise.tune.belief import Prior

Numbers = npt.NDArray[np.float64]
Tiles = npt.NDArray[np.int64]  # one a row, in the order of TileConfig's fields
SHIPPED = Path(__file__).with_name("first_choice.safetensors")
LAYOUTS = ("nn", "nt", "tn", "tt")
PATHS = (
    "tiled", "transposed tiles", "few rows", "few results", "short sums", "few columns", "scaled rows",
    "inner products",
)  # fmt: skip
WORTH_THREADS = 1 << 20  # multiplications; the kernels run smaller products on the calling thread alone
_PRIOR = Prior(slope=1.0, spread=0.01, own=0.01)
_PACKS_A = 0.05
_LANES = 16  # of the instruction set that was measured


@dataclass(frozen=True)
class Product:
    """A matrix product, and the way the default takes for it."""

    m: int
    n: int
    k: int
    layout: str
    path: str


def plan_of(module: Any, m: int, n: int, k: int, layout: str) -> tuple[Product, Tiles]:
    """The product, and the default tile as a row."""
    path, tile = module.matmul_plan(*views(m, n, k, layout), 1)
    return Product(m, n, k, layout, path), np.array([tile], dtype=np.int64)


def views(m: int, n: int, k: int, layout: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Operands that only their shapes and strides are read of; their memory is never touched."""
    a = np.empty((k, m), np.float32).T if layout[0] == "t" else np.empty((m, k), np.float32)
    b = np.empty((n, k), np.float32).T if layout[1] == "t" else np.empty((k, n), np.float32)
    return a, b


def candidates(module: Any, m: int, n: int, k: int, threads: int) -> Tiles:
    """Some fifty to two hundred tiles, one a row in the order of TileConfig's fields, that hold nearly all of the best.

    A is not packed: over the embedded collection the best such tile is within 0.03 % of the best.
    """
    grids = [(t, threads // t) for t in range(1, threads + 1) if threads % t == 0]
    rows: list[tuple[int, ...]] = []
    for mr, nr, row_blocks, column_blocks, depth_blocks in tile_blocks(module, m, n, k):
        for mc, nc, kc, pack_b, grid in product(row_blocks, column_blocks, depth_blocks, (0, 1), grids):
            rows.append((mr, nr, mc, nc, kc, 0, pack_b, *grid))
    return np.array(rows, dtype=np.int64)


def tile_at(row: npt.NDArray[np.int64]) -> TileConfig:
    mr, nr, mc, nc, kc, pack_a, pack_b, threads_m, threads_n = (int(value) for value in row)
    return TileConfig(mr, nr, mc, nc, kc, bool(pack_a), bool(pack_b), threads_m, threads_n)


def _filled(size: Any, step: Any) -> Any:
    """The share of whole steps that a size fills."""
    return size / (np.ceil(size / step) * step)


def _of_product(p: Product) -> list[float]:
    m, n, k = float(p.m), float(p.n), float(p.k)
    tail = p.n % _LANES
    rows_apart = (p.m if p.layout[0] == "t" else p.k), (p.k if p.layout[1] == "t" else p.n), p.n  # of A, B and C
    along_k, across = math.log(k / (math.ceil(k / _LANES) * _LANES + 40)), math.log(_filled(n, _LANES))
    return [
        *(math.log2(x) for x in (m, n, k, m * n * k, m * k, n * k, m * n, min(m, n), max(m, n), m + n)),
        p.layout[0] == "t", p.layout[1] == "t", p.layout == "tt",
        *(_filled(n, x) for x in (4, 12, 16, 32, 48, 64)), *(_filled(m, x) for x in (4, 6, 14, 16)),
        _filled(k, _LANES), tail / _LANES, tail == 0, tail / 4 if tail <= 4 else 0,
        min(m, 16) / 16, min(m, 64) / 64, min(n, 64) / 64, min(k, 64) / 64,
        p.k % _LANES == 0, *(stride % floats == 0 for stride in rows_apart for floats in (16, 128, 256, 512, 1024)),
        along_k, across, along_k - across, math.log(m / (m + 8)), math.log(n / (n + 8)),
        *(p.path == path for path in PATHS),
    ]  # fmt: skip


def features(p: Product, tiles: Tiles) -> Numbers:
    """What the network reads: a row for each tile, the product's own numbers first."""
    m, n, k = p.m, p.n, p.k
    t = tiles.astype(np.float64)
    mr, nr = t[:, 0], t[:, 1]
    mc, nc, kc = (np.minimum(t[:, i], size) for i, size in ((2, m), (3, n), (4, k)))
    down, across = np.ceil(m / mr), np.ceil(n / nr)
    own = [
        mr, nr / _LANES, mr * nr / 64, np.log2(mc), np.log2(nc), np.log2(kc), t[:, 6],
        _filled(m, mr), _filled(n, nr), _filled(m, mr) * _filled(n, nr), np.minimum(across, 4), np.minimum(down, 4),
        mc >= m, nc >= n, kc >= k, np.log2(mc * kc), np.log2(kc * nr), np.log2(kc * nc),
        nr >= 2 * _LANES, nr >= 3 * _LANES, nr >= 4 * _LANES, n % nr / nr, m % mr / mr, np.log2(across), np.log2(down),
    ]  # fmt: skip
    shared = np.tile(np.array(_of_product(p), dtype=np.float64), (len(t), 1))
    return np.hstack([shared, np.stack([np.asarray(column, dtype=np.float64) for column in own], axis=1)])


class FirstChoice:
    """The network: members of two hidden layers each, `x * sigmoid(x)` between them, one number out."""

    def __init__(
        self, arrays: dict[str, npt.NDArray[Any]], margin: float, share: float, most_work: int, prior: Prior = _PRIOR
    ) -> None:
        self._arrays, self.margin, self.share, self.most_work = arrays, margin, share, most_work
        self.prior = prior  # how the tuner trusts `scores`

    def predict(self, x: Numbers) -> Numbers:
        """Log time over the default's: a row for each member, a column for each tile."""
        a = self._arrays
        hidden = (x.astype(np.float32) - a["mean"]) / a["deviation"]
        hidden = np.broadcast_to(hidden, (len(a["w0"]), *hidden.shape))
        for layer in ("0", "1"):
            hidden = hidden @ a["w" + layer] + a["b" + layer][:, None, :]
            hidden = hidden / (1 + np.exp(-np.clip(hidden, -40, 40)))
        return np.asarray((hidden @ a["w2"][:, :, None])[:, :, 0] + a["b2"][:, None], dtype=np.float64)

    def covers(self, work: int, threads: int) -> bool:
        """Whether such products were among those it was taught on: on one thread, as small ones run in any case."""
        return work <= self.most_work and (threads == 1 or work < WORTH_THREADS)

    def scores(self, module: Any, m: int, n: int, k: int, layout: str, tiles: Tiles) -> Numbers:
        """Log time over the default's of any tiles; those that pack A, of which none was measured, come after."""
        p, default = plan_of(module, m, n, k, layout)
        guesses: Numbers = self.predict(features(p, tiles)).mean(axis=0) + _PACKS_A * tiles[:, 5]
        guesses[(tiles == default).all(axis=1)] = 0.0
        return guesses

    def order(self, p: Product, tiles: Tiles) -> list[int]:
        """The tiles that promise more than the margin over the default, the best first."""
        guesses = self.predict(features(p, tiles))
        cautious = guesses.mean(axis=0) + self.share * guesses.std(axis=0)
        return [int(i) for i in np.argsort(cautious, kind="stable") if cautious[i] < -self.margin]

    def choose(self, module: Any, m: int, n: int, k: int, layout: str) -> TileConfig | None:
        """The tile to use in place of the default; None to stay with it."""
        p, _ = plan_of(module, m, n, k, layout)
        tiles = candidates(module, m, n, k, 1)
        for index in self.order(p, tiles):
            tile = tile_at(tiles[index])
            if module.gemm_tile_problem(tile, m, n, k, layout[1] == "t") is None:
                return tile
        return None

    def write(self, path: Path, about: dict[str, Any]) -> None:
        numbers = {"margin": self.margin, "share": self.share, "most_work": self.most_work, "prior": asdict(self.prior)}
        save(self._arrays, path, {"chooser": json.dumps(numbers | about)})


_ARRAYS = ("mean", "deviation", "w0", "b0", "w1", "b1", "w2", "b2")


def read_first_choice(path: Path = SHIPPED) -> FirstChoice:
    """The network in a file; one sentence where it is none."""
    arrays, metadata = load_arrays(path)
    try:
        told = json.loads(metadata["chooser"])
        numbers = float(told["margin"]), float(told["share"]), int(told["most_work"])
        model = FirstChoice({name: arrays[name] for name in _ARRAYS}, *numbers, Prior.from_dict(told["prior"]))
        model.predict(features(Product(64, 64, 64, "nn", "tiled"), np.array([[6, 64, 60, 64, 64, 0, 0, 1, 1]])))
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise FileFormatError(f"{path.name} is not a chooser's network: {error}.") from None
    return model
