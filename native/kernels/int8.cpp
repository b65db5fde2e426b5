// The register tiles of the integer product: up to 16 rows by 1 panel of 16 columns, 12 by 2 or 6 by 4 with AVX-512, 4 by 1
// elsewhere; and the loops over blocks around them. Per step of four K values a row is one 32-bit broadcast and a panel one vector load; the dot product of four
// bytes is one VNNI instruction, or two 16-bit multiply-adds on AVX2. The usual AVX2 instruction for unsigned times signed
// bytes saturates at 16 bits (255 * 127 * 2 does not fit) and is not used: all sets give the same integers.
//
// This file is compiled with -ffp-contract=off: the rounding to 8 bits must not depend on the instruction set.
#include "kernels/int8.h"

#include "common/simd.h"
#include "kernels/rounding.h"

namespace tw {
namespace TW_ISA {
namespace {

constexpr int kVectors = kInt8Panel / kLanes;  // vectors per panel
#if defined(__AVX512F__)
constexpr int kTallest[kInt8MaxPanels + 1] = {0, 16, 12, 0, 6};
#else
constexpr int kTallest[kInt8MaxPanels + 1] = {0, 4, 0, 0, 0};
#endif

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

TW_INLINE vf clamp(vf x, float low, float high) {
  x = select(x > splat(low), x, splat(low));
  return select(x < splat(high), x, splat(high));
}

TW_INLINE void store_bytes(uint8_t* p, vi v, int n) {
#if defined(__AVX512F__)
  _mm512_mask_cvtepi32_storeu_epi8(p, lane_mask(n), (__m512i)v);
#else
  if (n == kLanes) return store_low_bytes(p, v);
  uint8_t bytes[kLanes];
  store_low_bytes(bytes, v);
  std::memcpy(p, bytes, n);
#endif
}

TW_INLINE vi load_bytes(const uint8_t* p, int n) {
#if defined(__AVX512F__)
  return (vi)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_maskz_loadu_epi8(lane_mask(n), p));
#else
  if (n == kLanes) return widen_bytes(p);
  uint8_t bytes[kLanes] = {};
  std::memcpy(bytes, p, n);
  return widen_bytes(bytes);
#endif
}

struct RowOffsets {  // the odd length keeps the three from lying whole pages apart, where they would get in each other's way
  int64_t in[kInt8MaxRows + 24], out[kInt8MaxRows + 24], residual[kInt8MaxRows + 24];
};

// All of K at once: sums start from the offset, stay in registers and are finished.
struct Whole {};

// The groups of K that are multiplied now; the sums of the block wait in memory and are finished at the end.
struct Slice {
  int first, last;
  int32_t* sums;     // of the block's first row and first panel
  int64_t row_step;
  int first_panel;

  TW_INLINE int32_t* at(int row, int column) const { return sums + row * row_step + column - first_panel * kInt8Panel; }
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

// `sum` already holds the column's offset.
TW_INLINE void finish(const Int8Problem& p, vi sum, int64_t row, int64_t out_offset, int64_t residual_offset, int column) {
  int lanes = p.out_columns - column;
  if (lanes <= 0) return;
  if (lanes > kLanes) lanes = kLanes;
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

#if defined(__AVX512F__)
// Whole panels to bytes: what finish_uint8 computes, for four vectors of 16 columns at a time. Saturating packs do the
// clamping below and the narrowing, and the result leaves in four stores of 16 bytes; the one-by-one way costs three
// times as much, which shows wherever K is small.
struct ByteStore {
  uint8_t* out;
  const uint8_t* residual;
  __m512 highest, residual_scale;
  __m512i zero, lowest, residual_zero;

  explicit ByteStore(const Int8Problem& p)
      : out(static_cast<uint8_t*>(p.out)), residual(p.residual),
        highest(_mm512_set1_ps(static_cast<float>(p.high - p.zero))), residual_scale(_mm512_set1_ps(p.residual_scale)),
        zero(_mm512_set1_epi16(static_cast<int16_t>(p.zero))), lowest(_mm512_set1_epi8(static_cast<char>(p.low))),
        residual_zero(_mm512_set1_epi32(p.residual_zero)) {}

  template <bool kResidual>
  TW_INLINE __m512i rounded(vi sum, __m512 scale, int64_t residual_at) const {
    __m512 value = _mm512_mul_ps((__m512)__builtin_convertvector(sum, vf), scale);
    if (kResidual) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(residual + residual_at));
      const __m512i skip = _mm512_sub_epi32(_mm512_maskz_cvtepu8_epi32(0xffff, bytes), residual_zero);
      value = _mm512_add_ps(value, _mm512_mul_ps((__m512)__builtin_convertvector((vi)skip, vf), residual_scale));
    }
    // The conversion rounds ties to even. (gcc 12 warns of its own header without the masks; they cost nothing.)
    return _mm512_maskz_cvtps_epi32(0xffff, _mm512_maskz_min_ps(0xffff, highest, value));
  }

  TW_INLINE void store(__m512i a, __m512i b, __m512i c, __m512i d, const int64_t* at) const {
    const __m512i ab = _mm512_adds_epi16(_mm512_packs_epi32(a, b), zero);
    const __m512i cd = _mm512_adds_epi16(_mm512_packs_epi32(c, d), zero);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i bytes = _mm512_maskz_permutexvar_epi32(0xffff, order, _mm512_max_epu8(_mm512_packus_epi16(ab, cd), lowest));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + at[0]), _mm512_maskz_extracti32x4_epi32(0xf, bytes, 0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + at[1]), _mm512_maskz_extracti32x4_epi32(0xf, bytes, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + at[2]), _mm512_maskz_extracti32x4_epi32(0xf, bytes, 2));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + at[3]), _mm512_maskz_extracti32x4_epi32(0xf, bytes, 3));
  }
};

template <int R, int P, bool kResidual>
TW_INLINE void finish_bytes(const Int8Problem& p, const vi (&acc)[R][P], const RowOffsets& at, int first, int column) {
  const ByteStore to(p);
  __m512 scale[P];
#pragma GCC unroll 4
  for (int v = 0; v < P; ++v) scale[v] = (__m512)load(p.scale + column + v * kLanes);
#pragma GCC unroll 16
  for (int i = 0; i < R * P; i += 4) {
    __m512i value[4];
    int64_t out_at[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const int r = (i + j) / P, v = (i + j) % P;
      out_at[j] = at.out[first + r] + column + v * kLanes;
      value[j] = to.rounded<kResidual>(acc[r][v], scale[v], at.residual[first + r] + column + v * kLanes);
    }
    to.store(value[0], value[1], value[2], value[3], out_at);
  }
}
#endif

template <int R, int P>
TW_INLINE void finish_tile(const Int8Problem& p, const vi (&acc)[R][P * kVectors], const RowOffsets& at, int first,
                           int64_t row, int panel) {
  const int column = panel * kInt8Panel;
#if defined(__AVX512F__)
  if constexpr (R * P % 4 == 0) {
    if (p.kind == Int8Out::uint8 && column + P * kInt8Panel <= p.out_columns) {
      p.residual != nullptr ? finish_bytes<R, P, true>(p, acc, at, first, column)
                            : finish_bytes<R, P, false>(p, acc, at, first, column);
      return;
    }
  }
#endif
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < P * kVectors; ++v) {
      finish(p, acc[r][v], row + r, at.out[first + r], at.residual[first + r], column + v * kLanes);
    }
  }
}

TW_INLINE vi load_ints(const int32_t* p) {
  vi ints;
  std::memcpy(&ints, p, sizeof ints);
  return ints;
}

TW_INLINE void store_ints(int32_t* p, vi ints) { std::memcpy(p, &ints, sizeof ints); }

// acc += rows x weights over `bytes` values of K from `start` on; `w` moves on with them.
template <int R, int V>
TW_INLINE void multiply(const uint8_t* const (&rows)[R], int64_t start, int64_t bytes, const int8_t*& w, int64_t panel_bytes,
                        vi (&acc)[R][V]) {
  for (int64_t k = start; k < start + bytes; k += kInt8Group) {
    Weights weights[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      weights[v] = load_weights(w + (v / kVectors) * panel_bytes + (v % kVectors) * kLanes * kInt8Group);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Activations a = broadcast(rows[r] + k);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) dot(acc[r][v], a, weights[v]);
    }
    w += kInt8Panel * kInt8Group;
  }
}

TW_INLINE int64_t panel_bytes_of(const Int8Problem& p) {
  return static_cast<int64_t>(p.runs) * p.groups_per_run * kInt8Panel * kInt8Group;
}

template <int R, int P>
void tile(const Int8Problem& p, const Whole&, const RowOffsets& at, int first, int64_t row, int panel) {
  constexpr int V = P * kVectors;
  const int64_t panel_bytes = panel_bytes_of(p);
  const int8_t* w = p.weights + panel * panel_bytes;
  const uint8_t* rows[R];
  vi acc[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    rows[r] = p.in + at.in[first + r];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[r][v] = load_ints(p.offset + panel * kInt8Panel + v * kLanes);
  }
  const int64_t run_bytes = static_cast<int64_t>(p.groups_per_run) * kInt8Group;
  for (int run = 0; run < p.runs; ++run) multiply<R, V>(rows, run * p.run_step, run_bytes, w, panel_bytes, acc);
  finish_tile<R, P>(p, acc, at, first, row, panel);
}

template <int R, int P>
void tile(const Int8Problem& p, const Slice& slice, const RowOffsets& at, int first, int64_t, int panel) {
  constexpr int V = P * kVectors;
  const int64_t panel_bytes = panel_bytes_of(p), start = static_cast<int64_t>(slice.first) * kInt8Group;
  const int8_t* w = p.weights + panel * panel_bytes + start * kInt8Panel;
  const uint8_t* rows[R];
  vi acc[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    rows[r] = p.in + at.in[first + r];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[r][v] = load_ints(slice.at(first + r, panel * kInt8Panel) + v * kLanes);
  }
  multiply<R, V>(rows, start, static_cast<int64_t>(slice.last) * kInt8Group - start, w, panel_bytes, acc);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store_ints(slice.at(first + r, panel * kInt8Panel) + v * kLanes, acc[r][v]);
  }
}

// One row of whole K: matrix times vector, bound by the stream of weights. Four independent sums hide the latency of the
// dot.
void one_row(const Int8Problem& p, const RowOffsets& at, int first, int64_t row, int panel) {
  constexpr int kChains = 4;
  const int8_t* w = p.weights + panel * panel_bytes_of(p);
  vi acc[kChains][kVectors] = {};
  for (int run = 0; run < p.runs; ++run) {
    const uint8_t* x = p.in + at.in[first] + run * p.run_step;
    int g = 0;
    for (; g + kChains <= p.groups_per_run; g += kChains) {
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
    for (; g < p.groups_per_run; ++g, w += kInt8Panel * kInt8Group) {
      const Activations a = broadcast(x + g * kInt8Group);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) dot(acc[0][v], a, load_weights(w + v * kLanes * kInt8Group));
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const int column = panel * kInt8Panel + v * kLanes;
    const vi sum = (acc[0][v] + acc[1][v]) + (acc[2][v] + acc[3][v]) + load_ints(p.offset + column);
    finish(p, sum, row, at.out[first], at.residual[first], column);
  }
}

template <int R, int P, class Part>
TW_INLINE void tile_if(const Int8Problem& p, const Part& part, const RowOffsets& at, int first, int64_t row, int panel) {
  if constexpr (R <= kTallest[P]) tile<R, P>(p, part, at, first, row, panel);
}

template <int P, class Part>
TW_INLINE void tile_rows(const Int8Problem& p, const Part& part, const RowOffsets& at, int first, int64_t row, int panel,
                         int rows) {
  switch (rows) {
    case 1:
      if constexpr (P == 1 && sizeof(Part) == sizeof(Whole)) {
        one_row(p, at, first, row, panel);
      } else {
        tile_if<1, P>(p, part, at, first, row, panel);
      }
      break;
    case 2: tile_if<2, P>(p, part, at, first, row, panel); break;
    case 3: tile_if<3, P>(p, part, at, first, row, panel); break;
    case 4: tile_if<4, P>(p, part, at, first, row, panel); break;
    case 5: tile_if<5, P>(p, part, at, first, row, panel); break;
    case 6: tile_if<6, P>(p, part, at, first, row, panel); break;
    case 7: tile_if<7, P>(p, part, at, first, row, panel); break;
    case 8: tile_if<8, P>(p, part, at, first, row, panel); break;
    case 9: tile_if<9, P>(p, part, at, first, row, panel); break;
    case 10: tile_if<10, P>(p, part, at, first, row, panel); break;
    case 11: tile_if<11, P>(p, part, at, first, row, panel); break;
    case 12: tile_if<12, P>(p, part, at, first, row, panel); break;
    case 13: tile_if<13, P>(p, part, at, first, row, panel); break;
    case 14: tile_if<14, P>(p, part, at, first, row, panel); break;
    case 15: tile_if<15, P>(p, part, at, first, row, panel); break;
    case 16: tile_if<16, P>(p, part, at, first, row, panel); break;
  }
}

// `count` rows of the block, `most` at a time, by P panels.
template <int P, class Part>
void strip(const Int8Problem& p, const Part& part, const RowOffsets& at, int64_t row, int count, int panel, int most) {
  for (int i = 0; i < count; i += most) {
    tile_rows<P>(p, part, at, i, row + i, panel, count - i < most ? count - i : most);
  }
}

// A block of panels. What is left over beside whole register tiles is narrower, and as much taller as fits.
template <class Part>
TW_INLINE void panels(const Int8Problem& p, const Int8Tile& t, const Part& part, const RowOffsets& at, int64_t row, int count,
                      int panel, int last_panel) {
  const int accumulators = t.mr * (t.nr / kInt8Panel);
  if (t.nr == 4 * kInt8Panel) {
    for (; panel + 4 <= last_panel; panel += 4) strip<4>(p, part, at, row, count, panel, t.mr);
  }
  if (t.nr >= 2 * kInt8Panel) {
    const int most = accumulators / 2 < kTallest[2] ? accumulators / 2 : kTallest[2];
    for (; panel + 2 <= last_panel; panel += 2) strip<2>(p, part, at, row, count, panel, most);
  }
  const int most = accumulators < kTallest[1] ? accumulators : kTallest[1];
  for (; panel < last_panel; ++panel) strip<1>(p, part, at, row, count, panel, most);
}

// A block with K cut: sums start as the offset, go through memory between slices, and are finished when all is in.
void sliced(const Int8Problem& p, const Int8Tile& t, const RowOffsets& at, int64_t row, int count, int panel, int last_panel,
            int32_t* sums) {
  const int depth = static_cast<int>(t.kc / kInt8Group), columns = (last_panel - panel) * kInt8Panel;
  Slice slice = {0, 0, sums, columns, panel};
  for (int r = 0; r < count; ++r) std::memcpy(sums + r * slice.row_step, p.offset + panel * kInt8Panel, columns * sizeof(int32_t));
  while (slice.last < p.groups_per_run) {
    slice.first = slice.last;
    slice.last = p.groups_per_run - slice.first < depth ? p.groups_per_run : slice.first + depth;
    panels(p, t, slice, at, row, count, panel, last_panel);
  }
  for (int r = 0; r < count; ++r) {
    for (int column = panel * kInt8Panel; column < last_panel * kInt8Panel; column += kLanes) {
      finish(p, load_ints(slice.at(r, column)), row + r, at.out[r], at.residual[r], column);
    }
  }
}

void fill_row(int64_t* to, const PixelGrid& grid, int64_t image, int64_t y, int64_t x, int count) {
  const int64_t start = image * grid.image_step + y * grid.row_step + x * grid.column_step;
  for (int i = 0; i < count; ++i) to[i] = start + i * grid.column_step;
}

void fill_offsets(const Int8Problem& p, int64_t first, int count, RowOffsets& at) {
  int64_t x = first % p.width, y = first / p.width % p.height, image = first / p.width / p.height;
  for (int i = 0; i < count;) {
    const int n = p.width - x < count - i ? static_cast<int>(p.width - x) : count - i;
    fill_row(at.in + i, p.in_grid, image, y, x, n);
    fill_row(at.out + i, p.out_grid, image, y, x, n);
    fill_row(at.residual + i, p.residual_grid, image, y, x, n);
    i += n;
    x = 0;
    if (++y == p.height) {
      y = 0;
      ++image;
    }
  }
}

void rows(const Int8Problem& p, const Int8Tile& t, int64_t first, int64_t last, int first_panel, int last_panel,
          int32_t* sums) {
  RowOffsets at;
  const int wide = static_cast<int>(t.nc / kInt8Panel);
  for (int panel = first_panel; panel < last_panel; panel += wide) {
    const int end = last_panel - panel < wide ? last_panel : panel + wide;
    for (int64_t row = first; row < last; row += t.mc) {
      const int count = static_cast<int>(last - row < t.mc ? last - row : t.mc);
      fill_offsets(p, row, count, at);
      if (sums != nullptr) {
        sliced(p, t, at, row, count, panel, end, sums);
      } else {
        panels(p, t, Whole(), at, row, count, panel, end);
      }
    }
  }
}

}  // namespace

const Int8Kernels int8 = {kTallest, rows};

}  // namespace TW_ISA
}  // namespace tw
