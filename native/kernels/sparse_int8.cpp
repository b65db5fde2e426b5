#include "kernels/sparse_int8.h"

#include "common/simd.h"

namespace tw {
namespace TW_ISA {
namespace {

constexpr int kVectorsPerBand = kBand / kLanes;

#if defined(__AVX512F__)
struct Inputs {
  __m512i low, high;
};
TW_INLINE Inputs load_inputs(const int16_t* x) { return {_mm512_loadu_si512(x), _mm512_loadu_si512(x + 32)}; }
template <int P>
TW_INLINE vi load_weights(const SparseInt8Group& group, int) {
  return (vi)_mm512_cvtepi8_epi16(_mm256_load_si256(reinterpret_cast<const __m256i*>(group.value[P])));
}
template <int P>
TW_INLINE vi add_pairs(vi acc, vi w, const Inputs& in, const SparseInt8Group& group, int) {
  const __m512i all = _mm512_load_si512(group.index);
  const __m512i i = P == 0 ? all : _mm512_srli_epi16(all, kIndexBits);
  return (vi)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)w, _mm512_permutex2var_epi16(in.low, i, in.high));
}
#elif defined(__AVX2__)
struct Inputs {
  const int16_t* x;
};
TW_INLINE Inputs load_inputs(const int16_t* x) { return {x}; }
template <int P>
TW_INLINE vi load_weights(const SparseInt8Group& group, int first) {
  return (vi)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(group.value[P][first])));
}
// A gather brings 32 bits: the number asked for in the lower half, its neighbour in the upper.
template <int P>
TW_INLINE vi add_pairs(vi acc, vi w, const Inputs& in, const SparseInt8Group& group, int first) {
  const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group.index[first]));
  const __m256i reach = _mm256_set1_epi32(kWindow - 1);
  const __m256i even = _mm256_and_si256(_mm256_srli_epi32(all, P * kIndexBits), reach);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(all, 16 + P * kIndexBits), reach);
  const int* base = reinterpret_cast<const int*>(in.x);
  const __m256i picked = _mm256_blend_epi16(_mm256_i32gather_epi32(base, even, 2),
                                            _mm256_slli_epi32(_mm256_i32gather_epi32(base, odd, 2), 16), 0xaa);
  return acc + (vi)_mm256_madd_epi16((__m256i)w, picked);
}
#else
struct Inputs {
  const int16_t* x;
};
TW_INLINE Inputs load_inputs(const int16_t* x) { return {x}; }
template <int P>
TW_INLINE vi load_weights(const SparseInt8Group&, int) {
  return vi{};
}
template <int P>
TW_INLINE vi add_pairs(vi acc, vi, const Inputs& in, const SparseInt8Group& group, int first) {
  for (int i = 0; i < kLanes; ++i) {
    const uint16_t* index = group.index[first + i];
    const int8_t* w = group.value[P][first + i];
    acc[i] += w[0] * in.x[index[0] >> (P * kIndexBits) & (kWindow - 1)] +
              w[1] * in.x[index[1] >> (P * kIndexBits) & (kWindow - 1)];
  }
  return acc;
}
#endif

template <int B>
TW_INLINE void band_times_vectors(const SparseInt8Matrix& a, int64_t band, const int16_t* x, int64_t x_step,
                                  int32_t* sums) {
  vi acc[2][B][kVectorsPerBand] = {};  // one per pair of slots, against the latency of the dot instruction
  const int64_t end = a.band_start[band + 1];
  for (int64_t g = a.band_start[band]; g < end; ++g) {
    const SparseInt8Group& group = a.groups[g];
    Inputs in[B];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) in[b] = load_inputs(x + b * x_step + a.window[g]);
#pragma GCC unroll 4
    for (int v = 0; v < kVectorsPerBand; ++v) {
      const vi w0 = load_weights<0>(group, v * kLanes), w1 = load_weights<1>(group, v * kLanes);
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) {
        acc[0][b][v] = add_pairs<0>(acc[0][b][v], w0, in[b], group, v * kLanes);
        acc[1][b][v] = add_pairs<1>(acc[1][b][v], w1, in[b], group, v * kLanes);
      }
    }
  }
#pragma GCC unroll 4
  for (int b = 0; b < B; ++b) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectorsPerBand; ++v) {
      const vi total = acc[0][b][v] + acc[1][b][v];
      std::memcpy(sums + b * kBand + v * kLanes, &total, sizeof total);
    }
  }
}

void vectors(const SparseInt8Matrix& a, const int16_t* x, int64_t x_step, int count, int32_t* out, int64_t out_step,
             int64_t first, int64_t last) {
  int32_t sums[kMaxVectors * kBand];
  for (int64_t band = first; band < last; ++band) {
    switch (count) {
      case 1: band_times_vectors<1>(a, band, x, x_step, sums); break;
      case 2: band_times_vectors<2>(a, band, x, x_step, sums); break;
      case 3: band_times_vectors<3>(a, band, x, x_step, sums); break;
      case 4: band_times_vectors<4>(a, band, x, x_step, sums); break;
    }
    for (int64_t e = a.overflow_start[band]; e < a.overflow_start[band + 1]; ++e) {
      const SparseOverflow& o = a.overflow[e];
      const int32_t w = static_cast<int32_t>(o.value);
      for (int b = 0; b < count; ++b) sums[b * kBand + o.lane] += w * x[b * x_step + o.column];
    }
    for (int lane = 0; lane < kBand; ++lane) {
      const int64_t row = band / kBlockBands * kBlockRows + a.row_at[band * kBand + lane];
      if (row >= a.rows) continue;
      for (int b = 0; b < count; ++b) out[b * out_step + row] = sums[b * kBand + lane];
    }
  }
}

float quantize(const float* x, int64_t count, int16_t* q) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves no room for a fraction
  float largest = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = x[i] < 0.0f ? -x[i] : x[i];
    largest = magnitude > largest ? magnitude : largest;  // never true for a NaN
  }
  const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float scaled = x[i] * inverse;
    const float rounded = (scaled + kRound) - kRound;
    q[i] = static_cast<int16_t>(scaled == scaled ? static_cast<int32_t>(rounded) : 0);
  }
  return largest / 127.0f;
}

}  // namespace

const SparseInt8Kernels sparse_int8 = {vectors, quantize};

}  // namespace TW_ISA
}  // namespace tw
