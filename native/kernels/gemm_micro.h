// The micro-kernel of matrix multiplication: an MR x (NV vectors) tile of C stays in registers while the loop over k
// runs. One template gives every register tile of every instruction set. The caller looks the tile up in a table by its
// size, so the last rows of a matrix get a smaller tile instead of padding.
//
// A is read one element at a time (broadcast) through two strides, so packed, row-major and transposed A share the
// code. B is read by vectors, with unit stride across columns and any stride between rows, so packed panels and
// row-major B share it too. Columns past the last are masked.
//
// The order of the sum over k does not depend on the tile; neither do the results.
#pragma once

#include "common/simd.h"

namespace tw {
namespace TW_ISA {

constexpr int kMaxVectors = 4;     // definition: widest register tile, in vectors
constexpr int kPrefetchStep = 16;  // hardware: floats in a cache line

// The tallest tile of NV vectors: its accumulators, NV vectors of B and one broadcast of A fit the register file.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kMaxRows[kMaxVectors + 1] = {0, 14, 14, 9, 6};
#else
constexpr int kMaxRows[kMaxVectors + 1] = {0, 12, 6, 4, 2};
#endif

// C[0:MR, 0:columns] = (accumulate ? C : 0) + A * B, where the last of the NV vectors has `last_lanes` columns.
struct MicroArgs {
  int64_t k;
  const float* a;
  int64_t a_row, a_col;  // a[i, p] is a[i * a_row + p * a_col]
  const float* b;
  int64_t b_row;  // b[p, j] is b[p * b_row + j]
  float* c;
  int64_t c_row;
  int last_lanes;  // 1 ... kLanes
  bool accumulate;
  const float* prefetch;  // packed A only: one cache line from here on is prefetched per step of k
  // Strided A only: the distance, in rows of B, of prefetches of B; 0 if B is in a near cache already.
  int64_t fetch_ahead = 0;
};
using MicroKernel = void (*)(const MicroArgs&);

// Rows of A are addressed from one pointer per three rows: pointer, pointer + stride, pointer + 2 * stride are
// addressing modes, and the pointers of 14 rows fit the general registers. Hiding how the pointers are related (the
// empty asm below) keeps the compiler from creating one per row.
constexpr int kRowsPerPointer = 3;  // hardware: index scales of 0, 1 and 2

// The last vector of a row of B, where columns end. Each instruction set has two kinds of micro-kernel for it,
// `Special` or not:
//   AVX-512: masked to any length (masks cost nothing); special: at most 8 columns, in 256-bit registers, because a
//   core
// that splits 512-bit operations in two multiplies them twice as fast.
//   others: a whole vector, part of which is not stored; special: masked, which is slower and only for a B that may not
// be read past its end.
#if defined(__AVX512F__)
typedef float vlast_half __attribute__((vector_size(32)));
template <bool Special>
struct LastVector {
  using type = vf;
  static TW_INLINE vf load_b(const float* p, int lanes) { return load_first(p, lanes); }
  static TW_INLINE vf broadcast(vf a) { return a; }
  static TW_INLINE vf broadcast_from(const float* a) { return splat(*a); }
  static TW_INLINE void add_to(float* p, vf v, int lanes, bool accumulate) {
    if (lanes == kLanes) {
      store(p, accumulate ? v + load(p) : v);
    } else {
      store_first(p, accumulate ? v + load_first(p, lanes) : v, lanes);
    }
  }
};
template <>
struct LastVector<true> {
  using type = vlast_half;
  static TW_INLINE type load_b(const float* p, int lanes) {
    return (type)_mm256_maskz_loadu_ps(static_cast<__mmask8>((1u << lanes) - 1u), p);
  }
  static TW_INLINE type broadcast(vf a) { return __builtin_shufflevector(a, a, 0, 1, 2, 3, 4, 5, 6, 7); }
  static TW_INLINE type broadcast_from(const float* a) { return *a - type{}; }
  static TW_INLINE void add_to(float* p, type v, int lanes, bool accumulate) {
    const __mmask8 mask = static_cast<__mmask8>((1u << lanes) - 1u);
    if (accumulate) v += (type)_mm256_maskz_loadu_ps(mask, p);
    _mm256_mask_storeu_ps(p, mask, (__m256)v);
  }
};
TW_INLINE bool wants_special(int lanes, bool) { return lanes <= kLanes / 2; }
constexpr bool kAnyLanes = false;  // the kind that accepts any number of lanes and does not read past them
#else
template <bool Special>
struct LastVector {
  using type = vf;
  static TW_INLINE vf load_b(const float* p, int lanes) { return Special ? load_first(p, lanes) : load(p); }
  static TW_INLINE vf broadcast(vf a) { return a; }
  static TW_INLINE vf broadcast_from(const float* a) { return splat(*a); }
  static TW_INLINE void add_to(float* p, vf v, int lanes, bool accumulate) {
    if (lanes == kLanes) {
      store(p, accumulate ? v + load(p) : v);
    } else {
      store_first(p, accumulate ? v + load_first(p, lanes) : v, lanes);
    }
  }
};
TW_INLINE bool wants_special(int lanes, bool readable) { return lanes < kLanes && !readable; }
constexpr bool kAnyLanes = true;
#endif

// The accumulators of a tile: NV - 1 whole vectors per row and the last one.
template <int MR, int NV, bool Special>
struct Tile {
  using Last = LastVector<Special>;
  vf acc[MR][NV];  // the last column is unused: `last` replaces it
  typename Last::type last[MR];
};

// One row of B in registers, and its product with an element of A.
template <int MR, int NV, bool Special>
struct StepB {
  using Last = LastVector<Special>;
  vf b[NV];
  typename Last::type last;
  TW_INLINE StepB(const float* from, int lanes) {
#pragma GCC unroll 4
    for (int j = 0; j < NV - 1; ++j) b[j] = load_once(from + j * kLanes);
    last = Last::load_b(from + (NV - 1) * kLanes, lanes);
  }
  TW_INLINE void times(const float* at, int i, Tile<MR, NV, Special>& t) const {
    if constexpr (NV == 1) {  // perhaps half a vector: a full broadcast would load twice as much
      t.last[i] += Last::broadcast_from(at) * last;
      return;
    }
    const vf a = splat(*at);
#pragma GCC unroll 4
    for (int j = 0; j < NV - 1; ++j) t.acc[i][j] += a * b[j];
    t.last[i] += Last::broadcast(a) * last;
  }
};

// The loop over k with packed A: MR contiguous elements per step.
template <int MR, int NV, bool Special>
TW_INLINE void multiply_packed(const MicroArgs& args, Tile<MR, NV, Special>& tile) {
  const float *a = args.a, *b = args.b, *ahead = args.prefetch;
  const int64_t b_row = args.b_row;
#pragma GCC unroll 1
  for (int64_t p = args.k; p > 0; --p) {
    const StepB<MR, NV, Special> step(b, args.last_lanes);
    __builtin_prefetch(ahead);
#pragma GCC unroll 14
    for (int i = 0; i < MR; ++i) step.times(a + i, i, tile);
    a += MR;
    b += b_row;
    ahead += kPrefetchStep;
  }
}

// How many rows of B to prefetch ahead: the hardware prefetcher does not recognize runs this short, one row apart, as
// one stream. Rows that are a multiple of 4 KiB apart share one set of L1, which must hold all of them until they are
// used.
constexpr int64_t kRowsAhead = 8, kCollidingAhead = 3;  // chosen
TW_INLINE int64_t rows_ahead(int64_t row) { return row % 1024 == 0 ? kCollidingAhead : kRowsAhead; }

// Prefetches NV vectors of a row of B, which may start anywhere within a cache line.
template <int NV>
TW_INLINE void fetch_row(const float* row) {
#pragma GCC unroll 4
  for (int j = 0; j < NV * kLanes; j += kPrefetchStep) __builtin_prefetch(row + j);
  __builtin_prefetch(row + NV * kLanes - 1);
}

// The loop over k with unpacked A, row-major or transposed.
template <bool FetchB, int MR, int NV, bool Special>
TW_INLINE void multiply_strided(const MicroArgs& args, Tile<MR, NV, Special>& tile) {
  constexpr int kPointers = (MR + kRowsPerPointer - 1) / kRowsPerPointer;
  const char* a[kPointers];
  const int64_t row_bytes = args.a_row * 4, col_bytes = args.a_col * 4, b_row = args.b_row;
#pragma GCC unroll 5
  for (int g = 0; g < kPointers; ++g) {
    a[g] = reinterpret_cast<const char*>(args.a) + g * kRowsPerPointer * row_bytes;
    asm("" : "+r"(a[g]));
  }
  const float* b = args.b;
  const int64_t ahead = args.fetch_ahead * b_row;
#pragma GCC unroll 1
  for (int64_t p = args.k; p > 0; --p) {
    const StepB<MR, NV, Special> step(b, args.last_lanes);
    if (FetchB) fetch_row<NV>(b + ahead);
#pragma GCC unroll 14
    for (int i = 0; i < MR; ++i) {
      const char* at = a[i / kRowsPerPointer] + (i % kRowsPerPointer) * row_bytes;
      step.times(reinterpret_cast<const float*>(at), i, tile);
    }
#pragma GCC unroll 5
    for (int g = 0; g < kPointers; ++g) a[g] += col_bytes;
    b += b_row;
  }
}

// From this many steps of k on, the tile's part of C is prefetched: it is written (and, past the first block of k,
// added to) at the end, when another block of rows has often evicted it from L1.
constexpr int64_t kFetchSteps = 64;  // chosen

// Prefetches the tile of C for writing, if the product is long enough to hide the latency.
template <int MR, int NV>
TW_INLINE void fetch_result(const MicroArgs& args) {
  if (args.k < kFetchSteps) return;
  const float* c = args.c;
#pragma GCC unroll 14
  for (int i = 0; i < MR; ++i, c += args.c_row) {
#pragma GCC unroll 4
    for (int j = 0; j < NV * kLanes; j += kPrefetchStep) __builtin_prefetch(c + j, 1);
    __builtin_prefetch(c + NV * kLanes - 1, 1);  // rows rarely start on a cache line
  }
}

// Stores the tile to C, or adds it.
template <bool Accumulate, int MR, int NV, bool Special>
TW_INLINE void store_tile(const MicroArgs& args, const Tile<MR, NV, Special>& tile) {
  float* c = args.c;
#pragma GCC unroll 14
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV - 1; ++j) {
      float* at = c + j * kLanes;
      store(at, Accumulate ? tile.acc[i][j] + load(at) : tile.acc[i][j]);
    }
    LastVector<Special>::add_to(c + (NV - 1) * kLanes, tile.last[i], args.last_lanes, Accumulate);
    c += args.c_row;
  }
}

// Computes a register tile of MR rows by NV vectors of C (+)= A B.
template <int MR, int NV, bool Special, bool PackedA>
void micro_kernel(const MicroArgs& args) {
  fetch_result<MR, NV>(args);
  Tile<MR, NV, Special> tile = {};
  if (PackedA) {
    multiply_packed<MR, NV, Special>(args, tile);
  } else {
    args.fetch_ahead > 0 ? multiply_strided<true>(args, tile) : multiply_strided<false>(args, tile);
  }
  args.accumulate ? store_tile<true>(args, tile) : store_tile<false>(args, tile);
}

template <int MR, int NV, bool Special, bool PackedA>
constexpr MicroKernel micro_or_null() {
  if constexpr (MR <= kMaxRows[NV]) {
    return micro_kernel<MR, NV, Special, PackedA>;
  } else {
    return nullptr;
  }
}

// Micro-kernels by size: at[NV - 1][MR - 1], null for more than kMaxRows[NV] rows.
struct MicroTable {
  MicroKernel at[kMaxVectors][14];
};

#define TW_MICRO_ROW(NV, Special, PackedA)                                               \
  {micro_or_null<1, NV, Special, PackedA>(),  micro_or_null<2, NV, Special, PackedA>(),  \
   micro_or_null<3, NV, Special, PackedA>(),  micro_or_null<4, NV, Special, PackedA>(),  \
   micro_or_null<5, NV, Special, PackedA>(),  micro_or_null<6, NV, Special, PackedA>(),  \
   micro_or_null<7, NV, Special, PackedA>(),  micro_or_null<8, NV, Special, PackedA>(),  \
   micro_or_null<9, NV, Special, PackedA>(),  micro_or_null<10, NV, Special, PackedA>(), \
   micro_or_null<11, NV, Special, PackedA>(), micro_or_null<12, NV, Special, PackedA>(), \
   micro_or_null<13, NV, Special, PackedA>(), micro_or_null<14, NV, Special, PackedA>()}

#define TW_MICRO_TABLE(Special, PackedA)                                                                       \
  {                                                                                                            \
    {                                                                                                          \
      TW_MICRO_ROW(1, Special, PackedA), TW_MICRO_ROW(2, Special, PackedA), TW_MICRO_ROW(3, Special, PackedA), \
          TW_MICRO_ROW(4, Special, PackedA)                                                                    \
    }                                                                                                          \
  }

}  // namespace TW_ISA
}  // namespace tw
