// int16 activations, for layers where uint8 would round too much: convolutions with int16 weights and 32-bit
// accumulators, and the elementwise operators and pools between them. real = q * scale with |q| <= kInt16Limit;
// buffers have channels last and zeros in their padding. Steps are in numbers, not bytes.
//
// All sums are exact: weights are chosen such that no sum exceeds 32 bits. Every instruction set gives the same
// numbers.
#pragma once

#include <cstdint>

#include "common/isa.h"
#include "kernels/int8.h"
#include "kernels/int8_ops.h"

namespace tw {

constexpr int64_t kMostSummed = 65535;  // pixels whose sum fits into 32 bits, whatever they are
constexpr int kInt16Group = 2;          // channels that one multiply-add takes

// A panel's run of input channels: where it begins, its pairs of channels, and where its packed weights begin.
struct Int16Window {
  int32_t first, pairs;
  int64_t weights;
};

struct Int16Problem {
  Int8Problem
      to;  // the pixels, where they are read (`in_grid`), and what becomes of their sums; not its bytes and weights
  const int16_t* x = nullptr;      // pixel (0, 0) of image 0 at the first tap
  const uint8_t* bytes = nullptr;  // depthwise: the same where bytes are read, with their zero point
  int zero = 0;
  int64_t kernel_h = 1, kernel_w = 1;
  int64_t tap_row = 0, tap_step = 0;  // from tap to tap
  const Int16Window* windows = nullptr;
  const int16_t* weights = nullptr;  // of a panel [tap][pair of channels][16 columns][2]; of depthwise layers see below
};

// Depthwise weights lie in blocks of 16 channels, the last one ending with the last channel where there are so many,
// and beginning where the one before it has not ended: [block][two rows of taps][tap of a row][channel, in
// `kBlockOrder`][row]. Of a row that is left over it is [two taps][channel][tap], then zeros. It is the order in which
// pixels that are taken together come to lie.
constexpr int kBlockOrder[4] = {0, 2, 1, 3};  // where the groups of four channels lie
constexpr int kDepthwiseBlock = 16;
static inline int64_t block_at(int64_t block, int64_t channels) {  // static: a copy for each instruction set
  const int64_t first = kDepthwiseBlock * block, last = channels - kDepthwiseBlock;
  return first > last && last >= 0 ? last : first;
}

// Pixels of uint8 or int16, `step` numbers apart; 0: one pixel is used for all.
struct MixedPixels {
  const void* data = nullptr;
  int64_t step = 0;
  float scale = 0.0f;
  int zero = 0;
  bool wide = false;
};

// The result: uint8 or int16.
struct MixedTarget {
  void* data = nullptr;
  int64_t step = 0;
  bool wide = false;
};

struct MixedStage {
  Uint8Stage bytes;
  Int16Stage wide;
};

struct Int16Kernels {
  // The pixels [first, last) of the problem for the panels [first_panel, last_panel).
  void (*rows)(const Int16Problem& problem, int64_t first, int64_t last, int first_panel, int last_panel);
  void (*depthwise)(const Int16Problem& problem, int64_t first, int64_t last);
  void (*add)(const MixedPixels& a, const MixedPixels& b, int64_t pixels, int64_t channels, const MixedStage& finish,
              const MixedTarget& to);
  // (a - its zero) * (b - its zero) * a's scale. Where b is one pixel for all and has a scale, it is numbers of 16
  // bits, w = round((b - its zero) * b's scale), that a's, of 16 bits too, are multiplied with: (a * w + 2^14) >> 15
  // within `finish`'s limits.
  void (*mul)(const MixedPixels& a, const MixedPixels& b, int64_t pixels, int64_t channels, const MixedStage& finish,
              const MixedTarget& to);
  // (x - its zero) * scale[channel] + shift[channel]
  void (*affine)(const MixedPixels& x, const float* scale, const float* shift, int64_t pixels, int64_t channels,
                 const MixedStage& finish, const MixedTarget& to);
  // round(x * inverse), ties to even, at most `most` either way, NaN as 0: a plane of each channel to pixels `step`
  // apart.
  void (*quantize)(const float* x, int64_t channels, int64_t pixels, int64_t plane, float inverse, int most,
                   int16_t* to, int64_t step);
  // And back: `pixels` of one row.
  void (*dequantize)(const int16_t* x, int64_t step, int64_t channels, int64_t pixels, float scale, float* to,
                     int64_t plane);
  // One row of windows. Pixels outside are left out of the maximum; in a mean they count as 0 or not at all.
  void (*pool)(const int16_t* x, const BytePlane& in, int64_t channels, const PoolWindow& window, bool mean, int16_t* y,
               const BytePlane& out);
  // y[c] = sum of the pixels, which may be bytes: of kMostSummed at most
  void (*sums)(const void* x, bool wide, const BytePlane& in, int64_t channels, int32_t* y);
};

TW_TABLE(Int16Kernels, int16)

}  // namespace tw
