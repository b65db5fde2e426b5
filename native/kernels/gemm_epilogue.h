// The epilogue of a tile of a matrix product: bias, residual and activation in one pass while the tile is in L1.
#pragma once

#include "kernels/gemm.h"
#include "kernels/row_loops.h"

namespace tw {
namespace TW_ISA {

template <Activation F>
TW_INLINE vf activate(vf v) {
  if (F == Activation::relu) return max_nan(v, vf{});
  if (F == Activation::gelu) return vgelu(v);
  if (F == Activation::gelu_tanh) return vgelu_tanh(v);
  return v;
}

// Applies an epilogue with a known activation to a tile of C in place.
template <Activation F>
void apply_epilogue_rows(const Epilogue& e, float* c, int64_t c_row, int64_t row, int64_t col, int64_t rows,
                         int64_t cols) {
  for (int64_t i = 0; i < rows; ++i) {
    float* to = c + i * c_row;
    const float* bias = e.bias ? e.bias + col : nullptr;
    const float* residual = e.residual ? e.residual + (row + i) * e.residual_row + col : nullptr;
    // Whole vectors are stored without a mask: on AMD's AVX2 cores a masked store takes a dozen cycles.
    each_vector(cols, [&](int64_t j, auto lanes) {
      vf v = lanes.get(to + j);
      if (bias) v += lanes.get(bias + j);
      if (residual) v += lanes.get(residual + j);
      lanes.put(to + j, activate<F>(v));
    });
  }
}

// Applies the epilogue to a tile of the result. `c` points at its element (row, col).
inline void apply_epilogue(const Epilogue& e, float* c, int64_t c_row, int64_t row, int64_t col, int64_t rows,
                           int64_t cols) {
  switch (e.activation) {
    case Activation::relu:
      return apply_epilogue_rows<Activation::relu>(e, c, c_row, row, col, rows, cols);
    case Activation::gelu:
      return apply_epilogue_rows<Activation::gelu>(e, c, c_row, row, col, rows, cols);
    case Activation::gelu_tanh:
      return apply_epilogue_rows<Activation::gelu_tanh>(e, c, c_row, row, col, rows, cols);
    default:
      return apply_epilogue_rows<Activation::none>(e, c, c_row, row, col, rows, cols);
  }
}

}  // namespace TW_ISA
}  // namespace tw
