// The interface of a graph's operators. Implementations are in native/ops, one file per family, for all data types.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "common/int8_layer.h"
#include "graph/tensor_desc.h"

namespace tw {

// A value as an operator receives it at run time: `desc` describes one batch element, `data` points to all of them.
struct Operand {
  const TensorDesc* desc = nullptr;
  void* data = nullptr;

  const TensorDesc* operator->() const { return desc; }
  uint8_t* bytes() const { return static_cast<uint8_t*>(data); }
  LastImage floats(int64_t batch) const { return desc->floats(batch, data); }

  // Row `row` of one image; the address of its first pixel inside the padding.
  uint8_t* row(int64_t image, int64_t row) const {
    const Int8Image at = desc->image(1);
    return bytes() + image * at.image_step() + at.inside() + row * at.row_step();
  }
};

constexpr int kMaxOperands = 4;  // definition: inputs of one operator, except concat

struct OpCall {
  int64_t batch;
  Operand in[kMaxOperands];
  Operand out;
  const Int8Tile* tile = nullptr;  // tile of a matrix product; null: the default
};

// The receptive field in rows. For row r of its result, an operator reads rows [r * step + first, r * step + first +
// rows) of its first input and row r of its second one. `rows` of 0: the operator can only compute whole images.
struct ReceptiveField {
  int64_t first = 0, rows = 0, step = 1;
};

// An operator. It must compute the same numbers for a batch element whatever else is in the batch.
class Op {
 public:
  virtual ~Op() = default;
  virtual TensorDesc infer(const std::vector<TensorDesc>& in) const = 0;  // shapes; throws std::invalid_argument
  virtual void run(const OpCall& call) const = 0;

  // --- what alias analysis and the memory planner ask ---
  virtual bool is_concat() const { return false; }      // `run` copies one input into its channels
  virtual int64_t first_channel() const { return -1; }  // >= 0: the result is channels of the input from this one on
  virtual bool is_view(const TensorDesc&) const { return false; }  // the result is the input's bytes, unchanged
  virtual bool runs_in_place(const TensorDesc&, const TensorDesc&) const {
    return false;
  }  // may overwrite its first input
  virtual bool reads_int16() const { return false; }
  virtual bool reads_any_pitch() const { return true; }   // the first input may have any pitch
  virtual bool writes_any_pitch() const { return true; }  // and it writes its channels only

  // --- what scheduling asks ---
  virtual ReceptiveField receptive_field() const { return {}; }
  virtual int64_t multiply_adds(const TensorDesc&) const { return 0; }  // for one batch element
  virtual int64_t weight_bytes() const { return 0; }
  virtual const Int8Layer* product() const { return nullptr; }  // of a plain matrix product, whose tile can be tuned
  // Returns one operator that computes this one and then `next`, the only reader of its result; null if there is none.
  virtual std::unique_ptr<Op> fuse_with(const Op&) const { return nullptr; }
};

}  // namespace tw
