// A linear layer with sparse int8 weights on float activations: each row of activations is quantized by its own scale
// (dynamic quantization), the products are exact in 32 bits, and the result is scaled back. Independent of Python.
#pragma once

#include "common/sparse_pack.h"
#include "kernels/sparse_int8.h"

namespace tw {

// The widest matrix whose sums cannot overflow: 127 * 127 * columns < 2^31.
constexpr int64_t kInt8MostColumns = 133000;  // definition: 2^31 / 127^2, rounded down to thousands

class PackedSparseInt8 {
 public:
  PackedSparseInt8(const int8_t* dense, int64_t rows, int64_t columns) : packed_(dense, rows, columns) {}

  void to_dense(int8_t* dense) const { packed_.to_dense(dense); }
  // sums (batch, rows) = x (batch, columns) Aᵀ
  void sums(const int8_t* x, int64_t batch, int32_t* sums) const;
  // y (batch, rows) = sums * scale[row] * (scale of the activations) + bias, then ReLU if asked; bias may be null.
  void linear(const float* x, int64_t batch, const float* scale, const float* bias, bool relu, float* y) const;

  int64_t rows() const { return packed_.rows(); }
  int64_t columns() const { return packed_.columns(); }
  int64_t nonzeros() const { return packed_.nonzeros(); }
  int64_t nbytes() const { return packed_.nbytes(); }

 private:
  int64_t x_step() const { return packed_.padded_columns() + kInt8Slack; }
  void products(const int16_t* x, int64_t batch, int32_t* sums) const;

  PackedCells<int8_t, kInt8Slots> packed_;
};

}  // namespace tw
