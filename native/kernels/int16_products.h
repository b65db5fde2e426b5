// Convolution on int16 activations (kernels/int16.h). An activation may be applied in a second pass, after the results
// are stored. Included by int16.cpp, which is compiled with -ffp-contract=off.
#pragma once

#include "kernels/int16.h"
#include "kernels/int8_sums.h"
#include "kernels/prefetch.h"

namespace tw {
namespace TW_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kMaxTileRows = 12;  // definition: pixels of a register tile (times one panel)
#elif defined(__AVX2__)
constexpr int kMaxTileRows = 6;  // definition
#else
constexpr int kMaxTileRows = 2;  // definition
#endif
constexpr int kBlock = 96;  // chosen: pixels per pass over the panels; a multiple of every kMaxTileRows

TW_INLINE vi load_lanes(const int32_t* p) {
  vi v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

TW_INLINE vf as_floats(vi v) { return __builtin_convertvector(v, vf); }

// acc + the sum of two neighbouring int16 products in each 32-bit lane.
TW_INLINE vi add_products(vi acc, vi a, vi w) {
#if defined(__AVX512F__)
  asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(w));
  return acc;
#elif defined(__AVX2__)
  acc += (vi)_mm256_madd_epi16((__m256i)a, (__m256i)w);
  asm("" : "+x"(acc));  // stops the compiler from adding products to each other first and spilling them
  return acc;
#else
  return acc + ((a << 16) >> 16) * ((w << 16) >> 16) + (a >> 16) * (w >> 16);
#endif
}

#if defined(__AVX2__)
TW_INLINE __m256i load_sixteen(const int16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// Returns whether the activation is applied in a second pass over the stored integers. Tile by tile, each evaluation
// would wait for the latency of the one before.
bool defers_activation(const Int8Problem& p) {
  return p.kind == Int8Out::int16 && p.int16_stage.activation == Int16Activation::piecewise;
}

// The output stage of the first pass: only rounds and clamps.
Int16Stage without_activation(const Int16Stage& stage) {
  Int16Stage whole;
  whole.low = -32767;
  whole.high = stage.piecewise.most;
  return whole;
}

TW_INLINE void activate_sixteen(const Int16PiecewiseVectors& curve, int16_t* numbers) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(numbers), curve.evaluate(load_sixteen(numbers)));
}

// Applies the activation to columns [first, last) of `count` pixels, sixteen at a time. A partial group goes through a
// buffer.
void apply_activation(const Int8Problem& p, const RowOffsets& at, int count, int first, int last) {
  const Int16PiecewiseVectors curve(p.int16_stage);
  int16_t* out = static_cast<int16_t*>(p.out);
  int c = first;
  for (; c + kInt8Panel <= last; c += kInt8Panel) {
    for (int i = 0; i < count; ++i) activate_sixteen(curve, out + at.out[i] + c);
  }
  for (int i = 0; c < last && i < count; ++i) {
    int16_t buffer[kInt8Panel] = {};
    std::memcpy(buffer, out + at.out[i] + c, 2 * (last - c));
    activate_sixteen(curve, buffer);
    std::memcpy(out + at.out[i] + c, buffer, 2 * (last - c));
  }
}
#else
bool defers_activation(const Int8Problem&) { return false; }
Int16Stage without_activation(const Int16Stage& stage) { return stage; }
void apply_activation(const Int8Problem&, const RowOffsets&, int, int, int) {}
#endif

constexpr int kPairsAtOnce = 4;  // chosen: channel pairs between two prefetches

// Multiplies the channel pair at offset `c` of R pixels by V vectors of a panel.
template <int R, int V>
TW_INLINE void multiply_pair(const int16_t* const (&rows)[R], int64_t c, const int16_t* w, vi (&acc)[R][V]) {
  vi weight[V];
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) std::memcpy(&weight[v], w + v * kLanes * kInt16Group, sizeof weight[v]);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    int32_t two;
    std::memcpy(&two, rows[r] + c, sizeof two);
    const vi a = two - vi{};
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[r][v] = add_products(acc[r][v], a, weight[v]);
  }
}

// Multiplies R pixels by V vectors of a panel, over all taps and channels of its window.
template <int R, int V>
TW_INLINE void multiply(const Int16Problem& p, const RowOffsets& at, int first, int panel, NextPanel& next,
                        vi (&acc)[R][V]) {
  constexpr int64_t kLine = kInt8Panel * kInt16Group;
  const PanelWindow window = p.windows[panel];
  const int16_t* w = p.weights + window.weights;
  const int16_t* rows[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    rows[r] = p.x + at.in[first + r] + window.first;
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[r][v] = load_lanes(p.to.offset + panel * kInt8Panel + v * kLanes);
  }
  for (int64_t ky = 0; ky < p.kernel_h; ++ky) {
    for (int64_t kx = 0; kx < p.kernel_w; ++kx) {
      int64_t c = ky * p.tap_row + kx * p.tap_step;
      const int64_t end = c + kInt16Group * window.groups;
      for (; c + kInt16Group * kPairsAtOnce <= end; c += kInt16Group * kPairsAtOnce, w += kPairsAtOnce * kLine) {
        next.fetch();
#pragma GCC unroll 4
        for (int pair = 0; pair < kPairsAtOnce; ++pair)
          multiply_pair(rows, c + pair * kInt16Group, w + pair * kLine, acc);
      }
      for (; c < end; c += kInt16Group, w += kLine) multiply_pair(rows, c, w, acc);
    }
  }
}

#if defined(__AVX2__)
// Computes V vectors of a panel for all full tiles of the block's pixels, while the weights of the next panels are
// prefetched. Returns the number of pixels computed.
template <int R, int V, OutputPath W>
__attribute__((noinline)) int strip(const Int16Problem& problem, const RowOffsets& at, int count, int panel,
                                    int last_panel) {
  const Int16Problem p = problem;  // a local copy: stores may alias the argument
  const PanelWindow window = p.windows[panel];
  const int64_t numbers = p.kernel_h * p.kernel_w * window.groups * kInt8Panel * kInt16Group;
  const int64_t fetch_calls = p.kernel_h * p.kernel_w * (window.groups / kPairsAtOnce);
  NextPanel next(p.weights + window.weights + numbers, panel + 1 < last_panel ? 2 * numbers : 0,
                 count / R * fetch_calls);
  int i = 0;
  for (; i + R <= count; i += R) {
    vi acc[R][V];
    multiply<R, V>(p, at, i, panel, next, acc);
    requantize_whole_panel<R, V, W>(p.to, acc, at, i, panel * kInt8Panel);
  }
  return i;
}

// Computes the full tiles of a whole panel, or of half a panel. Returns the number of pixels computed.
int whole_tiles(const Int16Problem& p, const RowOffsets& at, int count, int panel, int last_panel) {
  const int remaining = whole_columns(p.to) - panel * kInt8Panel;
  int done = 0;
  dispatch_output_path(p.to, [&](auto constant) {
    if (remaining >= kInt8Panel) {
      done = strip<kMaxTileRows, kVectors, constant.value>(p, at, count, panel, last_panel);
    } else if constexpr (kVectors == 2) {
      if (remaining == kLanes) done = strip<8, 1, constant.value>(p, at, count, panel, last_panel);
    }
  });
  return done;
}
#else
int whole_tiles(const Int16Problem&, const RowOffsets&, int, int, int) { return 0; }
#endif

// Computes the last pixels, or a partial panel: at most R pixels at a time.
template <int R = kMaxTileRows>
TW_INLINE void last_rows(const Int16Problem& p, const RowOffsets& at, int first, int64_t row, int panel, int count) {
  if constexpr (R > 0) {
    if (count != R) return last_rows<R - 1>(p, at, first, row, panel, count);
    vi acc[R][kVectors];
    NextPanel none;
    multiply<R, kVectors>(p, at, first, panel, none, acc);
    requantize_tile<R, 1>(p.to, acc, at, first, row, panel);
  }
}

// Computes pixels [first, last) block by block, and each block panel by panel.
void rows(const Int16Problem& problem, int64_t first, int64_t last, int first_panel, int last_panel) {
  RowOffsets at;
  Int16Problem p = problem;
  const bool deferred = defers_activation(problem.to);
  if (deferred) p.to.int16_stage = without_activation(problem.to.int16_stage);
  for (int64_t row = first; row < last; row += kBlock) {
    const int count = last - row < kBlock ? static_cast<int>(last - row) : kBlock;
    fill_offsets(p.to, row, count, at);
    for (int panel = first_panel; panel < last_panel; ++panel) {
      for (int i = whole_tiles(p, at, count, panel, last_panel); i < count; i += kMaxTileRows) {
        last_rows(p, at, i, row + i, panel, count - i < kMaxTileRows ? count - i : kMaxTileRows);
      }
      const int column = panel * kInt8Panel,
                end = p.to.columns - column < kInt8Panel ? p.to.columns : column + kInt8Panel;
      if (deferred) apply_activation(problem.to, at, count, column, end);
    }
  }
}

}  // namespace
}  // namespace TW_ISA
}  // namespace tw
