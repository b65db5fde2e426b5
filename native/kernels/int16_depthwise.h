// Depthwise layers on numbers of 16 bits (kernels/int16.h), or on bytes that are widened on the way. For int16.cpp, compiled with
// -ffp-contract=off.
#pragma once

#include "kernels/int16_products.h"

namespace tw {
namespace TW_ISA {
namespace {

// Numbers of 16 bits, or bytes less their zero point.
template <bool kBytes>
TW_INLINE vi numbers(const WideProblem& p, int64_t at, int lanes) {
  if constexpr (kBytes) return first_bytes(p.bytes + at, lanes) - p.zero;
  return first_shorts(p.x + at, lanes);
}

// Where the weights of a block begin.
TW_INLINE const int16_t* block_weights(const WideProblem& p, int64_t block) {
  return p.weights + block * ((p.kernel_h + 1) / 2) * p.kernel_w * 2 * kDepthwiseBlock;
}

// A vector of channels, a whole number of vectors from the block's first: of two rows, those of the first (0) or second one.
TW_INLINE vi channel_weights(const int16_t* tap, int channel, int row) {
  int32_t held[kLanes];
#pragma GCC unroll 4
  for (int g = 0; g < kLanes / 4; ++g) std::memcpy(held + 4 * g, tap + 8 * kBlockOrder[channel / 4 + g], 16);
  const vi two = load_lanes(held);
  return row == 0 ? two & 0xffff : (two >> 16) & 0xffff;  // the number beside a number is multiplied by 0
}

// A vector of a block's channels at one pixel, for every geometry.
template <bool kBytes>
void depthwise_pixel(const WideProblem& p, const RowOffsets& at, int i, int64_t row, int64_t block) {
  const int64_t first = block_at(block, p.to.columns);
  for (int c = 0; c < kDepthwiseBlock && first + c < p.to.columns; c += kLanes) {
    const int64_t column = first + c, left = p.to.columns - column;
    vi acc = load_lanes(p.to.offset + column);
    const int16_t* w = block_weights(p, block);
    for (int64_t ky = 0; ky < p.kernel_h; ++ky) {
      for (int64_t kx = 0; kx < p.kernel_w; ++kx) {
        const int16_t* tap = w + (ky / 2 * p.kernel_w + kx) * 2 * kDepthwiseBlock;
        const vi x = numbers<kBytes>(p, at.in[i] + ky * p.tap_row + kx * p.tap_step + column, left < kLanes ? static_cast<int>(left) : kLanes);
        acc = add_products(acc, x, channel_weights(tap, c, static_cast<int>(ky % 2)));
      }
    }
    finish(p.to, acc, row, at.out[i], at.residual[i], static_cast<int>(column));
  }
}

#if defined(__AVX2__)
// Sixteen channels of a pixel, in 16 bits.
template <bool kBytes>
TW_INLINE __m256i sixteen(const WideProblem& p, int64_t at) {
  if constexpr (kBytes) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p.bytes + at));
    return _mm256_sub_epi16(_mm256_cvtepu8_epi16(bytes), _mm256_set1_epi16(static_cast<int16_t>(p.zero)));
  }
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p.x + at));
}

TW_INLINE __m256i load_sixteen(const int16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

TW_INLINE __m256i add_pairs(__m256i acc, __m256i a, __m256i w) {
#if defined(__AVX512F__)
  asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(w));
#else
  acc = _mm256_add_epi32(acc, _mm256_madd_epi16(a, w));
  asm("" : "+x"(acc));  // as in add_products
#endif
  return acc;
}

// Eight numbers of 32 bits from each of two places.
TW_INLINE __m256i two_fours(const void* a, const void* b) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(a))),
                                 _mm_loadu_si128(static_cast<const __m128i*>(b)), 1);
}

// What becomes of a block's sums: channels 0-3 and 8-11 in one half, 4-7 and 12-15 in the other, as packing takes them.
class BlockFinish {
 public:
  BlockFinish(const Int8Problem& p, int64_t column)
      : p_(p), column_(static_cast<int>(column)), most_(_mm256_set1_ps(SixteenWide::most(p.wide))),
        low_(_mm256_set1_epi16(static_cast<int16_t>(p.wide.low))) {
    for (int half = 0; half < 2; ++half) {
      offset[half] = two_fours(p.offset + column + 4 * half, p.offset + column + 4 * half + 8);
      scale_[half] = _mm256_castsi256_ps(two_fours(p.scale + column + 4 * half, p.scale + column + 4 * half + 8));
    }
    quick = p.kind == Int8Out::int16 && p.residual == nullptr && p.wide.curve == WideCurve::straight;
  }

  template <int Pixels>
  TW_INLINE void whole(__m256i (&sums)[Pixels], int half) const {
#pragma GCC unroll 8
    for (int j = 0; j < Pixels; ++j) {
      sums[j] = _mm256_cvtps_epi32(_mm256_min_ps(most_, _mm256_mul_ps(_mm256_cvtepi32_ps(sums[j]), scale_[half])));
    }
  }

  // Both halves, whole numbers already where it is quick.
  TW_INLINE void store(__m256i low, __m256i high, const RowOffsets& at, int i, int64_t row) const {
    if (!quick) return store_each(low, high, at, i, row);
    int16_t* to = static_cast<int16_t*>(p_.out) + at.out[i] + column_;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_max_epi16(_mm256_packs_epi32(low, high), low_));
  }

  __m256i offset[2];
  bool quick;

 private:
  __attribute__((noinline)) void store_each(__m256i low, __m256i high, const RowOffsets& at, int i, int64_t row) const {
    alignas(32) int32_t sums[kDepthwiseBlock];
    _mm256_store_si256(reinterpret_cast<__m256i*>(sums), _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_store_si256(reinterpret_cast<__m256i*>(sums + 8), _mm256_permute2x128_si256(low, high, 0x31));
    for (int c = 0; c < kDepthwiseBlock; c += kLanes) finish(p_, load_lanes(sums + c), row, at.out[i], at.residual[i], column_ + c);
  }

  const Int8Problem& p_;
  int column_;
  __m256 most_, scale_[2];
  __m256i low_;
};

// Of two rows of pixels, the numbers of half of the channels side by side.
template <int Half>
TW_INLINE __m256i side_by_side(__m256i a, __m256i b) {
  return Half == 0 ? _mm256_unpacklo_epi16(a, b) : _mm256_unpackhi_epi16(a, b);
}

// Half of a block's channels at neighbouring pixels: as many as leave room in the registers for a row of weights. Two rows of taps
// are multiplied at once; pixels that lie in several windows are read once. Taps 0: any number of them, and any distance.
template <bool kBytes, int Taps, int Stride, int Pixels, int Half>
TW_INLINE void half_block(const WideProblem& p, const BlockFinish& end, const int16_t* w, int64_t x, __m256i (&acc)[Pixels]) {
#pragma GCC unroll 8
  for (int j = 0; j < Pixels; ++j) acc[j] = end.offset[Half];
  w += Half * kDepthwiseBlock;
  for (int64_t ky = 0; ky < p.kernel_h; ky += 2, x += 2 * p.tap_row) {
    const int64_t below = x + (ky + 1 < p.kernel_h ? p.tap_row : 0);
    if constexpr (Taps > 0) {
      __m256i weight[Taps];
#pragma GCC unroll 7
      for (int k = 0; k < Taps; ++k) weight[k] = load_sixteen(w + k * 2 * kDepthwiseBlock);
#pragma GCC unroll 32
      for (int n = 0; n < (Pixels - 1) * Stride + Taps; ++n) {
        const __m256i two = side_by_side<Half>(sixteen<kBytes>(p, x + n * p.tap_step), sixteen<kBytes>(p, below + n * p.tap_step));
#pragma GCC unroll 7
        for (int k = 0; k < Taps; ++k) {
          if (n < k || (n - k) % Stride != 0 || (n - k) / Stride >= Pixels) continue;
          acc[(n - k) / Stride] = add_pairs(acc[(n - k) / Stride], two, weight[k]);
        }
      }
      w += Taps * 2 * kDepthwiseBlock;
    } else {
      for (int64_t k = 0; k < p.kernel_w; ++k, w += 2 * kDepthwiseBlock) {
        const __m256i weight = load_sixteen(w);
#pragma GCC unroll 8
        for (int j = 0; j < Pixels; ++j) {
          const int64_t n = k * p.tap_step + j * p.to.in_grid.column_step;
          acc[j] = add_pairs(acc[j], side_by_side<Half>(sixteen<kBytes>(p, x + n), sixteen<kBytes>(p, below + n)), weight);
        }
      }
    }
  }
  if (end.quick) end.whole(acc, Half);
}

template <bool kBytes, int Taps, int Stride, int Pixels>
TW_INLINE void block_tile(const WideProblem& p, const BlockFinish& end, const int16_t* w, int64_t x, const RowOffsets& at, int i,
                          int64_t row) {
  __m256i low[Pixels], high[Pixels];
  half_block<kBytes, Taps, Stride, Pixels, 0>(p, end, w, x, low);
  half_block<kBytes, Taps, Stride, Pixels, 1>(p, end, w, x, high);
#pragma GCC unroll 8
  for (int j = 0; j < Pixels; ++j) end.store(low[j], high[j], at, i + j, row + j);
}

// Pixels [row, row + count), all of one row of the image.
template <bool kBytes, int Taps, int Stride>
void depthwise_row(const WideProblem& given, const RowOffsets& at, int64_t row, int count) {
  constexpr int kFew = 4, kMany = 8;
  const WideProblem p = given;  // of its own: for all that is known, what is stored might be a part of `given`
  for (int64_t block = 0; block * kDepthwiseBlock < p.to.columns; ++block) {
    const int64_t column = block_at(block, p.to.columns);
    const BlockFinish end(p.to, column);
    const int16_t* w = block_weights(p, block);
    for (int done = 0; done < count;) {
      const int left = count - done;
      const int tile = left > kFew && count >= kMany ? kMany : count >= kFew ? kFew : 1;
      const int i = left < tile ? count - tile : done;  // the last ones twice rather than one by one
      if (tile == kMany) {
        block_tile<kBytes, Taps, Stride, kMany>(p, end, w, at.in[i] + column, at, i, row + i);
      } else if (tile == kFew) {
        block_tile<kBytes, Taps, Stride, kFew>(p, end, w, at.in[i] + column, at, i, row + i);
      } else {
        block_tile<kBytes, Taps, Stride, 1>(p, end, w, at.in[i] + column, at, i, row + i);
      }
      done = i + tile;
    }
  }
}

template <bool kBytes>
void whole_blocks(const WideProblem& p, const RowOffsets& at, int64_t row, int count) {
  const int64_t step = p.to.in_grid.column_step, taps = p.kernel_w;
  if (taps == 3 && step == p.tap_step) return depthwise_row<kBytes, 3, 1>(p, at, row, count);
  if (taps == 3 && step == 2 * p.tap_step) return depthwise_row<kBytes, 3, 2>(p, at, row, count);
  if (taps == 5 && step == p.tap_step) return depthwise_row<kBytes, 5, 1>(p, at, row, count);
  if (taps == 5 && step == 2 * p.tap_step) return depthwise_row<kBytes, 5, 2>(p, at, row, count);
  if (taps == 7 && step == p.tap_step) return depthwise_row<kBytes, 7, 1>(p, at, row, count);
  depthwise_row<kBytes, 0, 0>(p, at, row, count);
}
#endif

template <bool kBytes>
void row_of_pixels(const WideProblem& p, const RowOffsets& at, int64_t row, int count) {
#if defined(__AVX2__)
  if (p.to.columns >= kDepthwiseBlock) return whole_blocks<kBytes>(p, at, row, count);
#endif
  for (int64_t block = 0; block * kDepthwiseBlock < p.to.columns; ++block) {
    for (int i = 0; i < count; ++i) depthwise_pixel<kBytes>(p, at, i, row + i, block);
  }
}

void depthwise(const WideProblem& given, int64_t first, int64_t last) {
  RowOffsets at;
  WideProblem p = given;
  const bool later = bends_later(given.to);
  if (later) p.to.wide = whole_numbers(given.to.wide);
  for (int64_t row = first; row < last;) {
    const int64_t left = p.to.width - row % p.to.width, most = last - row < left ? last - row : left;
    const int count = most < kBlock ? static_cast<int>(most) : kBlock;
    fill_offsets(p.to, row, count, at);
    p.bytes != nullptr ? row_of_pixels<true>(p, at, row, count) : row_of_pixels<false>(p, at, row, count);
    if (later) bend(given.to, at, count, 0, p.to.columns);
    row += count;
  }
}

}  // namespace
}  // namespace TW_ISA
}  // namespace tw
