// Per block of 32 values and 16 columns there are 8 groups of four values. With VNNI a group is one dot instruction
// (codes are its unsigned operand, a row's bytes its signed one); with AVX2 it is one vpmaddubsw, and since a code is
// at most 15, the 8 groups of a block add up to at most 8 * 2 * 15 * 127 = 30480 in 16 bits: nothing saturates, and
// only the block's end is widened to 32.
//
// This file is compiled with -ffp-contract=off: see int4.h.
#include "kernels/int4.h"

#include "common/simd.h"
#include "kernels/ahead.h"
#include "kernels/half.h"
#include "kernels/math.h"
#include "kernels/rounding.h"

namespace tw {
namespace TW_ISA {
namespace {

constexpr int kVectors = kInt4Panel / kLanes;  // of a panel
constexpr int kSteps = kInt4Block / 8;         // runs of codes in a block, each of two groups of four values
constexpr float kLargestFloat = 3.4028234663852886e38f;

// --- rows of floats to bytes ---

TW_INLINE float block_inverse(float top) {
  const float wanted = 127.0f / top;
  return top > 0.0f && wanted <= kLargestFloat ? wanted : 0.0f;  // numbers this small count as zeros
}

void quantize_block(const float* x, int n, int8_t* values, float* scale, int32_t* offset) {
  vf part[kInt4Block / kLanes], most = {};  // a NaN is passed over here and becomes 0
  for (int v = 0; v < kInt4Block / kLanes; ++v) {
    const int left = n - v * kLanes, lanes = left < 0 ? 0 : left < kLanes ? left : kLanes;
    part[v] = lanes == kLanes ? load(x + v * kLanes) : load_first(x + (lanes > 0 ? v * kLanes : 0), lanes);
    part[v] = select(part[v] == part[v], part[v], vf{});
    most = vmax(select(part[v] < splat(0.0f), -part[v], part[v]), most);
  }
  const float top = max_lanes(most), inverse = block_inverse(top);
  vi total = {};
  for (int v = 0; v < kInt4Block / kLanes; ++v) {
    const vf scaled = part[v] * splat(inverse);  // infinity times zero is NaN, which has no integer
    const vi q = __builtin_convertvector(round_even(select(scaled == scaled, scaled, vf{})), vi);
    store_low_bytes(values + v * kLanes, q);
    total += q;
  }
  int32_t lanes[kLanes], all = 0;
  std::memcpy(lanes, &total, sizeof lanes);
  for (int i = 0; i < kLanes; ++i) all += lanes[i];
  *scale = top / 127.0f;
  *offset = -8 * all;
}

void quantize(const float* x, int64_t n, int64_t blocks, int8_t* values, float* scale, int32_t* offset) {
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t left = n - b * kInt4Block;
    const int count = left >= kInt4Block ? kInt4Block : left > 0 ? static_cast<int>(left) : 0;
    quantize_block(count > 0 ? x + b * kInt4Block : x, count, values + b * kInt4Block, scale + b, offset + b);
  }
}

// --- codes and sums of one vector of columns ---

#if defined(__AVX512F__)
typedef __m512i Codes;  // unsigned bytes, four a column
typedef __m512i Sums;
TW_INLINE void load_codes(const uint8_t* p, Codes& low, Codes& high) {
  const __m512i mask = _mm512_set1_epi8(15), both = _mm512_loadu_si512(p);
  low = _mm512_and_si512(both, mask);
  high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
}
template <int V>
TW_INLINE void dot(Sums (&sums)[V], const Codes (&codes)[V], const int8_t* x) {
  for (int v = 0; v < V; ++v) {
    // Inline assembly because gcc 12 copies and spills accumulators around the intrinsic.
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums[v]) : "v"(codes[v]), "m"(*reinterpret_cast<const int32_t*>(x)));
  }
}
TW_INLINE Sums first_sums(int32_t offset) { return _mm512_set1_epi32(offset); }
TW_INLINE vi whole(const Sums& sums, int32_t /*offset*/) { return (vi)sums; }
#elif defined(__AVX2__)
typedef __m256i Codes;
typedef __m256i Sums;  // 16 bits, two a column
TW_INLINE void load_codes(const uint8_t* p, Codes& low, Codes& high) {
  const __m256i mask = _mm256_set1_epi8(15), both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  low = _mm256_and_si256(both, mask);
  high = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
}
template <int V>
TW_INLINE void dot(Sums (&sums)[V], const Codes (&codes)[V], const int8_t* x) {
  const __m256i four = (__m256i)_mm256_broadcast_ss(reinterpret_cast<const float*>(x));
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    // Inline assembly because gcc 12 first makes all products of a block, for which there are no registers, then adds
    // them.
    asm("vpaddw %1, %0, %0" : "+x"(sums[v]) : "x"(_mm256_maddubs_epi16(codes[v], four)));
  }
}
TW_INLINE Sums first_sums(int32_t /*offset*/) { return _mm256_setzero_si256(); }
TW_INLINE vi whole(const Sums& sums, int32_t offset) {
  return (vi)_mm256_madd_epi16(sums, _mm256_set1_epi16(1)) + (vi)_mm256_set1_epi32(offset);
}
#else
struct Codes {
  uint8_t v[4 * kLanes];
};
typedef vi Sums;
TW_INLINE void load_codes(const uint8_t* p, Codes& low, Codes& high) {
  for (int i = 0; i < 4 * kLanes; ++i) low.v[i] = p[i] & 15, high.v[i] = static_cast<uint8_t>(p[i] >> 4);
}
template <int V>
TW_INLINE void dot(Sums (&sums)[V], const Codes (&codes)[V], const int8_t* x) {
  for (int v = 0; v < V; ++v) {
    for (int i = 0; i < kLanes; ++i) {
      const uint8_t* c = codes[v].v + 4 * i;
      sums[v][i] += c[0] * x[0] + c[1] * x[1] + c[2] * x[2] + c[3] * x[3];
    }
  }
}
TW_INLINE Sums first_sums(int32_t offset) { return Sums{} + offset; }
TW_INLINE vi whole(const Sums& sums, int32_t /*offset*/) { return sums; }
#endif

// R rows by V vectors of columns of one panel, from vector `from` on.
template <int R, int V, bool kMinimum>
void tile(const Int4Problem& p, int64_t row, int64_t panel, int from) {
  const int64_t k = p.blocks * kInt4Block, pair_bytes = int4_pair_bytes(kMinimum);
  const uint8_t* pair = p.weights + panel * (p.blocks / 2) * pair_bytes;
  const int8_t* x = p.x.values + row * k;
  const float* scale = p.x.scale + row * p.blocks;
  const int32_t* offset = p.x.offset + row * p.blocks;
  vf acc[R][V] = {};
  for (int64_t b = 0; b < p.blocks; ++b) {
    const int half = b & 1;
    const auto* scales = reinterpret_cast<const uint16_t*>(pair) + half * kInt4Panel + from * kLanes;
    const uint8_t* codes = pair + (kMinimum ? 2 : 1) * 4 * kInt4Panel + half * kInt4Codes + from * kLanes * 4;
    if (R == 1 && half == 0) fetch_ahead(pair);
    Sums sums[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[r][v] = first_sums(kMinimum ? 0 : offset[r * p.blocks + b]);
    }
#pragma GCC unroll 4
    for (int step = 0; step < kSteps; ++step) {
      if (R == 1) fetch_ahead(codes + step * 4 * kInt4Panel);
      Codes low[V], high[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) load_codes(codes + step * 4 * kInt4Panel + v * kLanes * 4, low[v], high[v]);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        dot(sums[r], low, x + r * k + b * kInt4Block + step * 8);
        dot(sums[r], high, x + r * k + b * kInt4Block + step * 8 + 4);
      }
    }
    vf block_scale[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) block_scale[v] = load_half(scales + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const float row_scale = scale[r * p.blocks + b];
      const int32_t row_offset = offset[r * p.blocks + b];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const vi centred = whole(sums[r][v], kMinimum ? 0 : row_offset);
        acc[r][v] = acc[r][v] + __builtin_convertvector(centred, vf) * (block_scale[v] * splat(row_scale));
        if (kMinimum) {
          const vf lowest = load_half(scales + 2 * kInt4Panel + v * kLanes);
          acc[r][v] = acc[r][v] + lowest * splat(row_scale * (static_cast<float>(row_offset) * -0.125f));
        }
      }
    }
    pair += half * pair_bytes;
  }
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    const int64_t column = panel * kInt4Panel + (from + v) * kLanes;
    const int64_t left = p.columns - column;
    if (left <= 0) break;
    const vf column_scale = load(p.column_scale + column);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      store_first(p.y + (row + r) * p.y_row + column, acc[r][v] * column_scale,
                  left < kLanes ? static_cast<int>(left) : kLanes);
    }
  }
}

template <int R, bool kMinimum>
void panel_rows(const Int4Problem& p, int64_t row, int64_t panel) {
  constexpr int V = kVectors < 2 ? kVectors : 2;  // what a row's four bytes meet once they are loaded
  for (int from = 0; from < kVectors; from += V) tile<R, V, kMinimum>(p, row, panel, from);
}

#if defined(__AVX512F__)
constexpr int kTallest = 8;
#else
constexpr int kTallest = 4;
#endif

template <bool kMinimum>
void some_rows(const Int4Problem& p, int64_t row, int64_t count, int64_t panel) {
  switch (count) {
    case 1:
      return panel_rows<1, kMinimum>(p, row, panel);
    case 2:
      return panel_rows<2, kMinimum>(p, row, panel);
    case 3:
      return panel_rows<3, kMinimum>(p, row, panel);
    case 4:
      return panel_rows<4, kMinimum>(p, row, panel);
#if defined(__AVX512F__)
    case 5:
      return panel_rows<5, kMinimum>(p, row, panel);
    case 6:
      return panel_rows<6, kMinimum>(p, row, panel);
    case 7:
      return panel_rows<7, kMinimum>(p, row, panel);
    case 8:
      return panel_rows<8, kMinimum>(p, row, panel);
#endif
    default:
      return;
  }
}

// A strip of rows stays near while all panels go by.
void rows(const Int4Problem& p, int64_t first, int64_t last, int64_t first_panel, int64_t last_panel) {
  constexpr int64_t kStrip = 64;
  for (int64_t strip = first; strip < last; strip += kStrip) {
    const int64_t end = last - strip < kStrip ? last : strip + kStrip;
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
      for (int64_t row = strip; row < end; row += kTallest) {
        const int64_t count = end - row < kTallest ? end - row : kTallest;
        p.minimum ? some_rows<true>(p, row, count, panel) : some_rows<false>(p, row, count, panel);
      }
    }
  }
}

}  // namespace

const Int4Kernels int4 = {quantize, rows};

}  // namespace TW_ISA
}  // namespace tw
