// The choice of a product's configuration from its shape, its strides and the machine.
#pragma once

#include "common/machine.h"
#include "common/product_paths.h"

namespace tw {

// The configuration that is used when none is given. It depends on the whole problem and not on how it is split. It is
// written in place: copying a structure that was just written stalls the processor for as long as a tiny product takes.
void choose_config(const Gemm& g, int threads, ProductConfig* config);

// The tile of the tiled path when none is given.
GemmTile default_tile(const Gemm& g, int threads);

// The same with a path or a tile that the caller chose.
void config_of_path(const Gemm& g, ProductPath path, int threads, ProductConfig* config);
void config_of_tile(const Gemm& g, const GemmTile& tile, ProductConfig* config);

// Batch-invariant mode: a row of a result has the same bits for every number of rows, because the path's order of
// summation depends on B alone. Off at first; for the whole process.
bool batch_invariant();
void set_batch_invariant(bool on);

// True if a second thread saves more than waking it costs.
bool worth_threads(int64_t multiply_adds);

}  // namespace tw
