// Rows of a GraphSAGE network over (node, slot) pairs, a slot being a configuration that every node is joined with. A
// node's `slots` rows lie one after another, so that a sum over neighbours is a sum of whole runs of memory. What the
// matrix products leave to do is here: sums over neighbours, leaky ReLU with l2 normalisation, and the way back.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

constexpr float kSageSlope = 0.2f, kSageTiny = 1e-6f;

struct SageKernels {
  // to[c] = sum over the `count` nodes in `near` of x[node * slots + c], for c = 0 ... slots - 1.
  void (*gather)(const float* x, int64_t x_row, const int32_t* near, int64_t count, int64_t slots, int64_t width,
                 float* to, int64_t to_row);
  // z[c] = node + degree * configs[c][:width] + configs[c][width:].
  void (*join)(const float* node, float degree, const float* configs, int64_t slots, int64_t width, float* z,
               int64_t z_row);
  // z = l2_normalize(leaky_relu(z)) in place; scale[r] is what row r was multiplied with.
  void (*finish)(float* z, int64_t z_row, int64_t rows, int64_t width, float* scale);
  // Back through `finish`, from its results y: dz from dy, which may be the same memory.
  void (*unfinish)(const float* dy, int64_t dy_row, const float* y, int64_t y_row, const float* scale, int64_t rows,
                   int64_t width, float* dz);
  // to[r] += from[r].
  void (*add)(const float* from, int64_t from_row, int64_t rows, int64_t width, float* to, int64_t to_row);
  // Back through `join` for one node: node = sum of dz, configs[c] += [degree * dz[c], dz[c]].
  void (*unjoin)(const float* dz, float degree, int64_t slots, int64_t width, float* node, float* configs);
  // to = sum of rows.
  void (*sum)(const float* x, int64_t rows, int64_t width, float* to);
};

TW_TABLE(SageKernels, sage)

}  // namespace tw
