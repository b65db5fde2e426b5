// What stands between integer products besides pooling: additions, products, scales by channel. Bytes are channels
// last; a step of one input or output from pixel to pixel may be wider than its channels (a place in a concatenation).
//
// A value in units of the output becomes clamp(round(value) + zero, low, high). Hard-swish is what is taken away from
// it before, a parabola on either side of 0; SiLU the same with eight parabolas, in whole numbers of 16 bits. Of other
// activations that bend, and of SiLU with very fine steps, the value is a real number, rounded to a grid much finer
// than the output's steps, and the activation's byte is read from a table. All are the same on every instruction set.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

// value to bytes[clamp(round(value * fine), first, last) - first]
struct ByteTable {
  const uint8_t* bytes = nullptr;  // null: none
  float fine = 1.0f;               // of the grid: its points in 1
  int first = 0, last = 0;
};

// value to max(value, 0) - d * (1/2 + slope * d) with d = min(|value|, far): hard-swish, whose slope is -1/6 and which
// is 0 or the value from 3 on, in units of the output
struct ByteBend {
  float far = 0.0f, slope = 0.0f;
};

// SiLU: value, in units much finer than the output's steps, to u = round(value), at most kMostInPieces, then to (max(u,
// 0) - h) * step with t = min(|u| << shift, 32767), h = c0 + t * (c1 + t * c2) by the coefficients of the eighth of [0,
// 32767] that t lies in. Products are rounded to their high bits: (a * b + 2^14) >> 15. The output's highest byte is
// 255.
constexpr int kMostInPieces = 32700;  // that u may be: nothing overflows from there
struct BytePieces {
  int16_t c0[8] = {}, c1[8] = {}, c2[8] = {};
  int16_t shift = 0, step = 0;
};

enum class Curve : int { straight, bent, pieces, table };

struct ByteFinish {
  int zero = 0, low = 0, high = 255;
  ByteTable table;
  Curve curve = Curve::straight;
  ByteBend bend;
  BytePieces pieces;
};

// Values to numbers of 16 bits with a zero point of 0, where eight are too few: clamp(round(value), low, high). Gates,
// and SiLU and GELU where steps are very fine, are computed, operation by operation alike on every instruction set,
// from real numbers: act(value) * inverse.
constexpr int kWideMost = 32767;  // the largest size of such a number; who reads long sums of them asks for less

enum class WideCurve : int { straight, bent, hard_sigmoid, sigmoid, silu, gelu, pieces };

// SiLU and GELU are max(x, 0) less a bump that is the same on both sides of 0. The value, in units that are an odd part
// of a step of the output, so that rounding to it favours no side, becomes u = round(value), at most `most`, and then
// (max(u, 0) - h * round) * step. t = (min(|u|, far) * turn) << shift takes what is to be bent to [0, 32767], and
// h = c0 + d * (c1 + d * (c2 + d * c3)) by the coefficients of the eighth that t lies in and d, its place there, from 0
// to 32767. Products are rounded to their high bits, as above.
struct WidePieces {
  int16_t c[4][8] = {};
  int16_t far = 1, turn = 0, shift = 0, round = 0, step = 0, most = 0;
};

struct WideFinish {
  int low = -kWideMost, high = kWideMost;
  WideCurve curve = WideCurve::straight;
  float inverse = 1.0f;
  ByteBend bend;
  WidePieces pieces;
};

// Pixels of bytes; `step` bytes from one to the next, 0 where all read the same one.
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

struct Int8BetweenKernels {
  void (*add)(const BytePixels& a, const BytePixels& b, int64_t pixels, int64_t channels, const ByteFinish& finish,
              const ByteTarget& to);
  // (a - its zero) * (b - its zero) * a's scale
  void (*mul)(const BytePixels& a, const BytePixels& b, int64_t pixels, int64_t channels, const ByteFinish& finish,
              const ByteTarget& to);
  // (x - its zero) * scale[channel] + shift[channel]
  void (*affine)(const BytePixels& x, const float* scale, const float* shift, int64_t pixels, int64_t channels,
                 const ByteFinish& finish, const ByteTarget& to);
};

TW_TABLE(Int8BetweenKernels, int8_between)

}  // namespace tw
