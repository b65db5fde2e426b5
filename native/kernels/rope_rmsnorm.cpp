#include "kernels/rope_rmsnorm.h"

#include "kernels/row_loops.h"

namespace tw {
namespace TW_ISA {
namespace {

void rms_norm(const float* x, const float* weight, float eps, float* y, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r, x += columns, y += columns) {
    const double squares = sum_over(columns, [&](int64_t i, auto lanes) {
      const vf v = lanes.get(x + i);
      return v * v;
    });
    const float scale = static_cast<float>(1.0 / __builtin_sqrt(squares / static_cast<double>(columns) + eps));
    each_vector(columns,
                [&](int64_t i, auto lanes) { lanes.put(y + i, lanes.get(x + i) * scale * lanes.get(weight + i)); });
  }
}

void silu_product(float* gate, const float* up, int64_t n) {
  each_vector(n, [&](int64_t i, auto lanes) {
    const vf g = lanes.get(gate + i);
    lanes.put(gate + i, g / (1.0f + vexp(-g)) * lanes.get(up + i));
  });
}

void gelu_product(float* gate, const float* up, int64_t n) {
  each_vector(n,
              [&](int64_t i, auto lanes) { lanes.put(gate + i, vgelu_tanh(lanes.get(gate + i)) * lanes.get(up + i)); });
}

void rotate(float* head, const float* cosines, const float* sines, int64_t count, bool side_by_side) {
  const int64_t step = side_by_side ? 1 : count, next = side_by_side ? 2 : 1;
  for (int64_t i = 0; i < count; ++i) {
    const float a = head[i * next], b = head[i * next + step];
    head[i * next] = a * cosines[i] - b * sines[i];
    head[i * next + step] = a * sines[i] + b * cosines[i];
  }
}

}  // namespace

const RopeRmsNormKernels rope_rmsnorm = {rms_norm, silu_product, gelu_product, soft_cap, rotate};

}  // namespace TW_ISA
}  // namespace tw
