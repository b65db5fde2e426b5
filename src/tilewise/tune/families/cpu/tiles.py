"""Native tiles as configurations, and back, under the names that each operation's `TiledOp` gives its fields.

Blocks become bounds of tensors in a model's columns, the rest columns of their own. This file imports nothing of the
cost model, so that a process that only uses what was tuned starts quickly.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tilewise.backend.tiled import tiled_op
from tilewise.store.problem import Config


def config_for(op: str, tile: Any) -> Config:
    """A native tile as a configuration of its family."""
    return Config(tiled_op(op).values(tile))


def tile_for(op: str, config: Config) -> Any:
    """The native tile that a configuration of a family stands for."""
    return tiled_op(op).tile(config)


product_config, product_tile = partial(config_for, "matmul"), partial(tile_for, "matmul")
