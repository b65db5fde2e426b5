// Four-bit weights of a linear layer, packed for the kernels (kernels/int4.h), and their product with float rows.
#pragma once

#include <cstdint>
#include <memory>

#include "common/alloc.h"
#include "kernels/int4.h"

namespace tw {

// Rows as signed bytes in blocks; the memory is kept from one product to the next.
class Int4Scratch {
 public:
  Int4Rows quantize(const float* x, int64_t rows, int64_t inputs);

 private:
  Buffer<int8_t> values_;
  Buffer<float> scale_;
  Buffer<int32_t> offset_;
};

// Packed weights at one place. They may be moved (to lie beside a model's others) while somebody multiplies by them:
// who holds a place holds its memory too.
struct Int4Place {
  std::shared_ptr<Buffer<uint8_t>> memory;
  const uint8_t* packed = nullptr;
};

class Int4Weights {
 public:
  // codes (outputs, inputs) from 0 to 15; scales and minimums in half precision, (outputs, inputs / 32 rounded up), the
  // latter null where the weight is symmetric; column_scale (outputs) multiplies both.
  Int4Weights(int64_t outputs, int64_t inputs, const uint8_t* codes, const uint16_t* scales, const uint16_t* minimums,
              const float* column_scale);

  int64_t outputs() const { return outputs_; }
  int64_t inputs() const { return inputs_; }
  bool minimum() const { return minimum_; }
  int64_t bytes() const { return int4_packed_bytes(outputs_, inputs_, minimum_); }

  // What the constructor was given; minimums may be null.
  void unpack(uint8_t* codes, uint16_t* scales, uint16_t* minimums, float* column_scale) const;
  // y = x W^T for rows of x (rows, inputs), on the threads of the pool.
  void apply(const Int4Place& place, const float* x, int64_t rows, float* y, int64_t y_row, Int4Scratch& scratch) const;
  // Taking the place and moving it are for one thread at a time: from Python, with its lock held.
  const Int4Place& place() const { return place_; }
  // Moves the packed weights to `at` inside `memory`, which holds bytes() from there on, 64-byte aligned.
  void move_to(std::shared_ptr<Buffer<uint8_t>> memory, uint8_t* at);

 private:
  int64_t outputs_, inputs_;
  bool minimum_;
  Int4Place place_;
  Buffer<float> column_scale_;
};

}  // namespace tw
