// Cells of a sparse matrix times a few vectors, one row per lane (sparse.h describes the storage): the loops that
// floats and integers share. An Arithmetic defines a step of a band: one slot for floats, two for int8.
//
// struct Arithmetic {
//   typedef ... Input, Weight, Sum, Vector;    // of an input, a weight, a sum; kLanes sums
//   static constexpr int slots = ...;          // of a step
//   typedef ... Inputs, Step;                  // the inputs of a cell; a step of kLanes rows
//   static Inputs inputs(const Input* x);
//   static Step step(const Weight* value, const uint8_t* index);
//   static Vector add(Vector sums, const Step& step, const Inputs& inputs);
// };
#pragma once

#include "common/simd.h"
#include "kernels/sparse.h"

namespace tw {
namespace TW_ISA {

constexpr int kVectorsPerBand = kBand / kLanes;

// Computes the sums of a band of `steps` steps for B vectors. Bands are short and independent, which hides the latency
// of the additions.
template <class A, int B>
TW_INLINE void band_times_vectors(const typename A::Weight* value, const uint8_t* index, int steps,
                                  const typename A::Inputs* in, typename A::Sum (*sums)[kBlockRows], int lane0) {
  typename A::Vector acc[B][kVectorsPerBand] = {};
  for (; steps > 0; --steps) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectorsPerBand; ++v, value += A::slots * kLanes, index += A::slots * kLanes) {
      const typename A::Step step = A::step(value, index);
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) acc[b][v] = A::add(acc[b][v], step, in[b]);
    }
  }
#pragma GCC unroll 4
  for (int b = 0; b < B; ++b) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectorsPerBand; ++v) std::memcpy(sums[b] + lane0 + v * kLanes, &acc[b][v], sizeof acc[b][v]);
  }
}

// Adds the sums of a cell in the order of the rows: total[row] += sums[lane_of[row]].
#if defined(__AVX512F__)
// Adds the partial sums of a block, which are in lanes in any order, to the total of each row (AVX-512).
template <class Vector, class Sum>
TW_INLINE void add_by_row(const Sum* sums, const uint8_t* lane_of, Sum* total) {
  __m512 from[kBlockBands];
#pragma GCC unroll 8
  for (int i = 0; i < kBlockBands; ++i) from[i] = _mm512_loadu_ps(sums + i * kBand);
  for (int row = 0; row < kBlockRows; row += kBand) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(lane_of + row));
    const __m512i lane = _mm512_maskz_cvtepu8_epi32(0xffff, bytes);
    const __mmask16 odd = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(32));
    const __mmask16 upper = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(64));
    const auto pick = [&](int i) { return _mm512_permutex2var_ps(from[i], lane, from[i + 1]); };
    const __m512 low = _mm512_mask_blend_ps(odd, pick(0), pick(2)), high = _mm512_mask_blend_ps(odd, pick(4), pick(6));
    Vector t;
    std::memcpy(&t, total + row, sizeof t);
    t += (Vector)_mm512_mask_blend_ps(upper, low, high);
    std::memcpy(total + row, &t, sizeof t);
  }
}
#else
template <class Vector, class Sum>
TW_INLINE void add_by_row(const Sum* sums, const uint8_t* lane_of, Sum* total) {
  for (int row = 0; row < kBlockRows; ++row) total[row] += sums[lane_of[row]];
}
#endif

// Multiplies a block of rows by B vectors: total[b][row].
template <class A, int B>
void block_times_vectors(const SparseCells<typename A::Weight>& a, int64_t block, const typename A::Input* x,
                         int64_t x_step, typename A::Sum (*total)[kBlockRows]) {
  typename A::Sum sums[B][kBlockRows];
  std::memset(total, 0, sizeof sums);
  const int64_t end = (block + 1) * a.across;
  for (int64_t cell = block * a.across; cell < end; ++cell, x += kCellColumns) {
    const uint8_t* length = a.length + cell * kBlockQuads;
    if (length[0] == 0) continue;
    typename A::Inputs in[B];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) in[b] = A::inputs(x + b * x_step);
    int64_t slot = a.start[cell];
    for (int band = 0; band < kBlockBands; ++band) {
      const int steps = (length[band * (kBand / kQuad)] + A::slots - 1) / A::slots;
      band_times_vectors<A, B>(a.value + slot * kBand, a.index + slot * kBand, steps, in, sums, band * kBand);
      slot += steps * A::slots;
    }
    for (int b = 0; b < B; ++b) {
      add_by_row<typename A::Vector>(sums[b], a.lane_of + cell * kBlockRows, total[b]);
    }
  }
}

// Multiplies one block of rows by 1 to kMaxVectors vectors, with the number of vectors known at compile time.
template <class A>
void block_times_vectors(const SparseCells<typename A::Weight>& a, int64_t block, const typename A::Input* x,
                         int64_t x_step, int vectors, typename A::Sum (*total)[kBlockRows]) {
  switch (vectors) {
    case 1:
      block_times_vectors<A, 1>(a, block, x, x_step, total);
      break;
    case 2:
      block_times_vectors<A, 2>(a, block, x, x_step, total);
      break;
    case 3:
      block_times_vectors<A, 3>(a, block, x, x_step, total);
      break;
    case 4:
      block_times_vectors<A, 4>(a, block, x, x_step, total);
      break;
  }
}

// The rows of a block, fewer than kBlockRows in the last one.
TW_INLINE int rows_of_block(int64_t rows, int64_t block) {
  const int64_t remaining = rows - block * kBlockRows;
  return remaining < kBlockRows ? static_cast<int>(remaining) : kBlockRows;
}

}  // namespace TW_ISA
}  // namespace tw
