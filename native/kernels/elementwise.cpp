#include "kernels/elementwise.h"

#include "kernels/row_loops.h"

namespace tw {
namespace TW_ISA {
namespace {

void gelu(const float* x, float* y, int64_t n) {
  each_aligned_vector(y, n, [&](int64_t i, auto lanes) { lanes.put(y + i, vgelu(lanes.get(x + i))); });
}

void gelu_grad(const float* x, const float* gy, float* gx, int64_t n) {
  each_aligned_vector(
      gx, n, [&](int64_t i, auto lanes) { lanes.put(gx + i, lanes.get(gy + i) * vgelu_slope(lanes.get(x + i))); });
}

void relu(const float* x, float* y, int64_t n) {
  each_aligned_vector(y, n, [&](int64_t i, auto lanes) { lanes.put(y + i, vmax(splat(0.0f), lanes.get(x + i))); });
}

void relu_grad(const float* y, const float* gy, float* gx, int64_t n) {
  each_aligned_vector(gx, n, [&](int64_t i, auto lanes) {
    lanes.put(gx + i, select(lanes.get(y + i) <= 0.0f, vf{}, lanes.get(gy + i)));
  });
}

void add(const float* a, const float* b, float* y, int64_t n) {
  each_aligned_vector(y, n, [&](int64_t i, auto lanes) { lanes.put(y + i, lanes.get(a + i) + lanes.get(b + i)); });
}

void scale(float* x, float factor, int64_t n) {
  each_aligned_vector(x, n, [&](int64_t i, auto lanes) { lanes.put(x + i, lanes.get(x + i) * factor); });
}

// Sums the squares in double: a gradient of 1e20 must not make the norm infinite.
double sum_of_squares(const float* x, int64_t n) {
  double sums[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int u = 0; u < 8; ++u) sums[u] += static_cast<double>(x[i + u]) * x[i + u];
  }
  for (; i < n; ++i) sums[0] += static_cast<double>(x[i]) * x[i];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

TW_INLINE void add_to_doubles(double* totals, vf v, Whole) {
  for (int i = 0; i < kLanes; ++i) totals[i] += v[i];
}
TW_INLINE void add_to_doubles(double* totals, vf v, Partial lanes) {
  for (int i = 0; i < lanes.n; ++i) totals[i] += v[i];
}

// Sums a strip of kVectors vectors of columns over some rows, in registers.
template <int kVectors, class Lanes, class RowAt>
TW_INLINE void strip_sums(int64_t rows, const RowAt& row_at, Lanes lanes, float* sums) {
  vf acc[kVectors] = {};
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = row_at(r);
#pragma GCC unroll 8
    for (int u = 0; u < kVectors; ++u) acc[u] += lanes.get(row + u * kLanes);
  }
  for (int u = 0; u < kVectors; ++u) store(sums + u * kLanes, acc[u]);
}

// Calls store_sums(first column, count, sums) for every strip of columns, over at most kRowsInFloat rows.
template <class RowAt, class Store>
TW_INLINE void each_strip(int64_t rows, int64_t columns, const RowAt& row_at, const Store& store_sums) {
  float sums[8 * kLanes];
  int64_t c = 0;
  for (; c + 8 * kLanes <= columns; c += 8 * kLanes) {
    strip_sums<8>(rows, [&](int64_t r) { return row_at(r) + c; }, Whole{}, sums);
    store_sums(c, 8 * kLanes, sums);
  }
  for (; c + kLanes <= columns; c += kLanes) {
    strip_sums<1>(rows, [&](int64_t r) { return row_at(r) + c; }, Whole{}, sums);
    store_sums(c, kLanes, sums);
  }
  if (c < columns) {
    const int remainder = static_cast<int>(columns - c);
    strip_sums<1>(rows, [&](int64_t r) { return row_at(r) + c; }, Partial{remainder}, sums);
    store_sums(c, remainder, sums);
  }
}

template <class Lanes>
TW_INLINE vf sum_of_four(const float* p, int64_t stride, Lanes lanes) {
  return (lanes.get(p) + lanes.get(p + stride)) + (lanes.get(p + 2 * stride) + lanes.get(p + 3 * stride));
}

// Sums sixteen rows at a time, each as a separate stream, in pairs and then into doubles.
void add_column_sums(const float* x, int64_t rows, int64_t columns, int64_t stride, double* totals) {
  int64_t r = 0;
  for (; r + 16 <= rows; r += 16) {
    const float *p = x + r * stride, *p4 = p + 4 * stride, *p8 = p + 8 * stride, *p12 = p + 12 * stride;
    each_vector(columns, [&](int64_t c, auto lanes) {
      const vf low = sum_of_four(p + c, stride, lanes) + sum_of_four(p4 + c, stride, lanes);
      const vf high = sum_of_four(p8 + c, stride, lanes) + sum_of_four(p12 + c, stride, lanes);
      add_to_doubles(totals + c, low + high, lanes);
    });
  }
  for (; r < rows; ++r) {
    const float* p = x + r * stride;
    each_vector(columns, [&](int64_t c, auto lanes) { add_to_doubles(totals + c, lanes.get(p + c), lanes); });
  }
}

// Sums up to kRowsInFloat rows at a time in registers, strip by strip of columns.
void sum_listed_rows(const float* x, const int64_t* rows, int64_t count, int64_t columns, float* out) {
  __builtin_memset(out, 0, static_cast<size_t>(columns) * sizeof(float));
  for (int64_t r0 = 0; r0 < count; r0 += kRowsInFloat) {
    const int64_t some = count - r0 < kRowsInFloat ? count - r0 : kRowsInFloat;
    each_strip(
        some, columns, [&](int64_t r) { return x + rows[r0 + r] * columns; },
        [&](int64_t c, int n, const float* sums) {
          for (int i = 0; i < n; ++i) out[c + i] += sums[i];
        });
  }
}

// PyTorch's order of operations, so that a training run can be compared step by step. TW_KEEP fixes which products are
// rounded separately; otherwise the compiler could fuse the head of an array differently from its middle.
void adam(float* param, const float* grad, float* m, float* v, const AdamSettings& settings, int64_t n) {
  const AdamSettings s = settings;
  each_aligned_vector(param, n, [&](int64_t i, auto lanes) {
    vf p = lanes.get(param + i) * s.decay;
    TW_KEEP(p);
    vf g = lanes.get(grad + i);
    if (s.penalty != 0.0f) g += p * s.penalty;
    const vf m0 = lanes.get(m + i);
    const vf m1 = m0 + (g - m0) * s.one_minus_beta1;
    vf square = g * g * s.one_minus_beta2;
    TW_KEEP(square);
    const vf v1 = lanes.get(v + i) * s.beta2 + square;
    lanes.put(m + i, m1);
    lanes.put(v + i, v1);
    const vf root = vsqrt(v1) * s.root_factor + s.eps;
    lanes.put(param + i, p - m1 / root * s.step_size);
  });
}

}  // namespace

const ElementwiseKernels elementwise = {
    gelu, gelu_grad, relu, relu_grad, add, scale, sum_of_squares, add_column_sums, sum_listed_rows, adam};

}  // namespace TW_ISA
}  // namespace tw
