// What stands between integer layers: floats to bytes and channels last, pooling, sums over pixels. All buffers are
// (images, height + 2 border, width + 2 border, channels rounded up to 4) with the zero point in border and padding.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

struct PoolWindow {
  int64_t kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w;
};

struct Int8OpsKernels {
  // One image (channels, height, width) to the inside of a buffer whose rows are row_step and pixels pixel_step bytes.
  void (*quantize_image)(const float* x, int64_t channels, int64_t height, int64_t width, float inverse_scale, int zero,
                         uint8_t* to, int64_t row_step, int64_t pixel_step);
  // n floats to bytes, in order.
  void (*quantize)(const float* x, int64_t n, float inverse_scale, int zero, uint8_t* to);
  // One image; pixels outside are left out of the maximum.
  void (*max_pool)(const uint8_t* x, int64_t height, int64_t width, int64_t row_step, int64_t pixel_step,
                   const PoolWindow& window, int64_t out_h, int64_t out_w, uint8_t* y, int64_t y_row_step);
  // sums[c] over the pixels of one image.
  void (*sum_pixels)(const uint8_t* x, int64_t height, int64_t width, int64_t row_step, int64_t pixel_step, int32_t* sums);
};

TW_TABLE(Int8OpsKernels, int8_ops)

}  // namespace tw
