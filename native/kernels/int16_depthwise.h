// Depthwise convolutions on int16 activations (kernels/int16.h), or on uint8 activations widened while loading.
// Included by int16.cpp, which is compiled with -ffp-contract=off.
#pragma once

#include "kernels/int16_products.h"

namespace tw {
namespace TW_ISA {
namespace {

// Loads int16 values, or uint8 values minus their zero point.
template <bool kBytes>
TW_INLINE vi numbers(const Int16Problem& p, int64_t at, int lanes) {
  if constexpr (kBytes) return load_bytes(p.bytes + at, lanes) - p.zero;
  return load_int16(p.x + at, lanes);
}

// The packed weights of a block.
TW_INLINE const int16_t* block_weights(const Int16Problem& p, int64_t block) {
  return p.weights + block * ((p.kernel_h + 1) / 2) * p.kernel_w * 2 * kDepthwiseBlock;
}

// Loads one tap's weights for a vector of channels.
TW_INLINE vi tap_weights(const Int16Problem& p, const int16_t* w, int64_t ky, int64_t kx, int channel) {
  const bool last = ky + 1 == p.kernel_h && p.kernel_h % 2 == 1;  // an odd last row pairs neighbouring taps
  const int16_t* two = w + (ky / 2 * p.kernel_w + (last ? kx / 2 : kx)) * 2 * kDepthwiseBlock;
  int32_t buffer[kLanes];
#pragma GCC unroll 4
  for (int g = 0; g < kLanes / 4; ++g) std::memcpy(buffer + 4 * g, two + 8 * kBlockOrder[channel / 4 + g], 16);
  return ((last ? kx : ky) % 2 == 0 ? load_lanes(buffer) : load_lanes(buffer) >> 16) &
         0xffff;  // the other value of the pair is multiplied by 0
}

// `count` neighbouring pixels of one image row, starting at pixel `first` of the problem, and their offsets.
struct Run {
  int64_t first, count;
  int64_t in, out, residual;
};

TW_INLINE int64_t offset_of(const PixelGrid& grid, const Int8Problem& p, int64_t pixel) {
  return pixel / p.width / p.height * grid.image_step + pixel / p.width % p.height * grid.row_step +
         pixel % p.width * grid.column_step;
}

TW_INLINE Run run_at(const Int8Problem& p, int64_t first, int64_t last) {
  const int64_t remaining = p.width - first % p.width;
  return {first, last - first < remaining ? last - first : remaining, offset_of(p.in_grid, p, first),
          offset_of(p.out_grid, p, first), offset_of(p.residual_grid, p, first)};
}

TW_INLINE void requantize_at(const Int8Problem& p, vi sums, const Run& run, int64_t i, int64_t column) {
  requantize(p, sums, run.first + i, run.out + i * p.out_grid.column_step,
             run.residual + i * p.residual_grid.column_step, static_cast<int>(column));
}

// Computes a block's channels at one pixel, for any geometry.
template <bool kBytes>
void depthwise_pixel(const Int16Problem& p, const Run& run, int64_t i, int64_t block) {
  const int64_t first = block_at(block, p.to.columns), x = run.in + i * p.to.in_grid.column_step;
  for (int c = 0; c < kDepthwiseBlock && first + c < p.to.columns; c += kLanes) {
    const int64_t column = first + c, remaining = p.to.columns - column;
    vi acc = load_lanes(p.to.offset + column);
    for (int64_t ky = 0; ky < p.kernel_h; ++ky) {
      for (int64_t kx = 0; kx < p.kernel_w; ++kx) {
        const vi tap = numbers<kBytes>(p, x + ky * p.tap_row + kx * p.tap_step + column,
                                       remaining < kLanes ? static_cast<int>(remaining) : kLanes);
        acc = add_products(acc, tap, tap_weights(p, block_weights(p, block), ky, kx, c));
      }
    }
    requantize_at(p.to, acc, run, i, column);
  }
}

void depthwise_pixels(const Int16Problem& p, const Run& run) {
  for (int64_t block = 0; block * kDepthwiseBlock < p.to.columns; ++block) {
    for (int64_t i = 0; i < run.count; ++i)
      (p.bytes != nullptr ? depthwise_pixel<true> : depthwise_pixel<false>)(p, run, i, block);
  }
}

#if defined(__AVX2__)
// Loads load_int16_channels channels of a pixel as int16.
template <bool kBytes>
TW_INLINE __m256i load_int16_channels(const Int16Problem& p, int64_t at) {
  if constexpr (kBytes) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p.bytes + at));
    return _mm256_sub_epi16(_mm256_cvtepu8_epi16(bytes), _mm256_set1_epi16(static_cast<int16_t>(p.zero)));
  }
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p.x + at));
}

TW_INLINE __m256i add_pairs(__m256i acc, __m256i a, __m256i w) {
#if defined(__AVX512F__)
  asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(w));
#else
  acc = _mm256_add_epi32(acc, _mm256_madd_epi16(a, w));
  asm("" : "+x"(acc));  // see add_products
#endif
  return acc;
}

// Loads four 32-bit values from each of two addresses.
TW_INLINE __m256i two_fours(const void* a, const void* b) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(a))),
                                 _mm_loadu_si128(static_cast<const __m128i*>(b)), 1);
}

// The output stage of a block. Sums are in two halves, channels 0-3 and 8-11, and 4-7 and 12-15: the order that
// _mm256_packs_epi32 undoes.
class BlockOutputStage {
 public:
  BlockOutputStage(const Int8Problem& p, int64_t column)
      : p_(p),
        column_(column),
        most_(_mm256_set1_ps(Int16PiecewiseVectors::most(p.int16_stage))),
        low_(_mm256_set1_epi16(static_cast<int16_t>(p.int16_stage.low))) {
    for (int half = 0; half < 2; ++half) {
      offset[half] = two_fours(p.offset + column + 4 * half, p.offset + column + 4 * half + 8);
      scale_[half] = _mm256_castsi256_ps(two_fours(p.scale + column + 4 * half, p.scale + column + 4 * half + 8));
    }
    quick = p.kind == Int8Out::int16 && p.residual == nullptr && p.int16_stage.activation == Int16Activation::none;
  }

  template <int Pixels>
  TW_INLINE void whole(__m256i (&sums)[Pixels], int half) const {
#pragma GCC unroll 8
    for (int j = 0; j < Pixels; ++j) {
      sums[j] = _mm256_cvtps_epi32(_mm256_min_ps(most_, _mm256_mul_ps(_mm256_cvtepi32_ps(sums[j]), scale_[half])));
    }
  }

  // Stores both halves. They are already rounded if `quick`.
  TW_INLINE void store(__m256i low, __m256i high, const Run& run, int64_t i) const {
    if (!quick) return store_each(low, high, run, i);
    int16_t* to = static_cast<int16_t*>(p_.out) + run.out + i * p_.out_grid.column_step + column_;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_max_epi16(_mm256_packs_epi32(low, high), low_));
  }

  __m256i offset[2];
  bool quick;

 private:
  __attribute__((noinline)) void store_each(__m256i low, __m256i high, const Run& run, int64_t i) const {
    alignas(32) int32_t sums[kDepthwiseBlock];
    _mm256_store_si256(reinterpret_cast<__m256i*>(sums), _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_store_si256(reinterpret_cast<__m256i*>(sums + 8), _mm256_permute2x128_si256(low, high, 0x31));
    for (int c = 0; c < kDepthwiseBlock; c += kLanes) requantize_at(p_, load_lanes(sums + c), run, i, column_ + c);
  }

  const Int8Problem& p_;
  int64_t column_;
  __m256 most_, scale_[2];
  __m256i low_;
};

// Interleaves half of the channels of two pixels.
template <int Half>
TW_INLINE __m256i interleave_half(__m256i a, __m256i b) {
  return Half == 0 ? _mm256_unpacklo_epi16(a, b) : _mm256_unpackhi_epi16(a, b);
}

// Accumulates two rows of taps for neighbouring windows `Stride` apart. One multiply-add takes both rows; pixels shared
// by several windows are loaded once.
template <bool kBytes, int Taps, int Stride, int Pixels, int Half>
TW_INLINE void two_rows(const Int16Problem& p, const int16_t* w, int64_t x, __m256i (&acc)[Pixels]) {
  __m256i weight[Taps];
#pragma GCC unroll 7
  for (int k = 0; k < Taps; ++k) weight[k] = load_sixteen(w + k * 2 * kDepthwiseBlock);
#pragma GCC unroll 32
  for (int n = 0; n < (Pixels - 1) * Stride + Taps; ++n) {
    const int64_t at = x + n * p.tap_step;
    const __m256i two =
        interleave_half<Half>(load_int16_channels<kBytes>(p, at), load_int16_channels<kBytes>(p, at + p.tap_row));
#pragma GCC unroll 7
    for (int k = 0; k < Taps; ++k) {
      if (n < k || (n - k) % Stride != 0 || (n - k) / Stride >= Pixels) continue;
      acc[(n - k) / Stride] = add_pairs(acc[(n - k) / Stride], two, weight[k]);
    }
  }
}

// Accumulates an odd last row, two neighbouring taps per multiply-add. The last tap of an odd number is paired with
// itself times 0.
template <bool kBytes, int Taps, int Stride, int Pixels, int Half>
TW_INLINE void last_row(const Int16Problem& p, const int16_t* w, int64_t x, __m256i (&acc)[Pixels]) {
  constexpr int kPairs = (Taps + 1) / 2, kRead = (Pixels - 1) * Stride + Taps;  // definition: pairs of taps; pixels
  __m256i weight[kPairs];
#pragma GCC unroll 4
  for (int k = 0; k < kPairs; ++k) weight[k] = load_sixteen(w + k * 2 * kDepthwiseBlock);
  __m256i next = load_int16_channels<kBytes>(p, x);
#pragma GCC unroll 32
  for (int n = 0; n < kRead; ++n) {
    const __m256i pixel = next;
    if (n + 1 < kRead) next = load_int16_channels<kBytes>(p, x + (n + 1) * p.tap_step);
    if (n % Stride != 0 && Stride % 2 == 0) continue;
    const __m256i two = interleave_half<Half>(pixel, next);
#pragma GCC unroll 4
    for (int k = 0; k < kPairs; ++k) {
      if (n < 2 * k || (n - 2 * k) % Stride != 0 || (n - 2 * k) / Stride >= Pixels) continue;
      acc[(n - 2 * k) / Stride] = add_pairs(acc[(n - 2 * k) / Stride], two, weight[k]);
    }
  }
}

// Accumulates a row of any number of taps and any stride. `below` is the offset from the first to the second value of a
// pair: the next row of taps, or the next tap of an odd last row.
template <bool kBytes, int Pixels, int Half>
TW_INLINE void taps_of(const Int16Problem& p, const int16_t* w, int64_t x, int64_t below, int step,
                       __m256i (&acc)[Pixels]) {
  for (int64_t k = 0; k < p.kernel_w; k += step, w += 2 * kDepthwiseBlock) {
    const __m256i weight = load_sixteen(w);
    const int64_t second = step == 1 || k + 1 < p.kernel_w ? below : 0;
#pragma GCC unroll 8
    for (int j = 0; j < Pixels; ++j) {
      const int64_t at = x + k * p.tap_step + j * p.to.in_grid.column_step;
      acc[j] = add_pairs(
          acc[j],
          interleave_half<Half>(load_int16_channels<kBytes>(p, at), load_int16_channels<kBytes>(p, at + second)),
          weight);
    }
  }
}

// Computes half of a block's channels at neighbouring pixels: as many as fit the registers with a row of weights.
// Taps > 0: the filter is Taps x Taps.
template <bool kBytes, int Taps, int Stride, int Pixels, int Half>
TW_INLINE void half_block(const Int16Problem& p, const BlockOutputStage& end, const int16_t* w, int64_t x,
                          __m256i (&acc)[Pixels]) {
#pragma GCC unroll 8
  for (int j = 0; j < Pixels; ++j) acc[j] = end.offset[Half];
  w += Half * kDepthwiseBlock;
  if constexpr (Taps > 0) {
#pragma GCC unroll 3
    for (int two = 0; two < Taps / 2; ++two) {
      two_rows<kBytes, Taps, Stride, Pixels, Half>(p, w + two * Taps * 2 * kDepthwiseBlock, x + two * 2 * p.tap_row,
                                                   acc);
    }
    if (Taps % 2 == 1) {
      last_row<kBytes, Taps, Stride, Pixels, Half>(p, w + Taps / 2 * Taps * 2 * kDepthwiseBlock,
                                                   x + (Taps - 1) * p.tap_row, acc);
    }
  } else {
    int64_t ky = 0;
    for (; ky + 2 <= p.kernel_h; ky += 2, x += 2 * p.tap_row, w += p.kernel_w * 2 * kDepthwiseBlock) {
      taps_of<kBytes, Pixels, Half>(p, w, x, p.tap_row, 1, acc);
    }
    if (ky < p.kernel_h) taps_of<kBytes, Pixels, Half>(p, w, x, p.tap_step, 2, acc);
  }
  if (end.quick) end.whole(acc, Half);
}

// Computes and stores all channels of a block at neighbouring pixels.
template <bool kBytes, int Taps, int Stride, int Pixels>
TW_INLINE void block_tile(const Int16Problem& p, const BlockOutputStage& end, const int16_t* w, int64_t column,
                          const Run& run, int64_t i) {
  const int64_t x = run.in + i * p.to.in_grid.column_step + column;
  __m256i low[Pixels], high[Pixels];
  half_block<kBytes, Taps, Stride, Pixels, 0>(p, end, w, x, low);
  half_block<kBytes, Taps, Stride, Pixels, 1>(p, end, w, x, high);
#pragma GCC unroll 8
  for (int j = 0; j < Pixels; ++j) end.store(low[j], high[j], run, i + j);
}

// Computes a run of pixels block by block. If `curve` is not null, applies it to the stored values of each block.
template <bool kBytes, int Taps, int Stride>
__attribute__((noinline)) void depthwise_run(const Int16Problem& problem, const Run& run,
                                             const Int16PiecewiseVectors* curve) {
  constexpr int kSmallTile = 4, kLargeTile = 8;  // definition: pixels of a register tile
  const Int16Problem p = problem;                // a local copy: stores may alias the argument
  for (int64_t block = 0; block * kDepthwiseBlock < p.to.columns; ++block) {
    const int64_t column = block_at(block, p.to.columns);
    const BlockOutputStage end(p.to, column);
    const int16_t* w = block_weights(p, block);
    for (int64_t done = 0; done < run.count;) {
      const int64_t remaining = run.count - done;
      const int tile = remaining > kSmallTile && run.count >= kLargeTile ? kLargeTile
                       : run.count >= kSmallTile                         ? kSmallTile
                                                                         : 1;
      const int64_t i =
          remaining < tile ? run.count - tile : done;  // recomputes a few pixels instead of a partial tile
      if (tile == kLargeTile) {
        block_tile<kBytes, Taps, Stride, kLargeTile>(p, end, w, column, run, i);
      } else if (tile == kSmallTile) {
        block_tile<kBytes, Taps, Stride, kSmallTile>(p, end, w, column, run, i);
      } else {
        block_tile<kBytes, Taps, Stride, 1>(p, end, w, column, run, i);
      }
      done = i + tile;
    }
    int16_t* out = static_cast<int16_t*>(p.to.out) + run.out + column;
    for (int64_t i = 0; curve != nullptr && i < run.count; ++i)
      activate_sixteen(*curve, out + i * p.to.out_grid.column_step);
  }
}

// Selects the loop for this filter and stride.
template <bool kBytes>
void whole_blocks(const Int16Problem& p, const Run& run, const Int16PiecewiseVectors* curve) {
  const int64_t step = p.to.in_grid.column_step, taps = p.kernel_w == p.kernel_h ? p.kernel_w : 0;
  if (taps == 3 && step == p.tap_step) return depthwise_run<kBytes, 3, 1>(p, run, curve);
  if (taps == 3 && step == 2 * p.tap_step) return depthwise_run<kBytes, 3, 2>(p, run, curve);
  if (taps == 5 && step == p.tap_step) return depthwise_run<kBytes, 5, 1>(p, run, curve);
  if (taps == 5 && step == 2 * p.tap_step) return depthwise_run<kBytes, 5, 2>(p, run, curve);
  if (taps == 7 && step == p.tap_step) return depthwise_run<kBytes, 7, 1>(p, run, curve);
  depthwise_run<kBytes, 0, 0>(p, run, curve);
}

// Computes pixels [first, last) of a depthwise convolution with int16 weights, one run of a row at a time.
void depthwise(const Int16Problem& problem, int64_t first, int64_t last) {
  Int16Problem p = problem;
  const Int16PiecewiseVectors curve(problem.to.int16_stage);
  const bool blocks = p.to.columns >= kDepthwiseBlock, deferred = blocks && defers_activation(problem.to);
  if (deferred) p.to.int16_stage = without_activation(problem.to.int16_stage);
  while (first < last) {
    const Run run = run_at(p.to, first, last);
    if (blocks) {
      (p.bytes != nullptr ? whole_blocks<true> : whole_blocks<false>)(p, run, deferred ? &curve : nullptr);
    } else {
      depthwise_pixels(p, run);
    }
    first += run.count;
  }
}
#else
void depthwise(const Int16Problem& p, int64_t first, int64_t last) {
  while (first < last) {
    const Run run = run_at(p.to, first, last);
    depthwise_pixels(p, run);
    first += run.count;
  }
}
#endif

}  // namespace
}  // namespace TW_ISA
}  // namespace tw
