// Matrix multiplication for everyone: chooses a configuration for the shape, splits the work over the threads, hands
// out workspaces. The kernels (kernels/gemm.h) do the arithmetic. Results depend on shapes, strides and the tile, never
// on the number of threads: no sum over k is split.
#pragma once

#include <cstddef>

#include "common/product_choice.h"

namespace tw {

// `count` products of one shape, the batch dimensions of the operands as in NumPy (a stride of 0 broadcasts). Results
// lie one after the other in c.
constexpr int kMaxBatchDims = 32;  // definition
struct Batch {
  int64_t count = 1;
  int dims = 0;
  int64_t shape[kMaxBatchDims], a_stride[kMaxBatchDims], b_stride[kMaxBatchDims], residual_stride[kMaxBatchDims];
};

// False when no workspace could be allocated. A given configuration must be feasible (`path_feasible` returns true,
// `tile_problem` false); without one `choose_config` chooses.
bool matmul(const Gemm& g, const Batch& batch, const ProductConfig* config);

// Why this tile cannot be used for this problem, written into `reason`; false when it can.
bool tile_problem(const GemmTile& tile, const Gemm& g, char* reason, std::size_t size);

}  // namespace tw
