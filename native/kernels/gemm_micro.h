// The micro-kernel: an MR x (NV vectors) tile of C held in registers while k runs. One template gives every register
// tile of every instruction set; the caller looks the size it needs up in a table, so the last rows of a matrix get a
// smaller tile of their own instead of padding. A is read one element at a time (broadcast) through two strides: packed,
// row-major and transposed A are the same code. B is read a vector at a time with unit stride across columns and any
// stride between rows: packed panels and row-major B are the same code too. Columns past the last are masked.
//
// The order of the sum over k does not depend on the tile, so neither do the results.
#pragma once

#include "common/simd.h"

namespace tw {
namespace TW_ISA {

constexpr int kMaxVectors = 4;     // widest register tile, in vectors
constexpr int kPrefetchStep = 16;  // floats in a cache line

// Rows that fit in the register file beside NV vectors of B and one broadcast of A.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kMaxRows[kMaxVectors + 1] = {0, 14, 14, 9, 6};
#else
constexpr int kMaxRows[kMaxVectors + 1] = {0, 12, 6, 4, 2};
#endif

// C[0:MR, 0:columns] = (accumulate ? C : 0) + A * B, where the tile has NV vectors and `last_lanes` of the last count.
struct MicroArgs {
  int64_t k;
  const float* a;
  int64_t a_row, a_col;  // a[i, p] is a[i * a_row + p * a_col]
  const float* b;
  int64_t b_row;  // b[p, j] is b[p * b_row + j]
  float* c;
  int64_t c_row;
  int last_lanes;   // 1 ... kLanes
  bool accumulate;
  const float* prefetch;  // packed A only: read soon after this tile; one cache line is fetched a step
};
using MicroKernel = void (*)(const MicroArgs&);

// Rows of A are reached from one pointer for every three rows plus one stride: that is as many addresses as fit into the
// general registers beside the loop's own. Hiding how the pointers are related keeps the compiler from making fourteen.
constexpr int kRowsPerPointer = 3;

template <int MR, int NV, bool Masked>
TW_INLINE void load_b(const float* b, int lanes, vf* out) {
#pragma GCC unroll 4
  for (int j = 0; j < NV - 1; ++j) out[j] = load(b + j * kLanes);
  const float* last = b + (NV - 1) * kLanes;
  out[NV - 1] = Masked ? load_first(last, lanes) : load(last);
}

template <int MR, int NV, bool Masked>
TW_INLINE void multiply_packed(const MicroArgs& args, vf (&acc)[MR][NV]) {
  const float *a = args.a, *b = args.b, *ahead = args.prefetch;
  const int64_t b_row = args.b_row;
#pragma GCC unroll 1
  for (int64_t p = args.k; p > 0; --p) {
    vf bv[NV];
    load_b<MR, NV, Masked>(b, args.last_lanes, bv);
    __builtin_prefetch(ahead);
#pragma GCC unroll 14
    for (int i = 0; i < MR; ++i) {
      const vf ai = splat(a[i]);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) acc[i][j] += ai * bv[j];
    }
    a += MR;
    b += b_row;
    ahead += kPrefetchStep;
  }
}

template <int MR, int NV, bool Masked>
TW_INLINE void multiply_strided(const MicroArgs& args, vf (&acc)[MR][NV]) {
  constexpr int kPointers = (MR + kRowsPerPointer - 1) / kRowsPerPointer;
  const char* a[kPointers];
  const int64_t row_bytes = args.a_row * 4, col_bytes = args.a_col * 4, b_row = args.b_row;
#pragma GCC unroll 5
  for (int g = 0; g < kPointers; ++g) {
    a[g] = reinterpret_cast<const char*>(args.a) + g * kRowsPerPointer * row_bytes;
    asm("" : "+r"(a[g]));
  }
  const float* b = args.b;
#pragma GCC unroll 1
  for (int64_t p = args.k; p > 0; --p) {
    vf bv[NV];
    load_b<MR, NV, Masked>(b, args.last_lanes, bv);
#pragma GCC unroll 14
    for (int i = 0; i < MR; ++i) {
      const char* at = a[i / kRowsPerPointer] + (i % kRowsPerPointer) * row_bytes;
      const vf ai = splat(*reinterpret_cast<const float*>(at));
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) acc[i][j] += ai * bv[j];
    }
#pragma GCC unroll 5
    for (int g = 0; g < kPointers; ++g) a[g] += col_bytes;
    b += b_row;
  }
}

template <int MR, int NV, bool Accumulate, bool Partial>
TW_INLINE void store_tile(const MicroArgs& args, vf (&acc)[MR][NV]) {
  float* c = args.c;
  const int lanes = args.last_lanes;
#pragma GCC unroll 14
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < NV; ++j) {
      float* at = c + j * kLanes;
      vf v = acc[i][j];
      if (Partial && j == NV - 1) {
        if (Accumulate) v += load_first(at, lanes);
        store_first(at, v, lanes);
      } else {
        if (Accumulate) v += load(at);
        store(at, v);
      }
    }
    c += args.c_row;
  }
}

// Masked: the last vector of a row of B may not be read in full. (With AVX-512 a mask costs nothing, so all are.)
template <int MR, int NV, bool Masked, bool PackedA>
void micro_kernel(const MicroArgs& args) {
  vf acc[MR][NV] = {};
  if (PackedA) {
    multiply_packed<MR, NV, Masked>(args, acc);
  } else {
    multiply_strided<MR, NV, Masked>(args, acc);
  }
  if (args.last_lanes == kLanes) {
    args.accumulate ? store_tile<MR, NV, true, false>(args, acc) : store_tile<MR, NV, false, false>(args, acc);
  } else {
    args.accumulate ? store_tile<MR, NV, true, true>(args, acc) : store_tile<MR, NV, false, true>(args, acc);
  }
}

#if defined(__AVX512F__)
constexpr bool kMaskIsFree = true;
#else
constexpr bool kMaskIsFree = false;
#endif

template <int MR, int NV, bool Masked, bool PackedA>
constexpr MicroKernel micro_or_null() {
  if constexpr (MR <= kMaxRows[NV]) {
    return micro_kernel<MR, NV, Masked || kMaskIsFree, PackedA>;
  } else {
    return nullptr;
  }
}

// kernels.at[NV - 1][MR - 1], null past kMaxRows[NV].
struct MicroTable {
  MicroKernel at[kMaxVectors][14];
};

#define TW_MICRO_ROW(NV, Masked, PackedA)                                                                            \
  {micro_or_null<1, NV, Masked, PackedA>(),  micro_or_null<2, NV, Masked, PackedA>(),                                 \
   micro_or_null<3, NV, Masked, PackedA>(),  micro_or_null<4, NV, Masked, PackedA>(),                                 \
   micro_or_null<5, NV, Masked, PackedA>(),  micro_or_null<6, NV, Masked, PackedA>(),                                 \
   micro_or_null<7, NV, Masked, PackedA>(),  micro_or_null<8, NV, Masked, PackedA>(),                                 \
   micro_or_null<9, NV, Masked, PackedA>(),  micro_or_null<10, NV, Masked, PackedA>(),                                \
   micro_or_null<11, NV, Masked, PackedA>(), micro_or_null<12, NV, Masked, PackedA>(),                                \
   micro_or_null<13, NV, Masked, PackedA>(), micro_or_null<14, NV, Masked, PackedA>()}

#define TW_MICRO_TABLE(Masked, PackedA)                                                                              \
  {{TW_MICRO_ROW(1, Masked, PackedA), TW_MICRO_ROW(2, Masked, PackedA), TW_MICRO_ROW(3, Masked, PackedA),             \
    TW_MICRO_ROW(4, Masked, PackedA)}}

}  // namespace TW_ISA
}  // namespace tw
