#include "kernels/half_dot.h"

#include "common/simd.h"
#include "kernels/gemm_micro.h"
#include "kernels/gemm_pack.h"
#include "kernels/gemv.h"
#include "kernels/half.h"

namespace tw {
namespace TW_ISA {
namespace {

constexpr int kLineWeights = 32;       // hardware: weights of a cache line
constexpr int64_t kFetchAhead = 4096;  // hardware: weights of two 4-KiB pages (Zen 5: one or four are 10 % slower)
// Rows of weights that are 4 KiB apart collide in the cache, so a tile has an odd number of them.
constexpr int kOutputs = 3, kTileRows = kLanes == 16 ? 4 : 2;  // definition: a register tile with two chains each
constexpr int kStripRows = kMaxRows[2];  // with two vectors of outputs, a tile of this height fills the registers
constexpr int kPanel = 2 * kLanes;       // outputs of a panel
constexpr int64_t kPanelWords = 512;     // chosen: words of K; a panel takes 64 KiB of the L2 cache, a strip 28 KiB

// Converts a vector of bfloat16: they are the upper halves of floats.
TW_INLINE vf load_bfloat(const uint16_t* p) {
#if defined(__AVX512F__)
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return (vf)_mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, bits), 16);
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
struct Constant {
  static constexpr HalfKind value = K;
};

// The values per word of a row.
constexpr int values_of(HalfKind kind) { return kind == HalfKind::bfloat16_pairs ? 2 : 1; }

// Loads the weights of kLanes words.
template <HalfKind K>
TW_INLINE vf load_weights(const uint16_t* p) {
  if constexpr (K == HalfKind::bfloat16_pairs) return load(reinterpret_cast<const float*>(p));
  return K == HalfKind::float16 ? load_half(p) : load_bfloat(p);
}

template <HalfKind K>
TW_INLINE vf load_first_weights(const uint16_t* p, int n) {
  uint16_t part[values_of(K) * kLanes] = {};
  std::memcpy(part, p, n * values_of(K) * sizeof(uint16_t));
  return load_weights<K>(part);
}

// Adds x * weights to the accumulators; pairs of bfloat16 are multiplied by one instruction.
template <HalfKind K>
TW_INLINE void add_product(vf& acc, vf x, vf weights) {
#if defined(__AVX512F__)
  if constexpr (K == HalfKind::bfloat16_pairs) {
    // Inline assembly keeps the compiler from using AVX512_BF16 elsewhere.
    asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(weights), "v"(x));
    return;
  }
#endif
  acc += x * weights;
}

// Multiplies R rows by O outputs, as inner products. The vectors of a row are added in two chains, alternately: one
// would wait for its additions.
template <HalfKind K, int R, int O>
void dot_products(const float* x, int64_t words, const uint16_t* w, float* y, int64_t y_row) {
  constexpr int kLine = kLineWeights / (kLanes * values_of(K));  // vectors of a cache line
  constexpr int kSteps = kLine > 2 ? kLine : 2;
  const int64_t k = words * values_of(K), ahead = O > 1 && O * k > kFetchAhead ? O * k : kFetchAhead;
  vf acc[2][R][O] = {};
  const auto add = [&](vf(&sums)[R][O], int64_t at) __attribute__((always_inline)) {
    vf row[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      row[r] = load(x + r * words + at);
      asm("" : "+x"(row[r]));  // one load for all outputs, not a memory operand of each
    }
#pragma GCC unroll 4
    for (int o = 0; o < O; ++o) {
      const vf weights = load_weights<K>(w + o * k + at * values_of(K));
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) add_product<K>(sums[r][o], row[r], weights);
    }
  };
  int64_t p = 0;
  for (; p + kSteps * kLanes <= words; p += kSteps * kLanes) {
#pragma GCC unroll 2
    for (int line = 0; line < kSteps; line += kLine) {
#pragma GCC unroll 4
      for (int o = 0; o < O; ++o) __builtin_prefetch(w + o * k + (p + line * kLanes) * values_of(K) + ahead);
#pragma GCC unroll 8
      for (int step = line; step < line + kLine; ++step) add(acc[step % 2], p + step * kLanes);
    }
  }
  for (; p + kLanes <= words; p += kLanes) add(acc[0], p);
  const int remaining = static_cast<int>(words - p);
#pragma GCC unroll 4
  for (int o = 0; o < O; ++o) {
    if (remaining == 0) break;
    const vf weights = load_first_weights<K>(w + o * k + p * values_of(K), remaining);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) add_product<K>(acc[0][r][o], load_first(x + r * words + p, remaining), weights);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    vf sums[power_of_two_from(O)] = {};
#pragma GCC unroll 4
    for (int o = 0; o < O; ++o) sums[o] = acc[0][r][o] + acc[1][r][o];
    store_sums(sums, y + r * y_row, O);
  }
}

// Multiplies all rows by O outputs, whose weights stay in the L1 cache.
template <HalfKind K, int O>
void all_rows(const float* x, int64_t rows, int64_t words, const uint16_t* w, float* y, int64_t y_row) {
  int64_t r = 0;
  for (; r + kTileRows <= rows; r += kTileRows)
    dot_products<K, kTileRows, O>(x + r * words, words, w, y + r * y_row, y_row);
  for (; r + 2 <= rows; r += 2) dot_products<K, 2, O>(x + r * words, words, w, y + r * y_row, y_row);
  if (r < rows) dot_products<K, 1, O>(x + r * words, words, w, y + r * y_row, y_row);
}

// Multiplies a few rows by outputs [first, last).
template <HalfKind K>
void rows_of(const float* x, int64_t rows, int64_t words, const uint16_t* w, int64_t first, int64_t last, float* y,
             int64_t y_row) {
  const int64_t k = words * values_of(K);
  int64_t o = first;
  // One or two rows are bound by memory, which is fastest front to back (Zen 5: 40 GB/s; three streams 33).
  for (; rows > 2 && o + kOutputs <= last; o += kOutputs)
    all_rows<K, kOutputs>(x, rows, words, w + o * k, y + o, y_row);
  for (; o < last; ++o) all_rows<K, 1>(x, rows, words, w + o * k, y + o, y_row);
}

// --- many rows ---

template <HalfKind K>
void widen_of(const uint16_t* from, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load_weights<K>(from + i));
  if (i < n) store_first(to + i, load_first_weights<K>(from + i, static_cast<int>(n - i)), static_cast<int>(n - i));
}

void pack_strips(const float* x, int64_t rows, int64_t words, int64_t first_strip, int64_t last_strip, float* packed) {
  const int64_t strips = (rows + kStripRows - 1) / kStripRows;
  for (int64_t s = first_strip; s < last_strip; ++s) {
    const int64_t first = rows * s / strips;
    const int count = static_cast<int>(rows * (s + 1) / strips - first);
    pack({x + first * words, 1, words, words, count, count, false}, packed + first * words);
  }
}

// Multiplies a strip of R rows (words, R) by a panel (words, kPanel) and stores the first `columns` columns of y.
template <HalfKind K, int R>
void tile(const float* a, const float* b, int64_t words, int64_t columns, bool accumulate, float* y, int64_t y_row) {
  vf acc[R][2] = {};
  for (int i = 0; i < R; ++i) {
    __builtin_prefetch(y + i * y_row, 1);
    __builtin_prefetch(y + i * y_row + columns - 1, 1);
  }
  for (int64_t p = 0; p < words; ++p, a += R, b += kPanel) {
    const vf left = load(b), right = load(b + kLanes);
#pragma GCC unroll 14
    for (int i = 0; i < R; ++i) {
      vf x = splat(a[i]);
      asm("" : "+x"(x));  // one load for both vectors, not two memory operands
      add_product<K>(acc[i][0], x, left);
      add_product<K>(acc[i][1], x, right);
    }
  }
#pragma GCC unroll 2
  for (int j = 0; j < 2; ++j) {
    const int64_t remaining = columns - j * kLanes;
    if (remaining <= 0) break;
    const int lanes = remaining < kLanes ? static_cast<int>(remaining) : kLanes;
#pragma GCC unroll 14
    for (int i = 0; i < R; ++i) {
      float* to = y + i * y_row + j * kLanes;
      store_first(to, accumulate ? load_first(to, lanes) + acc[i][j] : acc[i][j], lanes);
    }
  }
}

template <HalfKind K, int R = kStripRows>
TW_INLINE void tile_of(int rows, const float* a, const float* b, int64_t words, int64_t columns, bool accumulate,
                       float* y, int64_t y_row) {
  if (rows == R) return tile<K, R>(a, b, words, columns, accumulate, y, y_row);
  if constexpr (R > 1) tile_of<K, R - 1>(rows, a, b, words, columns, accumulate, y, y_row);
}

// Converts `count` words of `outputs` outputs of W (outputs, words) to (count, kPanel), transposing blocks of kLanes x
// kLanes. Columns past the last output repeat it.
template <HalfKind K>
void pack_weights(const uint16_t* w, int64_t words, int outputs, int64_t count, float* panel) {
  for (int x = 0; x < outputs; x += kLanes) {
    for (int64_t p = 0; p < count; p += kLanes) {
      const int lanes = count - p < kLanes ? static_cast<int>(count - p) : kLanes;
      vf r[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const uint16_t* from = w + ((x + i < outputs ? x + i : outputs - 1) * words + p) * values_of(K);
        r[i] = lanes == kLanes ? load_weights<K>(from) : load_first_weights<K>(from, lanes);
      }
      transpose(r);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        if (i < lanes) store(panel + (p + i) * kPanel + x, r[i]);
      }
    }
  }
}

// Multiplies all strips of rows by outputs [first, last), panel by panel.
template <HalfKind K>
void panels_of(const float* packed, int64_t rows, int64_t words, const uint16_t* w, int64_t first, int64_t last,
               float* y, int64_t y_row, float* panel) {
  const int64_t strips = (rows + kStripRows - 1) / kStripRows, k = words * values_of(K);
  for (int64_t o = first; o < last; o += kPanel) {
    const int outputs = last - o < kPanel ? static_cast<int>(last - o) : kPanel;
    for (int64_t p = 0; p < words; p += kPanelWords) {
      const int64_t count = words - p < kPanelWords ? words - p : kPanelWords;
      pack_weights<K>(w + (o * words + p) * values_of(K), words, outputs, count, panel);
      // The weights of the next panel are prefetched meanwhile, an equal share with every strip.
      const bool whole = p + kPanelWords >= words;
      const uint16_t* next = w + (whole ? (o + kPanel) * k : o * k + (p + kPanelWords) * values_of(K));
      for (int64_t s = 0; s < strips; ++s) {
        for (int64_t i = kPanel * s / strips; i < kPanel * (s + 1) / strips; ++i) {
          for (int64_t at = 0; at < kPanelWords * values_of(K); at += kLineWeights)
            __builtin_prefetch(next + i * k + at, 0, 2);
        }
        const int64_t row = rows * s / strips, height = rows * (s + 1) / strips - row;
        tile_of<K>(static_cast<int>(height), packed + row * words + p * height, panel, count, outputs, p > 0,
                   y + row * y_row + o, y_row);
      }
    }
  }
}

// Calls f with the kind as a constant.
template <class F>
TW_INLINE void with_kind(HalfKind kind, F f) {
  if (kind == HalfKind::float16) return f(Constant<HalfKind::float16>());
#if defined(__AVX512F__)
  if (kind == HalfKind::bfloat16_pairs) return f(Constant<HalfKind::bfloat16_pairs>());
#endif
  f(Constant<HalfKind::bfloat16>());
}

void rows(HalfKind kind, const float* x, int64_t rows, int64_t words, const uint16_t* w, int64_t first, int64_t last,
          float* y, int64_t y_row) {
  with_kind(kind, [&](auto k) { rows_of<k.value>(x, rows, words, w, first, last, y, y_row); });
}

void panels(HalfKind kind, const float* packed, int64_t rows, int64_t words, const uint16_t* w, int64_t first,
            int64_t last, float* y, int64_t y_row, float* panel) {
  with_kind(kind, [&](auto k) { panels_of<k.value>(packed, rows, words, w, first, last, y, y_row, panel); });
}

void widen(HalfKind kind, const uint16_t* from, int64_t n, float* to) {
  kind == HalfKind::float16 ? widen_of<HalfKind::float16>(from, n, to) : widen_of<HalfKind::bfloat16>(from, n, to);
}

#if defined(__AVX512F__)
void round_pairs(const float* x, int64_t words, float* to) {
  for (int64_t p = 0; p < words; p += kLanes / 2) {
    const int count = words - p < kLanes / 2 ? static_cast<int>(words - p) : kLanes / 2;
    const vf from = count == kLanes / 2 ? load(x + 2 * p) : load_first(x + 2 * p, 2 * count);
    __m256i rounded;
    asm("vcvtneps2bf16 %1, %0" : "=v"(rounded) : "v"(from));
    std::memcpy(to + p, &rounded, count * sizeof(float));
  }
}
#else
constexpr decltype(HalfKernels::round_pairs) round_pairs = nullptr;
#endif

}  // namespace

const HalfKernels half_dot = {rows, kStripRows, kPanel, kPanel* kPanelWords, pack_strips, panels, widen, round_pairs};

}  // namespace TW_ISA
}  // namespace tw
