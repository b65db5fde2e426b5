// Packs a sparse matrix and shares its products out to threads (sparse_matrix.h).
#include "common/sparse_matrix.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <new>
#include <vector>

#include "common/scratch.h"
#include "common/sparse_strip_pack.h"
#include "common/thread_pool.h"

namespace tw {

struct PackedSparse::Strips {
  std::mutex mutex;
  std::unique_ptr<PackedStrips> strips;
  std::atomic<const PackedStrips*> ready{nullptr};

  const PackedStrips& of(const PackedCells<float, 1>& cells) {
    if (const PackedStrips* strips_ready = ready.load()) return *strips_ready;
    std::lock_guard<std::mutex> lock(mutex);
    if (!strips) {
      Buffer<float> dense(static_cast<std::size_t>(cells.rows() * cells.columns()));
      cells.to_dense(dense.data());
      strips = std::make_unique<PackedStrips>(dense.data(), cells.rows(), cells.columns());
      ready.store(strips.get());
    }
    return *strips;
  }
};

PackedSparse::PackedSparse(const float* dense, int64_t rows, int64_t columns)
    : packed_(dense, rows, columns), strips_(std::make_unique<Strips>()) {}
PackedSparse::~PackedSparse() = default;
PackedSparse::PackedSparse(PackedSparse&&) noexcept = default;

int64_t PackedSparse::nbytes() const {
  const PackedStrips* strips = strips_->ready.load();
  return packed_.nbytes() + (strips == nullptr ? 0 : strips->nbytes());
}

bool PackedSparse::strips_serve(const float* x, int64_t count) const {
  return active_sparse_strips().vectors != nullptr && active_sparse_strips().finite(x, count);
}

int PackedSparse::threads_for(int64_t multiply_adds, int64_t shares) const {
  constexpr int64_t kMinWorkPerThread = 200000;
  return static_cast<int>(
      std::min<int64_t>({num_threads(), shares, std::max<int64_t>(1, multiply_adds / kMinWorkPerThread)}));
}

void PackedSparse::times_rows(const float* x, int64_t batch, float* y, const SparseEpilogue& epilogue) const {
  // Up to here vectors one by one beat a tile: of 16 in AVX-512's cells, of 8 beside AVX2's strips
  // (benchmarks/sparse.py, "1024×1024 at 70%, batch 4").
  const int64_t max_vectors = active_sparse_strips().vectors != nullptr ? 4 : 5;
  const int64_t remainder = batch % 16 <= max_vectors ? batch % 16 : 0;
  if (batch > remainder) times_many(x, batch - remainder, y, epilogue);
  if (remainder > 0)
    times_small_batch(x + (batch - remainder) * columns(), remainder, y + (batch - remainder) * rows(), epilogue);
}

void PackedSparse::times_small_batch(const float* x, int64_t batch, float* y, const SparseEpilogue& epilogue) const {
  const int64_t padded = packed_.padded_columns(), blocks = sparse_blocks(rows());
  if (padded != columns()) {
    float* copy = thread_scratch(batch * padded);
    if (copy == nullptr) throw std::bad_alloc();
    for (int64_t b = 0; b < batch; ++b) {
      std::copy(x + b * columns(), x + (b + 1) * columns(), copy + b * padded);
      std::fill(copy + b * padded + columns(), copy + (b + 1) * padded, 0.0f);
    }
    x = copy;
  }
  const int threads = threads_for(nonzeros() * batch, std::max<int64_t>(1, blocks));
  const auto passes = [&](int64_t shares, auto run) {
    parallel_for(threads, [&](int t) {
      for (int64_t b = 0; b < batch; b += kMaxVectors) {
        const int n = static_cast<int>(std::min<int64_t>(kMaxVectors, batch - b));
        run(x + b * padded, n, y + b * rows(), shares * t / threads, shares * (t + 1) / threads);
      }
    });
  };
  if (strips_serve(x, batch * padded)) {
    const SparseStrips strips = strips_->of(packed_).strips();
    passes((rows() + kStripRows - 1) / kStripRows,
           [&](const float* in, int n, float* out, int64_t first, int64_t last) {
             active_sparse_strips().vectors(strips, in, padded, n, out, rows(), epilogue, first, last);
           });
    return;
  }
  const SparseCells<float> cells = packed_.cells();
  passes(blocks, [&](const float* in, int n, float* out, int64_t first, int64_t last) {
    active_sparse().vectors(cells, in, padded, n, out, rows(), epilogue, first, last);
  });
}

namespace {

// Returns how many inputs of a batch one pass of the kernels processes.
int tile_of(int64_t remaining) { return remaining <= 16 ? 16 : kMaxBatch; }

// Transposed tiles that a wave has at most, unless there are more threads: half of a second-level cache of 1 MiB.
constexpr int64_t kWaveFloats = 128 * 1024;

struct Tile {
  int64_t first;
  int size, valid;
};

// Prefetches the result of a block, many short runs far apart, so that its cache lines arrive during the product.
void fetch_result(const float* y, int64_t y_step, int rows, int count) {
  for (int b = 0; b < count; ++b) {
    for (int i = 0; i < rows; i += 16) __builtin_prefetch(y + b * y_step + i, 1, 2);
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

// The tiles of the batch pass in waves: those of a wave are transposed, and then threads share the blocks. A block
// meets all tiles of the wave while its weights are in the second-level cache, next to the tiles.
void PackedSparse::times_many(const float* x, int64_t batch, float* y, const SparseEpilogue& epilogue) const {
  const SparseCells<float> cells = packed_.cells();
  const std::vector<Tile> tiles = tiles_of(batch);
  const int64_t blocks = sparse_blocks(rows()), count = static_cast<int64_t>(tiles.size());
  const int threads = threads_for(nonzeros() * batch, std::max<int64_t>(1, blocks * count));
  const int64_t tile_floats = packed_.padded_columns() * tiles.front().size;
  const int64_t together = std::min(count, std::max<int64_t>(threads, kWaveFloats / tile_floats));
  float* xt = thread_scratch(tile_floats * together);
  if (xt == nullptr) throw std::bad_alloc();
  for (int64_t first = 0; first < count; first += together) {
    const int64_t wave = std::min(together, count - first);
    const Tile* tile = tiles.data() + first;
    parallel_for(threads, [&](int t) {
      for (int64_t i = t; i < wave; i += threads) {
        active_sparse().transpose(x + tile[i].first * columns(), columns(), tile[i].valid, tile[i].size,
                                  xt + i * tile_floats);
      }
    });
    parallel_for(threads, [&](int t) {
      alignas(64) float work[kWorkFloats];
      for (int64_t i = wave * blocks * t / threads; i < wave * blocks * (t + 1) / threads; ++i) {
        const Tile& of = tile[i % wave];
        const int64_t block = i / wave, row0 = block * kBlockRows;
        const int n = static_cast<int>(std::min<int64_t>(kBlockRows, rows() - row0));
        float* to = y + of.first * rows() + row0;
        fetch_result(to, rows(), n, of.valid);
        active_sparse().block(cells, block, xt + i % wave * tile_floats, of.size, of.valid, epilogue, work);
        active_sparse().scatter_columns(work, n, of.size, of.valid, to, rows());
      }
    });
  }
}

}  // namespace tw
