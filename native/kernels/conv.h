// Two-dimensional convolution, NCHW in and out, NHWC inside. Two algorithms share shape, epilogue and tile:
//   winograd: 3x3, stride 1. F(4x4, 3x3) needs 36 multiplications for 16 outputs, where the definition needs 144;
//   F(2x2,
// 3x3) needs 16 for 4 outputs instead of 36 (Lavin and Gray 2016).
//   direct: any shape, as implicit GEMM over an NHWC copy of a band of rows; lanes are output channels. Groups so
//   narrow
// that several share a vector, above all depthwise ones, have their own loop (conv_grouped.h).
// Weights are given as a strided view, so that the gradient of the input is the same convolution with flipped weights.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

struct ConvShape {
  int64_t n, c, h, w;  // input
  int64_t o, kh, kw;   // weights (o, c / groups, kh, kw)
  int64_t sh, sw;      // stride
  int64_t ph, pw;      // zero padding before the first row and column; after the last, oh and ow determine it
  int64_t groups;
  int64_t oh, ow;          // output
  int64_t dh = 1, dw = 1;  // dilation: input rows and columns from one tap to the next

  int64_t reach_h() const { return (kh - 1) * dh + 1; }  // input rows and columns under one window
  int64_t reach_w() const { return (kw - 1) * dw + 1; }
  int64_t group_c() const { return c / groups; }
  int64_t group_o() const { return o / groups; }
};

// Element (o, c, ky, kx) of group g is data[g * group + o * out + c * in + ky * row + kx * col].
struct WeightView {
  const float* data;
  int64_t group, out, in, row, col;
};

struct ConvActivation {
  enum Kind { none, relu, gelu, relu6, silu, hard_swish, sigmoid, hard_sigmoid, gelu_tanh, leaky_relu };

  Kind kind;
  float slope;  // of leaky_relu below zero

  constexpr ConvActivation(Kind kind = none, float slope = 0.0f) : kind(kind), slope(slope) {}
  constexpr operator Kind() const { return kind; }
};

// y = activation(conv + bias + residual), each part optional.
struct ConvEpilogue {
  const float* bias;      // (o) or null
  const float* residual;  // shape of y, or null
  ConvActivation activation;
};

// Where outputs are written: to y itself (step 1), or to every `step`-th row and column of a larger plane. The gradient
// of a strided convolution is assembled from stride-1 convolutions this way.
struct OutputGrid {
  int64_t plane_h, plane_w;
  int64_t y0, x0, step_y, step_x;
};

// Memory layout of images: planes (pitch 0), or NHWC with `pitch` floats per pixel. A vector of an NHWC image may read
// up to one vector past a pixel's last channel (a graph's buffers reserve space for it) and never writes there.
struct ConvLayout {
  int64_t x_pitch = 0, y_pitch = 0, residual_pitch = 0;
};

// Loop blocking. The unit of `mr` and `block` is an output pixel (direct) or a Winograd tile.
struct ConvTile {
  int64_t mr;        // register tile: units
  int64_t vectors;   // register tile: vectors of output channels
  int64_t block;     // units that a task takes through all stages, in whole rows (at least one)
  int64_t channels;  // vectors of output channels that are computed before they are converted to NCHW
  int64_t split;     // tasks that share the output channels of a block; each prepares the input again
};

struct ConvLimits {
  int64_t lanes, max_rows, max_vectors;  // floats in a vector; the largest register tile
};

// The largest magnitude that the Winograd transforms accept: products, sums over channels and the gain of the
// transforms then stay far from overflow. NaN and infinity exceed it, so they reach the direct kernel, which propagates
// them.
constexpr float kWinogradLimit = 1.0e15f;  // chosen

struct WinogradKernels {
  int64_t tile, positions;          // outputs per side; multiplications per tile
  int64_t input_cost, output_cost;  // vector instructions of a tile's transforms
  int64_t (*packed_floats)(const ConvShape& s);
  bool (*pack)(const ConvShape& s, const WeightView& w, float* packed);  // false: a weight is above the limit
  // Recovers the filters (o, c of a group, 3, 3) from their packed form, up to rounding.
  void (*unpack)(const ConvShape& s, const float* packed, float* raw);
  ConvTile (*default_tile)(const ConvShape& s, int64_t threads);
  int64_t (*block_bytes)(const ConvShape& s, const ConvTile& tile);  // working memory of a task
  // Returns false if an input is above the limit or memory is exhausted; y is then unspecified.
  bool (*forward)(const ConvShape& s, const float* x, const float* packed, const ConvEpilogue& e, const ConvTile& tile,
                  const ConvLayout& layout, float* y);
};

struct DirectKernels {
  ConvLimits limits;
  int64_t (*packed_floats)(const ConvShape& s);
  void (*pack)(const ConvShape& s, const WeightView& w, float* packed);
  ConvTile (*default_tile)(const ConvShape& s, int64_t threads);
  int64_t (*block_bytes)(const ConvShape& s, const ConvTile& tile);
  bool (*forward)(const ConvShape& s, const float* x, const float* packed, const ConvEpilogue& e, const ConvTile& tile,
                  const OutputGrid& grid, float* y);  // false: out of memory
};

// The direct algorithm with an NHWC result, for graphs that keep that layout between layers. Weights are packed by
// DirectKernels; the bias is padded by one vector.
struct ChannelsLastKernels {
  // Returns false if memory is exhausted.
  bool (*forward)(const ConvShape& s, const float* x, const float* packed, const ConvEpilogue& e,
                  const ConvLayout& layout, float* y);
  // A 1x1 convolution of stride 1 without padding, residual or groups, fused with a depthwise convolution of its
  // result, which is never stored whole. The pitches of result and residual are those of the second convolution.
  bool (*forward_pair)(const ConvShape& first, const float* x, int64_t x_pitch, const float* packed_first,
                       const ConvEpilogue& e_first, const ConvShape& second, const float* packed_second,
                       const ConvEpilogue& e_second, const ConvLayout& layout, float* y);
};

struct GradWeightKernels {
  int64_t (*partial_floats)(const ConvShape& s);
  int64_t (*max_parts)(const ConvShape& s);
  // gw = the gradient of the weights. `partials` has room for `partial_count` partial results, which are computed in
  // parallel. Returns false if memory is exhausted.
  bool (*run)(const ConvShape& s, const float* gy, const float* x, float* partials, int64_t partial_count, float* gw);
};

TW_TABLE(WinogradKernels, winograd)
TW_TABLE(WinogradKernels, winograd2)
TW_TABLE(WinogradKernels, winograd_late)
TW_TABLE(DirectKernels, conv_direct)
TW_TABLE(ChannelsLastKernels, conv_channels_last)
TW_TABLE(GradWeightKernels, conv_grad_weight)

}  // namespace tw
