// int16 activations (mixed precision), for layers where uint8 would round too much: convolutions with int16 weights and
// 32-bit accumulators, and the elementwise operators and pools between them. real = q * scale with |q| <= kInt16Limit.
// Buffers are NHWC with zeros in their padding. Steps count elements, not bytes.
//
// All sums are exact: weights are chosen such that no sum exceeds 32 bits. Every instruction set produces the same
// integers.
#pragma once

#include <cstdint>

#include "common/isa.h"
#include "kernels/int8.h"
#include "kernels/int8_grouped.h"
#include "kernels/int8_ops.h"

namespace tw {

constexpr int64_t kMaxSummedPixels = 65535;  // definition: 2^16 - 1 int16 pixels, whose sum fits 32 bits
constexpr int kInt16Group = 2;               // hardware: channels per multiply-add of a lane

struct Int16Problem {
  Int8Problem to;                  // output pixels, `in_grid` and output stage; its `in` and `weights` are not used
  const int16_t* x = nullptr;      // pixel (0, 0) of image 0 at the first tap
  const uint8_t* bytes = nullptr;  // depthwise with uint8 input: replaces x; `zero` is its zero point
  int zero = 0;
  int64_t kernel_h = 1, kernel_w = 1;
  int64_t tap_row = 0, tap_step = 0;  // from tap to tap, down and across
  const PanelWindow* windows = nullptr;
  const int16_t* weights = nullptr;  // panel: [tap][channel pair][16 columns][2]; depthwise: see below
};

// Depthwise weights are stored in blocks of 16 channels; if the channels are not a multiple of 16, the last block
// overlaps the one before it. Layout: [block][pair of tap rows][tap][channel in `kBlockOrder`][row of the pair]. An odd
// last row is stored as [pair of taps][channel][tap], followed by zeros. In this order unpack instructions interleave
// two pixels.
constexpr int kBlockOrder[4] = {0, 2, 1, 3};  // position of each group of four channels
constexpr int kDepthwiseBlock = 16;           // definition: channels of a block
// The first channel of a block.
static inline int64_t block_at(int64_t block, int64_t channels) {  // static: compiled once per instruction set
  const int64_t first = kDepthwiseBlock * block, last = channels - kDepthwiseBlock;
  return first > last && last >= 0 ? last : first;
}

// uint8 or int16 pixels, `step` elements apart; a step of 0 broadcasts one pixel.
struct MixedPixels {
  const void* data = nullptr;
  int64_t step = 0;
  float scale = 0.0f;
  int zero = 0;
  bool is_int16 = false;
};

// The result: uint8 or int16.
struct MixedTarget {
  void* data = nullptr;
  int64_t step = 0;
  bool is_int16 = false;
};

struct MixedStage {
  Uint8Stage uint8_stage;
  Int16Stage int16_stage;
};

struct Int16Kernels {
  // Computes pixels [first, last) of the problem for panels [first_panel, last_panel).
  void (*rows)(const Int16Problem& problem, int64_t first, int64_t last, int first_panel, int last_panel);
  void (*depthwise)(const Int16Problem& problem, int64_t first, int64_t last);
  void (*add)(const MixedPixels& a, const MixedPixels& b, int64_t pixels, int64_t channels, const MixedStage& stage,
              const MixedTarget& to);
  // (a - a.zero) * (b - b.zero) * a.scale. If b is broadcast and has a scale, it is a gate: w = round((b - b.zero) *
  // b.scale) as int16, and the result is (a * w + 2^14) >> 15, clamped to the limits of `stage`; a is int16 then.
  void (*mul)(const MixedPixels& a, const MixedPixels& b, int64_t pixels, int64_t channels, const MixedStage& stage,
              const MixedTarget& to);
  // (x - x.zero) * scale[channel] + shift[channel]
  void (*affine)(const MixedPixels& x, const float* scale, const float* shift, int64_t pixels, int64_t channels,
                 const MixedStage& stage, const MixedTarget& to);
  // round(x * inverse), ties to even, clamped to [-most, most]; NaN becomes 0. Converts (channels, pixels) planes to
  // pixels `step` apart.
  void (*quantize)(const float* x, int64_t channels, int64_t pixels, int64_t plane, float inverse, int most,
                   int16_t* to, int64_t step);
  // The inverse of quantize, for `pixels` of one row.
  void (*dequantize)(const int16_t* x, int64_t step, int64_t channels, int64_t pixels, float scale, float* to,
                     int64_t plane);
  // Pools one row of windows. A maximum ignores padding; a mean counts it as 0 or ignores it.
  void (*pool)(const int16_t* x, const BytePlane& in, int64_t channels, const PoolWindow& window, bool mean, int16_t* y,
               const BytePlane& out);
  // y[c] = sum over at most kMaxSummedPixels pixels of uint8 or int16
  void (*sums)(const void* x, bool is_int16, const BytePlane& in, int64_t channels, int32_t* y);
};

TW_TABLE(Int16Kernels, int16)

}  // namespace tw
