// Convolution with groups no wider than a vector, above all depthwise. A block is as many whole groups as fill a vector
// of output channels; its input channels fit one vector too. Each lane multiplies the channels of its own group, so a
// block of several groups loads a pixel once and distributes its channels to the lanes, one permutation per channel of
// a group. Depthwise needs no permutation; a group as wide as a vector broadcasts one value. No input is multiplied by
// the zero of another group, so NaN and infinity stay in their group.
#pragma once

#include "kernels/conv_layout.h"
#include "kernels/conv_micro.h"

namespace tw {
namespace TW_ISA {
namespace {

constexpr int64_t kBandPixels = 640;  // chosen: pixels of a band of rows, whose panel of products stays in L2

struct GroupBlocks {
  int64_t groups, blocks;  // groups per block; number of blocks
  int64_t c, o;            // input and output channels of a block
};

inline GroupBlocks group_blocks(const ConvShape& s) {
  const int64_t groups = kLanes / s.group_o();
  return {groups, ceil_div(s.groups, groups), groups * s.group_c(), groups * s.group_o()};
}

// Returns whether the groups are narrow enough for these kernels.
inline bool shares_vectors(const ConvShape& s) {
  if (s.groups < 2 || s.group_o() < 1 || s.group_c() < 1 || s.group_o() > kLanes) return false;
  return group_blocks(s).c <= kLanes;
}

inline int64_t grouped_floats(const ConvShape& s) {
  return group_blocks(s).blocks * s.kh * s.kw * s.group_c() * kLanes;
}

// Packs the weights to [block][ky][kx][channel of the group][lane].
inline void pack_grouped(const ConvShape& s, const WeightView& w, float* packed) {
  const GroupBlocks b = group_blocks(s);
  const int64_t o = s.group_o();
  for (int64_t block = 0; block < b.blocks; ++block) {
    for (int64_t ky = 0; ky < s.kh; ++ky) {
      for (int64_t kx = 0; kx < s.kw; ++kx) {
        for (int64_t c = 0; c < s.group_c(); ++c, packed += kLanes) {
          for (int64_t lane = 0; lane < kLanes; ++lane) {
            const int64_t g = block * b.groups + lane / o;
            const bool used = lane < b.o && g < s.groups;
            packed[lane] = used ? w.data[g * w.group + lane % o * w.out + c * w.in + ky * w.row + kx * w.col] : 0.0f;
          }
        }
      }
    }
  }
}

// Lane i of the result is lane from[i] of v.
TW_INLINE vf permuted(vf v, vi from) {
#if defined(__AVX512F__)
  return (vf)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)from, (__m512)v);
#elif defined(__AVX2__)
  return (vf)_mm256_permutevar8x32_ps((__m256)v, (__m256i)from);
#else
  vf out;
  for (int i = 0; i < kLanes; ++i) out[i] = v[from[i]];
  return out;
#endif
}

// Broadcasts lane `Which` of every four lanes to the four.
template <int Which>
TW_INLINE vf of_four(vf v) {
#if defined(__AVX512F__)
  return (vf)_mm512_maskz_permute_ps(0xffff, (__m512)v, Which * 0x55);
#elif defined(__AVX2__)
  return (vf)_mm256_permute_ps((__m256)v, Which * 0x55);
#else
  vf out;
  for (int i = 0; i < kLanes; ++i) out[i] = v[i / 4 * 4 + Which];
  return out;
#endif
}

// A row of outputs of one block. `x` points to column 0 of the input row under the first tap that is inside the image.
struct GroupedRow {
  const float* x;
  int64_t pitch, tap_row;  // floats from one pixel to the next, and from one tap row to the next
  int64_t width;           // image width; columns outside count as zero
  const float* w;          // weights of the first tap inside the image
  int64_t rows;            // tap rows inside the image
  int64_t kw, sw, dw, pad;
  int64_t group_c, group_o;
  const TileEpilogue* epilogue;  // epilogue of the current outputs
  float* y;
  int64_t y_pitch;
};

constexpr int kGroupedPixels = 8;  // definition: most outputs of a tile

inline bool is_depthwise(int64_t group_c, int64_t group_o, int64_t dilation) {
  return group_c == 1 && group_o == 1 && dilation == 1;
}

// The most outputs of a tile: fewer fit if pixels are held in registers for the permutations.
inline int64_t pixels_at_once(const ConvShape& s) {
  return is_depthwise(s.group_c(), s.group_o(), s.dw) ? kGroupedPixels : smaller(kGroupedPixels, kMaxRows);
}

// Loads a pixel; zeros outside the image. Inside: no check is needed.
template <bool Inside>
TW_INLINE vf pixel(const GroupedRow& g, const float* row, int64_t column) {
  if (!Inside && (column < 0 || column >= g.width)) return vf{};
  return load(row + column * g.pitch);
}

// Applies the epilogue to the sums of consecutive pixels and stores them.
template <int Pixels>
TW_INLINE void store_pixels(const GroupedRow& g, const vf (&acc)[Pixels][1]) {
  if (clips(*g.epilogue, 1)) return store_clipped_tile<Pixels, 1>(acc, *g.epilogue, g.y, g.y_pitch);
  float tile[Pixels * kLanes];
#pragma GCC unroll 8
  for (int p = 0; p < Pixels; ++p) store(tile + p * kLanes, acc[p][0]);
  store_tile(tile, Pixels, 1, *g.epilogue, g.y, g.y_pitch);
}

// Depthwise: each input pixel is loaded once per row and added to every output whose window contains it.
template <int Taps, int Stride, int Pixels, bool Inside>
TW_INLINE void depthwise_tile(const GroupedRow& g, int64_t column) {
  vf acc[Pixels][1] = {};
  const float *row = g.x, *w = g.w;
  for (int64_t ky = 0; ky < g.rows; ++ky, row += g.tap_row, w += Taps * kLanes) {
    vf weight[Taps];
#pragma GCC unroll 7
    for (int kx = 0; kx < Taps; ++kx) weight[kx] = load(w + kx * kLanes);
#pragma GCC unroll 32
    for (int i = 0; i < (Pixels - 1) * Stride + Taps; ++i) {
      const vf x = pixel<Inside>(g, row, column + i);
#pragma GCC unroll 7
      for (int kx = 0; kx < Taps; ++kx) {
        if (i >= kx && (i - kx) % Stride == 0 && (i - kx) / Stride < Pixels) {
          acc[(i - kx) / Stride][0] = multiply_add(acc[(i - kx) / Stride][0], x, weight[kx]);
        }
      }
    }
  }
  store_pixels<Pixels>(g, acc);
}

// A tile for any filter, stride, dilation and group.
template <int Pixels, bool Inside>
void grouped_tile(const GroupedRow& g, int64_t column) {
  vf acc[Pixels][1] = {};
  vi first;
  for (int i = 0; i < kLanes; ++i) {
    const int64_t from = i / g.group_o * g.group_c;
    first[i] = static_cast<int32_t>(from < kLanes ? from : 0);
  }
  const float *row = g.x, *w = g.w;
  for (int64_t ky = 0; ky < g.rows; ++ky, row += g.tap_row) {
    for (int64_t kx = 0; kx < g.kw; ++kx) {
      vf x[Pixels];
#pragma GCC unroll 8
      for (int p = 0; p < Pixels; ++p) x[p] = pixel<Inside>(g, row, column + p * g.sw + kx * g.dw);
      vi from = first;
      for (int64_t c = 0; c < g.group_c; ++c, w += kLanes, from += 1) {
        const vf weight = load(w);
#pragma GCC unroll 8
        for (int p = 0; p < Pixels; ++p) acc[p][0] = multiply_add(acc[p][0], permuted(x[p], from), weight);
      }
    }
  }
  store_pixels<Pixels>(g, acc);
}

template <int Which, int Pixels>
TW_INLINE void add_four(vf (&acc)[Pixels][1], const vf (&x)[Pixels], const float* w) {
  const vf weight = load(w + Which * kLanes);
#pragma GCC unroll 8
  for (int p = 0; p < Pixels; ++p) acc[p][0] = multiply_add(acc[p][0], of_four<Which>(x[p]), weight);
}

// A tile for groups of four channels in and out.
template <int Pixels, bool Inside>
void fours_tile(const GroupedRow& g, int64_t column) {
  vf acc[Pixels][1] = {};
  const float *row = g.x, *w = g.w;
  for (int64_t ky = 0; ky < g.rows; ++ky, row += g.tap_row) {
    for (int64_t kx = 0; kx < g.kw; ++kx, w += 4 * kLanes) {
      vf x[Pixels];
#pragma GCC unroll 8
      for (int p = 0; p < Pixels; ++p) x[p] = pixel<Inside>(g, row, column + p * g.sw + kx * g.dw);
      add_four<0>(acc, x, w);
      add_four<1>(acc, x, w);
      add_four<2>(acc, x, w);
      add_four<3>(acc, x, w);
    }
  }
  store_pixels<Pixels>(g, acc);
}

// A tile for a group as wide as a vector at the edge of the image: columns outside are read from zeros.
template <int Pixels>
void edge_tile(const GroupedRow& g, int64_t column) {
  static constexpr float kZeros[kLanes] = {};
  vf acc[Pixels][1] = {};
  const float *row = g.x, *w = g.w;
  for (int64_t ky = 0; ky < g.rows; ++ky, row += g.tap_row) {
    for (int64_t kx = 0; kx < g.kw; ++kx) {
      const float* x[Pixels];
      for (int p = 0; p < Pixels; ++p) {
        const int64_t at = column + p * g.sw + kx * g.dw;
        x[p] = at < 0 || at >= g.width ? kZeros : row + at * g.pitch;
      }
      for (int64_t c = 0; c < g.group_c; ++c, w += kLanes) {
        const vf weight = load(w);
#pragma GCC unroll 8
        for (int p = 0; p < Pixels; ++p) acc[p][0] = multiply_add(acc[p][0], splat(x[p][c]), weight);
      }
    }
  }
  store_pixels<Pixels>(g, acc);
}

// A tile for a group as wide as a vector inside the image, where no column needs a check.
template <int Pixels>
void inside_tile(const GroupedRow& g, int64_t column) {
  MicroArgs args;
  args.a = g.x + column * g.pitch;
  args.a_row = g.sw * g.pitch;
  args.a_segment = g.tap_row;
  args.run = g.kw;
  args.a_step = g.dw * g.pitch;
  args.b = g.w;
  args.b_segment = g.group_c * kLanes;
  args.segments = g.rows * g.kw;
  args.length = g.group_c;
  args.c = g.y;
  args.c_row = g.y_pitch;
  args.accumulate = false;
  args.epilogue = g.epilogue;
  micro<(Pixels <= kMaxRows ? Pixels : 1), 1, true>(args);
}

// Selects the most specialized tile that applies.
template <int Pixels, bool Inside>
void any_tile(const GroupedRow& g, int64_t column) {
  const bool depthwise = is_depthwise(g.group_c, g.group_o, g.dw);
  if (depthwise && g.sw == 1 && g.kw == 3) return depthwise_tile<3, 1, Pixels, Inside>(g, column);
  if (depthwise && g.sw == 1 && g.kw == 5) return depthwise_tile<5, 1, Pixels, Inside>(g, column);
  if (depthwise && g.sw == 1 && g.kw == 7) return depthwise_tile<7, 1, Pixels, Inside>(g, column);
  if (depthwise && g.sw == 2 && g.kw == 3) return depthwise_tile<3, 2, Pixels, Inside>(g, column);
  if (depthwise && g.sw == 2 && g.kw == 5) return depthwise_tile<5, 2, Pixels, Inside>(g, column);
  if (depthwise && g.sw == 2 && g.kw == 7) return depthwise_tile<7, 2, Pixels, Inside>(g, column);
  if constexpr (Pixels <= kMaxRows) {
    if (g.group_o * 2 > kLanes) return Inside ? inside_tile<Pixels>(g, column) : edge_tile<Pixels>(g, column);
    if (g.group_c == 4 && g.group_o == 4) return fours_tile<Pixels, Inside>(g, column);
  }
  grouped_tile<Pixels, Inside>(g, column);
}

template <int Pixels>
void edge_or_inside(const GroupedRow& g, int64_t x) {
  const int64_t column = x * g.sw - g.pad, last = column + (Pixels - 1) * g.sw + (g.kw - 1) * g.dw;
  column >= 0 && last < g.width ? any_tile<Pixels, true>(g, column) : any_tile<Pixels, false>(g, column);
}

// Computes outputs [x0, x0 + count) of a row with their epilogue; count <= pixels_at_once.
TW_INLINE void grouped_pixels(const GroupedRow& g, int64_t x0, int64_t count) {
  using Run = void (*)(const GroupedRow&, int64_t);
  static constexpr Run table[kGroupedPixels] = {edge_or_inside<1>, edge_or_inside<2>, edge_or_inside<3>,
                                                edge_or_inside<4>, edge_or_inside<5>, edge_or_inside<6>,
                                                edge_or_inside<7>, edge_or_inside<8>};
  table[count - 1](g, x0);
}

}  // namespace
}  // namespace TW_ISA
}  // namespace tw
