#include "kernels/half_dot.h"

#include "common/simd.h"
#include "kernels/gemv.h"
#include "kernels/half.h"

namespace tw {
namespace TW_ISA {
namespace {

constexpr int kParts = 4;          // accumulators of one row's sum
constexpr int kOutputs = 4;        // outputs that share each load of several rows
constexpr int kAheadBytes = 4096;  // across the end of a page, where the hardware stops fetching

TW_INLINE vf load_bfloat(const uint16_t* p) {
#if defined(__AVX512F__)
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return (vf)_mm512_slli_epi32(_mm512_maskz_cvtepu16_epi32(0xffff, bits), 16);
#elif defined(__AVX2__)
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
#else
  vi words;
  for (int i = 0; i < kLanes; ++i) words[i] = static_cast<int32_t>(static_cast<uint32_t>(p[i]) << 16);
  return (vf)words;
#endif
}

template <HalfKind K>
TW_INLINE vf load_weights(const uint16_t* p) {
  return K == HalfKind::float16 ? load_half(p) : load_bfloat(p);
}

template <HalfKind K>
TW_INLINE vf load_first_weights(const uint16_t* p, int n) {
  uint16_t part[kLanes] = {};
  std::memcpy(part, p, n * sizeof(uint16_t));
  return load_weights<K>(part);
}

// Multiplies one row by outputs [first, last), one at a time: a single stream of weights from front to back.
template <HalfKind K>
void row_of(const float* x, int64_t k, const uint16_t* w, int64_t first, int64_t last, float* y) {
  for (int64_t o = first; o < last; ++o) {
    const uint16_t* from = w + o * k;
    vf acc[kParts] = {};
    int64_t p = 0;
    for (; p + kParts * kLanes <= k; p += kParts * kLanes) {
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        const uint16_t* at = from + p + part * kLanes;
        if (part * kLanes % 32 == 0) __builtin_prefetch(reinterpret_cast<const char*>(at) + kAheadBytes);
        acc[part] += load(x + p + part * kLanes) * load_weights<K>(at);
      }
    }
    for (; p < k; p += kLanes) {
      const int lanes = k - p < kLanes ? static_cast<int>(k - p) : kLanes;
      acc[0] += load_first(x + p, lanes) * load_first_weights<K>(from + p, lanes);
    }
    vf sum[1] = {(acc[0] + acc[1]) + (acc[2] + acc[3])};
    store_sums(sum, y + o, 1);
  }
}

// R rows times O outputs.
template <HalfKind K, int R, int O>
void dot_products(const float* x, int64_t k, const uint16_t* w, float* y, int64_t y_row) {
  vf acc[R][O] = {};
  int64_t p = 0;
  for (; p + kLanes <= k; p += kLanes) {
#pragma GCC unroll 4
    for (int o = 0; o < O; ++o) {
      const vf weights = load_weights<K>(w + o * k + p);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[r][o] += load(x + r * k + p) * weights;
    }
  }
  const int remaining = static_cast<int>(k - p);
  for (int o = 0; remaining > 0 && o < O; ++o) {
    const vf weights = load_first_weights<K>(w + o * k + p, remaining);
    for (int r = 0; r < R; ++r) acc[r][o] += load_first(x + r * k + p, remaining) * weights;
  }
  for (int r = 0; r < R; ++r) store_sums(acc[r], y + r * y_row, O);
}

// Multiplies all rows by O outputs, whose weights stay in the L1 cache.
template <HalfKind K, int O>
void all_rows(const float* x, int64_t rows, int64_t k, const uint16_t* w, float* y, int64_t y_row) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) dot_products<K, 4, O>(x + r * k, k, w, y + r * y_row, y_row);
  for (; r + 2 <= rows; r += 2) dot_products<K, 2, O>(x + r * k, k, w, y + r * y_row, y_row);
  if (r < rows) dot_products<K, 1, O>(x + r * k, k, w, y + r * y_row, y_row);
}

template <HalfKind K>
void rows_of(const float* x, int64_t rows, int64_t k, const uint16_t* w, int64_t first, int64_t last, float* y,
             int64_t y_row) {
  int64_t o = first;
  for (; o + kOutputs <= last; o += kOutputs) all_rows<K, kOutputs>(x, rows, k, w + o * k, y + o, y_row);
  for (; o < last; ++o) all_rows<K, 1>(x, rows, k, w + o * k, y + o, y_row);
}

void row(HalfKind kind, const float* x, int64_t k, const uint16_t* w, int64_t first, int64_t last, float* y) {
  kind == HalfKind::float16 ? row_of<HalfKind::float16>(x, k, w, first, last, y)
                            : row_of<HalfKind::bfloat16>(x, k, w, first, last, y);
}

void rows(HalfKind kind, const float* x, int64_t rows, int64_t k, const uint16_t* w, int64_t first, int64_t last,
          float* y, int64_t y_row) {
  const auto run = kind == HalfKind::float16 ? rows_of<HalfKind::float16> : rows_of<HalfKind::bfloat16>;
  run(x, rows, k, w, first, last, y, y_row);
}

template <HalfKind K>
void widen_of(const uint16_t* from, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load_weights<K>(from + i));
  if (i < n) store_first(to + i, load_first_weights<K>(from + i, static_cast<int>(n - i)), static_cast<int>(n - i));
}

void widen(HalfKind kind, const uint16_t* from, int64_t n, float* to) {
  kind == HalfKind::float16 ? widen_of<HalfKind::float16>(from, n, to) : widen_of<HalfKind::bfloat16>(from, n, to);
}

}  // namespace

const HalfKernels half_dot = {row, rows, widen};

}  // namespace TW_ISA
}  // namespace tw
