"""The recommendations of nvMatmulHeuristics for the products of `benchmarks.inductor`.

`python3 -m benchmarks.inductor_peer --seed S --out FILE` lists them (tile, stages, warps) without a GPU; it needs
nvidia-matmul-heuristics. On the GPU the compiler benchmarks the templates that are nearest to them.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from benchmarks.inductor_problems import products
from tools.products_peer import recommended_kernels

COUNT = 3  # recommendations per product: tilewise's budget
# The products (m, n, k) of the blocks of `inductor_problems.MODELS`.
_MODEL_PRODUCTS = (
    *((3072, n, k) for n, k in ((3840, 1280), (1280, 1280), (5120, 1280), (1280, 5120))),
    *((3072, n, k) for n, k in ((2304, 768), (768, 768), (3072, 768), (768, 3072))),
    *((3152, n, k) for n, k in ((3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096))),
    *((20480, n, k) for n, k in ((256, 196), (196, 256))), (6272, 2560, 640), (6272, 640, 2560),
)  # fmt: skip


def recommendations(sizes: tuple[int, int, int]) -> list[dict[str, int]]:
    """List the recommended tiles for one product of a Linear layer, the best first."""
    kernels = recommended_kernels(sizes, "nt", 8)
    tiles = [{"BLOCK_M": k.cta_tile_m, "BLOCK_N": k.cta_tile_n, "BLOCK_K": k.cta_tile_k, "num_stages": k.stages,
              "num_warps": 8 if k.cta_tile_m * k.cta_tile_n > 128 * 128 else 4} for k in kernels]  # fmt: skip
    return list({json.dumps(tile): tile for tile in tiles}.values())


def nearest(tile: dict[str, int], templates: list[str], parameters: list[dict[str, Any]]) -> int | None:
    """Return the index of the template closest to a recommended tile; with TMA if two are equally close."""

    def distance(index: int) -> float:
        row = parameters[index]
        if "BLOCK_M" not in row:
            return math.inf
        blocks = sum(abs(math.log2(row[name] / tile[name])) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
        return (blocks + 0.1 * abs(row["num_stages"] - tile["num_stages"])
                + 0.05 * (row["num_warps"] != tile["num_warps"]) - 0.01 * ("tma" in templates[index]))  # fmt: skip

    best = min(range(len(templates)), key=distance)
    return best if distance(best) < math.inf else None


def follow_peer(advisor: Any, peer: dict[str, Any]) -> None:
    """Make an advisor select the peer's recommendations; they are benchmarked in the same way."""
    from tilewise.gpu.inductor.templates import Reason, Selection

    def select(problem: Any, choices: tuple[list[str], list[dict[str, Any]]]) -> Selection:
        templates, parameters = choices
        aten = [index for index, name in enumerate(templates) if name.startswith("aten")]
        tiles = peer.get("x".join(str(problem.size(name)) for name in ("m", "n", "k")), [])
        indices = [nearest(tile, templates, parameters) for tile in tiles]
        distinct = list(dict.fromkeys(index for index in indices if index is not None))[:COUNT]
        return Selection((*aten, *distinct), Reason.BENCHMARK, len(templates), 0.0)

    advisor._select = select


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--products", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    all_sizes = [(m, n, k) for _, (*_, m, n, k), _ in products(options.seed, options.products)] + list(_MODEL_PRODUCTS)
    tiles = {"x".join(map(str, sizes)): recommendations(sizes) for sizes in all_sizes}
    options.out.write_text(json.dumps(tiles, indent=1))
    print(f"{len(tiles)} products, {sum(map(len, tiles.values()))} recommendations")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
