"""Cases of `benchmarks.pinned`: an autotuned kernel, its problems, and how to make the arguments of one."""

# mypy: ignore-errors

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from triton import Config


@dataclass(frozen=True)
class ForeignCase:
    """An autotuned kernel with problems; `make(problem, device)` returns its positional arguments and its grid."""

    name: str
    kernel: Any
    problems: tuple[tuple[int, ...], ...]
    make: Callable[[tuple[int, ...], str], tuple[tuple[Any, ...], Any]]


CASES: list[ForeignCase] = []


def case(name: str, kernel: Any, *problems: tuple[int, ...]) -> Any:
    """Register the decorated function as the maker of a case's arguments."""

    def register(make: Any) -> Any:
        CASES.append(ForeignCase(name, kernel, problems, make))
        return make

    return register


def block_configs(blocks: tuple[int, ...], warps: tuple[int, ...]) -> list[Config]:
    """List every combination of block size and warps."""
    return [Config({"BLOCK": b}, num_warps=w) for b in blocks for w in warps]


def warp_configs(warps: tuple[int, ...] = (1, 2, 4, 8, 16)) -> list[Config]:
    return [Config({}, num_warps=w) for w in warps]


def randn(*size: int, device: str, dtype: Any = torch.bfloat16) -> Any:
    return torch.randn(size, device=device, dtype=torch.float32).to(dtype)


def all_configs(
    names: dict[str, tuple[int, ...]], warps: tuple[int, ...], stages: tuple[int, ...] = (3,)
) -> list[Config]:
    """List every combination of block sizes, warps and pipeline stages."""
    sizes = [dict(zip(names, values, strict=True)) for values in product(*names.values())]
    return [Config(size, num_warps=w, num_stages=s) for size in sizes for w in warps for s in stages]
