#include "common/int4_layer.h"

#include <algorithm>
#include <cstring>

#include "common/thread_pool.h"

namespace tw {
namespace {

// Where one block of one column lies.
struct BlockPlace {
  int64_t scale, minimum, codes;  // offsets in bytes; `codes` of group 0
};

BlockPlace block_place(int64_t column, int64_t block, int64_t blocks, bool minimum) {
  const int64_t pair = (column / kInt4Panel * (blocks / 2) + block / 2) * int4_pair_bytes(minimum);
  const int64_t lane = column % kInt4Panel, half = block % 2, scales = 4 * kInt4Panel;  // bytes of two blocks' scales
  const int64_t scale = pair + 2 * (half * kInt4Panel + lane);
  return {scale, scale + scales, pair + (minimum ? 2 : 1) * scales + half * kInt4Codes + 4 * lane};
}

// The byte of value i of a block, and whether the value is in its high half.
int64_t code_offset(int i) { return i / 8 * 4 * kInt4Panel + i % 4; }
int code_shift(int i) { return i % 8 < 4 ? 0 : 4; }

}  // namespace

Int4Rows Int4Scratch::quantize(const float* x, int64_t rows, int64_t inputs) {
  const int64_t blocks = int4_blocks(inputs);
  int8_t* values = values_.grow(rows * blocks * kInt4Block);
  float* scale = scale_.grow(rows * blocks);
  int32_t* offset = offset_.grow(rows * blocks);
  for (int64_t r = 0; r < rows; ++r) {
    active_int4().quantize(x + r * inputs, inputs, blocks, values + r * blocks * kInt4Block, scale + r * blocks,
                           offset + r * blocks);
  }
  return {values, scale, offset};
}

Int4Weights::Int4Weights(int64_t outputs, int64_t inputs, const uint8_t* codes, const uint16_t* scales,
                         const uint16_t* minimums, const float* column_scale)
    : outputs_(outputs),
      inputs_(inputs),
      minimum_(minimums != nullptr),
      column_scale_((outputs + kInt4Panel - 1) / kInt4Panel * kInt4Panel) {
  place_.memory = std::make_shared<Buffer<uint8_t>>(bytes());
  place_.packed = place_.memory->data();
  uint8_t* packed = place_.memory->data();
  if (bytes() > 0) std::memset(packed, 0, bytes());
  std::fill(column_scale_.data(), column_scale_.data() + column_scale_.size(), 0.0f);
  if (outputs > 0) std::memcpy(column_scale_.data(), column_scale, outputs * sizeof(float));
  const int64_t given = (inputs + kInt4Block - 1) / kInt4Block;
  for (int64_t column = 0; column < outputs; ++column) {
    for (int64_t b = 0; b < given; ++b) {
      const BlockPlace at = block_place(column, b, int4_blocks(inputs), minimum_);
      std::memcpy(packed + at.scale, scales + column * given + b, 2);
      if (minimum_) std::memcpy(packed + at.minimum, minimums + column * given + b, 2);
      const uint8_t* from = codes + column * inputs + b * kInt4Block;
      const int n = static_cast<int>(std::min<int64_t>(kInt4Block, inputs - b * kInt4Block));
      for (int i = 0; i < n; ++i)
        packed[at.codes + code_offset(i)] |= static_cast<uint8_t>((from[i] & 15) << code_shift(i));
    }
  }
}

void Int4Weights::unpack(uint8_t* codes, uint16_t* scales, uint16_t* minimums, float* column_scale) const {
  const int64_t given = (inputs_ + kInt4Block - 1) / kInt4Block;
  for (int64_t column = 0; column < outputs_; ++column) {
    column_scale[column] = column_scale_[column];
    for (int64_t b = 0; b < given; ++b) {
      const BlockPlace at = block_place(column, b, int4_blocks(inputs_), minimum_);
      std::memcpy(scales + column * given + b, place_.packed + at.scale, 2);
      if (minimum_ && minimums != nullptr) std::memcpy(minimums + column * given + b, place_.packed + at.minimum, 2);
      uint8_t* to = codes + column * inputs_ + b * kInt4Block;
      const int n = static_cast<int>(std::min<int64_t>(kInt4Block, inputs_ - b * kInt4Block));
      for (int i = 0; i < n; ++i) to[i] = place_.packed[at.codes + code_offset(i)] >> code_shift(i) & 15;
    }
  }
}

void Int4Weights::apply(const Int4Place& place, const float* x, int64_t rows, float* y, int64_t y_row,
                        Int4Scratch& scratch) const {
  if (rows == 0 || outputs_ == 0) return;
  Int4Problem p;
  p.x = scratch.quantize(x, rows, inputs_);
  p.blocks = int4_blocks(inputs_);
  p.weights = place.packed;
  p.minimum = minimum_;
  p.column_scale = column_scale_.data();
  p.columns = outputs_;
  p.y = y;
  p.y_row = y_row;
  const int64_t panels = (outputs_ + kInt4Panel - 1) / kInt4Panel;
  // As for int8 (int8_driver.cpp): a few rows wait for their weights and share the waiting sooner.
  const int64_t worth_a_thread = rows <= 4 ? 1 << 18 : 1 << 20;
  const int64_t wanted = std::min(panels, rows * panels * kInt4Panel * inputs_ / worth_a_thread);
  const int tasks = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(num_threads(), wanted)));
  const auto& kernels = active_int4();
  if (tasks == 1) return kernels.rows(p, 0, rows, 0, panels);
  parallel_for(tasks, [&](int task) { kernels.rows(p, 0, rows, panels * task / tasks, panels * (task + 1) / tasks); });
}

void Int4Weights::move_to(std::shared_ptr<Buffer<uint8_t>> memory, uint8_t* at) {
  if (bytes() > 0) std::memcpy(at, place_.packed, bytes());
  place_ = {std::move(memory), at};
}

}  // namespace tw
