// Compares sparse products with plain loops. Buffers have exactly the needed size, so that the sanitizers report any
// access beyond them.
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
    packed.times_rows(x.data(), columns, batch, epilogue, y.data(), rows);
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

// Element (n, c, y, x) of images with channels last and `pitch` floats per pixel, or of planes if it is 0.
int64_t offset_of(int64_t n, int64_t c, int64_t y, int64_t x, int64_t channels, int64_t h, int64_t w, int64_t pitch) {
  return pitch == 0 ? ((n * channels + c) * h + y) * w + x : ((n * h + y) * w + x) * pitch + c;
}

int64_t size_of(int64_t n, int64_t c, int64_t h, int64_t w, int64_t pitch) {
  return pitch == 0 ? n * c * h * w : (n * h * w - 1) * pitch + c;  // nothing after the last channel
}

void check_convolution(const tw::ConvShape& s, bool planes, bool adds, tw::ConvActivation activation) {
  const int64_t columns = s.c * s.kh * s.kw, x_pitch = planes ? 0 : s.c + 3, y_pitch = s.o + 5;
  const std::vector<float> w = pruned(s.o, columns, 0.3), bias = numbers(s.o);
  const std::vector<float> x = numbers(size_of(s.n, s.c, s.h, s.w, x_pitch));
  const std::vector<float> residual = numbers(size_of(s.n, s.o, s.oh, s.ow, s.o));
  std::vector<float> y(static_cast<std::size_t>(size_of(s.n, s.o, s.oh, s.ow, y_pitch)), -7.0f);
  const tw::PackedSparse packed(w.data(), s.o, columns, true);
  packed.convolve(s, x.data(), {bias.data(), adds ? residual.data() : nullptr, activation}, {x_pitch, y_pitch, s.o},
                  y.data());
  for (int64_t n = 0; n < s.n; ++n) {
    for (int64_t o = 0; o < s.o; ++o) {
      for (int64_t oy = 0; oy < s.oh; ++oy) {
        for (int64_t ox = 0; ox < s.ow; ++ox) {
          double sum = bias[static_cast<std::size_t>(o)];
          for (int64_t column = 0; column < columns; ++column) {
            const int64_t c = column / (s.kh * s.kw), ky = column / s.kw % s.kh, kx = column % s.kw;
            const int64_t iy = oy * s.sh - s.ph + ky * s.dh, ix = ox * s.sw - s.pw + kx * s.dw;
            if (iy < 0 || iy >= s.h || ix < 0 || ix >= s.w) continue;
            sum += double{w[static_cast<std::size_t>(o * columns + column)]} *
                   x[static_cast<std::size_t>(offset_of(n, c, iy, ix, s.c, s.h, s.w, x_pitch))];
          }
          const auto at = [&](int64_t pitch) {
            return static_cast<std::size_t>(offset_of(n, o, oy, ox, s.o, s.oh, s.ow, pitch));
          };
          if (adds) sum += residual[at(s.o)];
          if (activation == tw::ConvActivation::relu) sum = std::max(sum, 0.0);
          TW_CHECK(std::fabs(y[at(y_pitch)] - sum) <= 1e-4);
        }
      }
    }
  }
  for (int64_t p = 0; p + 1 < s.n * s.oh * s.ow; ++p) {
    for (int64_t i = s.o; i < y_pitch; ++i) TW_CHECK(y[static_cast<std::size_t>(p * y_pitch + i)] == -7.0f);
  }
}

// `after`: padding at the bottom and right.
tw::ConvShape conv_shape(int64_t n, int64_t c, int64_t h, int64_t w, int64_t o, int64_t kernel, int64_t stride,
                         int64_t dilation, int64_t before, int64_t after) {
  tw::ConvShape s{n, c, h, w, o, kernel, kernel, stride, stride, before, before, 1, 0, 0, dilation, dilation};
  s.oh = (h + before + after - s.reach_h()) / stride + 1;
  s.ow = (w + before + after - s.reach_w()) / stride + 1;
  return s;
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
  const tw::ConvActivation none = tw::ConvActivation::none, relu = tw::ConvActivation::relu;
  for (const bool planes : {false, true}) {
    for (const int64_t stride : {1, 2, 3}) {
      for (const int64_t dilation : {1, 2}) {
        check_convolution(conv_shape(2, 5, 9, 11, 130, 3, stride, dilation, 1, 2), planes, true, relu);
        check_convolution(conv_shape(1, 4, 9, 12, 6, 3, stride, dilation, 0, 0), planes, false, none);
      }
      check_convolution(conv_shape(2, 7, 7, 9, 6, 1, stride, 1, 0, 0), planes, false, relu);
      check_convolution(conv_shape(3, 7, 5, 6, 20, 1, stride, 1, 1, 0), planes, true, none);
    }
    check_convolution(conv_shape(1, 3, 40, 37, 33, 5, 1, 1, 2, 2), planes, true, relu);
    check_convolution(conv_shape(70, 40, 1, 1, 9, 1, 1, 1, 0, 0), planes, true, none);
    for (const int64_t rows : {1, 3, 5})
      check_convolution(conv_shape(rows, 70, 1, 1, 9, 1, 1, 1, 0, 0), planes, true, relu);
  }
}
