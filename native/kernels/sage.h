// Row kernels of a GraphSAGE network (Hamilton et al. 2017) over (node, slot) pairs; a slot is one configuration that
// is joined with every node. The `slots` rows of a node are contiguous, so that a sum over neighbours adds whole runs
// of memory. These kernels do everything except the matrix products: sums over neighbours, leaky ReLU with L2
// normalization, and their gradients.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

constexpr float kSageSlope = 0.2f;  // definition: leaky ReLU below zero in the published baseline
constexpr float kSageTiny = 1e-6f;  // chosen: smallest norm by which a row is divided

struct SageKernels {
  // to[c] = sum over the `count` nodes in `neighbours` of x[node * slots + c], for c = 0 ... slots - 1.
  void (*sum_neighbours)(const float* x, int64_t x_row, const int32_t* neighbours, int64_t count, int64_t slots,
                         int64_t width, float* to, int64_t to_row);
  // z[c] = node + degree * configs[c][:width] + configs[c][width:].
  void (*join_config)(const float* node, float degree, const float* configs, int64_t slots, int64_t width, float* z,
                      int64_t z_row);
  // z = l2_normalize(leaky_relu(z)) in place; scale[r] receives the factor of row r.
  void (*leaky_relu_normalize)(float* z, int64_t z_row, int64_t rows, int64_t width, float* scale);
  // Gradient of `leaky_relu_normalize`: dz from dy and the results y; dz and dy may be the same memory.
  void (*leaky_relu_normalize_grad)(const float* dy, int64_t dy_row, const float* y, int64_t y_row, const float* scale,
                                    int64_t rows, int64_t width, float* dz);
  // to[r] += from[r] for every row.
  void (*add_rows)(const float* from, int64_t from_row, int64_t rows, int64_t width, float* to, int64_t to_row);
  // Gradient of `join_config` for one node: node = sum of dz, configs[c] += [degree * dz[c], dz[c]].
  void (*join_config_grad)(const float* dz, float degree, int64_t slots, int64_t width, float* node, float* configs);
  // to = sum of the rows of x.
  void (*sum_rows)(const float* x, int64_t rows, int64_t width, float* to);
};

TW_TABLE(SageKernels, sage)

}  // namespace tw
