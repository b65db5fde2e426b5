"""Conversion between native tiles and configurations, with the field names of each operation's `TiledOp`.

This file does not import the cost model, so that a process that only looks up tuned tiles starts quickly.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tilewise.backend.tiled import tiled_op
from tilewise.store.problem import Config


def config_for(op: str, tile: Any) -> Config:
    """Convert a native tile to a configuration of its family."""
    return Config(tiled_op(op).values(tile))


def tile_for(op: str, config: Config) -> Any:
    """Convert a configuration of a family to a native tile."""
    return tiled_op(op).tile(config)


product_config, product_tile = partial(config_for, "matmul"), partial(tile_for, "matmul")
