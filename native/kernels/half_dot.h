// Products of float rows with weights that stay in 16 bits: float16 or bfloat16 become float32 as they are loaded.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

enum class HalfKind { float16, bfloat16 };

struct HalfKernels {
  // y (outputs) = x W^T for one row and the outputs [first, last) of W (outputs, inputs).
  void (*row)(HalfKind kind, const float* x, int64_t inputs, const uint16_t* weights, int64_t first, int64_t last,
              float* y);
  // The same for several rows, y (rows, outputs) = x W^T; rows of y are `y_row` floats apart. The order of a sum does
  // not depend on the number of rows.
  void (*rows)(HalfKind kind, const float* x, int64_t rows, int64_t inputs, const uint16_t* weights, int64_t first,
               int64_t last, float* y, int64_t y_row);
  void (*widen)(HalfKind kind, const uint16_t* from, int64_t n, float* to);
};

TW_TABLE(HalfKernels, half_dot)

}  // namespace tw
