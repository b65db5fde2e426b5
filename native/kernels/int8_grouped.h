// Integer convolution in groups, or with taps that do not lie side by side: each output channel reads a part of the
// input's channels. Depthwise (a channel reads itself) has its own loop; the others take 16 output channels at a time,
// and of each tap the run of input channels that these read between them, with zero weights where one does not read
// another's.
//
// Bytes channels last, in a frame of zero points at least as wide as the padding: no tap is ever skipped.
#pragma once

#include <cstdint>

#include "common/isa.h"
#include "kernels/int8_elementwise.h"

namespace tw {

struct GroupedTaps {
  int64_t kernel_h = 1, kernel_w = 1, stride_h = 1, stride_w = 1, dilation_h = 1, dilation_w = 1;
};

// Some rows of one image's result. `x` lies at the first tap of the first of them.
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
  Uint8Stage finish;
};

// How many products of any bytes with a panel's weights are proven to add up to 16 bits: a pair, or two pairs.
enum class PanelFit : int { none, pairs, quads };

// A panel's run of input channels: where it begins, and its groups of four.
struct PanelWindow {
  int32_t first, groups;
  int64_t weights;  // where its packed weights begin
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
