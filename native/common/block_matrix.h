// The weight of a linear layer in one of GGUF's formats, and its product with float rows. Integer formats are packed
// for the kernels once (kernels/block_dot.h). float16, bfloat16 and float32 are read in place, usually from the mapped
// file.
#pragma once

#include <cstdint>
#include <memory>

#include "common/alloc.h"
#include "common/block_formats.h"

namespace tw {

// Converts float rows to what a format's kernels read. The memory is reused from product to product.
class BlockScratch {
 public:
  // Rows as int8 in blocks of 32, with a scale per block.
  BlockRowsInt8 quantize(const float* x, int64_t rows, int64_t inputs, const BlockPacking& packing);
  // Rows as pairs of bfloat16, (rows, inputs / 2).
  const float* round_pairs(const float* x, int64_t rows, int64_t inputs);
  // Rows of words, transposed in strips (half_dot.h).
  const float* pack_strips(const float* x, int64_t rows, int64_t words);
  // Between share_rows(true) and share_rows(false) all products have the same rows, which are converted once per
  // format.
  void share_rows(bool on) { shared_ = on, ready_ = words_ready_ = strips_ready_ = false; }

 private:
  bool shared_ = false, ready_ = false;
  int offset_factor_ = 0, sums_ = 0;  // of the last rows' format
  bool words_ready_ = false, strips_ready_ = false;
  Buffer<float> bfloat16_words_, strips_;
  Buffer<int8_t> values_;
  Buffer<float> scale_, total_;
  Buffer<int32_t> offset_;
};

// Memory for the packed weights of a whole model, one after the other, so that large pages are full.
class WeightArena {
 public:
  explicit WeightArena(int64_t bytes) : memory_(std::make_shared<Buffer<uint8_t>>(bytes)) {}
  // Allocates `bytes`; null if the arena is full.
  std::shared_ptr<uint8_t> allocate(int64_t bytes);

 private:
  std::shared_ptr<Buffer<uint8_t>> memory_;
  int64_t used_ = 0;
};

class BlockMatrix {
 public:
  // `data` has `outputs` rows of blocks, as the file stores them. Integer formats are copied; float formats are read in
  // place. Throws std::domain_error if a scale is NaN or infinite.
  BlockMatrix(int code, const uint8_t* data, int64_t outputs, int64_t inputs, WeightArena* arena = nullptr);
  // Four-bit codes (outputs, inputs) from 0 to 15; float16 scales and minimums (outputs, inputs / 32 rounded up), the
  // latter null if the weight is symmetric; column_scale (outputs) multiplies both.
  BlockMatrix(int64_t outputs, int64_t inputs, const uint8_t* codes, const uint16_t* scales, const uint16_t* minimums,
              const float* column_scale, WeightArena* arena = nullptr);
  // Rounds float32 weights (outputs, inputs) to Q8_0, with a power of two per output as the unit of its scales. Throws
  // std::domain_error if a weight is NaN or infinite.
  BlockMatrix(const float* weight, int64_t outputs, int64_t inputs, WeightArena* arena = nullptr);

  // Bytes of the packed matrix; 0 for float formats, which are not copied.
  static int64_t packed_bytes(const BlockFormat& format, int64_t outputs, int64_t inputs);

  int code() const { return format_.code; }
  int64_t outputs() const { return outputs_; }
  int64_t inputs() const { return inputs_; }
  int64_t bytes() const;  // read by each product
  const uint8_t* data() const { return data_; }

  // y = x W^T for rows of x (rows, inputs), on the threads of the pool.
  bool apply(const float* x, int64_t rows, float* y, int64_t y_row, BlockScratch& scratch) const;
  // Recovers codes and scales of four-bit weights, as the second constructor takes them; minimums may be null.
  void unpack(uint8_t* codes, uint16_t* scales, uint16_t* minimums, float* column_scale) const;
  // Converts the weights of output `row` to floats.
  void row(int64_t row, float* values) const;

 private:
  const BlockPacking& packing() const { return kBlockPacking[format_.packing]; }
  int64_t blocks() const;  // per column, whole units
  void allocate(WeightArena* arena);
  uint8_t* unit_at(int64_t column, int64_t b) const;
  void put(int64_t column, int64_t b, const BlockWords& words);
  BlockWords get(int64_t column, int64_t b) const;
  void apply_halves(const float* x, int64_t rows, float* y, int64_t y_row, BlockScratch& scratch) const;

  BlockFormat format_;
  int64_t outputs_, inputs_;
  std::shared_ptr<uint8_t> packed_;
  const uint8_t* data_ = nullptr;  // the packed weights, or the caller's
  Buffer<float> column_scale_;     // empty, or padded to whole panels
};

}  // namespace tw
