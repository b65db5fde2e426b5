// Elementwise operators between integer layers: sums, products, per-channel affine functions. Data is uint8 NHWC; the
// distance between the pixels of an input or output may be larger than its channels.
//
// Requantization: a value in units of the output becomes clamp(round(value) + zero, low, high). An activation that
// clamping cannot express is approximated first: hard-swish by a parabola on either side of 0; SiLU by eight parabolas
// in 16-bit integers; others (and SiLU with a very small output scale) by a lookup table over a grid much finer than
// the output's quantization step. Every instruction set produces the same results.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

// A lookup table: value -> bytes[clamp(round(value * fine), first, last) - first].
struct LookupTable {
  const uint8_t* bytes = nullptr;  // null: none
  float fine = 1.0f;               // grid points per unit
  int first = 0, last = 0;
};

// Two parabolas: value -> max(value, 0) - d * (1/2 + slope * d) with d = min(|value|, far). For hard-swish the slope is
// -1/6 and far is 3, in units of the output.
struct Parabola {
  float far = 0.0f, slope = 0.0f;
};

// SiLU as a piecewise polynomial. The value is in units much finer than the output's steps:
//   u = round(value), at most kMaxPiecewiseInput
//   t = min(|u| << shift, 32767)
//   h = c0 + t * (c1 + t * c2), with the coefficients of the eighth of [0, 32767] that contains t
//   result = (max(u, 0) - h) * step
// Products are rounded to their high bits: (a * b + 2^14) >> 15. The output's highest byte is 255.
constexpr int kMaxPiecewiseInput = 32700;  // chosen: u for which no intermediate result overflows
struct Uint8Piecewise {
  int16_t c0[8] = {}, c1[8] = {}, c2[8] = {};
  int16_t shift = 0, step = 0;
};

enum class Approximation : int { none, parabola, piecewise, lookup_table };

struct Uint8Stage {
  int zero = 0, low = 0, high = 255;
  LookupTable table;
  Approximation approximation = Approximation::none;
  Parabola parabola;
  Uint8Piecewise piecewise;
};

// Requantization to int16 with a zero point of 0: clamp(round(value), low, high). Gates, and SiLU and GELU if steps are
// very fine, are computed in floats as act(value) * inverse, by the same operations on every instruction set.
constexpr int kInt16Limit = 32767;  // definition: the largest magnitude; layers with long sums need smaller ones

enum class Int16Activation : int { none, parabola, hard_sigmoid, sigmoid, silu, gelu, piecewise, leaky_relu };

// SiLU and GELU as a piecewise polynomial: max(x, 0) minus a function that is symmetric around 0. The value is in units
// of an odd fraction of the output's step, so that rounding is unbiased:
//   u = min(round(value), most)
//   t = (min(|u|, far) * turn) << shift, which maps the nonlinear range to [0, 32767]
//   h = c0 + d * (c1 + d * (c2 + d * c3)), with the coefficients of the eighth that contains t; d in [0, 32767] is the
// offset of t within that eighth
//   result = (max(u, 0) - h * round) * step
// Products are rounded to their high bits, as above.
struct Int16Piecewise {
  int16_t c[4][8] = {};
  int16_t far = 1, turn = 0, shift = 0, round = 0, step = 0, most = 0;
};

// The output stage of int16 results. For LeakyReLU, the slope of `parabola` is the slope below 0.
struct Int16Stage {
  int low = -kInt16Limit, high = kInt16Limit;
  Int16Activation activation = Int16Activation::none;
  float inverse = 1.0f;
  Parabola parabola;
  Int16Piecewise piecewise;
};

// Pixels of uint8, `step` bytes apart; a step of 0 broadcasts one pixel.
struct BytePixels {
  const uint8_t* data = nullptr;
  int64_t step = 0;
  float scale = 0.0f;
  int zero = 0;
};

struct ByteTarget {
  uint8_t* data;
  int64_t step;
};

struct Int8ElementwiseKernels {
  void (*add)(const BytePixels& a, const BytePixels& b, int64_t pixels, int64_t channels, const Uint8Stage& stage,
              const ByteTarget& to);
  // (a - a.zero) * (b - b.zero) * a.scale
  void (*mul)(const BytePixels& a, const BytePixels& b, int64_t pixels, int64_t channels, const Uint8Stage& stage,
              const ByteTarget& to);
  // (x - x.zero) * scale[channel] + shift[channel]
  void (*affine)(const BytePixels& x, const float* scale, const float* shift, int64_t pixels, int64_t channels,
                 const Uint8Stage& stage, const ByteTarget& to);
};

TW_TABLE(Int8ElementwiseKernels, int8_elementwise)

}  // namespace tw
