// Matrix multiplication: chooses a configuration for the shape, splits the work over the threads, provides workspaces.
// The kernels (kernels/gemm.h) do the arithmetic. Results depend on shapes, strides and the tile, never on the number
// of threads: no sum over k is split.
#pragma once

#include <cstddef>

#include "common/product_choice.h"

namespace tw {

// `count` products of one shape. Batch dimensions of the operands are as in NumPy (a stride of 0 broadcasts). Results
// are contiguous in c.
constexpr int kMaxBatchDims = 32;  // definition: NPY_MAXDIMS of NumPy 1
struct Batch {
  int64_t count = 1;
  int dims = 0;
  int64_t shape[kMaxBatchDims], a_stride[kMaxBatchDims], b_stride[kMaxBatchDims], residual_stride[kMaxBatchDims];
};

// Computes c. Returns false if no workspace could be allocated. A given configuration must be feasible (`path_feasible`
// returns true, `tile_problem` false); if it is null, `choose_config` chooses one.
bool matmul(const Gemm& g, const Batch& batch, const ProductConfig* config);

// Returns whether this tile cannot be used for this problem, and writes why into `reason`.
bool tile_problem(const GemmTile& tile, const Gemm& g, char* reason, std::size_t size);

}  // namespace tw
