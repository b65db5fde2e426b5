#include "kernels/sage.h"

#include "kernels/row_loops.h"

namespace tw {
namespace TW_ISA {
namespace {

#if defined(__AVX512F__)
// Adds up the lanes in registers: rows are so short that a round trip through memory would take as long as their sum.
TW_INLINE float horizontal_sum(vf v) {
  const vf half = v + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  const vf quarter = half + __builtin_shufflevector(half, half, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}
#else
TW_INLINE float horizontal_sum(vf v) { return sum_lanes(v); }
#endif

// Adds four vectors at a time while that many are left: a hidden layer of 64 floats is then one pass in registers.
void sum_neighbours(const float* x, int64_t x_row, const int32_t* neighbours, int64_t count, int64_t slots,
                    int64_t width, float* to, int64_t to_row) {
  for (int64_t c = 0; c < slots; ++c, to += to_row) {
    int64_t i = 0;
    for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
      vf sum[4] = {};
      for (int64_t j = 0; j < count; ++j) {
        const float* from = x + (neighbours[j] * slots + c) * x_row + i;
#pragma GCC unroll 4
        for (int u = 0; u < 4; ++u) sum[u] += load(from + u * kLanes);
      }
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u) store(to + i + u * kLanes, sum[u]);
    }
    each_vector(width - i, [&](int64_t k, auto lanes) {
      vf sum = {};
      for (int64_t j = 0; j < count; ++j) sum += lanes.get(x + (neighbours[j] * slots + c) * x_row + i + k);
      lanes.put(to + i + k, sum);
    });
  }
}

void join_config(const float* node, float degree, const float* configs, int64_t slots, int64_t width, float* z,
                 int64_t z_row) {
  for (int64_t c = 0; c < slots; ++c, configs += 2 * width, z += z_row) {
    each_vector(width, [&](int64_t i, auto lanes) {
      lanes.put(z + i, lanes.get(node + i) + degree * lanes.get(configs + i) + lanes.get(configs + width + i));
    });
  }
}

TW_INLINE vf leaky(vf v) { return select(v > 0.0f, v, v * kSageSlope); }

void leaky_relu_normalize(float* z, int64_t z_row, int64_t rows, int64_t width, float* scale) {
  for (int64_t r = 0; r < rows; ++r, z += z_row) {
    vf squares = {};
    each_vector(width, [&](int64_t i, auto lanes) {
      const vf v = leaky(lanes.get(z + i));
      squares += lanes.or_else(v * v, 0.0f);
      lanes.put(z + i, v);
    });
    const float norm = __builtin_sqrtf(horizontal_sum(squares));
    const float factor = 1.0f / (norm < kSageTiny ? kSageTiny : norm);  // the comparison lets NaN pass
    each_vector(width, [&](int64_t i, auto lanes) { lanes.put(z + i, lanes.get(z + i) * factor); });
    scale[r] = factor;
  }
}

void leaky_relu_normalize_grad(const float* dy, int64_t dy_row, const float* y, int64_t y_row, const float* scale,
                               int64_t rows, int64_t width, float* dz) {
  for (int64_t r = 0; r < rows; ++r, dy += dy_row, y += y_row, dz += width) {
    vf sum = {};
    each_vector(width,
                [&](int64_t i, auto lanes) { sum += lanes.or_else(lanes.get(dy + i) * lanes.get(y + i), 0.0f); });
    // A row whose norm was below kSageTiny was multiplied by a constant, so its projection term is zero.
    const float projection = scale[r] < 1.0f / kSageTiny ? horizontal_sum(sum) : 0.0f, factor = scale[r];
    each_vector(width, [&](int64_t i, auto lanes) {
      const vf v = lanes.get(y + i), g = (lanes.get(dy + i) - v * projection) * factor;
      lanes.put(dz + i, select(v > 0.0f, g, g * kSageSlope));
    });
  }
}

void add_rows(const float* from, int64_t from_row, int64_t rows, int64_t width, float* to, int64_t to_row) {
  for (int64_t r = 0; r < rows; ++r, from += from_row, to += to_row) {
    each_vector(width, [&](int64_t i, auto lanes) { lanes.put(to + i, lanes.get(to + i) + lanes.get(from + i)); });
  }
}

void join_config_grad(const float* dz, float degree, int64_t slots, int64_t width, float* node, float* configs) {
  for (int64_t c = 0; c < slots; ++c, dz += width, configs += 2 * width) {
    each_vector(width, [&](int64_t i, auto lanes) {
      const vf g = lanes.get(dz + i);
      lanes.put(node + i, c == 0 ? g : lanes.get(node + i) + g);
      lanes.put(configs + i, lanes.get(configs + i) + degree * g);
      lanes.put(configs + width + i, lanes.get(configs + width + i) + g);
    });
  }
}

void sum_rows(const float* x, int64_t rows, int64_t width, float* to) {
  each_vector(width, [&](int64_t i, auto lanes) {
    vf sums[4] = {};
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u) sums[u] += lanes.get(x + (r + u) * width + i);
    }
    for (; r < rows; ++r) sums[0] += lanes.get(x + r * width + i);
    lanes.put(to + i, (sums[0] + sums[1]) + (sums[2] + sums[3]));
  });
}

}  // namespace

const SageKernels sage = {sum_neighbours,   join_config, leaky_relu_normalize, leaky_relu_normalize_grad, add_rows,
                          join_config_grad, sum_rows};

}  // namespace TW_ISA
}  // namespace tw
