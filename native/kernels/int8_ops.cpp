#include "kernels/int8_ops.h"

#include "common/simd.h"

namespace tw {
namespace TW_ISA {
namespace {

// round(x * inverse) + zero in [0, 255], ties to even; a NaN becomes the zero point. Plain arithmetic that the compiler
// turns into vectors, and the same on every instruction set (this file, too, has no fused multiply-adds).
TW_INLINE uint8_t to_byte(float x, float inverse, int zero) {
  const float scaled = x * inverse;
  const float low = static_cast<float>(-zero), high = static_cast<float>(255 - zero);
  float v = scaled == scaled ? scaled : 0.0f;
  v = v < low ? low : v;
  v = v > high ? high : v;
  const float magic = 12582912.0f;
  return static_cast<uint8_t>(static_cast<int32_t>((v + magic) - magic) + zero);
}

void quantize(const float* x, int64_t n, float inverse, int zero, uint8_t* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = to_byte(x[i], inverse, zero);
}

void quantize_image(const float* x, int64_t channels, int64_t height, int64_t width, float inverse, int zero, uint8_t* to,
                    int64_t row_step, int64_t pixel_step) {
  constexpr int64_t kStrip = 64;
  uint8_t strip[kStrip];
  for (int64_t y = 0; y < height; ++y) {
    for (int64_t c = 0; c < pixel_step; ++c) {
      for (int64_t left = 0; left < width; left += kStrip) {
        const int64_t n = width - left < kStrip ? width - left : kStrip;
        uint8_t* at = to + y * row_step + left * pixel_step + c;
        if (c < channels) {
          quantize(x + (c * height + y) * width + left, n, inverse, zero, strip);
        } else {
          std::memset(strip, zero, n);
        }
        for (int64_t i = 0; i < n; ++i) at[i * pixel_step] = strip[i];
      }
    }
  }
}

TW_INLINE void max_into(uint8_t* y, const uint8_t* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] > y[i] ? x[i] : y[i];
}

void max_pool(const uint8_t* x, int64_t height, int64_t width, int64_t row_step, int64_t pixel_step,
              const PoolWindow& w, int64_t out_h, int64_t out_w, uint8_t* y, int64_t y_row_step) {
  for (int64_t oy = 0; oy < out_h; ++oy) {
    for (int64_t ox = 0; ox < out_w; ++ox) {
      uint8_t* to = y + oy * y_row_step + ox * pixel_step;
      std::memset(to, 0, pixel_step);
      for (int64_t i = 0; i < w.kernel_h; ++i) {
        const int64_t iy = oy * w.stride_h - w.pad_h + i;
        if (iy < 0 || iy >= height) continue;
        for (int64_t j = 0; j < w.kernel_w; ++j) {
          const int64_t ix = ox * w.stride_w - w.pad_w + j;
          if (ix < 0 || ix >= width) continue;
          max_into(to, x + iy * row_step + ix * pixel_step, pixel_step);
        }
      }
    }
  }
}

void sum_pixels(const uint8_t* x, int64_t height, int64_t width, int64_t row_step, int64_t pixel_step, int32_t* sums) {
  for (int64_t c = 0; c < pixel_step; ++c) sums[c] = 0;
  for (int64_t y = 0; y < height; ++y) {
    for (int64_t i = 0; i < width; ++i) {
      const uint8_t* pixel = x + y * row_step + i * pixel_step;
      for (int64_t c = 0; c < pixel_step; ++c) sums[c] += pixel[c];
    }
  }
}

}  // namespace

const Int8OpsKernels int8_ops = {quantize_image, quantize, max_pool, sum_pixels};

}  // namespace TW_ISA
}  // namespace tw
