// The interface of a graph's operators. Implementations are in native/ops, one file per family, for all data types.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "common/int8_layer.h"
#include "graph/tensor_desc.h"

namespace tw {

// A value as an operator sees it while it runs: `desc` for one batch element, `data` of all of them.
struct Operand {
  const TensorDesc* desc = nullptr;
  void* data = nullptr;

  const TensorDesc* operator->() const { return desc; }
  uint8_t* bytes() const { return static_cast<uint8_t*>(data); }
  LastImage floats(int64_t batch) const { return desc->floats(batch, data); }

  // A row of pixels of one image, without its padding.
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
  const Int8Tile* tile = nullptr;  // of a matrix product; null: the default
};

// The input rows that an operator needs for row r of its result: [r * step + first, r * step + first + rows) of its
// first input, row r of its second one. No rows: the operator cannot compute some rows alone.
struct ReceptiveField {
  int64_t first = 0, rows = 0, step = 1;
};

// An operator must compute the same numbers for a batch element whatever else is in the batch.
class Op {
 public:
  virtual ~Op() = default;
  virtual TensorDesc infer(const std::vector<TensorDesc>& in) const = 0;  // throws std::invalid_argument on a misfit
  virtual void run(const OpCall& call) const = 0;

  // --- what alias analysis and the memory planner ask ---
  virtual bool is_concat() const { return false; }      // `run` copies one input to its channels
  virtual int64_t first_channel() const { return -1; }  // of a slice of channels; 0: all of them, in another shape
  virtual bool is_view(const TensorDesc&) const { return false; }  // the result is the input's bytes, unchanged
  virtual bool runs_in_place(const TensorDesc&, const TensorDesc&) const { return false; }  // over its first input
  virtual bool reads_int16() const { return false; }
  virtual bool reads_any_pitch() const { return true; }   // of its first input
  virtual bool writes_any_pitch() const { return true; }  // and nothing beside its channels

  // --- what scheduling asks ---
  virtual ReceptiveField receptive_field() const { return {}; }
  virtual int64_t multiply_adds(const TensorDesc&) const { return 0; }  // per batch element of the result
  virtual int64_t weight_bytes() const { return 0; }
  virtual const Int8Layer* product() const { return nullptr; }  // of a plain matrix product, which takes a tile
  // One operator that computes this one and then `next`, which alone reads its result; null: there is none.
  virtual std::unique_ptr<Op> fuse_with(const Op&) const { return nullptr; }
};

}  // namespace tw
