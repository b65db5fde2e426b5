"""What nvMatmulHeuristics answers for the products of `benchmarks.inductor`, and the compiler made to follow it.

`python3 -m benchmarks.inductor_peer --seed S --out FILE` lists its answers (tile, stages, warps) without a GPU; it
needs nvidia-matmul-heuristics. On the GPU an answer becomes the template nearest to it.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from benchmarks.inductor_problems import products
from tools.products_peer import recommended_kernels

COUNT = 3  # answers a product; tilewise's budget
# What the blocks of `inductor_problems.MODELS` multiply: (m, n, k).
_IN_MODELS = (
    *((3072, n, k) for n, k in ((3840, 1280), (1280, 1280), (5120, 1280), (1280, 5120))),
    *((3072, n, k) for n, k in ((2304, 768), (768, 768), (3072, 768), (768, 3072))),
    *((3152, n, k) for n, k in ((3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096))),
    *((20480, n, k) for n, k in ((256, 196), (196, 256))), (6272, 2560, 640), (6272, 640, 2560),
)  # fmt: skip


def answers(sizes: tuple[int, int, int]) -> list[dict[str, int]]:
    """Tiles for one product of a Linear layer, the best first."""
    kernels = recommended_kernels(sizes, "nt", 8)
    tiles = [{"BLOCK_M": k.cta_tile_m, "BLOCK_N": k.cta_tile_n, "BLOCK_K": k.cta_tile_k, "num_stages": k.stages,
              "num_warps": 8 if k.cta_tile_m * k.cta_tile_n > 128 * 128 else 4} for k in kernels]  # fmt: skip
    return list({json.dumps(tile): tile for tile in tiles}.values())


def nearest(answer: dict[str, int], templates: list[str], parameters: list[dict[str, Any]]) -> int | None:
    """The place of the template that is closest to an answer; with descriptors where that is all the same."""

    def far(place: int) -> float:
        of = parameters[place]
        if "BLOCK_M" not in of:
            return math.inf
        sizes = ("BLOCK_M", "BLOCK_N", "BLOCK_K")
        tile = sum(abs(math.log2(of[name] / answer[name])) for name in sizes)
        return (tile + 0.1 * abs(of["num_stages"] - answer["num_stages"])
                + 0.05 * (of["num_warps"] != answer["num_warps"]) - 0.01 * ("tma" in templates[place]))  # fmt: skip

    place = min(range(len(templates)), key=far)
    return place if far(place) < math.inf else None


def answering(advisor: Any, peer: dict[str, Any]) -> None:
    """Have an advisor of tilewise's keep a peer's answers, measured in the same way."""
    from tilewise.gpu.inductor.templates import Reason, Selection

    def select(problem: Any, choices: tuple[list[str], list[dict[str, Any]]]) -> Selection:
        templates, parameters = choices
        library = [place for place, name in enumerate(templates) if name.startswith("aten")]
        known = peer.get("x".join(str(problem.size(name)) for name in ("m", "n", "k")), [])
        places = [nearest(answer, templates, parameters) for answer in known]
        chosen = list(dict.fromkeys(place for place in places if place is not None))[:COUNT]
        return Selection((*library, *chosen), Reason.BENCHMARK, len(templates), 0.0)

    advisor._select = select


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--products", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    wanted = [(m, n, k) for _, (*_, m, n, k), _ in products(given.seed, given.products)] + list(_IN_MODELS)
    found = {"x".join(map(str, sizes)): answers(sizes) for sizes in wanted}
    given.out.write_text(json.dumps(found, indent=1))
    print(f"{len(found)} products, {sum(map(len, found.values()))} answers")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
