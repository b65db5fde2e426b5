// Layers on numbers of 16 bits (kernels/int16.h): products of pixels and panels of weights, and results that are bent
// after they are stored. For int16.cpp, compiled with -ffp-contract=off.
#pragma once

#include "kernels/ahead.h"
#include "kernels/int16.h"
#include "kernels/int8_sums.h"

namespace tw {
namespace TW_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kTallest = 12;  // pixels of a register tile, by a panel
#elif defined(__AVX2__)
constexpr int kTallest = 6;
#else
constexpr int kTallest = 2;
#endif
constexpr int kBlock = 96;  // pixels that all panels are multiplied with in turn: a multiple of every kTallest

TW_INLINE vi load_lanes(const int32_t* p) {
  vi v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

TW_INLINE vf as_floats(vi v) { return __builtin_convertvector(v, vf); }

// acc + the sums of the products of neighbouring 16-bit numbers, of a lane two.
TW_INLINE vi add_products(vi acc, vi a, vi w) {
#if defined(__AVX512F__)
  asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(w));
  return acc;
#elif defined(__AVX2__)
  acc += (vi)_mm256_madd_epi16((__m256i)a, (__m256i)w);
  asm("" : "+x"(acc));  // left to itself, the compiler adds products to each other first, and keeps them on the stack
  return acc;
#else
  return acc + ((a << 16) >> 16) * ((w << 16) >> 16) + (a >> 16) * (w >> 16);
#endif
}

#if defined(__AVX2__)
TW_INLINE __m256i load_sixteen(const int16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// Whether results are bent after they are stored, as whole numbers: one after the other by itself each waits for the
// one before.
bool bends_later(const Int8Problem& p) {
  return p.kind == Int8Out::int16 && p.wide.curve == Int16Activation::piecewise;
}

Int16Stage whole_numbers(const Int16Stage& bent) {
  Int16Stage whole;
  whole.low = -32767;
  whole.high = bent.pieces.most;
  return whole;
}

TW_INLINE void bend_sixteen(const Int16PiecewiseVectors& curve, int16_t* numbers) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(numbers), curve.pieces(load_sixteen(numbers)));
}

// Columns [first, last) of `count` pixels, sixteen of them at a time; those left over beside the result.
void bend(const Int8Problem& p, const RowOffsets& at, int count, int first, int last) {
  const Int16PiecewiseVectors curve(p.wide);
  int16_t* out = static_cast<int16_t*>(p.out);
  int c = first;
  for (; c + kInt8Panel <= last; c += kInt8Panel) {
    for (int i = 0; i < count; ++i) bend_sixteen(curve, out + at.out[i] + c);
  }
  for (int i = 0; c < last && i < count; ++i) {
    int16_t held[kInt8Panel] = {};
    std::memcpy(held, out + at.out[i] + c, 2 * (last - c));
    bend_sixteen(curve, held);
    std::memcpy(out + at.out[i] + c, held, 2 * (last - c));
  }
}
#else
bool bends_later(const Int8Problem&) { return false; }
Int16Stage whole_numbers(const Int16Stage& bent) { return bent; }
void bend(const Int8Problem&, const RowOffsets&, int, int, int) {}
#endif

constexpr int kPairsAtOnce = 4;  // of channels, between two looks ahead

// Two channels, `c` numbers from where the pixels begin, of V vectors of a panel for R pixels.
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

// V vectors of a panel for R pixels.
template <int R, int V>
TW_INLINE void multiply(const Int16Problem& p, const RowOffsets& at, int first, int panel, NextPanel& next,
                        vi (&acc)[R][V]) {
  constexpr int64_t kLine = kInt8Panel * kInt16Group;
  const Int16Window window = p.windows[panel];
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
      const int64_t end = c + kInt16Group * window.pairs;
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
// V vectors of a panel, finished by way W, for whole tiles of the block's pixels; how many pixels that are.
template <int R, int V, ByteWay W>
__attribute__((noinline)) int strip(const Int16Problem& given, const RowOffsets& at, int count, int panel,
                                    int last_panel) {
  const Int16Problem p = given;  // of its own: for all that is known, what is stored might be a part of `given`
  const Int16Window window = p.windows[panel];
  const int64_t numbers = p.kernel_h * p.kernel_w * window.pairs * kInt8Panel * kInt16Group;
  const int64_t parts = p.kernel_h * p.kernel_w * (window.pairs / kPairsAtOnce);
  NextPanel next(p.weights + window.weights + numbers, panel + 1 < last_panel ? 2 * numbers : 0, count / R * parts);
  int i = 0;
  for (; i + R <= count; i += R) {
    vi acc[R][V];
    multiply<R, V>(p, at, i, panel, next, acc);
    finish_whole<R, V, W>(p.to, acc, at, i, panel * kInt8Panel);
  }
  return i;
}

int whole_tiles(const Int16Problem& p, const RowOffsets& at, int count, int panel, int last_panel) {
  const int left = whole_columns(p.to) - panel * kInt8Panel;
  int done = 0;
  with_way(p.to, [&](auto known) {
    if (left >= kInt8Panel) {
      done = strip<kTallest, kVectors, known.value>(p, at, count, panel, last_panel);
    } else if constexpr (kVectors == 2) {
      if (left == kLanes) done = strip<8, 1, known.value>(p, at, count, panel, last_panel);
    }
  });
  return done;
}
#else
int whole_tiles(const Int16Problem&, const RowOffsets&, int, int, int) { return 0; }
#endif

template <int R = kTallest>
TW_INLINE void last_rows(const Int16Problem& p, const RowOffsets& at, int first, int64_t row, int panel, int count) {
  if constexpr (R > 0) {
    if (count != R) return last_rows<R - 1>(p, at, first, row, panel, count);
    vi acc[R][kVectors];
    NextPanel none;
    multiply<R, kVectors>(p, at, first, panel, none, acc);
    finish_tile<R, 1>(p.to, acc, at, first, row, panel);
  }
}

void rows(const Int16Problem& given, int64_t first, int64_t last, int first_panel, int last_panel) {
  RowOffsets at;
  Int16Problem p = given;
  const bool later = bends_later(given.to);
  if (later) p.to.wide = whole_numbers(given.to.wide);
  for (int64_t row = first; row < last; row += kBlock) {
    const int count = last - row < kBlock ? static_cast<int>(last - row) : kBlock;
    fill_offsets(p.to, row, count, at);
    for (int panel = first_panel; panel < last_panel; ++panel) {
      for (int i = whole_tiles(p, at, count, panel, last_panel); i < count; i += kTallest) {
        last_rows(p, at, i, row + i, panel, count - i < kTallest ? count - i : kTallest);
      }
      const int column = panel * kInt8Panel,
                end = p.to.columns - column < kInt8Panel ? p.to.columns : column + kInt8Panel;
      if (later) bend(given.to, at, count, column, end);
    }
  }
}

}  // namespace
}  // namespace TW_ISA
}  // namespace tw
