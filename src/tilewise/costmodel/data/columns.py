"""Select the configuration columns of a model's schema from a collection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.dataset import SPLITS, Dataset, from_kernels
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.data.schema import TILE_FEATURES, Schema
from tilewise.errors import ConfigurationError


def select_columns(
    data: Dataset, schema: Schema, constants: Mapping[str, float] | None = None
) -> tuple[Dataset, dict[str, npt.NDArray[np.int64]]]:
    """Reduce a dataset to the configuration columns of a model's `schema`, and to configurations that have a tile.

    `constants` are the values of columns that the collection lacks. A library call among the configurations has no tile
    and cannot be scored; the second result maps the name of each kernel with such a call to the indices of its other
    configurations.
    """
    if data.schema.config_features == schema.config_features and not constants:
        return data, {}
    names, constants = list(data.schema.config_features), constants or {}
    missing = [name for name in schema.config_features if name not in names and name not in constants]
    if missing:
        raise ConfigurationError(
            f"{data.root} lacks columns that the model was trained on: {', '.join(missing[:3])}; if one is constant, "
            f"give its value (--fill {missing[0]}=VALUE), else train a model: `tilewise tiles train {data.root}`."
        )
    has_tiles, rows_of = set(TILE_FEATURES) <= set(names), dict[str, npt.NDArray[np.int64]]()

    def select(kernel: Kernel) -> Kernel:
        """Return a kernel with the selected columns, without configurations that have no tile."""
        columns = [
            kernel.config_feat[:, names.index(name)] if name in names else np.full(kernel.n_configs, constants[name])
            for name in schema.config_features
        ]
        table = np.stack(columns, axis=1).astype(np.float32)
        rows = np.flatnonzero(table[:, : len(TILE_FEATURES)].any(axis=1)) if has_tiles else np.arange(len(table))
        # A kernel with library calls only is unchanged: the model cannot distinguish its configurations.
        if len(rows) in (0, len(table)):
            return replace(kernel, config_feat=table)
        rows_of[kernel.name] = rows
        return replace(
            kernel, config_feat=table[rows], runtime=kernel.runtime[rows], normalizer=kernel.normalizer[rows]
        )

    # `select` fills `rows_of` while the splits are built.
    splits = {name: from_kernels([select(kernel) for kernel in data.split(name)], schema) for name in SPLITS}
    return Dataset(data.root, Schema(schema.config_features, data.schema.extra), **splits), rows_of
