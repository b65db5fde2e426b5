// Products of float rows with weights in the quantized block formats of GGUF. Along K, a matrix is cut into blocks of
// 32 weights: weight = scale * (code - offset), or scale * code + minimum, with unsigned codes of 4 to 8 bits. A row of
// floats becomes int8 with one scale per block of 32. The sums of a block are integers, exact on every instruction set.
// The scaled sums of all blocks are added in order, column by column and without fused multiply-adds, so that the
// floats are equal on every instruction set, however many rows are computed at a time.
//
// Packed layout: panels of 16 columns (outputs of the layer), each a sequence of units of 2 or 8 blocks. A unit has a
// header with the scales of its blocks, then the codes of block after block. The low four bits of a block's codes are
// four runs of 64 bytes: byte 4 c + i of run g has the code of value 4 g + i of column c in its low half, and of value
// 16 + 4 g + i in its high half. Codes of 5 or 6 bits have their other bits in one or two runs before these (planes).
// Codes of 8 bits are eight runs (values 0, 16, 4, 20, ... on). Every run begins on a cache line.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

constexpr int kBlock = 32;       // definition: values of K that share a scale
constexpr int kBlockPanel = 16;  // definition: columns of a panel
constexpr int kBlockRun = 64;    // definition: bytes of a run of codes

enum class BlockScales {
  half,           // a float16 scale per block
  half_minimum,   // a float16 scale and a float16 minimum per block
  super_minimum,  // 8 blocks share a float16 scale and minimum; each has a uint8 multiple of both
  super_halves,   // 8 blocks share a float16 scale; each half of a block has an int8 multiple of it
};

// One format of packed weights. A code minus `offset` is the signed integer it stands for.
struct BlockPacking {
  int bits;
  int offset;
  bool lookup;  // codes index the IQ4_NL table
  BlockScales scales;
  int file_bytes;  // bytes of a block in the file: of 32 weights, or of 256 if scales are grouped

  constexpr bool grouped() const { return scales == BlockScales::super_minimum || scales == BlockScales::super_halves; }
  constexpr bool minimum() const { return scales == BlockScales::half_minimum || scales == BlockScales::super_minimum; }
  constexpr int sums() const { return scales == BlockScales::super_halves ? 2 : 1; }  // integers per block
  constexpr int unit_blocks() const { return grouped() ? 8 : 2; }
  constexpr int header_bytes() const { return grouped() ? 320 : minimum() ? 128 : 64; }
  constexpr int plane_runs() const { return bits == 8 ? 0 : bits - 4; }  // per block, of the bits above four
  constexpr int code_runs() const { return bits == 8 ? 8 : bits; }  // per block: the planes, then 4 runs of low bits
  constexpr int unit_bytes() const { return header_bytes() + unit_blocks() * code_runs() * kBlockRun; }
};

// The formats, in the order of BlockKernels::rows.
constexpr int kBlockPackings = 9;  // definition: entries of the table
constexpr BlockPacking kBlockPacking[kBlockPackings] = {
    {4, 8, false, BlockScales::half, 18},            // Q4_0
    {4, 0, false, BlockScales::half_minimum, 20},    // Q4_1
    {5, 16, false, BlockScales::half, 22},           // Q5_0
    {5, 0, false, BlockScales::half_minimum, 24},    // Q5_1
    {8, 128, false, BlockScales::half, 34},          // Q8_0
    {4, 128, true, BlockScales::half, 18},           // IQ4_NL
    {4, 0, false, BlockScales::super_minimum, 144},  // Q4_K
    {5, 0, false, BlockScales::super_minimum, 176},  // Q5_K
    {6, 32, false, BlockScales::super_halves, 210},  // Q6_K
};

// The values of IQ4_NL's codes (llama.cpp, kvalues_iq4nl).
constexpr int8_t kNonLinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Rows quantized to int8 (rows, blocks * 32), and per block the numbers that its sums need.
struct BlockRowsInt8 {
  const int8_t* values = nullptr;
  const float* scale = nullptr;     // (rows, blocks)
  const int32_t* offset = nullptr;  // (rows, blocks, sums): minus the format's offset times the sum of the int8 values
  const float* total = nullptr;     // (rows, blocks): scale times the sum of the int8 values
};

struct BlockProblem {
  BlockRowsInt8 x;
  int64_t blocks = 0;  // a multiple of the format's unit_blocks()
  const uint8_t* weights = nullptr;
  const float* column_scale = nullptr;  // null, or one factor per column, padded to whole panels
  int64_t columns = 0;
  float* y = nullptr;
  int64_t y_row = 0;
};

struct BlockKernels {
  // Quantizes n floats to `blocks` blocks of int8 (zeros after the last float): round(x / scale) with scale = max|x| /
  // 127. Per block, `sums` (1 or 2) sums of the values times `factor` are stored to offset, and scale times the whole
  // sum to total.
  void (*quantize)(const float* x, int64_t n, int64_t blocks, int sums, int32_t factor, int8_t* values, float* scale,
                   int32_t* offset, float* total);
  // Packs one panel: at most 16 rows (`columns`) of `row_bytes` bytes with `blocks` blocks of 32 weights each, as the
  // file stores them. Returns false if a scale is NaN or infinite.
  bool (*pack[kBlockPackings])(const uint8_t* data, int64_t row_bytes, int columns, int64_t blocks, uint8_t* panel);
  // Multiplies rows [first, last) by panels [first_panel, last_panel), one function per format.
  void (*rows[kBlockPackings])(const BlockProblem& problem, int64_t first, int64_t last, int64_t first_panel,
                               int64_t last_panel);
};

TW_TABLE(BlockKernels, block_dot)

}  // namespace tw
