// Conversion between NCHW and NHWC. The inner loops of convolution need the channels of a pixel next to each other.
// These functions transpose kLanes pixels by kLanes channels in registers, and apply padding and epilogue on the way.
#pragma once

#include "common/simd.h"
#include "kernels/activation.h"
#include "kernels/conv.h"
#include "kernels/math.h"

namespace tw {
namespace TW_ISA {
namespace {

constexpr int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
constexpr int64_t ceil_div(int64_t x, int64_t by) { return (x + by - 1) / by; }
constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Splits `total` into `count` runs whose lengths differ by at most one: run i is [cut(i), cut(i + 1)).
constexpr int64_t cut(int64_t total, int64_t count, int64_t i) { return total * i / count; }

// A block of lanes x lanes is transposed in three rounds of shuffles: pairs, then quadruples within each 128 bits, then
// whole 128-bit quarters.
#if defined(__AVX512F__)
TW_INLINE vf pairs_low(vf a, vf b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
}
TW_INLINE vf pairs_high(vf a, vf b) {
  return __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
TW_INLINE vf halves_low(vf a, vf b) {
  return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
}
TW_INLINE vf halves_high(vf a, vf b) {
  return __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
TW_INLINE vf even_quarters(vf a, vf b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
}
TW_INLINE vf odd_quarters(vf a, vf b) {
  return __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
#elif defined(__AVX2__)
TW_INLINE vf pairs_low(vf a, vf b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13); }
TW_INLINE vf pairs_high(vf a, vf b) { return __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15); }
TW_INLINE vf halves_low(vf a, vf b) { return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13); }
TW_INLINE vf halves_high(vf a, vf b) { return __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15); }
#else
TW_INLINE vf pairs_low(vf a, vf b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
TW_INLINE vf pairs_high(vf a, vf b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
TW_INLINE vf halves_low(vf a, vf b) { return __builtin_shufflevector(a, b, 0, 1, 4, 5); }
TW_INLINE vf halves_high(vf a, vf b) { return __builtin_shufflevector(a, b, 2, 3, 6, 7); }
#endif

// Transposes kLanes x kLanes floats in registers: 4 x 4 quads within the 128-bit parts, then the parts among the
// vectors.
TW_INLINE void transpose(vf (&r)[kLanes]) {
  vf u[kLanes];
  for (int i = 0; i < kLanes; i += 4) {
    const vf a = pairs_low(r[i], r[i + 1]), b = pairs_high(r[i], r[i + 1]);
    const vf c = pairs_low(r[i + 2], r[i + 3]), d = pairs_high(r[i + 2], r[i + 3]);
    u[i] = halves_low(a, c);
    u[i + 1] = halves_high(a, c);
    u[i + 2] = halves_low(b, d);
    u[i + 3] = halves_high(b, d);
  }
  for (int j = 0; j < 4; ++j) {  // u[4 q + j] has rows 4 q to 4 q + 3 of columns j, j + 4, ...
#if defined(__AVX512F__)
    const vf a = even_quarters(u[j], u[4 + j]), b = odd_quarters(u[j], u[4 + j]);
    const vf c = even_quarters(u[8 + j], u[12 + j]), d = odd_quarters(u[8 + j], u[12 + j]);
    r[j] = even_quarters(a, c);
    r[4 + j] = even_quarters(b, d);
    r[8 + j] = odd_quarters(a, c);
    r[12 + j] = odd_quarters(b, d);
#elif defined(__AVX2__)
    r[j] = __builtin_shufflevector(u[j], u[4 + j], 0, 1, 2, 3, 8, 9, 10, 11);
    r[4 + j] = __builtin_shufflevector(u[j], u[4 + j], 4, 5, 6, 7, 12, 13, 14, 15);
#else
    r[j] = u[j];
#endif
  }
}

// Tracks the largest magnitude, as the bits of its float: as integers they have the order of the magnitudes, with
// infinity and NaN last.
struct Magnitude {
  vi bits = {};
  TW_INLINE void observe(vf v) {
    const vi b = (vi)v & 0x7fffffff;
    bits = b > bits ? b : bits;
  }
  TW_INLINE bool above(float limit) const {
    int32_t l;
    std::memcpy(&l, &limit, 4);
    int32_t worst = 0;
    for (int i = 0; i < kLanes; ++i) worst = bits[i] > worst ? bits[i] : worst;
    return worst >= l;
  }
};

// Writes pixels [first, first + count) of all `channels` planes to out[offsets[p] ...], count <= kLanes. A pixel has
// `pitch` floats there; those past `channels` become zero.
TW_INLINE void pack_pixels(const float* x, int64_t plane, int64_t channels, int64_t first, int64_t count,
                           const int64_t* offsets, float* out, int64_t pitch, Magnitude& magnitude) {
  if (pitch < 4) {
    for (int64_t p = 0; p < count; ++p) {
      for (int64_t c = 0; c < channels; ++c) out[offsets[p] + c] = x[c * plane + first + p];
    }
    return;
  }
  for (int64_t c = 0; c < channels; c += kLanes) {
    const int64_t rows = smaller(kLanes, channels - c), room = smaller(kLanes, pitch - c);
    const float* from = x + c * plane + first;
    vf r[kLanes];
    if (rows == kLanes && count == kLanes) {
      for (int i = 0; i < kLanes; ++i) r[i] = load(from + i * plane);
    } else {
      for (int i = 0; i < kLanes; ++i) r[i] = i < rows ? load_first(from + i * plane, static_cast<int>(count)) : vf{};
    }
    for (int i = 0; i < kLanes; ++i) magnitude.observe(r[i]);
    transpose(r);
    float* to = out + c;
    if (room == kLanes && count == kLanes) {
#pragma GCC unroll 16
      for (int p = 0; p < kLanes; ++p) store(to + offsets[p], r[p]);
    } else {
      for (int p = 0; p < count; ++p) store_first(to + offsets[p], r[p], static_cast<int>(room));
    }
  }
}

// A ring buffer of NHWC rows of one image: row y is in slot (y - origin) mod slots, after `left_padding` columns of
// padding.
struct RowBuffer {
  float* data;
  int64_t pitch;         // floats per pixel
  int64_t columns;       // pixels per row, padding included
  int64_t left_padding;  // padding columns before the first pixel
  int64_t origin;        // the row in slot 0
  int64_t slots;

  float* row(int64_t y) const { return data + (y - origin) % slots * columns * pitch; }
};

TW_INLINE void zero(float* p, int64_t n) { std::memset(p, 0, static_cast<size_t>(n) * sizeof(float)); }

// Interleaves a row of three planes into pixels of three channels.
inline void pack_three(const float* __restrict x, int64_t plane, int64_t w, float* __restrict to) {
  for (int64_t i = 0; i < w; ++i) {
    to[i * 3] = x[i];
    to[i * 3 + 1] = x[plane + i];
    to[i * 3 + 2] = x[2 * plane + i];
  }
}

// Packs rows [y0, y1) of an image of `channels` planes of h x w. Rows outside the image become zero.
inline void pack_rows(const RowBuffer& b, const float* x, int64_t channels, int64_t h, int64_t w, int64_t y0,
                      int64_t y1, Magnitude& magnitude) {
  for (int64_t y = y0; y < y1; ++y) {
    if (y < 0 || y >= h) zero(b.row(y) + b.left_padding * b.pitch, w * b.pitch);
  }
  const int64_t last = smaller(y1, h);
  if (channels == 3 && b.pitch == 3) {
    for (int64_t y = larger(y0, 0); y < last; ++y) pack_three(x + y * w, h * w, w, b.row(y) + b.left_padding * 3);
    return;
  }
  int64_t y = larger(y0, 0), column = 0;
  int64_t offset = y < last ? b.row(y) - b.data + b.left_padding * b.pitch : 0;
  for (int64_t first = y * w; first < last * w; first += kLanes) {
    const int64_t count = smaller(kLanes, last * w - first);
    int64_t offsets[kLanes];
    for (int64_t p = 0; p < count; ++p) {
      offsets[p] = offset;
      offset += b.pitch;
      if (++column == w) {
        column = 0;
        ++y;
        offset = b.row(y) - b.data + b.left_padding * b.pitch;
      }
    }
    pack_pixels(x, h * w, channels, first, count, offsets, b.data, b.pitch, magnitude);
  }
}

// Copies rows [y0, y1) of an NHWC image of `pitch` floats per pixel. Rows outside the image become zero.
inline void copy_rows(const RowBuffer& b, const float* x, int64_t pitch, int64_t channels, int64_t h, int64_t w,
                      int64_t y0, int64_t y1) {
  const size_t bytes = static_cast<size_t>(channels) * sizeof(float);
  for (int64_t y = y0; y < y1; ++y) {
    float* to = b.row(y) + b.left_padding * b.pitch;
    if (y < 0 || y >= h) {
      zero(to, w * b.pitch);
      continue;
    }
    const float* from = x + y * w * pitch;
    for (int64_t i = 0; i < w; ++i) std::memcpy(to + i * b.pitch, from + i * pitch, bytes);
  }
}

// Clears the padding columns of every slot.
inline void zero_margins(const RowBuffer& b, int64_t w) {
  for (int64_t slot = 0; slot < b.slots; ++slot) {
    float* row = b.data + slot * b.columns * b.pitch;
    zero(row, b.left_padding * b.pitch);
    zero(row + (b.left_padding + w) * b.pitch, (b.columns - b.left_padding - w) * b.pitch);
  }
}

struct PlaneEpilogue {
  const float* bias;      // bias of the first channel, or null
  const float* residual;  // residual of the first channel's first pixel, or null
  ConvActivation activation;
};

TW_INLINE vf apply_epilogue(vf v, const PlaneEpilogue& f, int64_t channel, int64_t at, int64_t count) {
  if (f.bias != nullptr) v += splat(f.bias[channel]);
  if (f.residual != nullptr)
    v += count == kLanes ? load(f.residual + at) : load_first(f.residual + at, static_cast<int>(count));
  return activated(v, f.activation);
}

// Converts `pixels` NHWC pixels of `pitch` floats to `channels` <= kLanes planes at y and applies the epilogue.
inline void unpack_pixels(const float* from, int64_t pitch, int64_t pixels, int64_t channels,
                          const PlaneEpilogue& epilogue, float* y, int64_t plane) {
  for (int64_t first = 0; first < pixels; first += kLanes) {
    const int64_t count = smaller(kLanes, pixels - first);
    vf r[kLanes];
    for (int p = 0; p < kLanes; ++p) r[p] = p < count ? load(from + (first + p) * pitch) : vf{};
    transpose(r);
    if (count == kLanes && channels == kLanes) {
      for (int c = 0; c < kLanes; ++c)
        store(y + c * plane + first, apply_epilogue(r[c], epilogue, c, c * plane + first, kLanes));
    } else {
      for (int c = 0; c < channels; ++c) {
        store_first(y + c * plane + first, apply_epilogue(r[c], epilogue, c, c * plane + first, count),
                    static_cast<int>(count));
      }
    }
  }
}

}  // namespace
}  // namespace TW_ISA
}  // namespace tw
