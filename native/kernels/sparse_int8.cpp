#include "kernels/sparse_int8.h"

#include "kernels/sparse_vectors.h"

namespace tw {
namespace TW_ISA {
namespace {

// The Arithmetic (sparse_vectors.h) of int8 weights: two slots per step.
struct Int8Lanes {
  typedef int16_t Input;
  typedef int8_t Weight;
  typedef int32_t Sum;
  typedef vi Vector;
  static constexpr int slots = kInt8Slots;
#if defined(__AVX512F__)
  struct Inputs {
    __m512i low, high;
  };
  struct Step {
    __m512i value, index;
  };
  static TW_INLINE Inputs inputs(const int16_t* x) { return {_mm512_loadu_si512(x), _mm512_loadu_si512(x + 32)}; }
  static TW_INLINE Step step(const int8_t* value, const uint8_t* index) {
    return {_mm512_maskz_cvtepi8_epi16(~0u, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(value))),
            _mm512_maskz_cvtepu8_epi16(~0u, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(index)))};
  }
  static TW_INLINE vi add(vi sums, const Step& s, const Inputs& in) {
    const __m512i picked = _mm512_permutex2var_epi16(in.low, s.index, in.high);
    return (vi)_mm512_dpwssd_epi32((__m512i)sums, s.value, picked);
  }
#elif defined(__AVX2__)
  typedef const int* Inputs;
  struct Step {
    __m256i value, even, odd;
  };
  static TW_INLINE Inputs inputs(const int16_t* x) { return reinterpret_cast<const int*>(x); }
  static TW_INLINE Step step(const int8_t* value, const uint8_t* index) {
    const __m256i both = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(index)));
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(value))),
            _mm256_and_si256(both, _mm256_set1_epi32(0xffff)), _mm256_srli_epi32(both, 16)};
  }
  // A gather loads 32 bits: the wanted int16 in the lower half, its neighbour in the upper.
  static TW_INLINE vi add(vi sums, const Step& s, Inputs x) {
    const __m256i picked = _mm256_blend_epi16(_mm256_i32gather_epi32(x, s.even, 2),
                                              _mm256_slli_epi32(_mm256_i32gather_epi32(x, s.odd, 2), 16), 0xaa);
    return sums + (vi)_mm256_madd_epi16(s.value, picked);
  }
#else
  typedef const int16_t* Inputs;
  struct Step {
    const int8_t* value;
    const uint8_t* index;
  };
  static TW_INLINE Inputs inputs(const int16_t* x) { return x; }
  static TW_INLINE Step step(const int8_t* value, const uint8_t* index) { return {value, index}; }
  static TW_INLINE vi add(vi sums, const Step& s, Inputs x) {
    for (int i = 0; i < kLanes; ++i) {
      sums[i] += s.value[2 * i] * x[s.index[2 * i]] + s.value[2 * i + 1] * x[s.index[2 * i + 1]];
    }
    return sums;
  }
#endif
};

void vectors(const SparseCells<int8_t>& a, const int16_t* x, int64_t x_step, int count, int32_t* out, int64_t out_step,
             int64_t first, int64_t last) {
  int32_t total[kMaxVectors][kBlockRows];
  for (int64_t block = first; block < last; ++block) {
    block_times_vectors<Int8Lanes>(a, block, x, x_step, count, total);
    for (int b = 0; b < count; ++b) {
      std::memcpy(out + b * out_step + block * kBlockRows, total[b], sizeof(int32_t) * rows_of_block(a.rows, block));
    }
  }
}

float quantize(const float* x, int64_t count, int16_t* q) {
  constexpr float kRound = 12582912.0f;  // definition: 1.5 * 2^23: adding it leaves no room for a fraction
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
