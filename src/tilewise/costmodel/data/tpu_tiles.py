"""Meaning of the tile bounds of a TPU kernel, and the quantities that follow from them.

XLA stores a tensor in registers of 8 rows by 128 lanes (float32; 16 rows for 16-bit types). A tile bound counts
elements in the major dimensions and registers in the two minor ones, and bounds are listed in layout order, major to
minor. Output bounds refer to the output of a convolution or dot, to the operand of a reduce, and otherwise to the root
of the fusion; kernel bounds refer to the second operand of a convolution or dot, the filter. A vector is stored in
whole registers of 1,024 float32 elements. These rules hold for all 752 valid runs of the public autotuner sample (see
`tests/costmodel/data/test_tpu_tiles.py`); the largest bound of a dimension is its number of registers there.

The module needs nothing but NumPy, because the course's hand-in contains a copy of it (see `course/handin.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LANES = 128
DIMENSIONS = 6  # columns per list of dimensions
BOUNDS = {"kernel": slice(0, 6), "output": slice(8, 14), "input": slice(16, 22)}  # columns of a configuration
# Columns of the node features, and numbers of opcodes (a test compares them with `data.schema`).
ROOT, TYPES, SHAPE, WINDOW, STRIDE = 0, slice(2, 21), slice(21, 27), slice(37, 43), slice(45, 51)
INPUT_BATCH, INPUT_FEATURE, INPUT_SPATIAL = 93, 94, slice(95, 99)
FILTER_INPUT, FILTER_OUTPUT, FILTER_SPATIAL = 99, 100, slice(101, 105)
OUTPUT_BATCH, OUTPUT_FEATURE, LAYOUT = 105, 106, slice(134, 140)
CONVOLUTION, DOT, PARAMETER, REDUCE, TUPLE = 26, 34, 63, 70, 100
# Bytes of an element and rows of a register, by element type in the order of the one-hot columns. A real comparison of
# 32 rows has bounds of up to 2, so that a register of predicates has 16 rows; 32 rows are assumed for other bytes.
ELEMENT_BYTES = (4, 1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 2, 8, 16, 4, 4, 4)
REGISTER_ROWS = (8, 16, 32, 16, 8, 8, 32, 16, 8, 8, 16, 8, 8, 16, 8, 8, 8, 8, 8)
_MAX_PADDING = 64.0  # ratio of padded to real size; larger ratios are clipped
# Rough figures of a TPU v3 core for `estimate`: its top-1 error on the public sample is equal for half or twice each.
_BYTES_PER_NS, _MXU_COLUMNS, MXU_ROWS_PER_NS, _ITERATION_NS = 400.0, 128, 2.0, 300.0


class TiledTensor(NamedTuple):
    """A TPU tensor with dimensions in layout order, major to minor; `units` is the register shape."""

    order: tuple[int, ...]  # logical dimension at each position
    sizes: Floats  # elements
    units: Floats  # elements that one step of a bound covers
    element_bytes: int

    @property
    def registers(self) -> Floats:
        """Return the number of registers that each dimension takes."""
        return np.ceil(self.sizes / self.units)

    def position(self, dimension: int) -> int:
        """Return the position of a logical dimension in layout order."""
        return self.order.index(dimension)

    def tile_elements(self, bounds: Floats) -> Floats:
        """Return the size of tiles in elements (C, rank), from their bounds (C, rank) in registers."""
        return np.asarray(np.minimum(np.maximum(bounds, 1) * self.units, self.sizes))

    def tile_registers(self, elements: Floats) -> Floats:
        """Return the number of registers (C,) of tiles with these sizes in elements (C, rank)."""
        return np.asarray(np.ceil(elements / self.units).prod(axis=1))

    @property
    def register_bytes(self) -> float:
        return float(self.units[-2:].prod() * self.element_bytes)


class TileReading(NamedTuple):
    """The tensors and dimensions that the tile bounds of a kernel's configurations refer to."""

    operation: str  # contraction, reduction or loop
    node: int  # the contraction, the reduce or the tensor itself
    output: TiledTensor
    filter: TiledTensor | None = None
    input: TiledTensor | None = None
    # Contractions: pairs of positions in the output and in the other tensors, -1 if there is none.
    features: tuple[int, int] = (-1, -1)  # output features: position in the output and in the filter
    contraction: tuple[int, int] = (-1, -1)  # input features: position in the filter and in the input
    spatial: tuple[tuple[int, int, int, float], ...] = ()  # output, filter and input position, and stride


def tiled_tensor(node: npt.NDArray[Any]) -> TiledTensor:
    """Read shape, layout and element type of a node's result from its 140 features, (140,)."""
    shape = [int(size) for size in node[SHAPE] if size > 0]
    rank = len(shape)
    minor_to_major = [int(dimension) for dimension in node[LAYOUT][:rank]]
    # Files without layouts have zeros there: assume the row-major order.
    order = tuple(reversed(minor_to_major)) if sorted(minor_to_major) == list(range(rank)) else tuple(range(rank))
    kind = int(np.argmax(node[TYPES]))
    rows = REGISTER_ROWS[kind]
    units = np.ones(rank)
    units[-1:] = LANES if rank > 1 else rows * LANES
    units[-2:-1] = rows
    return TiledTensor(order, np.array([float(shape[d]) for d in order]), units, ELEMENT_BYTES[kind])


def read_tiles(
    node: npt.NDArray[Any], opcode: npt.NDArray[Any], edges: npt.NDArray[Any], config: npt.NDArray[Any]
) -> TileReading:
    """Find the tensors that the bounds `config` (C, 24) of a kernel refer to.

    Operations are compared by their work. Only the number of bounds is read from `config`, which is the same for all
    configurations of a kernel, so that a score does not depend on the other configurations.
    """
    rank = int(np.count_nonzero(config[:1, BOUNDS["output"]]))
    ranks = np.count_nonzero(node[:, SHAPE], axis=1)
    volume = np.where(ranks > 0, np.maximum(node[:, SHAPE].astype(np.float64), 1).prod(axis=1), 0.0)
    if config[:1, BOUNDS["kernel"]].any():
        # Sort by the work of a contraction: for a product of (M, K) and (K, N), sqrt(MK * KN * MN) = MNK.
        contractions = [int(n) for n in np.flatnonzero((opcode == CONVOLUTION) | (opcode == DOT)) if ranks[n] == rank]
        operands = {n: _operands(edges, n) for n in contractions}
        contractions = [n for n in contractions if operands[n]]
        if contractions:
            heaviest = max(contractions, key=lambda n: volume[[n, *operands[n]]].prod())
            return _contraction(node, heaviest, operands[heaviest])
    # Operands of reductions come first, so that they win against a root of the same size.
    reduction_operands = [(int(n), v) for n in np.flatnonzero(opcode == REDUCE) for v in _operands(edges, int(n))]
    roots = np.flatnonzero(node[:, ROOT] > 0)
    outputs = [int(roots[-1]) if len(roots) else len(node) - 1]
    outputs += [v for n in np.flatnonzero(opcode == TUPLE) for v in _operands(edges, int(n))]
    candidates = reduction_operands + [(v, v) for v in outputs]
    matching = [pair for pair in candidates if ranks[pair[1]] == rank] or [(outputs[0], outputs[0])]
    owner, tensor = max(matching, key=lambda pair: volume[pair[1]])
    return TileReading("reduction" if owner != tensor else "loop", owner, tiled_tensor(node[tensor]))


def _operands(edges: npt.NDArray[Any], consumer: int) -> list[int]:
    return [int(v) for v in edges[edges[:, 0] == consumer, 1]]


def _contraction(node: npt.NDArray[Any], index: int, operands: list[int]) -> TileReading:
    """Identify output, filter and input of convolution or dot number `index` by their sizes, as edges have no order."""
    fields, output = node[index], tiled_tensor(node[index])
    pairs = [(operands[0], operands[-1]), (operands[-1], operands[0])]
    for entry, weights in pairs:
        dimensions = _contraction_dimensions(fields, node[entry], node[weights])
        if dimensions is not None:
            break
    else:
        entry, weights = pairs[0]
    source, filters = tiled_tensor(node[entry]), tiled_tensor(node[weights])
    reading = TileReading("contraction", index, output, filters, source)
    if dimensions is None:
        return reading
    (out_feature, filter_feature), (filter_input, input_feature), spatial = dimensions
    return reading._replace(
        features=(output.position(out_feature), filters.position(filter_feature)),
        contraction=(filters.position(filter_input), source.position(input_feature)),
        spatial=tuple(
            (output.position(o), filters.position(f), source.position(i), max(stride, 1.0))
            for o, f, i, stride in spatial
        ),
    )


def _contraction_dimensions(
    fields: npt.NDArray[Any], entry: npt.NDArray[Any], weights: npt.NDArray[Any]
) -> tuple[tuple[int, int], tuple[int, int], list[tuple[int, int, int, float]]] | None:
    """Match the dimensions of output, input and filter; each argument is a node's 140 features.

    Returns (output features), (input features) as (dimension, dimension) pairs, and a list of spatial dimensions; None
    if the sizes contradict each other.
    """
    out, source, filters = (row[SHAPE].astype(int) for row in (fields, entry, weights))
    ranks = [int(np.count_nonzero(shape)) for shape in (out, source, filters)]
    numbers = fields.astype(int)
    if min(ranks) < 2 or len(set(ranks)) > 1:
        return None
    rank, first = ranks[0], (0, 1)
    if numbers[[OUTPUT_FEATURE, FILTER_INPUT, FILTER_OUTPUT, OUTPUT_BATCH, INPUT_FEATURE]].any():
        batch, feature = numbers[OUTPUT_BATCH], numbers[OUTPUT_FEATURE]
        features, contraction = (feature, numbers[FILTER_OUTPUT]), (numbers[FILTER_INPUT], numbers[INPUT_FEATURE])
        if max(*features, *contraction, batch) >= rank:
            return None
        positions = [d for d in range(rank) if d not in (batch, feature)]
        columns = zip(positions, numbers[FILTER_SPATIAL], numbers[INPUT_SPATIAL], fields[STRIDE], strict=False)
        spatial = [(o, int(f), int(i), float(s)) for o, f, i, s in columns]
        if any(max(f, i) >= rank for _, f, i, _ in spatial):
            return None
    else:
        # A dot has no dimension numbers here: find its contraction dimension by size.
        spatial = []
        options = [((rank - 1, rank - 1 - j), (rank - 2 + j, rank - 1 - i)) for j in first for i in first]
        fits = [o for o in options if _sizes_agree(out, source, filters, *o)]
        if not fits:
            return None
        features, contraction = fits[0]
    return (features, contraction, spatial) if _sizes_agree(out, source, filters, features, contraction) else None


def _sizes_agree(
    out: npt.NDArray[Any],
    source: npt.NDArray[Any],
    filters: npt.NDArray[Any],
    features: tuple[int, int],
    contraction: tuple[int, int],
) -> bool:
    """Tell whether the shapes of output, input (`source`) and filter fit together.

    `features` are the output's and the filter's output-feature dimensions, `contraction` the filter's and the input's
    input-feature dimensions, whose sizes may differ by the number of groups.
    """
    same_features = bool(out[features[0]] == filters[features[1]])
    return same_features and source[contraction[1]] % max(filters[contraction[0]], 1) == 0


def tile_quantities(reading: TileReading, config: npt.NDArray[Any]) -> dict[str, Floats]:
    """Return quantities (C,) of configurations (C, 24): counts, registers, bytes and nanoseconds."""
    output, filters, source = reading.output, reading.filter, reading.input
    out_bounds = _bounds(config, "output", len(output.sizes))
    tiles = np.ceil(output.registers / out_bounds).prod(axis=1)
    elements = output.tile_elements(out_bounds)
    out_registers = output.tile_registers(elements)
    out_bytes = out_registers * output.register_bytes
    one = np.ones(len(config))
    quantities = {"output_tiles": tiles, "output_registers": out_registers, "output_bytes": out_bytes}
    if filters is None or source is None or not len(filters.sizes):
        bytes_moved, mxu_rows = 2 * tiles * out_bytes, 0 * one
        return quantities | _with_estimate(tiles, out_bytes * 2, out_registers, bytes_moved, mxu_rows)
    filter_bounds = _bounds(config, "kernel", len(filters.sizes))
    filter_elements = filters.tile_elements(filter_bounds)
    # The output's features tile the filter and the output alike; every other dimension of the filter is a reduction.
    steps = np.ceil(filters.registers / filter_bounds)
    steps[:, [reading.features[1]] if reading.features[1] >= 0 else []] = 1
    reductions = steps.prod(axis=1)
    filter_bytes = filters.tile_registers(filter_elements) * filters.register_bytes
    source_elements = _input_elements(reading, elements, filter_elements)
    source_bytes = source.tile_registers(source_elements) * source.register_bytes
    iterations = tiles * reductions
    # A filter that is one tile stays in the scratchpad, and so does an input tile that the next iteration reads again.
    reloads = np.where(np.ceil(filters.registers / filter_bounds).prod(axis=1) > 1, iterations, 1.0)
    bytes_moved = iterations * source_bytes + reloads * filter_bytes + tiles * out_bytes
    feature = elements[:, reading.features[0]]
    rows = elements.prod(axis=1) / feature
    contraction = filter_elements[:, reading.contraction[0]]
    window = filter_elements.prod(axis=1) / (filter_elements[:, reading.features[1]] * contraction)
    # The matrix unit multiplies by 128 x 128 weights, which it has to load first.
    passes = np.ceil(feature / _MXU_COLUMNS) * np.ceil(contraction / _MXU_COLUMNS) * window
    mxu_rows = passes * np.maximum(rows, _MXU_COLUMNS)
    innermost = passes * np.ceil(rows / output.units[-2])
    quantities |= {
        "reduction_tiles": reductions,
        "filter_bytes": filter_bytes,
        "input_bytes": source_bytes,
        "mxu_passes": passes,
        "mxu_rows": rows,
    }
    return quantities | _with_estimate(
        iterations, out_bytes + filter_bytes + source_bytes, innermost, bytes_moved, mxu_rows
    )


def estimate_runtime(
    node: npt.NDArray[Any], opcode: npt.NDArray[Any], edges: npt.NDArray[Any], config: npt.NDArray[Any]
) -> Floats:
    """Estimate the nanoseconds of configurations (C, 24) without any measurement."""
    return tile_quantities(read_tiles(node, opcode, edges, config), config)["estimate"]


def _with_estimate(
    iterations: Floats, scratchpad: Floats, innermost: Floats, bytes_moved: Floats, mxu: Floats
) -> dict[str, Floats]:
    """Return a kernel's tile quantities (C,) by name, with a rough estimate of the runtime in nanoseconds."""
    memory, compute = bytes_moved / _BYTES_PER_NS, iterations * mxu / MXU_ROWS_PER_NS
    return {
        "iterations": iterations,
        "scratchpad_bytes": scratchpad,
        "innermost_iterations": innermost,
        "bytes_moved": bytes_moved,
        "compute": compute,
        "estimate": np.maximum(memory, compute) + _ITERATION_NS * iterations,
    }


def _bounds(config: npt.NDArray[Any], name: str, rank: int) -> Floats:
    """Return the tile bounds (C, rank), at least 1, of the tensor `name` from configurations (C, 24)."""
    return np.maximum(config[:, BOUNDS[name]][:, :rank].astype(np.float64), 1)


def _input_elements(reading: TileReading, output: Floats, filters: Floats) -> Floats:
    """Return how many input elements per dimension each tile of a contraction reads: (C, rank)."""
    source = reading.input
    assert source is not None
    rank = len(source.sizes)
    elements = np.tile(source.sizes, (len(output), 1))
    if reading.contraction[1] < 0:
        return elements
    out_positions = {reading.features[0]}
    elements[:, reading.contraction[1]] = filters[:, reading.contraction[0]]
    for out, window, position, stride in reading.spatial:
        elements[:, position] = (output[:, out] - 1) * stride + filters[:, window]
        out_positions.add(out)
    # What is left are batch dimensions: they are the same in output and input.
    in_positions = {reading.contraction[1], *(position for _, _, position, _ in reading.spatial)}
    batch_out = [p for p in range(output.shape[1]) if p not in out_positions]
    batch_in = [p for p in range(rank) if p not in in_positions]
    for out, position in zip(batch_out, batch_in, strict=False):
        elements[:, position] = output[:, out]
    return np.minimum(elements, source.sizes)


QUANTITIES = (
    "output_tiles", "reduction_tiles", "iterations", "output_registers", "output_bytes", "filter_bytes", "input_bytes",
    "scratchpad_bytes", "bytes_moved", "innermost_iterations", "mxu_passes", "mxu_rows", "compute", "estimate",
)  # fmt: skip
TILE_FEATURE_COUNT = 7 * DIMENSIONS + len(QUANTITIES)


def tile_features(reading: TileReading, config: npt.NDArray[Any]) -> Floats:
    """Return features (TILE_FEATURE_COUNT, C) of configurations (C, 24), all logarithms to base 2.

    For the output and the filter: bounds, tile counts and padding of each dimension, minor dimension first, because
    the minor dimensions have the same meaning at every rank. Then the input bounds, and the quantities of the tile.
    """
    table = np.zeros((TILE_FEATURE_COUNT, len(config)))
    blocks = table[: 7 * DIMENSIONS].reshape(7, DIMENSIONS, len(config))
    for block, name, tensor in ((0, "output", reading.output), (3, "kernel", reading.filter)):
        rank = 0 if tensor is None or not config[:1, BOUNDS[name]].any() else len(tensor.sizes)
        if tensor is None or not rank:
            continue
        bounds, registers = _bounds(config, name, rank), tensor.registers
        tiles = np.ceil(registers / bounds)
        for offset, values in enumerate((bounds, tiles, np.minimum(tiles * bounds / registers, _MAX_PADDING))):
            blocks[block + offset, :rank] = np.log2(values.T[::-1])
    blocks[6] = np.log2(_bounds(config, "input", DIMENSIONS).T)
    quantities = tile_quantities(reading, config)
    for row, name in enumerate(QUANTITIES):
        if name in quantities:
            table[7 * DIMENSIONS + row] = np.log2(np.maximum(quantities[name], 1.0))
    return table


def tile_kernel_features(reading: TileReading, node: npt.NDArray[Any]) -> Floats:
    """Return features of the kernel itself: operation, size of its tensors, window and stride."""
    kinds = [float(reading.operation == kind) for kind in ("contraction", "reduction", "loop")]
    registers, total = np.zeros((3, DIMENSIONS)), np.zeros(3)
    for row, tensor in enumerate((reading.output, reading.filter, reading.input)):
        if tensor is not None and len(tensor.sizes):
            registers[row, : len(tensor.sizes)] = np.log2(tensor.registers[::-1])
            total[row] = np.log2(tensor.registers.prod() * tensor.register_bytes)
    fields = node[reading.node].astype(np.float64)
    window = np.log2(np.maximum([fields[WINDOW][:2], fields[STRIDE][:2]], 1)).ravel()
    return np.concatenate([kinds, registers.ravel(), total, window])
