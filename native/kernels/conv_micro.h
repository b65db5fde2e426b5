// The micro-kernel of convolution: a register tile of up to kMaxRows rows (pixels, Winograd tiles or weight positions)
// by one or two vectors of output channels. Unlike the micro-kernel of matrix multiplication, its k runs in segments
// (one per filter row), and its rows are read in place, at a stride.
#pragma once

#include "kernels/activation.h"

namespace tw {
namespace TW_ISA {
namespace {

// AVX-512 has 32 vector registers, others 16. kMaxRows x kPanelVectors accumulators, two vectors of B and one broadcast
// fit them.
#if defined(__AVX512F__)
constexpr int kMaxRows = 14;  // definition
#else
constexpr int kMaxRows = 6;  // definition
#endif
constexpr int kPanelVectors = 2;  // definition: vectors of output channels of a register tile

// The epilogue of a tile with an NHWC result. Pointers are to its first row and vector.
struct TileEpilogue {
  const float* bias;      // whole vectors, or null
  const float* residual;  // or null
  int64_t residual_row;
  ConvActivation activation;
  int64_t channels;  // channels of the result from the first vector on; lanes past them are not written
};

// Applies the epilogue to a tile at `from` and stores it to c. `f` is passed by value: a store could change the target
// of a reference.
template <ConvActivation::Kind kind>
void apply_epilogue_rows(const float* from, int64_t rows, int64_t vectors, const TileEpilogue f, float* c,
                         int64_t c_row) {
  for (int64_t v = 0; v < vectors; ++v, from += kLanes, c += kLanes) {
    const vf bias = f.bias == nullptr ? vf{} : load(f.bias + v * kLanes);
    const float* residual = f.residual == nullptr ? nullptr : f.residual + v * kLanes;
    const int64_t remaining = f.channels - v * kLanes, step = vectors * kLanes;
    if (remaining < kLanes) {
      const int lanes = static_cast<int>(remaining);
      for (int64_t m = 0; m < rows; ++m) {
        vf sum = load(from + m * step) + bias;
        if (residual != nullptr) sum += load_first(residual + m * f.residual_row, lanes);
        store_first(c + m * c_row, activate<kind>(sum, f.activation.slope), lanes);
      }
    } else if (residual != nullptr) {
      for (int64_t m = 0; m < rows; ++m)
        store(c + m * c_row,
              activate<kind>(load(from + m * step) + bias + load(residual + m * f.residual_row), f.activation.slope));
    } else {
      for (int64_t m = 0; m < rows; ++m)
        store(c + m * c_row, activate<kind>(load(from + m * step) + bias, f.activation.slope));
    }
  }
}

// Applies the epilogue to a tile of `rows` by `vectors`, contiguous in memory, and stores it to c.
__attribute__((noinline)) inline void store_tile(const float* from, int64_t rows, int64_t vectors,
                                                 const TileEpilogue& f, float* c, int64_t c_row) {
  with_activation(f.activation, [&](auto kind) { apply_epilogue_rows<kind.value>(from, rows, vectors, f, c, c_row); });
}

// C[m][...] (+)= sum over segments g < segments and k < length of A[m * a_row + g * a_segment + k * a_k] * B[...]. The
// vectors of B for consecutive k are `b_k` floats apart, and a segment of B starts `b_segment` after the one before. If
// `run` > 1, segments come in runs: a run starts every a_segment, and the segments within a run are a_step apart.
struct MicroArgs {
  const float* a;
  int64_t a_row, a_segment, a_k;
  const float* b;
  int64_t b_segment, b_k;
  int64_t segments, length;
  float* c;
  int64_t c_row;
  bool accumulate;
  int64_t run = 1, a_step = 0;
  const TileEpilogue* epilogue = nullptr;  // set if c is the final result
  const char* ahead = nullptr;             // address to prefetch, advanced by ahead_step bytes per k
  int64_t ahead_step = 0;
};

// Rows are addressed from one pointer per three rows, as in gemm_micro.h. Hiding how the pointers are related keeps the
// compiler from creating one per row.
constexpr int kRowsPerPointer = 3;  // hardware: index scales of 0, 1 and 2

// Returns whether the epilogue is applied in registers: full vectors, and an activation that only clips.
TW_INLINE bool clips(const TileEpilogue& f, int64_t vectors) {
  const ConvActivation a = f.activation;
  return f.channels >= vectors * kLanes &&
         (a == ConvActivation::none || a == ConvActivation::relu || a == ConvActivation::relu6);
}

// Applies an epilogue that `clips` to the accumulators and stores them.
template <int Rows, int Vectors>
TW_INLINE void store_clipped_tile(const vf (&acc)[Rows][Vectors], const TileEpilogue& f, float* c, int64_t c_row) {
  const bool plain = f.activation == ConvActivation::none;
  const vf high = splat(f.activation == ConvActivation::relu6 ? 6.0f : __builtin_inff());
  vf bias[Vectors];
#pragma GCC unroll 2
  for (int v = 0; v < Vectors; ++v) bias[v] = f.bias == nullptr ? vf{} : load(f.bias + v * kLanes);
#pragma GCC unroll 14
  for (int m = 0; m < Rows; ++m) {
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) {
      vf sum = acc[m][v] + bias[v];
      if (f.residual != nullptr) sum += load(f.residual + m * f.residual_row + v * kLanes);
      store(c + m * c_row + v * kLanes, plain ? sum : vmin(high, vmax(vf{}, sum)));
    }
  }
}

// Prefetches the residual and the destination while the tile is computed.
template <int Rows>
TW_INLINE void fetch_result(const MicroArgs& s) {
#pragma GCC unroll 14
  for (int m = 0; m < Rows; ++m) __builtin_prefetch(s.c + m * s.c_row, 1);
  if (s.epilogue->residual == nullptr) return;
#pragma GCC unroll 14
  for (int m = 0; m < Rows; ++m) __builtin_prefetch(s.epilogue->residual + m * s.epilogue->residual_row);
}

// The micro-kernel. Contiguous: k has unit stride in A, and the vectors of B follow each other. Ahead: prefetches.
template <int Rows, int Vectors, bool Contiguous, bool Ahead = false>
void micro(const MicroArgs& s) {
  constexpr int kPointers = (Rows + kRowsPerPointer - 1) / kRowsPerPointer;
  vf acc[Rows][Vectors] = {};
  if (s.epilogue != nullptr) fetch_result<Rows>(s);
  const int64_t a_row = s.a_row * 4, a_k = Contiguous ? 4 : s.a_k * 4, b_k = Contiguous ? Vectors * kLanes : s.b_k;
  const float *run_start = s.a, *segment = s.a;
  int64_t left_in_run = s.run;
  [[maybe_unused]] const char* ahead = s.ahead;
  for (int64_t g = 0; g < s.segments; ++g) {
    const char* a[kPointers];
#pragma GCC unroll 5
    for (int i = 0; i < kPointers; ++i) {
      a[i] = reinterpret_cast<const char*>(segment) + i * kRowsPerPointer * a_row;
      asm("" : "+r"(a[i]));
    }
    if (--left_in_run > 0) {
      segment += s.a_step;
    } else {
      segment = run_start += s.a_segment;
      left_in_run = s.run;
    }
    const float* b = s.b + g * s.b_segment;
#pragma GCC unroll 1
    for (int64_t k = s.length; k > 0; --k) {
      vf w[Vectors];
      if constexpr (Ahead) {
        __builtin_prefetch(ahead);
        ahead += s.ahead_step;
      }
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) w[v] = load(b + v * kLanes);
#pragma GCC unroll 14
      for (int m = 0; m < Rows; ++m) {
        float x;
        std::memcpy(&x, a[m / kRowsPerPointer] + m % kRowsPerPointer * a_row, sizeof x);
#pragma GCC unroll 2
        for (int v = 0; v < Vectors; ++v) acc[m][v] += splat(x) * w[v];
      }
#pragma GCC unroll 5
      for (int i = 0; i < kPointers; ++i) a[i] += a_k;
      b += b_k;
    }
  }
  if (s.epilogue != nullptr) {
    if (clips(*s.epilogue, Vectors)) return store_clipped_tile<Rows, Vectors>(acc, *s.epilogue, s.c, s.c_row);
    float tile[Rows * Vectors * kLanes];
#pragma GCC unroll 14
    for (int m = 0; m < Rows; ++m) {
#pragma GCC unroll 2
      for (int v = 0; v < Vectors; ++v) store(tile + (m * Vectors + v) * kLanes, acc[m][v]);
    }
    return store_tile(tile, Rows, Vectors, *s.epilogue, s.c, s.c_row);
  }
#pragma GCC unroll 14
  for (int m = 0; m < Rows; ++m) {
#pragma GCC unroll 2
    for (int v = 0; v < Vectors; ++v) {
      float* c = s.c + m * s.c_row + v * kLanes;
      store(c, s.accumulate ? acc[m][v] + load(c) : acc[m][v]);
    }
  }
}

using MicroFn = void (*)(const MicroArgs&);

template <int Vectors, bool Contiguous, bool Ahead = false>
inline MicroFn micro_rows(int64_t rows) {
#define TW_ROWS(n) micro<(n <= kMaxRows ? n : 1), Vectors, Contiguous, Ahead>
  static constexpr MicroFn table[] = {TW_ROWS(1),  TW_ROWS(2),  TW_ROWS(3),  TW_ROWS(4), TW_ROWS(5),
                                      TW_ROWS(6),  TW_ROWS(7),  TW_ROWS(8),  TW_ROWS(9), TW_ROWS(10),
                                      TW_ROWS(11), TW_ROWS(12), TW_ROWS(13), TW_ROWS(14)};
#undef TW_ROWS
  return table[rows - 1];
}

template <bool Contiguous>
inline MicroFn pick_micro(int64_t rows, int64_t vectors) {
  return vectors == 2 ? micro_rows<2, Contiguous>(rows) : micro_rows<1, Contiguous>(rows);
}

// Multiplies by a panel of packed weights, which is kPanelVectors wide (the last of an odd number, one). A register
// tile of a single vector passes over a wide panel twice, at a stride.
inline void run_panel(const MicroArgs& args, int64_t rows, int64_t panel_vectors, int64_t tile_vectors) {
  if (args.ahead != nullptr && tile_vectors >= panel_vectors && panel_vectors == 2)
    return micro_rows<2, true, true>(rows)(args);
  if (tile_vectors >= panel_vectors) return pick_micro<true>(rows, panel_vectors)(args);
  MicroArgs one = args;
  one.a_k = 1;
  one.b_k = panel_vectors * kLanes;
  for (int64_t v = 0; v < panel_vectors; ++v, one.b += kLanes, one.c += kLanes) micro_rows<1, false>(rows)(one);
}

}  // namespace
}  // namespace TW_ISA
}  // namespace tw
