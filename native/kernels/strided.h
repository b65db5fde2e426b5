// Elementwise functions, reductions and scans on rows of floats that are any distance apart: the inner loops of the
// operators in ops/strided.cpp.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

// The order is that of the names in ops/strided.cpp.
enum class MapKind : uint8_t {
  copy,
  neg,
  abs,
  exp,
  log,
  sqrt,
  square,
  tanh,
  erf,
  sigmoid,
  silu,
  gelu,
  gelu_tanh,
  softplus,
  sin,
  cos,
  relu,
  clip,
  add,
  sub,
  mul,
  div,
  pow,
  maximum,
  minimum,
  select
};
enum class ReduceKind : uint8_t { sum, mean, max, min };

// A row of an operand: `step` floats from one element to the next; 0 repeats the first.
struct StridedRow {
  const float* data;
  int64_t step;
};

struct StridedKernels {
  // y[i] = f(x[0][i], ...) for i < n. clip is limited to [low, high]; select is x[0] != 0 ? x[1] : x[2].
  void (*map)(MapKind kind, const StridedRow* x, float low, float high, float* y, int64_t n);
  // y[i] = f(y[i], x[i]): a sum or extremum over rows, one row at a time.
  void (*accumulate)(ReduceKind kind, StridedRow x, float* y, int64_t n);
  // The sum or extremum of one row.
  float (*reduce)(ReduceKind kind, StridedRow x, int64_t n);
};

TW_TABLE(StridedKernels, strided)

}  // namespace tw
