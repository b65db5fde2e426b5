// A sparse matrix in the layout of native/kernels/sparse.h, packed from a dense one, and its products: with the rows of
// a matrix (a linear layer) and with the patches of images (a convolution). Knows nothing of Python; throws
// std::bad_alloc when memory runs out.
#pragma once

#include <memory>

#include "common/sparse_pack.h"

namespace tw {

struct SparseConvShape {
  int64_t images = 0, channels = 0, height = 0, width = 0;
  int64_t kernel_height = 1, kernel_width = 1, stride_y = 1, stride_x = 1, pad_y = 0, pad_x = 0;

  int64_t out_height() const { return (height + 2 * pad_y - kernel_height) / stride_y + 1; }
  int64_t out_width() const { return (width + 2 * pad_x - kernel_width) / stride_x + 1; }
};

class PackedSparse {
 public:
  PackedSparse(const float* dense, int64_t rows, int64_t columns);
  ~PackedSparse();
  PackedSparse(PackedSparse&&) noexcept;

  void to_dense(float* dense) const { packed_.to_dense(dense); }
  // y (batch, rows) = x (batch, columns) Aᵀ
  void times_rows(const float* x, int64_t batch, float* y, const SparseEpilogue& epilogue) const;
  // y (images, rows, out_height, out_width); the columns are (channel, kernel row, kernel column). In sparse_conv.cpp.
  void convolve(const SparseConvShape& s, const float* x, float* y, const SparseEpilogue& epilogue) const;

  int64_t rows() const { return packed_.rows(); }
  int64_t columns() const { return packed_.columns(); }
  int64_t nonzeros() const { return packed_.nonzeros(); }
  int64_t nbytes() const;

 private:
  struct Strips;
  int threads_for(int64_t multiply_adds, int64_t shares) const;
  void times_small_batch(const float* x, int64_t batch, float* y, const SparseEpilogue& epilogue) const;
  void times_many(const float* x, int64_t batch, float* y, const SparseEpilogue& epilogue) const;
  bool strips_serve(const float* x, int64_t count) const;

  PackedCells<float, 1> packed_;
  std::unique_ptr<Strips> strips_;  // a second storage for a few vectors, made when it is first asked for
};

}  // namespace tw
