// Grouped or dilated integer convolution: each output channel reads some of the input channels. Depthwise convolution
// has its own loop. Others compute 16 output channels at a time and read, for each tap, the union of their input
// channels (a window), with zero weights where a channel is not read.
//
// Buffers are NHWC uint8 with at least as much padding as the convolution needs, filled with the zero point: no tap is
// ever skipped.
#pragma once

#include <cstdint>

#include "common/isa.h"
#include "kernels/int8_elementwise.h"

namespace tw {

struct GroupedTaps {
  int64_t kernel_h = 1, kernel_w = 1, stride_h = 1, stride_w = 1, dilation_h = 1, dilation_w = 1;
};

// Rows of the result of one image. `x` points to the first tap of the first row.
struct GroupedRows {
  const uint8_t* x = nullptr;
  int64_t row_step = 0, pixel_step = 0;  // of x, in bytes
  int64_t rows = 0, width = 0;           // of the result
  int64_t channels = 0;                  // of the result
  const uint8_t* residual = nullptr;
  int64_t residual_row = 0, residual_pixel = 0;
  float residual_scale = 0.0f;
  int residual_zero = 0;
  uint8_t* y = nullptr;
  int64_t out_row = 0, out_pixel = 0;
  Uint8Stage uint8_stage;
};

// Saturation safety of a panel's weights: the most products that always fit 16 bits in sum, one pair or two.
enum class PanelFit : int { none, pairs, quads };

// The input channels that a panel reads: the first one and the number of groups (of four, or of two int16).
struct PanelWindow {
  int32_t first, groups;
  int64_t weights;  // offset of its packed weights
  PanelFit fit = PanelFit::none;
};

struct Int8GroupedKernels {
  // weights [tap][channels rounded up to 16] as 32-bit numbers; offset and scale rounded up likewise
  void (*depthwise)(const GroupedTaps& taps, const int32_t* weights, const int32_t* offset, const float* scale,
                    const GroupedRows& rows);
  // weights of a panel [tap][group of four channels][16 columns][4]
  void (*grouped)(const GroupedTaps& taps, const PanelWindow* windows, const int8_t* weights, const int32_t* offset,
                  const float* scale, const GroupedRows& rows);
};

TW_TABLE(Int8GroupedKernels, int8_grouped)

}  // namespace tw
