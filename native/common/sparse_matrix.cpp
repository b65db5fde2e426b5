// Packs a sparse matrix and shares its products out to threads (sparse_matrix.h).
#include "common/sparse_matrix.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/scratch.h"
#include "common/thread_pool.h"

namespace tw {
namespace {

// A weight in the overflow list costs about as much time as this many slots of one row.
constexpr int kOverflowCost = 4;
// The columns that packing considers as the start of the next window.
constexpr int kWindowChoices = 4;

struct RowEntries {  // the weights of one lane that are still to be packed
  const uint32_t* column = nullptr;
  const float* value = nullptr;
  int64_t at = 0, count = 0;

  bool done() const { return at == count; }
  uint32_t next() const { return column[at]; }
};

int64_t padded(int64_t columns) {
  return std::max<int64_t>(kWindow, (columns + kWindowStep - 1) / kWindowStep * kWindowStep);
}

// Slots that a window from `start` would fill, less the price of the weights it would leave behind.
int window_worth(const RowEntries* rows, uint32_t start) {
  int worth = 0;
  for (int lane = 0; lane < kBand; ++lane) {
    const RowEntries& row = rows[lane];
    int taken = 0;
    for (int64_t i = row.at; i < row.count && row.column[i] < start + kWindow && taken < kSlots; ++i) {
      if (row.column[i] < start) {
        worth -= kOverflowCost;
      } else {
        ++taken;
      }
    }
    worth += taken;
  }
  return worth;
}

uint32_t best_window(const RowEntries* rows, int64_t padded_columns) {
  uint32_t first = UINT32_MAX;
  for (int lane = 0; lane < kBand; ++lane) {
    if (!rows[lane].done()) first = std::min(first, rows[lane].next());
  }
  const uint32_t limit = static_cast<uint32_t>(padded_columns - kWindow);
  uint32_t start = std::min(first / kWindowStep * kWindowStep, limit), best = start;
  int best_worth = window_worth(rows, start);
  for (int choice = 1; choice < kWindowChoices && start + kWindowStep <= limit; ++choice) {
    start += kWindowStep;
    const int worth = window_worth(rows, start);
    if (worth > best_worth) {
      best_worth = worth;
      best = start;
    }
  }
  return best;
}

class BandPacker {
 public:
  BandPacker(RowEntries* rows, int64_t padded_columns, std::vector<SparseGroup>& groups, std::vector<uint32_t>& window,
             std::vector<SparseOverflow>& overflow)
      : rows_(rows), padded_columns_(padded_columns), groups_(groups), window_(window), overflow_(overflow) {}

  void pack() {
    const std::size_t first = overflow_.size();
    while (std::any_of(rows_, rows_ + kBand, [](const RowEntries& row) { return !row.done(); })) pack_group();
    std::stable_sort(overflow_.begin() + static_cast<std::ptrdiff_t>(first), overflow_.end(),
                     [](const SparseOverflow& a, const SparseOverflow& b) { return a.column < b.column; });
  }

 private:
  void pack_group() {
    const uint32_t start = best_window(rows_, padded_columns_);
    SparseGroup group;
    std::memset(&group, 0, sizeof group);
    for (int lane = 0; lane < kBand; ++lane) {
      RowEntries& row = rows_[lane];
      for (; !row.done() && row.next() < start; ++row.at) {
        overflow_.push_back({row.next(), static_cast<uint32_t>(lane), row.value[row.at]});
      }
      for (int s = 0; s < kSlots && !row.done() && row.next() < start + kWindow; ++s, ++row.at) {
        group.index[lane] |= (row.next() - start) << (s * kIndexBits);
        group.value[s][lane] = row.value[row.at];
      }
    }
    groups_.push_back(group);
    window_.push_back(start);
  }

  RowEntries* rows_;
  int64_t padded_columns_;
  std::vector<SparseGroup>& groups_;
  std::vector<uint32_t>& window_;
  std::vector<SparseOverflow>& overflow_;
};

template <class T>
Buffer<T> kept(const std::vector<T>& values) {
  Buffer<T> buffer(values.size());
  if (!values.empty()) std::memcpy(static_cast<void*>(buffer.data()), values.data(), values.size() * sizeof(T));
  return buffer;
}

}  // namespace

PackedSparse::PackedSparse(const float* dense, int64_t rows, int64_t columns)
    : rows_(rows), columns_(columns), padded_columns_(padded(columns)) {
  pack(dense);
}

void PackedSparse::pack(const float* dense) {
  const int64_t bands = sparse_bands(rows_);
  std::vector<SparseGroup> groups;
  std::vector<uint32_t> window;
  std::vector<SparseOverflow> overflow;
  band_start_ = Buffer<int64_t>(static_cast<std::size_t>(bands + 1));
  overflow_start_ = Buffer<int64_t>(static_cast<std::size_t>(bands + 1));
  row_at_ = Buffer<uint8_t>(static_cast<std::size_t>(bands * kBand));
  std::vector<uint32_t> column;
  std::vector<float> value;
  for (int64_t block = 0; block < sparse_blocks(rows_); ++block) {
    column.clear();
    value.clear();
    int64_t start[kBlockRows + 1] = {};
    for (int64_t r = 0; r < kBlockRows; ++r) {
      const int64_t row = block * kBlockRows + r;
      for (int64_t c = 0; row < rows_ && c < columns_; ++c) {
        if (dense[row * columns_ + c] == 0.0f) continue;
        column.push_back(static_cast<uint32_t>(c));
        value.push_back(dense[row * columns_ + c]);
      }
      start[r + 1] = static_cast<int64_t>(column.size());
    }
    nonzeros_ += start[kBlockRows];
    uint8_t* order = row_at_.data() + block * kBlockRows;
    for (int r = 0; r < kBlockRows; ++r) order[r] = static_cast<uint8_t>(r);
    std::stable_sort(order, order + kBlockRows, [&](uint8_t a, uint8_t b) {
      return start[a + 1] - start[a] > start[b + 1] - start[b];
    });
    for (int i = 0; i < kBlockBands; ++i) {
      const int64_t band = block * kBlockBands + i;
      band_start_[static_cast<std::size_t>(band)] = static_cast<int64_t>(groups.size());
      overflow_start_[static_cast<std::size_t>(band)] = static_cast<int64_t>(overflow.size());
      RowEntries rows[kBand];
      for (int lane = 0; lane < kBand; ++lane) {
        const int r = order[i * kBand + lane];
        rows[lane] = {column.data() + start[r], value.data() + start[r], 0, start[r + 1] - start[r]};
      }
      BandPacker(rows, padded_columns_, groups, window, overflow).pack();
    }
  }
  band_start_[static_cast<std::size_t>(bands)] = static_cast<int64_t>(groups.size());
  overflow_start_[static_cast<std::size_t>(bands)] = static_cast<int64_t>(overflow.size());
  groups_ = kept(groups);
  window_ = kept(window);
  overflow_ = kept(overflow);
}

void PackedSparse::to_dense(float* dense) const {
  std::memset(dense, 0, sizeof(float) * static_cast<std::size_t>(rows_ * columns_));
  const SparseMatrix m = matrix();
  for (int64_t band = 0; band < sparse_bands(rows_); ++band) {
    const auto row = [&](int64_t lane) { return band / kBlockBands * kBlockRows + m.row_at[band * kBand + lane]; };
    for (int64_t g = m.band_start[band]; g < m.band_start[band + 1]; ++g) {
      for (int i = 0; i < kSlots * kBand; ++i) {
        const int s = i / kBand, lane = i % kBand;
        const float value = m.groups[g].value[s][lane];
        const uint32_t index = m.groups[g].index[lane] >> (s * kIndexBits) & (kWindow - 1);
        if (value != 0.0f) dense[row(lane) * columns_ + m.window[g] + index] = value;
      }
    }
    for (int64_t e = m.overflow_start[band]; e < m.overflow_start[band + 1]; ++e) {
      dense[row(m.overflow[e].lane) * columns_ + m.overflow[e].column] = m.overflow[e].value;
    }
  }
}

int64_t PackedSparse::nbytes() const {
  return static_cast<int64_t>(groups_.size() * sizeof(SparseGroup) + window_.size() * 4 + row_at_.size() +
                              8 * (band_start_.size() + overflow_start_.size()) +
                              overflow_.size() * sizeof(SparseOverflow));
}

SparseMatrix PackedSparse::matrix() const {
  SparseMatrix m;
  m.rows = rows_;
  m.columns = columns_;
  m.padded_columns = padded_columns_;
  m.groups = groups_.data();
  m.window = window_.data();
  m.band_start = band_start_.data();
  m.row_at = row_at_.data();
  m.overflow = overflow_.data();
  m.overflow_start = overflow_start_.data();
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
  const int threads = threads_for(nonzeros_ * batch, bands);
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
  const int threads = threads_for(nonzeros_ * batch, std::max<int64_t>(1, blocks * count));
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
