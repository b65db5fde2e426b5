// A sparse matrix in the layouts of native/kernels/sparse.h, packed from a dense one, and its products: with the rows
// of a matrix (a linear layer) and with the patches of images (a convolution). Independent of Python; throws
// std::bad_alloc if memory is exhausted.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "common/convolution.h"
#include "common/sparse_pack.h"

namespace tw {

class PackedStrips;

class PackedSparse {
 public:
  // Packs the layout for a few vectors, or the one for batches; others at their first use.
  PackedSparse(const float* dense, int64_t rows, int64_t columns, bool for_batches = false);
  ~PackedSparse();
  PackedSparse(PackedSparse&&) noexcept;

  void to_dense(float* dense) const;
  // y (batch, rows) = x (batch, columns) Aᵀ, rows `pitch` floats apart
  void times_rows(const float* x, int64_t x_pitch, int64_t batch, const SparseEpilogue& epilogue, float* y,
                  int64_t y_pitch) const;
  // y = act(conv(x) + bias + residual) with channels last and one group; the columns of the matrix are (channel, filter
  // row, filter column). x may be planes. In sparse_conv.cpp.
  void convolve(const ConvShape& s, const float* x, const ConvEpilogue& e, const ConvLayout& layout, float* y) const;

  // Returns whether skipping zeros is clearly cheaper than a dense algorithm: an estimate that is the same in every
  // run.
  static bool pays(const ConvShape& s, ConvAlgorithm dense, int64_t nonzeros);

  static bool is_small_batch(int64_t rows);  // few enough for the kernel for vectors

  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  int64_t nonzeros() const { return nonzeros_; }
  int64_t nbytes() const;

 private:
  typedef PackedCells<float, 1> Cells;
  typedef PackedCells<float, 1, kQuad, kTileColumns> Tiles;
  template <class Layout>
  struct Lazy {
    std::mutex mutex;
    std::unique_ptr<Layout> layout;
    std::atomic<const Layout*> ready{nullptr};
  };
  struct Layouts;
  struct ConvPlan;
  std::shared_ptr<const ConvPlan> plan(const ConvShape& s) const;
  template <class Layout>
  const Layout& packed(Lazy<Layout>& lazy) const;
  int threads_for(int64_t multiply_adds, int64_t shares) const;
  void convolve_rows(const ConvShape& s, const float* x, const ConvEpilogue& e, const ConvLayout& layout,
                     float* y) const;

  int64_t rows_, columns_, nonzeros_ = 0;
  std::unique_ptr<Layouts> layouts_;
};

// Makes `PackedSparse::pays` return true whenever half of the weights are zero: for tests of small layers.
void prefer_sparse(bool prefer);

}  // namespace tw
