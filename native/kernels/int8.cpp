// The register tiles of the integer product and the blocked loops around them. Tiles are up to 16 rows by 1 panel of 16
// columns, 12 by 2 or 6 by 4 with AVX-512, 4 by 1 otherwise. Per four values of K, a row is one 32-bit broadcast and a
// panel one or two vector loads. int8_dot.h has the instructions; every instruction set produces the same integers.
//
// This file is compiled with -ffp-contract=off: the rounding to 8 bits must not depend on the instruction set.
#include "kernels/int8.h"

#include "common/simd.h"
#include "kernels/int8_amx.h"
#include "kernels/int8_dot.h"
#include "kernels/int8_split.h"
#include "kernels/int8_sums.h"
#include "kernels/prefetch.h"

namespace tw {
namespace TW_ISA {
namespace {

// The tallest register tile of each number of panels.
#if defined(__AVX512F__)
constexpr int kMaxTileRows[kInt8MaxPanels + 1] = {0, 16, 12, 0, 6};
#else
constexpr int kMaxTileRows[kInt8MaxPanels + 1] = {0, 4, 0, 0, 0};
#endif

#if !defined(__AVX2__) || defined(__AVX512F__)
struct Split {  // defined by int8_split.h for AVX2
  const uint8_t* low;
};
#endif

// A tile over all of K: sums start from the offset, stay in registers and are requantized.
template <Dot D>
struct WholeK {
  static constexpr Dot kDot = D;
  static constexpr bool kOneRow = !uses_maddubs(D);  // whether a single row uses one_row()
  const Split& split;
  const int32_t* start;  // for `pairs`: the initial sums of the panel
};

// A tile over one slice of K: the sums of the block are stored in memory between slices and requantized after the last
// one.
template <Dot D>
struct KSlice {
  static constexpr Dot kDot = D;
  static constexpr bool kOneRow = false;
  int first, last;  // groups of K
  int32_t* sums;    // sums of the block's first row and panel
  int64_t row_step;
  int first_panel;

  TW_INLINE int32_t* at(int row, int column) const { return sums + row * row_step + column - first_panel * kInt8Panel; }
};

TW_INLINE vi load_ints(const int32_t* p) {
  vi ints;
  std::memcpy(&ints, p, sizeof ints);
  return ints;
}

TW_INLINE void store_ints(int32_t* p, vi ints) { std::memcpy(p, &ints, sizeof ints); }

TW_INLINE int64_t panel_bytes_of(const Int8Problem& p) {
  return static_cast<int64_t>(p.runs) * p.groups_per_run * kInt8Panel * kInt8Group;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Adds base * (sum of each column's weights), which compensates for subtracting the base from the activations.
TW_INLINE void add_base(const Int8Problem& p, const int8_t* w, int base, vi (&sums)[kVectors]) {
  const __m256i ones = _mm256_set1_epi8(1);
  vi total[kVectors] = {};
  for (int64_t g = 0; g < static_cast<int64_t>(p.runs) * p.groups_per_run; ++g, w += kInt8Panel * kInt8Group) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v)
      total[v] += dot_of_pairs(ones, load_weights<Dot::pairs>(w + v * kLanes * kInt8Group).v);
  }
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) sums[v] += total[v] * base;
}

// Adds the excess of the activations (int8_split.h), above or below, times their weights.
template <bool kAbove, int R>
TW_INLINE void add_excess(const Excess* e, const Excess* end, const int8_t* w, vi (&acc)[R][kVectors]) {
  for (; e < end; e += kSplitRows) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m256i a = _mm256_set1_epi32(e[r].bytes);
      const int8_t* at = w + static_cast<int64_t>(e[r].at) * kInt8Panel * kInt8Group;
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const vi product = dot_of_pairs(a, load_weights<Dot::pairs>(at + v * kLanes * kInt8Group).v);
        acc[r][v] = kAbove ? acc[r][v] + product : acc[r][v] - product;
      }
    }
  }
}

// Adds both kinds of excess of a tile of rows.
template <int R>
TW_INLINE void add_all_excess(const Split& split, int first, const int8_t* w, vi (&acc)[R][kVectors]) {
  const int32_t* from = split.first + 2 * (first / kSplitRows);
  add_excess<true, R>(split.excess + from[0], split.excess + from[1], w, acc);
  add_excess<false, R>(split.excess + from[1], split.excess + from[2], w, acc);
}
#endif

// Not inlined: there are many output paths, which would take registers from the multiply loop.
template <int R, int P>
__attribute__((noinline)) void requantize_tile_out_of_line(const Int8Problem& p, const vi (&sums)[R][P * kVectors],
                                                           const RowOffsets& at, int first, int64_t row, int panel) {
  requantize_tile<R, P>(p, sums, at, first, row, panel);
}

// Computes R rows by P panels over all of K, with the output stage. `first` is the row in the block, `row` in the
// problem.
template <int R, int P, Dot D>
void tile(const Int8Problem& p, const WholeK<D>& whole_k, const RowOffsets& at, int first, int64_t row, int panel) {
  constexpr int V = P * kVectors;
  const int64_t panel_bytes = panel_bytes_of(p);
  const int8_t* w = p.weights + panel * panel_bytes;
  const int32_t* start = p.offset + panel * kInt8Panel;
  if constexpr (uses_maddubs(D)) start = whole_k.start;
  const uint8_t* rows[R];
  vi acc[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    rows[r] = (uses_maddubs(D) ? whole_k.split.low : p.in) + at.in[first + r];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[r][v] = load_ints(start + v * kLanes);
  }
  const int64_t run_bytes = static_cast<int64_t>(p.groups_per_run) * kInt8Group;
  for (int run = 0; run < p.runs; ++run) multiply<D>(rows, run * p.run_step, run_bytes, w, panel_bytes, acc);
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (uses_maddubs(D)) {
    if (whole_k.split.first != nullptr) add_all_excess<R>(whole_k.split, first, p.weights + panel * panel_bytes, acc);
  }
#endif
  vi sums[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[r][v] = acc[r][v];
  }
  requantize_tile_out_of_line<R, P>(p, sums, at, first, row, panel);
}

// Adds one slice of K to R rows by P panels of sums in memory.
template <int R, int P, Dot D>
void tile(const Int8Problem& p, const KSlice<D>& slice, const RowOffsets& at, int first, int64_t, int panel) {
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
  multiply<D>(rows, start, static_cast<int64_t>(slice.last) * kInt8Group - start, w, panel_bytes, acc);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store_ints(slice.at(first + r, panel * kInt8Panel) + v * kLanes, acc[r][v]);
  }
}

// Not inlined, for the same reason as requantize_tile_out_of_line().
__attribute__((noinline)) void requantize_vector_out_of_line(const Int8Problem& p, const vi* sum, const RowOffsets& at,
                                                             int first, int64_t row, int column) {
  requantize(p, *sum, row, at.out[first], at.residual[first], column);
}

// Computes one row: a matrix-vector product bound by the stream of weights. Four independent sums hide the latency of
// the dot product.
template <Dot D>
void one_row(const Int8Problem& p, const RowOffsets& at, int first, int64_t row, int panel) {
  constexpr int kChains = 4;  // definition: independent sums
  const int8_t* w = p.weights + panel * panel_bytes_of(p);
  vi acc[kChains][kVectors] = {};
  for (int run = 0; run < p.runs; ++run) {
    const uint8_t* x = p.in + at.in[first] + run * p.run_step;
    int g = 0;
    for (; g + kChains <= p.groups_per_run; g += kChains) {
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) {
        fetch_ahead(w + c * kInt8Panel * kInt8Group);
        const Activations<D> a = broadcast<D>(x + (g + c) * kInt8Group);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          dot<D>(acc[c][v], a, load_weights<D>(w + (c * kInt8Panel + v * kLanes) * kInt8Group));
        }
      }
      w += kChains * kInt8Panel * kInt8Group;
    }
    for (; g < p.groups_per_run; ++g, w += kInt8Panel * kInt8Group) {
      const Activations<D> a = broadcast<D>(x + g * kInt8Group);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) dot<D>(acc[0][v], a, load_weights<D>(w + v * kLanes * kInt8Group));
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const int column = panel * kInt8Panel + v * kLanes;
    const vi sum = (acc[0][v] + acc[1][v]) + (acc[2][v] + acc[3][v]) + load_ints(p.offset + column);
    requantize_vector_out_of_line(p, &sum, at, first, row, column);
  }
}

template <int R, int P, class KRange>
TW_INLINE void tile_if(const Int8Problem& p, const KRange& k_range, const RowOffsets& at, int first, int64_t row,
                       int panel) {
  if constexpr (R <= kMaxTileRows[P]) tile<R, P>(p, k_range, at, first, row, panel);
}

// Dispatches to the tile of this number of rows.
template <int P, class KRange>
TW_INLINE void tile_rows(const Int8Problem& p, const KRange& k_range, const RowOffsets& at, int first, int64_t row,
                         int panel, int rows) {
  switch (rows) {
    case 1:
      if constexpr (P == 1 && KRange::kOneRow) {
        one_row<KRange::kDot>(p, at, first, row, panel);
      } else {
        tile_if<1, P>(p, k_range, at, first, row, panel);
      }
      break;
    case 2:
      tile_if<2, P>(p, k_range, at, first, row, panel);
      break;
    case 3:
      tile_if<3, P>(p, k_range, at, first, row, panel);
      break;
    case 4:
      tile_if<4, P>(p, k_range, at, first, row, panel);
      break;
    case 5:
      tile_if<5, P>(p, k_range, at, first, row, panel);
      break;
    case 6:
      tile_if<6, P>(p, k_range, at, first, row, panel);
      break;
    case 7:
      tile_if<7, P>(p, k_range, at, first, row, panel);
      break;
    case 8:
      tile_if<8, P>(p, k_range, at, first, row, panel);
      break;
    case 9:
      tile_if<9, P>(p, k_range, at, first, row, panel);
      break;
    case 10:
      tile_if<10, P>(p, k_range, at, first, row, panel);
      break;
    case 11:
      tile_if<11, P>(p, k_range, at, first, row, panel);
      break;
    case 12:
      tile_if<12, P>(p, k_range, at, first, row, panel);
      break;
    case 13:
      tile_if<13, P>(p, k_range, at, first, row, panel);
      break;
    case 14:
      tile_if<14, P>(p, k_range, at, first, row, panel);
      break;
    case 15:
      tile_if<15, P>(p, k_range, at, first, row, panel);
      break;
    case 16:
      tile_if<16, P>(p, k_range, at, first, row, panel);
      break;
  }
}

// Computes `count` rows of the block, at most `most` per tile, by P panels.
template <int P, class KRange>
void strip(const Int8Problem& p, const KRange& k_range, const RowOffsets& at, int64_t row, int count, int panel,
           int most) {
  for (int i = 0; i < count; i += most) {
    tile_rows<P>(p, k_range, at, i, row + i, panel, count - i < most ? count - i : most);
  }
}

// Computes a block of rows and panels. Panels that do not fill a register tile use a narrower tile, as tall as the
// registers allow.
template <class KRange>
TW_INLINE void panels(const Int8Problem& p, const Int8Tile& t, const KRange& k_range, const RowOffsets& at, int64_t row,
                      int count, int panel, int last_panel) {
  const int accumulators = t.mr * (t.nr / kInt8Panel);
  if (t.nr == 4 * kInt8Panel) {
    for (; panel + 4 <= last_panel; panel += 4) strip<4>(p, k_range, at, row, count, panel, t.mr);
  }
  if (t.nr >= 2 * kInt8Panel) {
    const int most = accumulators / 2 < kMaxTileRows[2] ? accumulators / 2 : kMaxTileRows[2];
    for (; panel + 2 <= last_panel; panel += 2) strip<2>(p, k_range, at, row, count, panel, most);
  }
  const int most = accumulators < kMaxTileRows[1] ? accumulators : kMaxTileRows[1];
  for (; panel < last_panel; ++panel) strip<1>(p, k_range, at, row, count, panel, most);
}

// Computes a block in slices of K: sums start as the offset, are kept in memory between slices, and are requantized at
// the end.
template <Dot D>
void sliced(const Int8Problem& p, const Int8Tile& t, const RowOffsets& at, int64_t row, int count, int panel,
            int last_panel, int32_t* sums) {
  const int depth = static_cast<int>(t.kc / kInt8Group), columns = (last_panel - panel) * kInt8Panel;
  KSlice<D> slice = {0, 0, sums, columns, panel};
  for (int r = 0; r < count; ++r)
    std::memcpy(sums + r * slice.row_step, p.offset + panel * kInt8Panel, columns * sizeof(int32_t));
  while (slice.last < p.groups_per_run) {
    slice.first = slice.last;
    slice.last = p.groups_per_run - slice.first < depth ? p.groups_per_run : slice.first + depth;
    panels(p, t, slice, at, row, count, panel, last_panel);
  }
  for (int r = 0; r < count; ++r) {
    for (int column = panel * kInt8Panel; column < last_panel * kInt8Panel; column += kLanes) {
      requantize(p, load_ints(slice.at(r, column)), row + r, at.out[r], at.residual[r], column);
    }
  }
}

// Computes a block of rows with all of K in one pass.
template <Dot D>
void whole_block(const Int8Problem& p, const Int8Tile& t, const RowOffsets& at, int64_t row, int count, int panel,
                 int last_panel) {
  const Split none = {};
  panels(p, t, WholeK<D>{none, nullptr}, at, row, count, panel, last_panel);
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Computes a block with split activations, panel by panel: multiplies the small parts, then adds the excess.
void pairs_block(const Int8Problem& p, const Split& split, const RowOffsets& at, int64_t row, int count, int panel,
                 int last_panel) {
  alignas(32) int32_t start[kInt8Panel];
  for (; panel < last_panel; ++panel) {
    vi sums[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sums[v] = load_ints(p.offset + panel * kInt8Panel + v * kLanes);
    if (split.base != 0) add_base(p, p.weights + panel * panel_bytes_of(p), split.base, sums);
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) store_ints(start + v * kLanes, sums[v]);
    strip<1>(p, WholeK<Dot::pairs>{split, start}, at, row, count, panel, kSplitRows);
  }
}

// Computes V vectors of a panel for full tiles of four rows. Returns the number of rows computed.
template <Dot D, int V, OutputPath W>
__attribute__((noinline)) int saturation_safe_strip(const Int8Problem& problem, const RowOffsets& at, int count,
                                                    int panel) {
  constexpr int R = kSplitRows;
  const Int8Problem p = problem;  // a local copy: byte stores may alias the argument
  const int64_t panel_bytes = panel_bytes_of(p), run_bytes = static_cast<int64_t>(p.groups_per_run) * kInt8Group;
  const bool last = (panel + 1) * kInt8Panel >= p.columns;
  NextPanel next(p.weights + (panel + 1) * panel_bytes, last ? 0 : panel_bytes, count / R);
  int i = 0;
  for (; i + R <= count; i += R) {
    next.fetch();
    const int8_t* w = p.weights + panel * panel_bytes;
    const uint8_t* rows[R];
    vi acc[R][V];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      rows[r] = p.in + at.in[i + r];
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) acc[r][v] = load_ints(p.offset + panel * kInt8Panel + v * kLanes);
    }
    for (int run = 0; run < p.runs; ++run) multiply<D>(rows, run * p.run_step, run_bytes, w, panel_bytes, acc);
    requantize_whole_panel<R, V, W>(p, acc, at, i, panel * kInt8Panel);
  }
  return i;
}

// Runs saturation_safe_strip for the problem's output path.
template <Dot D, int V>
int saturation_safe_rows(const Int8Problem& p, const RowOffsets& at, int count, int panel) {
  int done = 0;
  dispatch_output_path(p,
                       [&](auto constant) { done = saturation_safe_strip<D, V, constant.value>(p, at, count, panel); });
  return done;
}

// Copies n < 16 bytes, by two overlapping moves if n >= 4.
TW_INLINE void copy_columns(uint8_t* to, const uint8_t* from, int n) {
  if (n >= 8) {
    std::memcpy(to, from, 8);
    std::memcpy(to + n - 8, from + n - 8, 8);
  } else if (n >= 4) {
    std::memcpy(to, from, 4);
    std::memcpy(to + n - 4, from + n - 4, 4);
  } else {
    for (int i = 0; i < n; ++i) to[i] = from[i];
  }
}

// Computes all columns of a partial panel into a buffer and copies the first `remaining` of them.
template <Dot D>
__attribute__((noinline)) int partial_rows(const Int8Problem& p, const RowOffsets& at, int count, int panel,
                                           int remaining) {
  alignas(32) uint8_t buffer[kInt8MaxRows * kInt8Panel];
  RowOffsets buffer_offsets;
  for (int i = 0; i < count; ++i) {
    buffer_offsets.in[i] = at.in[i];
    buffer_offsets.out[i] = (i - panel) * kInt8Panel;  // the panel's first column is added to it
    buffer_offsets.residual[i] = 0;
  }
  Int8Problem whole = p;
  whole.out = buffer;
  const int done = remaining > kLanes ? saturation_safe_rows<D, 2>(whole, buffer_offsets, count, panel)
                                      : saturation_safe_rows<D, 1>(whole, buffer_offsets, count, panel);
  uint8_t* out = static_cast<uint8_t*>(p.out) + panel * kInt8Panel;
  for (int i = 0; i < done; ++i) copy_columns(out + at.out[i], buffer + i * kInt8Panel, remaining);
  return done;
}

// Saturation-safe weights: no activations can overflow, so none are split. Full and half panels have their own loop.
// Partial panels use it too for uint8 without a residual, because the residual may end with its last column.
template <Dot D>
void saturation_safe_block(const Int8Problem& p, const RowOffsets& at, int64_t row, int count, int panel,
                           int last_panel) {
  const Split none = {p.in};
  const int columns = whole_columns(p);
  for (; panel < last_panel; ++panel) {
    const int remaining = columns - panel * kInt8Panel;
    const int done = remaining >= kInt8Panel ? saturation_safe_rows<D, 2>(p, at, count, panel)
                     : remaining == kLanes   ? saturation_safe_rows<D, 1>(p, at, count, panel)
                     : remaining > 0 && p.residual == nullptr && p.kind == Int8Out::uint8
                         ? partial_rows<D>(p, at, count, panel, remaining)
                         : 0;
    const WholeK<D> whole = {none, p.offset + panel * kInt8Panel};
    for (int i = done; i < count; i += kSplitRows) {
      tile_rows<1>(p, whole, at, i, row + i, panel, count - i < kSplitRows ? count - i : kSplitRows);
    }
  }
}

// Computes one block of rows and panels in the fastest way that is exact for these weights: VNNI, saturation-safe
// quads or pairs, split activations, or int16.
void block(const Int8Problem& p, const Int8Tile& t, RowOffsets& at, int64_t row, int count, int panel, int last_panel,
           int32_t* sums) {
#if defined(TW_AVX_VNNI)
  if (uses_avx_vnni()) {
    return sums != nullptr ? sliced<Dot::vnni>(p, t, at, row, count, panel, last_panel, sums)
                           : whole_block<Dot::vnni>(p, t, at, row, count, panel, last_panel);
  }
#endif
  if (sums != nullptr) return sliced<Dot::int16>(p, t, at, row, count, panel, last_panel, sums);
  if (p.quads_fit) return saturation_safe_block<Dot::quads>(p, at, row, count, panel, last_panel);
  if (p.max_pair_sum >= 2 * 255) return saturation_safe_block<Dot::pairs>(p, at, row, count, panel, last_panel);
  if (count > 1) {  // one row does not repay splitting the activations
    Int8Problem safe = p;
    Split split;
    if (Splitter().split(safe, at, count, split)) return pairs_block(safe, split, at, row, count, panel, last_panel);
    fill_offsets(p, row, count, at);
  }
  whole_block<Dot::int16>(p, t, at, row, count, panel, last_panel);
}
#else
void block(const Int8Problem& p, const Int8Tile& t, RowOffsets& at, int64_t row, int count, int panel, int last_panel,
           int32_t* sums) {
  sums != nullptr ? sliced<Dot::int16>(p, t, at, row, count, panel, last_panel, sums)
                  : whole_block<Dot::int16>(p, t, at, row, count, panel, last_panel);
}
#endif

// Computes rows [first, last) of panels [first_panel, last_panel), block by block.
void rows(const Int8Problem& p, const Int8Tile& t, int64_t first, int64_t last, int first_panel, int last_panel,
          int32_t* sums) {
  RowOffsets at;
  const int panel_block = static_cast<int>(t.nc / kInt8Panel);
  for (int panel = first_panel; panel < last_panel; panel += panel_block) {
    const int end = last_panel - panel < panel_block ? last_panel : panel + panel_block;
    for (int64_t row = first; row < last; row += t.mc) {
      const int count = static_cast<int>(last - row < t.mc ? last - row : t.mc);
      fill_offsets(p, row, count, at);
      block(p, t, at, row, count, panel, end, sums);
    }
  }
}

#if defined(__AVX512F__)
// Computes the same on AMX tiles (int8_amx.h). Returns false if memory is exhausted.
template <class Tiles>
bool tiles_of(const Int8Problem& p, int64_t first, int64_t last, int first_panel, int last_panel) {
  RowOffsets at;
  Tiles registers;
  TileProduct<Tiles> product(p, registers);
  if (!product.allocate_scratch()) return false;
  for (int64_t row = first; row < last; row += kTileBlock) {
    const int count = static_cast<int>(last - row < kTileBlock ? last - row : kTileBlock);
    fill_offsets(p, row, count, at);
    product.block(at, row, count, first_panel, last_panel);
  }
  return true;
}

bool tiles(const Int8Problem& p, int64_t first, int64_t last, int first_panel, int last_panel, bool emulated) {
  if (emulated) return tiles_of<Emulated>(p, first, last, first_panel, last_panel);
#if defined(TW_AMX)
  return tiles_of<Hardware>(p, first, last, first_panel, last_panel);
#else
  return false;
#endif
}
#else
constexpr bool (*tiles)(const Int8Problem&, int64_t, int64_t, int, int, bool) = nullptr;
#endif

}  // namespace

const Int8Kernels int8 = {kMaxTileRows, rows, tiles};

}  // namespace TW_ISA
}  // namespace tw
