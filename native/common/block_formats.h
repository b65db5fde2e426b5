// The tensor formats of GGUF files: the sizes of their blocks, and the weights that a block encodes.
#pragma once

#include <cstdint>

#include "common/block_words.h"

namespace tw {

struct BlockFormat {
  int code;     // GGUF's number of the format
  int values;   // values of a block in the file: 1, 32 or 256
  int bytes;    // bytes of a block in the file
  int packing;  // index into kBlockPacking, or -1: float32, float16, bfloat16
};

constexpr int kF32 = 0, kF16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ8_0 = 8, kBF16 = 30;  // definition: GGUF's codes
constexpr int kQ8_0Packing = 4;                                                 // definition: index into kBlockPacking
constexpr BlockFormat kBlockFormats[] = {{kF32, 1, 4, -1},   {kF16, 1, 2, -1},
                                         {kBF16, 1, 2, -1},  // floats
                                         {kQ4_0, 32, 18, 0}, {kQ4_1, 32, 20, 1},
                                         {6, 32, 22, 2},  // Q4_0, Q4_1, Q5_0
                                         {7, 32, 24, 3},     {kQ8_0, 32, 34, kQ8_0Packing},
                                         {20, 32, 18, 5},  // Q5_1, Q8_0, IQ4_NL
                                         {12, 256, 144, 6},  {13, 256, 176, 7},
                                         {14, 256, 210, 8}};  // Q4_K, Q5_K, Q6_K

const BlockFormat* block_format(int code);  // null if the code is not supported

// Unpacks the codes of a block: 32 unsigned numbers.
void block_codes(const BlockPacking& packing, const BlockWords& words, uint8_t* codes);
// Computes the 32 weights that a block encodes.
void block_values(const BlockPacking& packing, const BlockWords& words, float* values);
// Converts the first n values of a row in any format to floats.
void row_values(const BlockFormat& format, const uint8_t* row, int64_t n, float* values);

// A table of rows that is read in place, such as the embedding of a mapped file.
struct BlockRows {
  BlockFormat format = kBlockFormats[0];
  const uint8_t* data = nullptr;
  int64_t rows = 0, columns = 0;

  int64_t row_bytes() const { return columns / format.values * format.bytes; }
  int64_t bytes() const { return rows * row_bytes(); }
  void row(int64_t i, float* values) const { row_values(format, data + i * row_bytes(), columns, values); }
};

float half_value(uint16_t half);
uint16_t half_bits(float value);
inline bool half_is_finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

}  // namespace tw
