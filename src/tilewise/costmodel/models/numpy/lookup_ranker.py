"""LookupRanker: TileRanker on one list of configurations for kernel after kernel, as a tuner calls it.

Every input of a TileRanker except occupancy is a function of one configuration column: its logarithm, its steps, and
how it divides each size of the kernel. A column has only a few distinct values. So the features are computed once per
value and multiplied by the first layer's weights there. A configuration's first layer is then the sum over its values:
a product with a 0/1 matrix that depends on the list of configurations alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tilewise._extension import native
from tilewise.costmodel.data.kernel import Kernel
from tilewise.costmodel.features.inputs import ModelInputs
from tilewise.costmodel.features.occupancy import Gpu, MemoryAccess, Occupancy
from tilewise.costmodel.features.ranker import RankerFeatures
from tilewise.costmodel.models.numpy.ranker import FoldedWeights, KernelEncoding, encode, score_hidden

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]
# With more values or configurations, the direct computation is as fast (measured on the h200 collection).
_MAX_VALUES, _MAX_CONFIGS = 160, 4096


@dataclass(frozen=True, eq=False)
class LookupRanker:
    """A TileRanker for a fixed list of C configurations whose columns have V distinct values in all.

    P is the number of (value, size slot) pairs, H the hidden width.
    """

    features: RankerFeatures
    folded: FoldedWeights
    columns: Floats  # (D, C): the configurations, with the train split's constants
    one_hot: Floats  # (C, V): which values each configuration has
    fixed: Floats  # (V, members * H): contribution of each value to the first layer, whatever the kernel
    pair_values: Floats  # (P,): value of each pair
    pair_slots: Indices  # (P,): size slot of each pair
    pair_scaling: tuple[Floats, Floats]  # (2, P) each: centre and scale of the two features of a pair
    pair_index: tuple[Indices, Indices]  # (2, P) each: value row and feature column of the two features of a pair
    gpu: Gpu | None
    occupancies: dict[MemoryAccess, Occupancy] = field(default_factory=dict)

    @classmethod
    def build(
        cls, features: RankerFeatures, folded: FoldedWeights, config: npt.NDArray[np.float32]
    ) -> LookupRanker | None:
        """Build the table; None if it would not be faster."""
        if not len(features.columns) or not 0 < len(config) <= _MAX_CONFIGS:
            return None
        config = features.with_train_constants(config)
        unique = [np.unique(config[:, column], return_inverse=True) for column in features.columns]
        ends = np.cumsum([len(values) for values, _ in unique])
        if ends[-1] > _MAX_VALUES:
            return None
        # Number the values of all columns consecutively and mark those of each configuration.
        one_hot = np.zeros((len(config), ends[-1]), np.float32)
        for end, (values, codes) in zip(ends, unique, strict=True):
            one_hot[np.arange(len(config)), end - len(values) + codes.reshape(-1)] = 1.0
        values = np.concatenate([values for values, _ in unique]).astype(np.float32)
        value_column = np.repeat(features.columns, [len(values) for values, _ in unique])
        # Features that depend on the value alone go through the first layer now.
        value_features = features.value_features(values, value_column)
        fixed = value_features @ folded.first[: value_features.shape[1]]
        # Features of pairs depend on the kernel's sizes; only their positions are computed now.
        pair, value_row = np.nonzero(features.pairs[:, :1] == value_column)
        pair_index = np.stack([value_row, value_row]), np.stack([pair, len(features.pairs) + pair])
        return cls(
            features=features,
            folded=folded,
            columns=np.ascontiguousarray(config.T),
            one_hot=one_hot,
            fixed=fixed,
            pair_values=values[value_row],
            pair_slots=features.pairs[pair, 1],
            pair_scaling=features.pair_scaling(pair),
            pair_index=pair_index,
            gpu=Gpu.from_array(features.gpu),
        )

    def score(self, kernel: Kernel) -> Floats:
        """Score all configurations for a kernel; equal to the direct computation except for rounding."""
        features, folded = self.features, self.folded
        sizes, kernel_wide, node = features.graph_inputs(kernel, features.reading(kernel))
        inputs = ModelInputs(node, kernel.node_opcode.astype(np.int64), kernel.edge_index, kernel_wide[None])
        encoding = encode(folded, inputs)
        begin, count = len(features.columns) + len(features.steps), len(features.pairs)
        pair_features = np.zeros((len(self.fixed), 2 * count), np.float32)
        pair_features[self.pair_index] = features.pair_features(
            self.pair_values, sizes[self.pair_slots], self.pair_scaling
        )
        first = self.fixed + pair_features @ folded.first[begin : begin + 2 * count]
        if self.gpu is None:
            return score_inputs(folded, encoding, self.one_hot, first)
        # Occupancy reads several columns at once, so its inputs stay per configuration.
        occupancy = features.scale_occupancy(self._occupancy(self.gpu, kernel, sizes).features(sizes))
        joined = np.concatenate([self.one_hot, occupancy.T], axis=1)
        return score_inputs(folded, encoding, joined, np.concatenate([first, folded.first[-len(occupancy) :]]))

    def _occupancy(self, gpu: Gpu, kernel: Kernel, sizes: npt.NDArray[np.float64]) -> Occupancy:
        """Return the occupancy table of kernels that access memory like this one, building it once."""
        access = MemoryAccess.from_kernel(kernel, sizes)
        if access not in self.occupancies:
            self.occupancies[access] = Occupancy(gpu, self.columns.T, access)
        return self.occupancies[access]


def score_inputs(folded: FoldedWeights, encoding: KernelEncoding, inputs: Floats, first: Floats) -> Floats:
    """Score (C, D) float32 inputs with another first layer (D, members * H).

    The compiled kernel takes a few configurations at a time through all layers, on one thread.
    """
    if native is None:
        return score_hidden(folded, encoding, inputs @ first)
    keys, key_bias, values = encoding.attention
    member_scores, _ = native.ranker_rows_forward(
        configs=inputs[None], skip_columns=0, first_weight=first, first_bias=encoding.bias[None],
        first_node=np.array([0, len(values)]), keys=np.ascontiguousarray(keys.T), key_bias=key_bias, values=values,
        block_weights=[kernel[None] for kernel, _ in encoding.blocks],
        block_biases=[bias[None] for _, bias in encoding.blocks],
        out_weight=folded.last,
    )  # fmt: skip
    scores: Floats = member_scores[0].sum(axis=1) if folded.members > 1 else member_scores[0, :, 0]
    return scores
