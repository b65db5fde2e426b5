#include "common/sparse_int8.h"

#include <algorithm>
#include <cstring>

#include "common/thread_pool.h"

namespace tw {

// Computes the int32 sums (batch, rows) of the sparse matrix and int16 inputs.
void PackedSparseInt8::products(const int16_t* x, int64_t batch, int32_t* sums) const {
  const SparseCells<int8_t> cells = packed_.cells();
  const int64_t blocks = sparse_blocks(rows());
  const int threads = static_cast<int>(std::min<int64_t>(
      {num_threads(), std::max<int64_t>(1, blocks), std::max<int64_t>(1, nonzeros() * batch / kTaskMultiplyAdds)}));
  // The weights of a few blocks stay in the cache while the batch passes by.
  constexpr int64_t kBlocksAtATime = 2;  // chosen
  parallel_for(threads, [&](int t) {
    const int64_t end = blocks * (t + 1) / threads;
    for (int64_t block = blocks * t / threads; block < end; block += kBlocksAtATime) {
      for (int64_t b = 0; b < batch; b += kMaxVectors) {
        const int n = static_cast<int>(std::min<int64_t>(kMaxVectors, batch - b));
        active_sparse_int8().vectors(cells, x + b * x_step(), x_step(), n, sums + b * rows(), rows(), block,
                                     std::min(end, block + kBlocksAtATime));
      }
    }
  });
}

void PackedSparseInt8::sums(const int8_t* x, int64_t batch, int32_t* out) const {
  Buffer<int16_t> int16_inputs(static_cast<std::size_t>(batch * x_step()));
  for (int64_t b = 0; b < batch; ++b) {
    int16_t* to = int16_inputs.data() + b * x_step();
    std::fill(std::copy(x + b * columns(), x + (b + 1) * columns(), to), to + x_step(), int16_t{0});
  }
  products(int16_inputs.data(), batch, out);
}

void PackedSparseInt8::linear(const float* x, int64_t batch, const float* scale, const float* bias, bool relu,
                              float* y) const {
  Buffer<int16_t> int16_inputs(static_cast<std::size_t>(batch * x_step()));
  Buffer<float> row_scale(static_cast<std::size_t>(batch));
  for (int64_t b = 0; b < batch; ++b) {
    int16_t* to = int16_inputs.data() + b * x_step();
    row_scale[static_cast<std::size_t>(b)] = active_sparse_int8().quantize(x + b * columns(), columns(), to);
    std::fill(to + columns(), to + x_step(), int16_t{0});
  }
  static_assert(sizeof(int32_t) == sizeof(float), "sums are stored in the memory of the results");
  products(int16_inputs.data(), batch, reinterpret_cast<int32_t*>(y));
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t row = 0; row < rows(); ++row) {
      int32_t sum;
      std::memcpy(&sum, y + b * rows() + row, sizeof sum);
      const float value = static_cast<float>(sum) * (scale[row] * row_scale[static_cast<std::size_t>(b)]) +
                          (bias != nullptr ? bias[row] : 0.0f);
      y[b * rows() + row] = relu && value < 0.0f ? 0.0f : value;
    }
  }
}

}  // namespace tw
