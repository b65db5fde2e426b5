// Elementwise functions, reductions and resampling on rows of floats with any strides: the inner loops of the operators
// in ops/strided.cpp.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

// The functions of `map`: a name and an expression in the vectors a and b and the bounds low and high. A new function
// is one line here and a record in graph/op_specs/functions.py.
#define TW_UNARY_FUNCTIONS(F)                                            \
  F(copy, a)                                                             \
  F(neg, -a)                                                             \
  F(abs, select(a < 0.0f, -a, a))                                        \
  F(exp, vexp(a))                                                        \
  F(log, vlog(a))                                                        \
  F(sqrt, vsqrt(a))                                                      \
  F(square, (a * a))                                                     \
  F(tanh, vtanh(a))                                                      \
  F(erf, verf(a))                                                        \
  F(sigmoid, vsigmoid(a))                                                \
  F(silu, (a * vsigmoid(a)))                                             \
  F(gelu, vgelu(a))                                                      \
  F(gelu_tanh, vgelu_tanh(a))                                            \
  F(softplus, vsoftplus(a))                                              \
  F(shrink, select(a < -low, a + high, select(a > low, a - high, vf{}))) \
  F(sin, vsin(a))                                                        \
  F(cos, vcos(a))                                                        \
  F(relu, max_nan(a, vf{}))                                              \
  F(clip, vmin(splat(high), vmax(splat(low), a)))
#define TW_BINARY_FUNCTIONS(F)                 \
  F(add, a + b)                                \
  F(sub, a - b)                                \
  F(mul, (a * b))                              \
  F(div, a / b)                                \
  F(pow, vpow(a, b))                           \
  F(maximum, select((a > b) | (a != a), a, b)) \
  F(minimum, select((a < b) | (a != a), a, b))
#define TW_NAME(name, value) name,
enum class MapKind : uint8_t { TW_UNARY_FUNCTIONS(TW_NAME) TW_BINARY_FUNCTIONS(TW_NAME) select };
#undef TW_NAME
enum class ReduceKind : uint8_t { sum, mean, max, min };

// Rows of an operand: elements are `step` floats apart, rows `row` floats apart; 0 broadcasts the first.
struct StridedRow {
  const float* data;
  int64_t step, row = 0;
};

// One tap of resampling: output pixel i reads pixel positions[i] (i if null) of `base`, times weights[i * weight_step].
struct ResampleTap {
  const float* base;
  const int32_t* positions;
  const float* weights;
  int64_t weight_step;
};

struct StridedKernels {
  // y[r][i] = f(x[0][r][i], ...) for r < rows, i < n; the rows of y are y_row floats apart. clip limits to [low, high],
  // shrink subtracts `high`; select is x[0] != 0 ? x[1] : x[2].
  void (*map)(MapKind kind, const StridedRow* x, float low, float high, float* y, int64_t y_row, int64_t rows,
              int64_t n);
  // y[i] = f(y[i], x[i]): a sum or extremum over rows, one row at a time.
  void (*accumulate)(ReduceKind kind, StridedRow x, float* y, int64_t n);
  // y[r * y_row] = the sum or extremum of row r.
  void (*reduce)(ReduceKind kind, StridedRow x, float* y, int64_t y_row, int64_t rows, int64_t n);
  // y[i] = the weighted sum of the taps' pixels. Pixels of x and y are x_step and y_step floats apart.
  void (*resample)(const ResampleTap* taps, int count, int64_t x_step, float* y, int64_t y_step, int64_t pixels,
                   int64_t channels);
};

TW_TABLE(StridedKernels, strided)

}  // namespace tw
