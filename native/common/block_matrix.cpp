#include "common/block_matrix.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "common/matmul.h"
#include "common/thread_pool.h"
#include "kernels/half_dot.h"

namespace tw {
namespace {

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

int threads_for(int64_t tasks, int64_t work, int64_t min_work_per_thread) {
  return static_cast<int>(
      std::max<int64_t>(1, std::min<int64_t>({int64_t{num_threads()}, tasks, work / min_work_per_thread})));
}

// Returns whether the active kernels may multiply pairs of bfloat16.
bool has_bfloat16_dot() {
#if defined(__x86_64__)
  return active_isa() == Isa::avx512 && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

// Returns the power of two by which a row is divided so that its largest weight is between 2^12 and 2^13 and no scale
// is out of float16's range; 0 if a weight is NaN or infinite.
float row_exponent_scale(const float* weight, int64_t n) {
  float largest = 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    if (!std::isfinite(weight[i])) return 0.0f;
    largest = std::max(largest, std::fabs(weight[i]));
  }
  int exponent = 1;
  if (largest > 0.0f) std::frexp(largest, &exponent);
  return std::ldexp(1.0f, std::max(exponent - 13, -126));
}

}  // namespace

// Quantizes rows (rows, inputs) to int8 in blocks of 32, unless products that share this scratch have done so.
BlockRowsInt8 BlockScratch::quantize(const float* x, int64_t rows, int64_t inputs, const BlockPacking& packing) {
  const int64_t blocks = round_up(inputs, kBlock * packing.unit_blocks()) / kBlock;
  int8_t* values = values_.grow(rows * blocks * kBlock);
  float* scale = scale_.grow(rows * blocks);
  float* total = total_.grow(rows * blocks);
  int32_t* offset = offset_.grow(rows * blocks * packing.sums());
  const bool ready = ready_ && offset_factor_ == packing.offset && sums_ == packing.sums();
  ready_ = shared_, offset_factor_ = packing.offset, sums_ = packing.sums();
  if (ready) return {values, scale, offset, total};
  const auto& kernels = active_block_dot();
  const int tasks = threads_for(rows, rows * inputs, 1 << 15);
  parallel_for(tasks, [&](int task) {
    for (int64_t r = rows * task / tasks; r < rows * (task + 1) / tasks; ++r) {
      const int64_t at = r * blocks;
      kernels.quantize(x + r * inputs, inputs, blocks, packing.sums(), -packing.offset, values + at * kBlock,
                       scale + at, offset + at * packing.sums(), total + at);
    }
  });
  return {values, scale, offset, total};
}

// Rounds rows to pairs of bfloat16, unless products that share this scratch have done so.
const float* BlockScratch::round_pairs(const float* x, int64_t rows, int64_t inputs) {
  float* rounded = bfloat16_words_.grow(rows * inputs / 2);
  if (words_ready_) return rounded;
  words_ready_ = shared_;
  const int tasks = threads_for(rows, rows * inputs, 1 << 15);
  parallel_for(tasks, [&](int task) {
    const int64_t first = rows * task / tasks, last = rows * (task + 1) / tasks;
    active_half_dot().round_pairs(x + first * inputs, (last - first) * inputs / 2, rounded + first * inputs / 2);
  });
  return rounded;
}

// Packs rows of words in transposed strips, unless products that share this scratch have done so.
const float* BlockScratch::pack_strips(const float* x, int64_t rows, int64_t words) {
  float* packed = strips_.grow(rows * words);
  if (strips_ready_) return packed;
  strips_ready_ = shared_;
  const auto& kernels = active_half_dot();
  const int64_t strips = (rows + kernels.strip_rows - 1) / kernels.strip_rows;
  const int tasks = threads_for(strips, rows * words, 1 << 15);
  parallel_for(tasks, [&](int task) {
    kernels.pack(x, rows, words, strips * task / tasks, strips * (task + 1) / tasks, packed);
  });
  return packed;
}

std::shared_ptr<uint8_t> WeightArena::allocate(int64_t bytes) {
  if (used_ + bytes > static_cast<int64_t>(memory_->size())) return nullptr;
  uint8_t* at = memory_->data() + used_;
  used_ += bytes;
  return std::shared_ptr<uint8_t>(memory_, at);
}

int64_t BlockMatrix::packed_bytes(const BlockFormat& format, int64_t outputs, int64_t inputs) {
  if (format.packing < 0) return 0;
  const BlockPacking& packing = kBlockPacking[format.packing];
  const int64_t units = round_up(inputs, kBlock * packing.unit_blocks()) / (kBlock * packing.unit_blocks());
  return round_up(outputs, kBlockPanel) / kBlockPanel * units * packing.unit_bytes();
}

int64_t BlockMatrix::blocks() const { return round_up(inputs_, kBlock * packing().unit_blocks()) / kBlock; }

int64_t BlockMatrix::bytes() const {
  return format_.packing < 0 ? outputs_ * inputs_ * format_.bytes : packed_bytes(format_, outputs_, inputs_);
}

void BlockMatrix::allocate(WeightArena* arena) {
  if (arena != nullptr) packed_ = arena->allocate(bytes());
  if (packed_ == nullptr) packed_ = WeightArena(bytes()).allocate(bytes());
  data_ = packed_.get();
}

BlockMatrix::BlockMatrix(int code, const uint8_t* data, int64_t outputs, int64_t inputs, WeightArena* arena)
    : format_(*block_format(code)), outputs_(outputs), inputs_(inputs), data_(data) {
  if (format_.packing < 0) return;
  allocate(arena);
  const int64_t row_bytes = inputs / format_.values * format_.bytes,
                panels = round_up(outputs, kBlockPanel) / kBlockPanel;
  const int64_t panel_bytes = panels > 0 ? bytes() / panels : 0;
  const auto pack = active_block_dot().pack[format_.packing];
  std::atomic<bool> finite{true};
  const int tasks = threads_for(panels, outputs * inputs, 1 << 18);
  parallel_for(tasks, [&](int task) {
    for (int64_t panel = panels * task / tasks; panel < panels * (task + 1) / tasks; ++panel) {
      const int columns = static_cast<int>(std::min<int64_t>(kBlockPanel, outputs - panel * kBlockPanel));
      uint8_t* to = packed_.get() + panel * panel_bytes;
      // Columns and blocks past the last must be zeros.
      if (columns < kBlockPanel || inputs % (kBlock * packing().unit_blocks()) != 0) std::memset(to, 0, panel_bytes);
      if (!pack(data + panel * kBlockPanel * row_bytes, row_bytes, columns, inputs / kBlock, to)) finite = false;
    }
  });
  if (!finite) throw std::domain_error("the scales of the weights hold NaN or infinity");
}

BlockMatrix::BlockMatrix(int64_t outputs, int64_t inputs, const uint8_t* codes, const uint16_t* scales,
                         const uint16_t* minimums, const float* column_scale, WeightArena* arena)
    : format_(*block_format(minimums == nullptr ? kQ4_0 : kQ4_1)),
      outputs_(outputs),
      inputs_(inputs),
      column_scale_(round_up(outputs, kBlockPanel)) {
  allocate(arena);
  if (bytes() > 0) std::memset(packed_.get(), 0, bytes());
  std::fill(column_scale_.data(), column_scale_.data() + column_scale_.size(), 0.0f);
  std::copy(column_scale, column_scale + outputs, column_scale_.data());
  const int64_t row_blocks = round_up(inputs, kBlock) / kBlock;
  for (int64_t column = 0; column < outputs; ++column) {
    for (int64_t b = 0; b < row_blocks; ++b) {
      BlockWords words = {};
      words.scale = scales[column * row_blocks + b];
      if (minimums != nullptr) words.minimum = minimums[column * row_blocks + b];
      const uint8_t* from = codes + column * inputs + b * kBlock;
      const int n = static_cast<int>(std::min<int64_t>(kBlock, inputs - b * kBlock));
      for (int v = 0; v < n; ++v) words.low[v / 4 % 4] |= (from[v] & 15u) << (v % 4 * 8 + v / 16 * 4);
      put(column, b, words);
    }
  }
}

BlockMatrix::BlockMatrix(const float* weight, int64_t outputs, int64_t inputs, WeightArena* arena)
    : format_(*block_format(kQ8_0)), outputs_(outputs), inputs_(inputs), column_scale_(round_up(outputs, kBlockPanel)) {
  allocate(arena);
  if (bytes() > 0) std::memset(packed_.get(), 0, bytes());
  std::fill(column_scale_.data(), column_scale_.data() + column_scale_.size(), 0.0f);
  std::atomic<bool> finite{true};
  const int tasks = threads_for(outputs, outputs * inputs, 1 << 16);
  parallel_for(tasks, [&](int task) {
    BlockScratch scratch;
    for (int64_t column = outputs * task / tasks; column < outputs * (task + 1) / tasks; ++column) {
      const float* from = weight + column * inputs;
      const float unit = column_scale_[column] = row_exponent_scale(from, inputs);
      if (unit == 0.0f) finite = false;
      const BlockRowsInt8 row = scratch.quantize(from, 1, inputs, packing());
      for (int64_t b = 0; unit > 0.0f && b * kBlock < inputs; ++b) {
        uint8_t block[34];  // as a file stores it
        const uint16_t scale = half_bits(row.scale[b] / unit);
        std::memcpy(block, &scale, 2);
        std::memcpy(block + 2, row.values + b * kBlock, kBlock);
        put(column, b, block_words(kBlockPacking[kQ8_0Packing], block, 0));
      }
    }
  });
  if (!finite) throw std::domain_error("the weights hold NaN or infinity, which have no int8 form");
}

uint8_t* BlockMatrix::unit_at(int64_t column, int64_t b) const {
  const int64_t units = blocks() / packing().unit_blocks();
  return packed_.get() + (column / kBlockPanel * units + b / packing().unit_blocks()) * packing().unit_bytes();
}

void BlockMatrix::put(int64_t column, int64_t b, const BlockWords& words) {
  uint8_t* to = unit_at(column, b);
  for_each_field(packing(), static_cast<int>(b % packing().unit_blocks()), static_cast<int>(column % kBlockPanel),
                 words, [&](int64_t offset, const void* field, int size) { std::memcpy(to + offset, field, size); });
}

BlockWords BlockMatrix::get(int64_t column, int64_t b) const {
  BlockWords words = {};
  const uint8_t* from = unit_at(column, b);
  for_each_field(packing(), static_cast<int>(b % packing().unit_blocks()), static_cast<int>(column % kBlockPanel),
                 words, [&](int64_t offset, void* field, int size) { std::memcpy(field, from + offset, size); });
  return words;
}

void BlockMatrix::unpack(uint8_t* codes, uint16_t* scales, uint16_t* minimums, float* column_scale) const {
  const int64_t row_blocks = round_up(inputs_, kBlock) / kBlock;
  for (int64_t column = 0; column < outputs_; ++column) {
    column_scale[column] = column_scale_.size() > 0 ? column_scale_[column] : 1.0f;
    for (int64_t b = 0; b < row_blocks; ++b) {
      const BlockWords words = get(column, b);
      scales[column * row_blocks + b] = words.scale;
      if (minimums != nullptr) minimums[column * row_blocks + b] = words.minimum;
      uint8_t block[kBlock];
      block_codes(packing(), words, block);
      std::copy(block, block + std::min<int64_t>(kBlock, inputs_ - b * kBlock), codes + column * inputs_ + b * kBlock);
    }
  }
}

void BlockMatrix::row(int64_t row, float* values) const {
  if (format_.packing < 0) return row_values(format_, data_ + row * inputs_ * format_.bytes, inputs_, values);
  const float by = column_scale_.size() > 0 ? column_scale_[row] : 1.0f;
  for (int64_t b = 0; b * kBlock < inputs_; ++b) {
    float block[kBlock];
    block_values(packing(), get(row, b), block);
    const int n = static_cast<int>(std::min<int64_t>(kBlock, inputs_ - b * kBlock));
    for (int i = 0; i < n; ++i) values[b * kBlock + i] = block[i] * by;
  }
}

// Computes y (rows, outputs) = x W' with inputs rounded to int8; returns false if memory is exhausted.
bool BlockMatrix::apply(const float* x, int64_t rows, float* y, int64_t y_row, BlockScratch& scratch) const {
  if (rows == 0 || outputs_ == 0) return true;
  if (format_.packing < 0) return apply_halves(x, rows, y, y_row, scratch), true;
  BlockProblem p;
  p.x = scratch.quantize(x, rows, inputs_, packing());
  p.blocks = blocks();
  p.weights = data_;
  p.column_scale = column_scale_.size() > 0 ? column_scale_.data() : nullptr;
  p.columns = outputs_;
  p.y = y;
  p.y_row = y_row;
  const int64_t panels = round_up(outputs_, kBlockPanel) / kBlockPanel;
  // As for int8 (int8_driver.cpp): a few rows are bound by memory and profit from a second thread earlier.
  const int tasks = threads_for(panels, rows * outputs_ * inputs_, rows <= 4 ? 1 << 18 : 1 << 20);
  const auto multiply = active_block_dot().rows[format_.packing];
  if (tasks == 1) return multiply(p, 0, rows, 0, panels), true;
  parallel_for(tasks, [&](int task) { multiply(p, 0, rows, panels * task / tasks, panels * (task + 1) / tasks); });
  return true;
}

// A few rows are multiplied by the weights as they are loaded. More rows share panels of converted weights.
void BlockMatrix::apply_halves(const float* x, int64_t rows, float* y, int64_t y_row, BlockScratch& scratch) const {
  const auto& kernels = active_half_dot();
  auto kind = format_.code == kF16 ? HalfKind::float16 : HalfKind::bfloat16;
  int64_t words = inputs_;
  if (kind == HalfKind::bfloat16 && has_bfloat16_dot() && inputs_ % 2 == 0) {
    kind = HalfKind::bfloat16_pairs;
    words = inputs_ / 2;
    x = scratch.round_pairs(x, rows, inputs_);
  }
  const auto* weights = reinterpret_cast<const uint16_t*>(data_);
  const int64_t few_rows = kind == HalfKind::bfloat16_pairs ? 12 : 48;  // chosen: with more, panels are faster (Zen 4)
  if (rows <= few_rows || batch_invariant()) {
    const int tasks = threads_for(outputs_ / 16 + 1, rows * outputs_ * inputs_, 1 << 17);
    return parallel_for(tasks, [&](int task) {
      const int64_t first = outputs_ * task / tasks, last = outputs_ * (task + 1) / tasks;
      kernels.rows(kind, x, rows, words, weights, first, last, y, y_row);
    });
  }
  const float* strips = scratch.pack_strips(x, rows, words);
  const int64_t panels = (outputs_ + kernels.panel_outputs - 1) / kernels.panel_outputs;
  const int tasks = threads_for(panels, rows * outputs_ * inputs_, 1 << 20);
  parallel_for(tasks, [&](int task) {
    Buffer<float> panel(kernels.panel_floats);
    const int64_t first = panels * task / tasks * kernels.panel_outputs;
    const int64_t last = std::min(outputs_, panels * (task + 1) / tasks * kernels.panel_outputs);
    kernels.panels(kind, strips, rows, words, weights, first, last, y, y_row, panel.data());
  });
}

}  // namespace tw
