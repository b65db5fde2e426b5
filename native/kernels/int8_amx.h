// The integer product on AMX tiles: 16 rows by 16 columns of sums, 64 values of K at a time.
//
// A tile of weights is 16 groups of a packed panel as it lies in memory; a tile of activations is 16 rows, a fixed distance
// apart, of 64 bytes. Where the rows of the problem lie so (a product, most convolutions whose pixels hold whole tiles) they
// are read in place, else they are copied side by side first. Two by two tiles of sums share four loads, over at most
// kSlice values of K, so that the weights stay in the first-level cache for all rows of the block.
//
// The loops are written once for `Hardware` and for `Emulated`, which does in plain C++ what the instructions do: so the
// loops, the edges and the integers can be tested on any CPU with AVX-512.
#pragma once

#include "kernels/int8.h"
#include "kernels/int8_sums.h"

#if defined(__AVX512F__)

namespace tw {
namespace TW_ISA {

constexpr int kTileRows = 16, kTileBytes = 64;  // a tile is 16 rows of 64 bytes, of activations, weights and sums alike
constexpr int kTileSize = kTileRows * kTileBytes;

struct alignas(64) TilePalette {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {kTileBytes, kTileBytes, kTileBytes, kTileBytes, kTileBytes, kTileBytes, kTileBytes, kTileBytes};
  uint8_t rows[16] = {kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows};
};

#if defined(TW_AMX)
// Inline assembly, so that nothing else in this file may use the instructions. Tiles 0 to 3 are sums, 4 and 5 activations,
// 6 and 7 weights.
struct Hardware {
  Hardware() {
    const TilePalette palette;
    asm volatile("ldtilecfg %0" : : "m"(palette));
  }
  ~Hardware() { asm volatile("tilerelease"); }
  Hardware(const Hardware&) = delete;
  Hardware& operator=(const Hardware&) = delete;

  template <int T>
  TW_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(T));
  }
  template <int T>
  TW_INLINE void load(const void* from, int64_t step) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(step), "i"(T) : "memory");
  }
  template <int T>
  TW_INLINE void store(void* to, int64_t step) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(step), "i"(T) : "memory");
  }
  template <int C, int A, int B>
  TW_INLINE void dot() {  // unsigned by signed bytes
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
};
#endif

struct Emulated {
  uint8_t tiles[8][kTileSize];

  template <int T>
  void zero() {
    std::memset(tiles[T], 0, kTileSize);
  }
  template <int T>
  void load(const void* from, int64_t step) {
    for (int r = 0; r < kTileRows; ++r) {
      std::memcpy(tiles[T] + r * kTileBytes, static_cast<const uint8_t*>(from) + r * step, kTileBytes);
    }
  }
  template <int T>
  void store(void* to, int64_t step) {
    for (int r = 0; r < kTileRows; ++r) {
      std::memcpy(static_cast<uint8_t*>(to) + r * step, tiles[T] + r * kTileBytes, kTileBytes);
    }
  }
  template <int C, int A, int B>
  void dot() {
    int32_t sums[kTileRows * 16];
    std::memcpy(sums, tiles[C], kTileSize);
    for (int m = 0; m < kTileRows; ++m) {
      for (int k = 0; k < kTileBytes; ++k) {
        const int a = tiles[A][m * kTileBytes + k];
        const uint8_t* w = tiles[B] + k / 4 * kTileBytes + k % 4;
        for (int n = 0; n < 16; ++n) sums[m * 16 + n] += a * static_cast<int8_t>(w[4 * n]);
      }
    }
    std::memcpy(tiles[C], sums, kTileSize);
  }
};

// Sixteen rows of activations: chunk q of K at data + offsets[q], rows `step` bytes apart.
struct TileRows {
  const uint8_t* data;
  const int64_t* offsets;
  int64_t step;
};

constexpr int kTileBlock = 256;  // rows of a block: whole pairs of tiles
constexpr int kSlice = 16;       // chunks of K multiplied before the next rows have their turn

template <class Tiles>
class TileProduct {
 public:
  TileProduct(const Int8Problem& p, Tiles& tiles) : p_(p), tiles_(tiles) {
    const int64_t k = static_cast<int64_t>(p.runs) * p.groups_per_run * kInt8Group;
    chunks_ = (k + kTileBytes - 1) / kTileBytes;
    bytes_ = k;
  }

  // Working memory for one block; false when there is none.
  bool take_memory() {
    const int64_t sums = kTileBlock * 2 * kInt8Panel, offsets = 4 * chunks_;
    int32_t* block = int8_scratch(sums + offsets + 2 * kTileSize / 4 + kTileBlock * chunks_ * kTileBytes / 4 + 64);
    if (block == nullptr) return false;
    sums_ = block;
    last_weights_ = reinterpret_cast<int8_t*>(block + sums);
    copied_ = reinterpret_cast<uint8_t*>(last_weights_ + 2 * kTileSize);
    in_place_ = reinterpret_cast<int64_t*>(copied_ + kTileBlock * chunks_ * kTileBytes);
    side_by_side_ = in_place_ + chunks_;
    const int64_t per_run = p_.groups_per_run * kInt8Group / kTileBytes;
    for (int64_t q = 0; q < chunks_; ++q) {
      in_place_[q] = per_run == 0 ? 0 : q / per_run * p_.run_step + q % per_run * kTileBytes;
      side_by_side_[q] = q * kTileBytes;
    }
    return true;
  }

  // `count` rows (at most kTileBlock) whose offsets are given, by the panels [panel, last_panel).
  void block(const RowOffsets& at, int64_t row, int count, int panel, int last_panel) {
    TileRows rows[kTileBlock / kTileRows];
    const int groups = (count + kTileRows - 1) / kTileRows;
    for (int g = 0; g < groups; ++g) rows[g] = rows_of(at, g * kTileRows, count);
    for (; panel + 2 <= last_panel; panel += 2) panels<2>(rows, groups, at, row, count, panel);
    if (panel < last_panel) panels<1>(rows, groups, at, row, count, panel);
  }

 private:
  bool evenly_spaced(const RowOffsets& at, int first) const {
    const int64_t step = at.in[first + 1] - at.in[first];
    for (int i = 2; i < kTileRows; ++i) {
      if (at.in[first + i] - at.in[first + i - 1] != step) return false;
    }
    return true;
  }

  TileRows rows_of(const RowOffsets& at, int first, int count) {
    const int64_t run_bytes = static_cast<int64_t>(p_.groups_per_run) * kInt8Group;
    if (run_bytes % kTileBytes == 0 && first + kTileRows <= count && evenly_spaced(at, first)) {
      return {p_.in + at.in[first], in_place_, at.in[first + 1] - at.in[first]};
    }
    const int64_t step = chunks_ * kTileBytes;
    uint8_t* const to = copied_ + first * step;
    for (int r = 0; r < kTileRows && first + r < count; ++r) {  // rows that are not there hold anything: nobody reads their sums
      uint8_t* row = to + r * step;
      for (int run = 0; run < p_.runs; ++run, row += run_bytes) {
        std::memcpy(row, p_.in + at.in[first + r] + run * p_.run_step, run_bytes);
      }
      std::memset(row, 0, step - bytes_);
    }
    return {to, side_by_side_, step};
  }

  // The weights of chunk q of a panel: in place, or the last of them filled up with zeros.
  TW_INLINE const int8_t* weights_of(const int8_t* panel, int64_t q, int which) const {
    return q * kTileBytes + kTileBytes <= bytes_ ? panel + q * kTileSize : last_weights_ + which * kTileSize;
  }

  template <int N>
  void panels(const TileRows* rows, int groups, const RowOffsets& at, int64_t row, int count, int panel) {
    const int64_t panel_bytes = bytes_ * kInt8Panel;
    const int8_t* w[2] = {p_.weights + panel * panel_bytes, p_.weights + (panel + N - 1) * panel_bytes};
    const int64_t whole = bytes_ / kTileBytes * kTileSize;
    for (int n = 0; n < N && whole < panel_bytes; ++n) {
      std::memcpy(last_weights_ + n * kTileSize, w[n] + whole, panel_bytes - whole);
      std::memset(last_weights_ + n * kTileSize + (panel_bytes - whole), 0, kTileSize - (panel_bytes - whole));
    }
    for (int64_t q = 0; q < chunks_; q += kSlice) {
      const int64_t end = chunks_ - q < kSlice ? chunks_ : q + kSlice;
      int g = 0;
      for (; g + 2 <= groups; g += 2) multiply<2, N>(rows + g, w, q, end, sums_of(g));
      if (g < groups) multiply<1, N>(rows + g, w, q, end, sums_of(g));
    }
    finish_rows<N>(at, row, count, panel);
  }

  int32_t* sums_of(int group) { return sums_ + group * kTileRows * 2 * kInt8Panel; }

  template <int M, int N>
  void multiply(const TileRows* rows, const int8_t* const (&w)[2], int64_t q, int64_t end, int32_t* sums) {
    constexpr int64_t step = 2 * kInt8Panel * 4;
    int32_t* below = sums + kTileRows * 2 * kInt8Panel;
    if (q == 0) {
      tiles_.template zero<0>();
      if (N == 2) tiles_.template zero<1>();
      if (M == 2) tiles_.template zero<2>();
      if (M == 2 && N == 2) tiles_.template zero<3>();
    } else {
      tiles_.template load<0>(sums, step);
      if (N == 2) tiles_.template load<1>(sums + kInt8Panel, step);
      if (M == 2) tiles_.template load<2>(below, step);
      if (M == 2 && N == 2) tiles_.template load<3>(below + kInt8Panel, step);
    }
    for (; q < end; ++q) {
      tiles_.template load<6>(weights_of(w[0], q, 0), kTileBytes);
      tiles_.template load<4>(rows[0].data + rows[0].offsets[q], rows[0].step);
      if (N == 2) tiles_.template load<7>(weights_of(w[1], q, 1), kTileBytes);
      if (M == 2) tiles_.template load<5>(rows[M - 1].data + rows[M - 1].offsets[q], rows[M - 1].step);
      tiles_.template dot<0, 4, 6>();
      if (N == 2) tiles_.template dot<1, 4, 7>();
      if (M == 2) tiles_.template dot<2, 5, 6>();
      if (M == 2 && N == 2) tiles_.template dot<3, 5, 7>();
    }
    tiles_.template store<0>(sums, step);
    if (N == 2) tiles_.template store<1>(sums + kInt8Panel, step);
    if (M == 2) tiles_.template store<2>(below, step);
    if (M == 2 && N == 2) tiles_.template store<3>(below + kInt8Panel, step);
  }

  template <int N>
  void finish_rows(const RowOffsets& at, int64_t row, int count, int panel) {
    int r = 0;
    for (; r + 4 <= count; r += 4) finish_some<4, N>(at, r, row + r, panel);
    for (; r < count; ++r) finish_some<1, N>(at, r, row + r, panel);
  }

  template <int R, int N>
  TW_INLINE void finish_some(const RowOffsets& at, int first, int64_t row, int panel) {
    vi acc[R][N];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) {
        vi offset;
        std::memcpy(&acc[r][n], sums_ + (first + r) * 2 * kInt8Panel + n * kInt8Panel, sizeof offset);
        std::memcpy(&offset, p_.offset + (panel + n) * kInt8Panel, sizeof offset);
        acc[r][n] += offset;
      }
    }
    finish_tile<R, N>(p_, acc, at, first, row, panel);
  }

  const Int8Problem& p_;
  Tiles& tiles_;
  int64_t chunks_, bytes_;
  int32_t* sums_ = nullptr;
  int8_t* last_weights_ = nullptr;
  uint8_t* copied_ = nullptr;
  int64_t *in_place_ = nullptr, *side_by_side_ = nullptr;
};

}  // namespace TW_ISA
}  // namespace tw

#endif
