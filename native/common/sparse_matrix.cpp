// Packs a sparse matrix and shares its products out to threads (sparse_matrix.h).
#include "common/sparse_matrix.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/scratch.h"
#include "common/thread_pool.h"

namespace tw {
PackedSparse::PackedSparse(const float* dense, int64_t rows, int64_t columns)
    : rows_(rows),
      columns_(columns),
      padded_columns_(sparse_padded(columns)),
      packed_(BandPacker<SparseGroup>(columns).pack(dense, rows, columns)) {}

void PackedSparse::to_dense(float* dense) const {
  std::memset(dense, 0, sizeof(float) * static_cast<std::size_t>(rows_ * columns_));
  const auto read = [](const SparseGroup& group, int lane, int slot, uint32_t* index) {
    *index = group.index[lane] >> (slot * kIndexBits) & (kWindow - 1);
    return group.value[slot][lane];
  };
  visit_weights(packed_, rows_, read, [&](int64_t row, int64_t column, float value) {
    dense[row * columns_ + column] = value;
  });
}

SparseMatrix PackedSparse::matrix() const {
  SparseMatrix m;
  m.rows = rows_;
  m.columns = columns_;
  m.padded_columns = padded_columns_;
  m.groups = packed_.groups.data();
  packed_.fill(&m);
  return m;
}

int PackedSparse::threads_for(int64_t multiply_adds, int64_t parts) const {
  constexpr int64_t kWorthAThread = 200000;
  return static_cast<int>(
      std::min<int64_t>({num_threads(), parts, std::max<int64_t>(1, multiply_adds / kWorthAThread)}));
}

void PackedSparse::times_rows(const float* x, int64_t batch, float* y, const SparseEpilogue& epilogue) const {
  constexpr int64_t kFew = 12;  // measured: up to here vectors one by one beat a padded tile of 16
  const int64_t rest = batch % 16 <= kMaxVectors && batch > kFew ? batch % 16 : batch <= kFew ? batch : 0;
  if (batch > rest) times_many(x, batch - rest, y, epilogue);
  if (rest > 0) times_few(x + (batch - rest) * columns_, rest, y + (batch - rest) * rows_, epilogue);
}

void PackedSparse::times_few(const float* x, int64_t batch, float* y, const SparseEpilogue& epilogue) const {
  if (padded_columns_ != columns_) {
    float* copy = thread_scratch(batch * padded_columns_);
    if (copy == nullptr) throw std::bad_alloc();
    for (int64_t b = 0; b < batch; ++b) {
      std::copy(x + b * columns_, x + (b + 1) * columns_, copy + b * padded_columns_);
      std::fill(copy + b * padded_columns_ + columns_, copy + (b + 1) * padded_columns_, 0.0f);
    }
    x = copy;
  }
  const SparseMatrix m = matrix();
  const int64_t bands = sparse_bands(rows_);
  const int threads = threads_for(packed_.nonzeros * batch, bands);
  parallel_for(threads, [&](int t) {
    for (int64_t b = 0; b < batch; b += kMaxVectors) {
      const int n = static_cast<int>(std::min<int64_t>(kMaxVectors, batch - b));
      active_sparse().vectors(m, x + b * padded_columns_, padded_columns_, n, y + b * rows_, rows_, epilogue,
                              bands * t / threads, bands * (t + 1) / threads);
    }
  });
}

namespace {

// The inputs of a batch that one pass of the kernels takes.
int tile_of(int64_t left) { return left <= 16 ? 16 : kMaxBatch; }

struct Tile {
  int64_t first;
  int size, valid;
};

// The result of a block is many short runs, far apart: asked for before the product, their lines are there after it.
void fetch_result(const float* y, int64_t y_step, int count) {
  for (int b = 0; b < count; ++b) {
    for (int i = 0; i < kBlockRows; i += 16) __builtin_prefetch(y + b * y_step + i, 1, 2);
  }
}

std::vector<Tile> tiles_of(int64_t batch) {
  std::vector<Tile> tiles;
  for (int64_t first = 0; first < batch; first += tiles.back().size) {
    const int size = tile_of(batch - first);
    tiles.push_back({first, size, static_cast<int>(std::min<int64_t>(size, batch - first))});
  }
  return tiles;
}

}  // namespace

// Waves of as many tiles of the batch as there are threads: first each is transposed, then all threads share the blocks.
void PackedSparse::times_many(const float* x, int64_t batch, float* y, const SparseEpilogue& epilogue) const {
  const SparseMatrix m = matrix();
  const std::vector<Tile> tiles = tiles_of(batch);
  const int64_t blocks = sparse_blocks(rows_), count = static_cast<int64_t>(tiles.size());
  const int threads = threads_for(packed_.nonzeros * batch, std::max<int64_t>(1, blocks * count));
  const int64_t tile_floats = padded_columns_ * tiles.front().size;
  float* xt = thread_scratch(tile_floats * threads);
  if (xt == nullptr) throw std::bad_alloc();
  for (int64_t first = 0; first < count; first += threads) {
    const int64_t wave = std::min<int64_t>(threads, count - first);
    const Tile* tile = tiles.data() + first;
    parallel_for(static_cast<int>(wave), [&](int t) {
      active_sparse().transpose(x + tile[t].first * columns_, columns_, padded_columns_, tile[t].valid, tile[t].size,
                                xt + t * tile_floats);
    });
    parallel_for(threads, [&](int t) {
      alignas(64) float work[kWorkFloats];
      for (int64_t i = wave * blocks * t / threads; i < wave * blocks * (t + 1) / threads; ++i) {
        const Tile& of = tile[i / blocks];
        fetch_result(y + of.first * rows_ + i % blocks * kBlockRows, rows_, of.valid);
        active_sparse().block(m, i % blocks, xt + i / blocks * tile_floats, of.size, epilogue, work);
        active_sparse().scatter_columns(m, i % blocks, work, of.size, of.valid, y + of.first * rows_, rows_);
      }
    });
  }
}

}  // namespace tw
