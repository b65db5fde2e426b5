// Packs a sparse matrix and multiplies a few vectors by it (sparse_matrix.h).
#include "common/sparse_matrix.h"

#include <algorithm>
#include <new>

#include "common/scratch.h"
#include "common/sparse_layouts.h"
#include "common/thread_pool.h"

namespace tw {

PackedSparse::PackedSparse(const float* dense, int64_t rows, int64_t columns, bool for_batches)
    : rows_(rows), columns_(columns), layouts_(std::make_unique<Layouts>()) {
  const auto pack = [&](auto& lazy) {
    using Layout = typename std::remove_reference_t<decltype(lazy.layout)>::element_type;
    lazy.layout = std::make_unique<Layout>(dense, rows, columns);
    lazy.ready.store(lazy.layout.get());
  };
  for_batches ? pack(layouts_->tiles) : pack(layouts_->cells);
  nonzeros_ = rows * columns - std::count(dense, dense + rows * columns, 0.0f);
}
PackedSparse::~PackedSparse() = default;
PackedSparse::PackedSparse(PackedSparse&&) noexcept = default;

void PackedSparse::to_dense(float* dense) const {
  if (const Cells* cells = layouts_->cells.ready.load()) return cells->to_dense(dense);
  layouts_->tiles.ready.load()->to_dense(dense);
}

int64_t PackedSparse::nbytes() const {
  const auto bytes = [](const auto& lazy) {
    const auto* layout = lazy.ready.load();
    return layout == nullptr ? 0 : layout->nbytes();
  };
  return bytes(layouts_->cells) + bytes(layouts_->tiles) + bytes(layouts_->strips);
}

int PackedSparse::threads_for(int64_t multiply_adds, int64_t shares) const {
  return static_cast<int>(
      std::min<int64_t>({num_threads(), shares, std::max<int64_t>(1, multiply_adds / kTaskMultiplyAdds)}));
}

// Up to this batch, single vectors are faster than a tile: of 16 with AVX-512's cells, of 8 with AVX2's strips
// (benchmarks/sparse.py, "1024×1024 at 70%, batch 4").
bool PackedSparse::is_small_batch(int64_t batch) {
  return batch <= (active_sparse_strips().vectors != nullptr ? 4 : 5);
}

// A large batch is a pointwise convolution. A small one uses strips if they exist and x is finite, else cells.
void PackedSparse::times_rows(const float* x, int64_t x_pitch, int64_t batch, const SparseEpilogue& epilogue, float* y,
                              int64_t y_pitch) const {
  if (batch == 0) return;
  if (!is_small_batch(batch)) {
    const ConvShape s{batch, columns_, 1, 1, rows_, 1, 1, 1, 1, 0, 0, 1, 1, 1};
    const ConvEpilogue e{epilogue.bias, nullptr, epilogue.relu ? ConvActivation::relu : ConvActivation::none};
    return convolve(s, x, e, {x_pitch, y_pitch, 0}, y);
  }
  const int64_t padded = sparse_padded(columns_, kCellColumns), blocks = sparse_blocks(rows_);
  if (padded != columns_) {
    float* copy = thread_scratch(batch * padded);
    if (copy == nullptr) throw std::bad_alloc();
    for (int64_t b = 0; b < batch; ++b) {
      std::copy(x + b * x_pitch, x + b * x_pitch + columns_, copy + b * padded);
      std::fill(copy + b * padded + columns_, copy + (b + 1) * padded, 0.0f);
    }
    x = copy, x_pitch = padded;
  }
  const int threads = threads_for(nonzeros() * batch, std::max<int64_t>(1, blocks));
  const auto passes = [&](int64_t shares, auto run) {
    parallel_for(threads, [&](int t) {
      for (int64_t b = 0; b < batch; b += kMaxVectors) {
        const int n = static_cast<int>(std::min<int64_t>(kMaxVectors, batch - b));
        run(x + b * x_pitch, n, y + b * y_pitch, shares * t / threads, shares * (t + 1) / threads);
      }
    });
  };
  if (active_sparse_strips().vectors != nullptr && active_sparse().finite(x, x_pitch, batch, padded)) {
    const SparseStrips strips = packed(layouts_->strips).strips();
    passes((rows_ + kStripRows - 1) / kStripRows, [&](const float* in, int n, float* out, int64_t first, int64_t last) {
      active_sparse_strips().vectors(strips, in, x_pitch, n, out, y_pitch, epilogue, first, last);
    });
    return;
  }
  const SparseCells<float> cells = packed(layouts_->cells).cells();
  passes(blocks, [&](const float* in, int n, float* out, int64_t first, int64_t last) {
    active_sparse().vectors(cells, in, x_pitch, n, out, y_pitch, epilogue, first, last);
  });
}

}  // namespace tw
