// Sparse products against plain loops, on buffers with no number to spare: the sanitizers see any read or write
// outside.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "common/sparse_int8.h"
#include "common/sparse_matrix.h"
#include "tests/tests.h"

namespace {

std::mt19937 rng(5);

float number() { return std::normal_distribution<float>()(rng); }

std::vector<float> numbers(int64_t n) {
  std::vector<float> out(static_cast<std::size_t>(n));
  for (float& v : out) v = number();
  return out;
}

bool is_drawn(double chance) { return std::uniform_real_distribution<>()(rng) < chance; }

// Rows of very different lengths: the density rises from the first row to the last.
std::vector<float> pruned(int64_t rows, int64_t columns, double density) {
  std::vector<float> w(static_cast<std::size_t>(rows * columns), 0.0f);
  for (int64_t i = 0; i < rows * columns; ++i) {
    const double row = 2.0 * static_cast<double>(i / columns) / static_cast<double>(rows);
    if (is_drawn(density * (density < 1.0 ? row : 1.0))) w[static_cast<std::size_t>(i)] = number();
  }
  return w;
}

void check_linear(int64_t rows, int64_t columns, double density) {
  const std::vector<float> w = pruned(rows, columns, density), bias = numbers(rows);
  const tw::PackedSparse packed(w.data(), rows, columns);
  std::vector<float> back(w.size(), 7.0f);
  packed.to_dense(back.data());
  TW_CHECK(back == w);
  for (const int64_t batch : {1, 2, 3, 4, 5, 6, 8, 16, 17, 22, 24, 33, 67}) {
    const std::vector<float> x = numbers(batch * columns);
    std::vector<float> y(static_cast<std::size_t>(batch * rows));
    tw::SparseEpilogue epilogue;
    epilogue.bias = batch % 2 ? bias.data() : nullptr;
    epilogue.relu = batch % 3 == 0;
    packed.times_rows(x.data(), batch, y.data(), epilogue);
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t r = 0; r < rows; ++r) {
        double sum = batch % 2 ? bias[static_cast<std::size_t>(r)] : 0.0, size = 1.0;
        for (int64_t c = 0; c < columns; ++c) {
          const double weight = w[static_cast<std::size_t>(r * columns + c)];
          const double term = weight * x[static_cast<std::size_t>(b * columns + c)];
          sum += term;
          size += std::fabs(term);
        }
        if (epilogue.relu) sum = std::max(sum, 0.0);
        TW_CHECK(std::fabs(y[static_cast<std::size_t>(b * rows + r)] - sum) <= 1e-6 * size);
      }
    }
  }
}

void check_int8(int64_t rows, int64_t columns, double density) {
  std::vector<int8_t> w(static_cast<std::size_t>(rows * columns));
  for (int8_t& v : w) v = is_drawn(density) ? static_cast<int8_t>(rng()) : int8_t{0};
  const tw::PackedSparseInt8 packed(w.data(), rows, columns);
  std::vector<int8_t> back(w.size(), 7);
  packed.to_dense(back.data());
  TW_CHECK(back == w);
  for (const int64_t batch : {1, 2, 3, 4, 7}) {
    std::vector<int8_t> x(static_cast<std::size_t>(batch * columns));
    for (int8_t& v : x) v = static_cast<int8_t>(rng());
    std::vector<int32_t> sums(static_cast<std::size_t>(batch * rows));
    packed.sums(x.data(), batch, sums.data());
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t r = 0; r < rows; ++r) {
        int32_t sum = 0;
        for (int64_t c = 0; c < columns; ++c) {
          sum += w[static_cast<std::size_t>(r * columns + c)] * x[static_cast<std::size_t>(b * columns + c)];
        }
        TW_CHECK(sums[static_cast<std::size_t>(b * rows + r)] == sum);
      }
    }
  }
}

void check_convolution(const tw::SparseConvShape& s, int64_t filters) {
  const int64_t columns = s.channels * s.kernel_height * s.kernel_width;
  const std::vector<float> w = pruned(filters, columns, 0.3), x = numbers(s.images * s.channels * s.height * s.width);
  const tw::PackedSparse packed(w.data(), filters, columns);
  std::vector<float> y(static_cast<std::size_t>(s.images * filters * s.out_height() * s.out_width()));
  packed.convolve(s, x.data(), y.data(), {});
  std::size_t at = 0;
  for (int64_t n = 0; n < s.images; ++n) {
    for (int64_t f = 0; f < filters; ++f) {
      for (int64_t oy = 0; oy < s.out_height(); ++oy) {
        for (int64_t ox = 0; ox < s.out_width(); ++ox, ++at) {
          double sum = 0.0;
          for (int64_t c = 0; c < columns; ++c) {
            const int64_t channel = c / (s.kernel_height * s.kernel_width), k = c % (s.kernel_height * s.kernel_width);
            const int64_t iy = oy * s.stride_y - s.pad_y + k / s.kernel_width;
            const int64_t ix = ox * s.stride_x - s.pad_x + k % s.kernel_width;
            if (iy < 0 || iy >= s.height || ix < 0 || ix >= s.width) continue;
            sum += double{w[static_cast<std::size_t>(f * columns + c)]} *
                   x[static_cast<std::size_t>(((n * s.channels + channel) * s.height + iy) * s.width + ix)];
          }
          TW_CHECK(std::fabs(y[at] - sum) <= 1e-4);
        }
      }
    }
  }
}

}  // namespace

TW_TEST(sparse_products_equal_the_dense_ones) {
  for (const int64_t rows : {1, 15, 128, 129}) {
    for (const int64_t columns : {1, 63, 64, 65, 130}) {
      for (const double density : {0.0, 0.05, 0.3, 1.0}) check_linear(rows, columns, density);
    }
  }
  check_linear(300, 200, 0.1);
  check_linear(3, 0, 0.5);
  check_linear(0, 3, 0.5);
}

TW_TEST(sparse_int8_products_are_exact) {
  for (const int64_t rows : {1, 16, 129}) {
    for (const int64_t columns : {1, 64, 130}) {
      for (const double density : {0.0, 0.1, 1.0}) check_int8(rows, columns, density);
    }
  }
}

TW_TEST(sparse_convolutions_equal_the_dense_ones) {
  for (const int64_t stride : {1, 2}) {
    for (const int64_t pad : {0, 1}) {
      tw::SparseConvShape s;
      s.images = 2;
      s.channels = 5;
      s.height = 7;
      s.width = 9;
      s.kernel_height = s.kernel_width = 3;
      s.stride_y = s.stride_x = stride;
      s.pad_y = s.pad_x = pad;
      check_convolution(s, 130);
      s.kernel_height = s.kernel_width = 1;
      check_convolution(s, 6);
    }
  }
}
