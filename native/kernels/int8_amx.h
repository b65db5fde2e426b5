// The integer product on AMX tiles: 16 rows by 16 columns of sums, 64 values of K at a time.
//
// A tile of weights is 16 groups of a packed panel, contiguous in memory. A tile of activations is 16 rows of 64 bytes
// at a fixed distance. If the problem's rows have that layout (a plain product, and most convolutions whose pixels fill
// whole tiles), they are read in place; otherwise they are copied first. Two by two tiles of sums share four loads,
// over at most kSlice chunks of K, so that the weights stay in the L1 cache for all rows of the block.
//
// Sums start as the columns' offsets. int32 results of full tiles are stored directly. Other results go through memory
// to the vector registers, where they are requantized while the tiles of the next rows are multiplied: at K = 512
// requantization takes as long as the product.
//
// The loops are templates over `Hardware` and `Emulated`, a plain C++ model of the instructions, so that loops, edges
// and integers can be tested on any CPU with AVX-512.
#pragma once

#include "kernels/int8.h"
#include "kernels/int8_sums.h"

#if defined(__AVX512F__)

namespace tw {
namespace TW_ISA {

constexpr int kTileRows = 16, kTileBytes = 64;  // hardware: activations, weights and sums alike
constexpr int kTileSize = kTileRows * kTileBytes;

// The operand of ldtilecfg: eight tiles of 16 rows of 64 bytes.
struct alignas(64) TilePalette {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {kTileBytes, kTileBytes, kTileBytes, kTileBytes,
                            kTileBytes, kTileBytes, kTileBytes, kTileBytes};
  uint8_t rows[16] = {kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows, kTileRows};
};

#if defined(TW_AMX)
// The AMX instructions. Inline assembly keeps the compiler from using them elsewhere in the file. Tiles 0 to 3 hold
// sums, 4 and 5 activations, 6 and 7 weights.
struct Hardware {
  Hardware() {
    const TilePalette palette;
    asm volatile("ldtilecfg %0" : : "m"(palette));
  }
  ~Hardware() { asm volatile("tilerelease"); }
  Hardware(const Hardware&) = delete;
  Hardware& operator=(const Hardware&) = delete;

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

// A model of the same instructions in plain C++.
struct Emulated {
  uint8_t tiles[8][kTileSize];

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
  // tdpbusd: tile C += tile A (uint8) times tile B (int8), four products per sum.
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

// Destination of the tiles of one or two groups of sixteen rows: rows are `step` bytes apart, the second group starts
// at `below`.
struct TileTarget {
  int32_t* first;
  int32_t* below;
  int64_t step;
};

constexpr int kTileBlock = 256;           // chosen: rows of a block, whole pairs of tiles
constexpr int kSlice = 16;                // chosen: chunks of 64 values of K per pass over the rows
constexpr int kSumsRow = 2 * kInt8Panel;  // sums of a row kept in memory

template <class Tiles>
class TileProduct {
 public:
  TileProduct(const Int8Problem& p, Tiles& tiles) : p_(p), tiles_(tiles) {
    const int64_t k = static_cast<int64_t>(p.runs) * p.groups_per_run * kInt8Group;
    chunks_ = (k + kTileBytes - 1) / kTileBytes;
    bytes_ = k;
  }

  // Allocates scratch memory for one block. Returns false if memory is exhausted.
  bool allocate_scratch() {
    const int64_t sums = kTileBlock * kSumsRow, offsets = 4 * chunks_;
    int32_t* block = int8_scratch(sums + offsets + 2 * kTileSize / 4 + kTileBlock * chunks_ * kTileBytes / 4 + 64);
    if (block == nullptr) return false;
    sums_ = block;
    last_weights_ = reinterpret_cast<int8_t*>(block + sums);
    gathered_ = reinterpret_cast<uint8_t*>(last_weights_ + 2 * kTileSize);
    in_place_ = reinterpret_cast<int64_t*>(gathered_ + kTileBlock * chunks_ * kTileBytes);
    side_by_side_ = in_place_ + chunks_;
    const int64_t per_run = p_.groups_per_run * kInt8Group / kTileBytes;
    for (int64_t q = 0; q < chunks_; ++q) {
      in_place_[q] = per_run == 0 ? 0 : q / per_run * p_.run_step + q % per_run * kTileBytes;
      side_by_side_[q] = q * kTileBytes;
    }
    return true;
  }

  // Computes `count` rows (at most kTileBlock) for panels [panel, last_panel).
  void block(const RowOffsets& at, int64_t row, int count, int panel, int last_panel) {
    at_ = &at;
    row_ = row;
    count_ = count;
    groups_ = (count + kTileRows - 1) / kTileRows;
    for (int g = 0; g < groups_; ++g) rows_[g] = rows_of(g * kTileRows);
    for (int g = 0; g < groups_; g += 2)
      stores_directly_[g / 2] = p_.kind == Int8Out::int32 && evenly_stored(g * kTileRows);
    for (; panel + 2 <= last_panel; panel += 2) panels<2>(panel);
    if (panel < last_panel) panels<1>(panel);
  }

 private:
  // Returns whether the sixteen rows starting at `first` are a fixed distance apart.
  bool evenly_spaced(const int64_t* offsets, int first) const {
    const int64_t step = offsets[first + 1] - offsets[first];
    for (int i = 2; i < kTileRows; ++i) {
      if (offsets[first + i] - offsets[first + i - 1] != step) return false;
    }
    return true;
  }

  // Returns whether the pair of groups starting at row `first` can be stored tile by tile.
  bool evenly_stored(int first) const {
    const int64_t* out = at_->out;
    if (first + kTileRows > count_ || !evenly_spaced(out, first)) return false;
    const int below = first + kTileRows;
    return below >= count_ || (below + kTileRows <= count_ && evenly_spaced(out, below) &&
                               out[below + 1] - out[below] == out[first + 1] - out[first]);
  }

  // Returns sixteen rows of activations: in place, or copied next to each other and zero-padded to whole chunks of K.
  TileRows rows_of(int first) {
    const int64_t run_bytes = static_cast<int64_t>(p_.groups_per_run) * kInt8Group;
    const int64_t* in = at_->in;
    if (run_bytes % kTileBytes == 0 && first + kTileRows <= count_ && evenly_spaced(in, first)) {
      return {p_.in + in[first], in_place_, in[first + 1] - in[first]};
    }
    const int64_t step = chunks_ * kTileBytes;
    uint8_t* const to = gathered_ + first * step;
    for (int r = 0; r < kTileRows && first + r < count_; ++r) {  // rows past the last are never stored
      uint8_t* row = to + r * step;
      for (int run = 0; run < p_.runs; ++run, row += run_bytes) {
        std::memcpy(row, p_.in + in[first + r] + run * p_.run_step, run_bytes);
      }
      std::memset(row, 0, step - bytes_);
    }
    return {to, side_by_side_, step};
  }

  // The weights of chunk q of a panel: in place, or the zero-padded copy of the last chunk.
  TW_INLINE const int8_t* weights_of(const int8_t* panel, int64_t q, int which) const {
    return q * kTileBytes + kTileBytes <= bytes_ ? panel + q * kTileSize : last_weights_ + which * kTileSize;
  }

  // Computes N panels for all rows of the block: slices of K outside, pairs of groups of rows inside.
  template <int N>
  void panels(int panel) {
    const int64_t panel_bytes = bytes_ * kInt8Panel;
    const int8_t* w[2] = {p_.weights + panel * panel_bytes, p_.weights + (panel + N - 1) * panel_bytes};
    const int64_t whole = bytes_ / kTileBytes * kTileSize;
    for (int n = 0; n < N && whole < panel_bytes; ++n) {
      std::memcpy(last_weights_ + n * kTileSize, w[n] + whole, panel_bytes - whole);
      std::memset(last_weights_ + n * kTileSize + (panel_bytes - whole), 0, kTileSize - (panel_bytes - whole));
    }
    const bool whole_panels = (panel + N) * kInt8Panel <= p_.out_columns;
    for (int64_t q = 0; q < chunks_; q += kSlice) {
      const int64_t end = chunks_ - q < kSlice ? chunks_ : q + kSlice;
      int waiting = -1;  // the previous group of rows, whose sums are not requantized yet
      for (int g = 0; g < groups_; g += 2) {
        const bool last = end == chunks_, leaves = last && whole_panels && stores_directly_[g / 2];
        const TileTarget to = leaves ? output_target(g, panel) : sums_target(g);
        g + 1 < groups_ ? multiply<2, N>(rows_ + g, w, q, end, panel, sums_target(g), to)
                        : multiply<1, N>(rows_ + g, w, q, end, panel, sums_target(g), to);
        if (waiting >= 0) requantize_rows<N>(waiting, panel);
        waiting = last && !leaves ? g : -1;
      }
      if (waiting >= 0) requantize_rows<N>(waiting, panel);
    }
  }

  // The sums of group g in memory, for the next slice of K or while the next pair of groups is multiplied.
  int32_t* sums_of(int g) { return sums_ + (chunks_ > kSlice ? g : g % 4) * kTileRows * kSumsRow; }

  TileTarget sums_target(int g) { return {sums_of(g), sums_of(g) + kTileRows * kSumsRow, kSumsRow * 4}; }

  TileTarget output_target(int g, int panel) {
    const int first = g * kTileRows;
    int32_t* out = static_cast<int32_t*>(p_.out) + panel * kInt8Panel;
    int32_t* below = g + 1 < groups_ ? out + at_->out[first + kTileRows] : nullptr;
    return {out + at_->out[first], below, (at_->out[first + 1] - at_->out[first]) * 4};
  }

  // Multiplies M groups of rows by N panels over chunks [q, end) of K: loads the sums of `from`, stores them to `to`.
  template <int M, int N>
  void multiply(const TileRows* rows, const int8_t* const (&w)[2], int64_t q, int64_t end, int panel,
                const TileTarget& from, const TileTarget& to) {
    const int32_t* offset = p_.offset + panel * kInt8Panel;
    const bool begins = q == 0;  // every row of a tile starts as the offsets: a row step of 0
    const int64_t step = begins ? 0 : from.step;
    const int32_t *first = begins ? offset : from.first, *below = begins ? offset : from.below;
    tiles_.template load<0>(first, step);
    if (N == 2) tiles_.template load<1>(first + kInt8Panel, step);
    if (M == 2) tiles_.template load<2>(below, step);
    if (M == 2 && N == 2) tiles_.template load<3>(below + kInt8Panel, step);
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
    tiles_.template store<0>(to.first, to.step);
    if (N == 2) tiles_.template store<1>(to.first + kInt8Panel, to.step);
    if (M == 2) tiles_.template store<2>(to.below, to.step);
    if (M == 2 && N == 2) tiles_.template store<3>(to.below + kInt8Panel, to.step);
  }

  // Requantizes the rows of group g and the one after it.
  template <int N>
  void requantize_rows(int g, int panel) {
    const int32_t* sums = sums_of(g);
    int r = g * kTileRows;
    const int end = count_ < r + 2 * kTileRows ? count_ : r + 2 * kTileRows;
    for (; r + 4 <= end; r += 4, sums += 4 * kSumsRow) requantize_some_rows<4, N>(sums, r, panel);
    for (; r < end; ++r, sums += kSumsRow) requantize_some_rows<1, N>(sums, r, panel);
  }

  template <int R, int N>
  TW_INLINE void requantize_some_rows(const int32_t* sums, int first, int panel) {
    vi acc[R][N];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) std::memcpy(&acc[r][n], sums + r * kSumsRow + n * kInt8Panel, sizeof(vi));
    }
    requantize_tile<R, N>(p_, acc, *at_, first, row_ + first, panel);
  }

  const Int8Problem& p_;
  Tiles& tiles_;
  int64_t chunks_, bytes_;  // K in chunks of 64 (the last padded) and in bytes
  int32_t* sums_ = nullptr;
  int8_t* last_weights_ = nullptr;
  uint8_t* gathered_ = nullptr;
  int64_t *in_place_ = nullptr, *side_by_side_ = nullptr;
  // state of the current block
  const RowOffsets* at_ = nullptr;
  int64_t row_ = 0;
  int count_ = 0, groups_ = 0;
  TileRows rows_[kTileBlock / kTileRows];
  bool stores_directly_[kTileBlock / kTileRows / 2];
};

}  // namespace TW_ISA
}  // namespace tw

#endif
