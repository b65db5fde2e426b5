#include "common/sparse_int8.h"

#include <algorithm>
#include <cstring>

#include "common/thread_pool.h"

namespace tw {

PackedSparseInt8::PackedSparseInt8(const int8_t* dense, int64_t rows, int64_t columns)
    : rows_(rows),
      columns_(columns),
      padded_columns_(sparse_padded(columns)),
      packed_(BandPacker<SparseInt8Group>(columns).pack(dense, rows, columns)) {}

void PackedSparseInt8::to_dense(int8_t* dense) const {
  std::memset(dense, 0, static_cast<std::size_t>(rows_ * columns_));
  const auto read = [](const SparseInt8Group& group, int lane, int slot, uint32_t* index) {
    *index = static_cast<uint32_t>(group.index[lane][slot % 2] >> (slot / 2 * kIndexBits) & (kWindow - 1));
    return static_cast<float>(group.value[slot / 2][lane][slot % 2]);
  };
  visit_weights(packed_, rows_, read, [&](int64_t row, int64_t column, float value) {
    dense[row * columns_ + column] = static_cast<int8_t>(value);
  });
}

void PackedSparseInt8::products(const int16_t* x, int64_t batch, int32_t* sums) const {
  constexpr int64_t kWorthAThread = 400000;
  SparseInt8Matrix m;
  m.rows = rows_;
  m.columns = columns_;
  m.padded_columns = padded_columns_;
  m.groups = packed_.groups.data();
  packed_.fill(&m);
  const int64_t bands = sparse_bands(rows_);
  const int threads = static_cast<int>(std::min<int64_t>(
      {num_threads(), std::max<int64_t>(1, bands), std::max<int64_t>(1, packed_.nonzeros * batch / kWorthAThread)}));
  // The weights of a block of bands stay in the cache while the batch passes by.
  constexpr int64_t kBandsAtATime = 16;
  parallel_for(threads, [&](int t) {
    const int64_t end = bands * (t + 1) / threads;
    for (int64_t band = bands * t / threads; band < end; band += kBandsAtATime) {
      for (int64_t b = 0; b < batch; b += kMaxVectors) {
        const int n = static_cast<int>(std::min<int64_t>(kMaxVectors, batch - b));
        active_sparse_int8().vectors(m, x + b * x_step(), x_step(), n, sums + b * rows_, rows_, band,
                                     std::min(end, band + kBandsAtATime));
      }
    }
  });
}

void PackedSparseInt8::sums(const int8_t* x, int64_t batch, int32_t* out) const {
  Buffer<int16_t> wide(static_cast<std::size_t>(batch * x_step()));
  for (int64_t b = 0; b < batch; ++b) {
    int16_t* to = wide.data() + b * x_step();
    std::fill(std::copy(x + b * columns_, x + (b + 1) * columns_, to), to + x_step(), int16_t{0});
  }
  products(wide.data(), batch, out);
}

void PackedSparseInt8::linear(const float* x, int64_t batch, const float* scale, const float* bias, bool relu,
                              float* y) const {
  Buffer<int16_t> wide(static_cast<std::size_t>(batch * x_step()));
  Buffer<float> row_scale(static_cast<std::size_t>(batch));
  for (int64_t b = 0; b < batch; ++b) {
    int16_t* to = wide.data() + b * x_step();
    row_scale[static_cast<std::size_t>(b)] = active_sparse_int8().quantize(x + b * columns_, columns_, to);
    std::fill(to + columns_, to + x_step(), int16_t{0});
  }
  static_assert(sizeof(int32_t) == sizeof(float), "sums and results share their place");
  products(wide.data(), batch, reinterpret_cast<int32_t*>(y));
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t row = 0; row < rows_; ++row) {
      int32_t sum;
      std::memcpy(&sum, y + b * rows_ + row, sizeof sum);
      const float value = static_cast<float>(sum) * (scale[row] * row_scale[static_cast<std::size_t>(b)]) +
                          (bias != nullptr ? bias[row] : 0.0f);
      y[b * rows_ + row] = relu && value < 0.0f ? 0.0f : value;
    }
  }
}

}  // namespace tw
