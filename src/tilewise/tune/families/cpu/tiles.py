"""Native tiles as configurations, and back: the names that stores, features and choices use for a tile's fields.

Blocks become bounds of tensors in a model's columns, the rest columns of their own. This file imports nothing of the
cost model, so that a process that only uses what was tuned starts quickly.
"""

from __future__ import annotations

from typing import Any

from tilewise.backend.conv_tiles import ConvTile
from tilewise.backend.int8_tiles import Int8Tile
from tilewise.backend.tiles import TileConfig
from tilewise.tune.problem import Config

_PRODUCT = {
    "register_m": "mr", "register_n": "nr", "block_m": "mc", "block_n": "nc", "block_k": "kc",
    "pack_a": "pack_a", "pack_b": "pack_b", "threads_m": "threads_m", "threads_n": "threads_n",
}  # fmt: skip
_INT8 = {name: field for name, field in _PRODUCT.items() if not name.startswith("pack")}
_CONV = {"register_m": "mr", "register_n": "nr", "block_m": "block", "block_n": "channels", "threads_n": "split"}
_ALGORITHMS = ("direct", "winograd")


def product_config(tile: TileConfig) -> Config:
    values = tile.as_dict()
    return Config({name: values[field] for name, field in _PRODUCT.items()})


def product_tile(config: Config) -> TileConfig:
    values: dict[str, Any] = {field: config.size(name) for name, field in _PRODUCT.items()}
    values["pack_a"], values["pack_b"] = bool(values["pack_a"]), bool(values["pack_b"])
    return TileConfig(**values)


def conv_config(tile: ConvTile) -> Config:
    values = tile.as_dict()
    numbers = {name: int(values[field]) for name, field in _CONV.items()}
    return Config({"winograd": _ALGORITHMS.index(tile.algorithm), **numbers})


def conv_tile(config: Config) -> ConvTile:
    numbers = {field: config.size(name) for name, field in _CONV.items()}
    return ConvTile(_ALGORITHMS[config.size("winograd")], **numbers)


def int8_config(tile: Int8Tile) -> Config:
    values = tile.as_dict()
    return Config({name: values[field] for name, field in _INT8.items()})


def int8_tile(config: Config) -> Int8Tile:
    return Int8Tile(**{field: config.size(name) for name, field in _INT8.items()})


def tile_for(op: str, config: Config) -> Any:
    """The native tile that a configuration of a family stands for."""
    return {"matmul": product_tile, "conv2d": conv_tile, "int8_matmul": int8_tile}[op](config)
