// Operators between integer layers: quantization to NHWC uint8, dequantization, pooling, global means. Image buffers
// are (images, height + 2 padding, width + 2 padding, channels rounded up to 4) and hold the zero point in the padding
// and in the channels that were added. A kernel processes one image through a pointer to its first pixel inside the
// padding.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

struct PoolWindow {
  int64_t kernel_h = 1, kernel_w = 1, stride_h = 1, stride_w = 1, pad_h = 0, pad_w = 0;
  int64_t end_h = 0, end_w = 0;  // padding after the last row and column (pad_h, pad_w: before the first)
  bool count_padding = true;     // whether a mean counts padding
};

// The interior of one uint8 image.
struct BytePlane {
  int64_t height, width, row_step, pixel_step;
};

struct Int8OpsKernels {
  // Quantizes (channels, height, width) floats into the interior of an image.
  void (*quantize_image)(const float* x, int64_t channels, float inverse_scale, int zero, const BytePlane& plane,
                         uint8_t* to);
  // Quantizes n floats in order.
  void (*quantize)(const float* x, int64_t n, float inverse_scale, int zero, uint8_t* to);
  // q = round(x / scale) + 128 with scale = max|x| / 127, padded with 128 to `padded` bytes; returns the scale.
  float (*quantize_row)(const float* x, int64_t n, int64_t padded, uint8_t* q);
  // Returns a hash of n floats that changes if any single float changes.
  uint64_t (*fingerprint)(const float* x, int64_t n);
  // Dequantizes the interior of an image to (channels, height, width) floats.
  void (*dequantize_image)(const uint8_t* x, const BytePlane& plane, int64_t channels, float scale, int zero,
                           float* to);
  // Dequantizes n bytes in order.
  void (*dequantize)(const uint8_t* x, int64_t n, float scale, int zero, float* to);
  // Maximum over windows; padding is ignored.
  void (*max_pool)(const uint8_t* x, const BytePlane& in, int64_t channels, const PoolWindow& window, uint8_t* y,
                   const BytePlane& out);
  // Mean over windows, rounded with ties to even; padding counts as `zero` or is ignored.
  void (*avg_pool)(const uint8_t* x, const BytePlane& in, int64_t channels, const PoolWindow& window, int zero,
                   uint8_t* y, const BytePlane& out);
  // y[c] = (mean of the pixels - zero) * scale, quantized by the output's scale and zero point. Padding channels of y
  // get the output's zero point.
  void (*global_pool)(const uint8_t* x, const BytePlane& in, int64_t channels, float scale, int zero,
                      float out_inverse_scale, int out_zero, uint8_t* y);
  // y[pixel, i] = x[pixel, channels[i]]
  void (*gather_channels)(const uint8_t* x, int64_t x_step, const int32_t* channels, int64_t count, int64_t pixels,
                          uint8_t* y, int64_t y_step);
};

TW_TABLE(Int8OpsKernels, int8_ops)

}  // namespace tw
