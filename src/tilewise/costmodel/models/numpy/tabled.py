"""Scoring one list of configurations for kernel after kernel, as a tuner does, without working out every feature anew.

A TileRanker's inputs are functions of one configuration column each (its logarithm, the steps it reaches, how it cuts
each size of the kernel), all but the few about filling a GPU; and a column has a handful of values. So the features are
worked out for the values and multiplied with the first layer's weights there; what a configuration gets is the sum over
its values, a product with a table of ones and zeros that belongs to the list of configurations alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.features.occupancy import Access, Filling, Gpu
from tilewise.costmodel.features.ranker import RankerFeatures
from tilewise.costmodel.features.scaling import Prepared
from tilewise.costmodel.models.numpy.ranker import Folded, encode, score_inputs

Floats = npt.NDArray[np.float32]
_MOST_VALUES, _MOST_CONFIGS = 160, 4096  # beyond, the plain way is as fast


@dataclass(frozen=True, eq=False)
class Tabled:
    """A list of configurations by the values of its columns, and a model's first layer over them."""

    features: RankerFeatures
    folded: Folded
    columns: Floats  # (D, C) the configurations as the model knows them
    has: Floats  # (C, V): which values each configuration has
    fixed: Floats  # (V, members * H): what values are worth whatever the kernel
    value: Floats  # (E,) of each pair of a value and a size that it may cut
    cuts: npt.NDArray[np.int64]  # (E,) the size
    scaling: tuple[Floats, Floats]  # (2, E) each: of the two features of a pair
    where: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]  # (2, E) each: the value's row and the feature's column
    gpu: Gpu | None
    fillings: dict[Access, Filling] = field(default_factory=dict)

    @classmethod
    def of(cls, features: RankerFeatures, folded: Folded, config: npt.NDArray[np.float32]) -> Tabled | None:
        """None where there is nothing to gain, or where a feature reads several columns."""
        if len(features.crowds) or not len(features.columns) or not 0 < len(config) <= _MOST_CONFIGS:
            return None
        config = features.known(config)
        unique = [np.unique(config[:, column], return_inverse=True) for column in features.columns]
        ends = np.cumsum([len(values) for values, _ in unique])
        if ends[-1] > _MOST_VALUES:
            return None
        has = np.zeros((len(config), ends[-1]), np.float32)
        for end, (values, codes) in zip(ends, unique, strict=True):
            has[np.arange(len(config)), end - len(values) + codes.reshape(-1)] = 1.0
        values = np.concatenate([values for values, _ in unique]).astype(np.float32)
        owner = np.repeat(features.columns, [len(values) for values, _ in unique])
        pair, place = np.nonzero(features.pairs[:, :1] == owner)
        told = features.of_values(values, owner)
        fixed = told @ folded.first[: told.shape[1]]
        columns, gpu = np.ascontiguousarray(config.T), Gpu.restore(features.gpu)
        where = np.stack([place, place]), np.stack([pair, len(features.pairs) + pair])
        scaling = features.scaling_of_pairs(pair)
        cuts = features.pairs[pair, 1]
        return cls(features, folded, columns, has, fixed, values[place], cuts, scaling, where, gpu)

    def score(self, kernel: Kernel) -> Floats:
        """What the plain way gives, but for rounding."""
        features, folded = self.features, self.folded
        sizes, wide, node = features.graph(kernel)
        encoded = encode(folded, Prepared(node, kernel.node_opcode.astype(np.int64), kernel.edge_index, wide[None]))
        begin, count = len(features.columns) + len(features.steps), len(features.pairs)
        cut = np.zeros((len(self.fixed), 2 * count), np.float32)
        cut[self.where] = features.of_pairs(self.value, sizes[self.cuts], self.scaling)
        first = self.fixed + cut @ folded.first[begin : begin + 2 * count]
        if self.gpu is None:
            return score_inputs(folded, encoded, self.has, first)
        filling = features.scaled_filling(self._filling(self.gpu, kernel, sizes).told(sizes))
        inputs = np.concatenate([self.has, filling.T], axis=1)
        return score_inputs(folded, encoded, inputs, np.concatenate([first, folded.first[-len(filling) :]]))

    def _filling(self, gpu: Gpu, kernel: Kernel, sizes: npt.NDArray[np.float64]) -> Filling:
        """The one for kernels that read memory as this one does."""
        access = Access.of(gpu, kernel, sizes)
        if access not in self.fillings:
            self.fillings[access] = Filling(gpu, self.columns.T, access)
        return self.fillings[access]
