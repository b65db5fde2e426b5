// The register tile of the integer product: up to 8 rows by 2 panels of 16 columns with AVX-512, 4 by 1 elsewhere.
// Per step of four K values a row is one 32-bit broadcast and a panel one vector load; the dot product of four bytes is
// one VNNI instruction, or two 16-bit multiply-adds on AVX2. The usual AVX2 instruction for unsigned times signed bytes
// saturates at 16 bits (255 * 127 * 2 does not fit) and is not used: all sets give the same integers.
//
// This file is compiled with -ffp-contract=off: the rounding to 8 bits must not depend on the instruction set.
#include "kernels/int8.h"

#include "common/simd.h"

namespace tw {
namespace TW_ISA {
namespace {

constexpr int kVectors = kInt8Panel / kLanes;  // vectors per panel
#if defined(__AVX512F__)
constexpr int kMaxRows = 8, kMaxPanels = 2;
#else
constexpr int kMaxRows = 4, kMaxPanels = 1;
#endif
constexpr int kRowBlock = 128;

typedef uint8_t vb __attribute__((vector_size(kLanes)));

struct Weights {  // one vector of weights: kLanes columns x 4 values, as the dot product wants it
#if defined(__AVX512F__)
  __m512i v;
#elif defined(__AVX2__)
  __m256i even, odd;
#else
  const int8_t* p;
#endif
};

TW_INLINE Weights load_weights(const int8_t* p) {
#if defined(__AVX512F__)
  return {_mm512_loadu_si512(p)};
#elif defined(__AVX2__)
  const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8), _mm256_srai_epi16(w, 8)};
#else
  return {p};
#endif
}

struct Activations {  // four bytes of a row, in every lane
#if defined(__AVX512F__)
  __m512i v;
#elif defined(__AVX2__)
  __m256i even, odd;
#else
  const uint8_t* p;
#endif
};

TW_INLINE Activations broadcast(const uint8_t* p) {
#if defined(__AVX2__)
  int32_t four;
  std::memcpy(&four, p, 4);
#endif
#if defined(__AVX512F__)
  return {_mm512_set1_epi32(four)};
#elif defined(__AVX2__)
  const __m256i a = _mm256_set1_epi32(four);
  return {_mm256_and_si256(a, _mm256_set1_epi16(0xff)), _mm256_srli_epi16(a, 8)};
#else
  return {p};
#endif
}

TW_INLINE void dot(vi& acc, const Activations& a, const Weights& w) {
#if defined(__AVX512F__)
  // Inline assembly because gcc 12 copies and spills accumulators around the intrinsic.
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(a.v), "v"(w.v));
#elif defined(__AVX2__)
  acc += (vi)_mm256_madd_epi16(a.even, w.even) + (vi)_mm256_madd_epi16(a.odd, w.odd);
#else
  for (int i = 0; i < kLanes; ++i) {
    acc[i] += a.p[0] * w.p[4 * i] + a.p[1] * w.p[4 * i + 1] + a.p[2] * w.p[4 * i + 2] + a.p[3] * w.p[4 * i + 3];
  }
#endif
}

// Rounds to the nearest integer, ties to even, for |x| < 2^22: the same on every set, and vectorised on all.
TW_INLINE vf round_even(vf x) {
  const vf magic = splat(12582912.0f);
  return (x + magic) - magic;
}

TW_INLINE vf clamp(vf x, float low, float high) {
  x = select(x > splat(low), x, splat(low));
  return select(x < splat(high), x, splat(high));
}

TW_INLINE void store_bytes(uint8_t* p, vi v, int n) {
#if defined(__AVX512F__)
  _mm512_mask_cvtepi32_storeu_epi8(p, lane_mask(n), (__m512i)v);
#else
  const vb bytes = __builtin_convertvector(v, vb);
  std::memcpy(p, &bytes, n);
#endif
}

TW_INLINE vi load_bytes(const uint8_t* p, int n) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(lane_mask(n), p));
#else
  vb bytes = {};
  std::memcpy(&bytes, p, n);
  return __builtin_convertvector(bytes, vi);
#endif
}

struct RowOffsets {
  int64_t in[kRowBlock], out[kRowBlock], residual[kRowBlock];
};

TW_INLINE vi finish_uint8(const Int8Problem& p, vf value, const uint8_t* residual, int lanes) {
  if (p.residual != nullptr) {
    const vi r = load_bytes(residual, lanes) - p.residual_zero;
    value = value + __builtin_convertvector(r, vf) * splat(p.residual_scale);
  }
  value = clamp(value, static_cast<float>(p.low - p.zero), static_cast<float>(p.high - p.zero));
  return __builtin_convertvector(round_even(value), vi) + p.zero;
}

TW_INLINE vf finish_float(const Int8Problem& p, vf value, int64_t row, int column) {
  if (p.row_scale != nullptr) value = value * splat(p.row_scale[row]);
  if (p.bias != nullptr) value = value + load(p.bias + column);
  if (p.relu) value = select(value < splat(0.0f), splat(0.0f), value);
  return value;
}

TW_INLINE void finish(const Int8Problem& p, vi sum, int64_t row, int64_t out_offset, int64_t residual_offset, int column) {
  int lanes = p.out_columns - column;
  if (lanes <= 0) return;
  if (lanes > kLanes) lanes = kLanes;
  vi offset;
  std::memcpy(&offset, p.offset + column, sizeof offset);
  sum += offset;
  if (p.kind == Int8Out::int32) {
    store_first(static_cast<float*>(p.out) + out_offset + column, (vf)sum, lanes);
    return;
  }
  const vf value = __builtin_convertvector(sum, vf) * load(p.scale + column);
  if (p.kind == Int8Out::float32) {
    store_first(static_cast<float*>(p.out) + out_offset + column, finish_float(p, value, row, column), lanes);
  } else {
    const uint8_t* residual = p.residual + residual_offset + column;
    store_bytes(static_cast<uint8_t*>(p.out) + out_offset + column, finish_uint8(p, value, residual, lanes), lanes);
  }
}

template <int R, int P>
void tile(const Int8Problem& p, const RowOffsets& at, int first, int64_t row, int panel) {
  constexpr int V = P * kVectors;
  const int64_t panel_bytes = static_cast<int64_t>(p.taps) * p.groups_per_tap * kInt8Panel * kInt8Group;
  const int8_t* w = p.weights + panel * panel_bytes;
  vi acc[R][V] = {};
  for (int t = 0; t < p.taps; ++t) {
    const uint8_t* rows[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) rows[r] = p.in + at.in[first + r] + p.tap_offset[t];
    for (int g = 0; g < p.groups_per_tap; ++g) {
      Weights weights[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        weights[v] = load_weights(w + (v / kVectors) * panel_bytes + (v % kVectors) * kLanes * kInt8Group);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Activations a = broadcast(rows[r]);
        rows[r] += kInt8Group;
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) dot(acc[r][v], a, weights[v]);
      }
      w += kInt8Panel * kInt8Group;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      finish(p, acc[r][v], row + r, at.out[first + r], at.residual[first + r], panel * kInt8Panel + v * kLanes);
    }
  }
}

// One row: matrix times vector, bound by the stream of weights. Four independent sums hide the latency of the dot.
void tile_one_row(const Int8Problem& p, const RowOffsets& at, int first, int64_t row, int panel) {
  constexpr int kChains = 4;
  const int64_t panel_bytes = static_cast<int64_t>(p.taps) * p.groups_per_tap * kInt8Panel * kInt8Group;
  const int8_t* w = p.weights + panel * panel_bytes;
  vi acc[kChains][kVectors] = {};
  for (int t = 0; t < p.taps; ++t) {
    const uint8_t* x = p.in + at.in[first] + p.tap_offset[t];
    int g = 0;
    for (; g + kChains <= p.groups_per_tap; g += kChains) {
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) {
        const Activations a = broadcast(x + (g + c) * kInt8Group);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          dot(acc[c][v], a, load_weights(w + (c * kInt8Panel + v * kLanes) * kInt8Group));
        }
      }
      w += kChains * kInt8Panel * kInt8Group;
    }
    for (; g < p.groups_per_tap; ++g, w += kInt8Panel * kInt8Group) {
      const Activations a = broadcast(x + g * kInt8Group);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) dot(acc[0][v], a, load_weights(w + v * kLanes * kInt8Group));
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const vi sum = (acc[0][v] + acc[1][v]) + (acc[2][v] + acc[3][v]);
    finish(p, sum, row, at.out[first], at.residual[first], panel * kInt8Panel + v * kLanes);
  }
}

template <int P>
TW_INLINE void tile_rows(const Int8Problem& p, const RowOffsets& at, int first, int64_t row, int panel, int rows) {
  switch (rows) {
    case 1: P == 1 ? tile_one_row(p, at, first, row, panel) : tile<1, P>(p, at, first, row, panel); break;
    case 2: tile<2, P>(p, at, first, row, panel); break;
    case 3: tile<3, P>(p, at, first, row, panel); break;
    case 4: tile<4, P>(p, at, first, row, panel); break;
#if defined(__AVX512F__)
    case 5: tile<5, P>(p, at, first, row, panel); break;
    case 6: tile<6, P>(p, at, first, row, panel); break;
    case 7: tile<7, P>(p, at, first, row, panel); break;
    case 8: tile<8, P>(p, at, first, row, panel); break;
#endif
  }
}

int64_t grid_offset(const PixelGrid& grid, int64_t image, int64_t y, int64_t x) {
  return image * grid.image_step + y * grid.row_step + x * grid.column_step;
}

void fill_offsets(const Int8Problem& p, int64_t first, int count, RowOffsets& at) {
  int64_t x = first % p.width, y = first / p.width % p.height, image = first / p.width / p.height;
  for (int i = 0; i < count; ++i) {
    at.in[i] = grid_offset(p.in_grid, image, y, x);
    at.out[i] = grid_offset(p.out_grid, image, y, x);
    at.residual[i] = grid_offset(p.residual_grid, image, y, x);
    if (++x == p.width) {
      x = 0;
      if (++y == p.height) {
        y = 0;
        ++image;
      }
    }
  }
}

void rows(const Int8Problem& p, int64_t first, int64_t last, int first_panel, int last_panel) {
  RowOffsets at;
  for (int64_t block = first; block < last; block += kRowBlock) {
    const int count = static_cast<int>(last - block < kRowBlock ? last - block : kRowBlock);
    fill_offsets(p, block, count, at);
    for (int panel = first_panel; panel < last_panel;) {
      const bool one_row = count == 1;
      const int panels = !one_row && panel + kMaxPanels <= last_panel ? kMaxPanels : 1;
      for (int i = 0; i < count; i += kMaxRows) {
        const int n = count - i < kMaxRows ? count - i : kMaxRows;
        if (panels == kMaxPanels && !one_row) {
          tile_rows<kMaxPanels>(p, at, i, block + i, panel, n);
        } else {
          tile_rows<1>(p, at, i, block + i, panel, n);
        }
      }
      panel += panels;
    }
  }
}

}  // namespace

const Int8Kernels int8 = {rows};

}  // namespace TW_ISA
}  // namespace tw
