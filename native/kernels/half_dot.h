// Products of rows with float16 or bfloat16 weights as a file stores them. A row is an array of 32-bit words: floats,
// for which weights become float32 as they are loaded; or pairs of bfloat16, which one instruction (AVX512_BF16)
// multiplies by pairs of bfloat16 weights and adds in float32.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

enum class HalfKind { float16, bfloat16, bfloat16_pairs };

struct HalfKernels {
  // A few rows: y (rows, outputs) = x W^T for outputs [first, last). Rows of x have `words` words; rows of y are
  // `y_row` floats apart. The order of a sum does not depend on the number of rows.
  void (*rows)(HalfKind kind, const float* x, int64_t rows, int64_t words, const uint16_t* weights, int64_t first,
               int64_t last, float* y, int64_t y_row);
  // Many rows. `pack` transposes strips of rows to (words, rows of the strip); strip s of `strips` begins at row rows *
  // s / strips. `panels` converts and transposes one panel of weights at a time and multiplies it by all strips;
  // `panel` has room for panel_floats.
  int strip_rows, panel_outputs;
  int64_t panel_floats;
  void (*pack)(const float* x, int64_t rows, int64_t words, int64_t first_strip, int64_t last_strip, float* packed);
  void (*panels)(HalfKind kind, const float* packed, int64_t rows, int64_t words, const uint16_t* weights,
                 int64_t first, int64_t last, float* y, int64_t y_row, float* panel);
  void (*widen)(HalfKind kind, const uint16_t* from, int64_t n, float* to);
  // Rounds floats to `words` pairs of bfloat16; null without bfloat16_pairs.
  void (*round_pairs)(const float* x, int64_t words, float* to);
};

TW_TABLE(HalfKernels, half_dot)

}  // namespace tw
