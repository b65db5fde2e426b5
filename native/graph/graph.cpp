#include "graph/graph.h"

#include <algorithm>

#include "graph/schedule.h"
#include "ops/ops.h"

namespace tw {

int Graph::add_value(const TensorDesc& desc) {
  require(!finished_, "this graph is finished");
  descs_.push_back(desc);
  converted_.push_back(-1);
  quantized_rows_.push_back(-1);
  return static_cast<int>(descs_.size()) - 1;
}

int Graph::add_input(const TensorDesc& desc) {
  require(desc.n >= 0 && desc.channels >= 0 && desc.height >= 0 && desc.width >= 0, "a size is negative");
  fixed_batch_ = fixed_batch_ || desc.sized;
  inputs_.push_back(add_value(desc));
  return inputs_.back();
}

// Adds an operator that reads these values, and returns the number of its result.
int Graph::add(std::unique_ptr<Op> op, std::vector<int> inputs) {
  const std::size_t most = op->is_concat() ? inputs.size() : kMaxOperands;
  require(!inputs.empty() && inputs.size() <= most, "an operator reads between one and four values");
  // If the sizes of all inputs are known, shapes are inferred here, so that a misfit is reported at the faulty
  // operator.
  TensorDesc result;
  std::vector<TensorDesc> in;
  for (int value : inputs) {
    check_value(value);
    in.push_back(descs_[value]);
    result.sized = result.sized && in.back().sized;
  }
  if (result.sized) result = op->infer(in);
  const int value = add_value(result);
  nodes_.push_back({std::move(op), std::move(inputs), value});
  return value;
}

// Returns the channels-last form of a value, inserting a conversion op if there is none yet.
int Graph::channels_last(int value) {
  check_value(value);
  const TensorDesc& from = descs_[value];
  const bool is_input = std::count(inputs_.begin(), inputs_.end(), value) > 0;
  if (!from.sized || from.is_integer() || (!is_input && from.layout == Layout::channels_last)) return value;
  if (converted_[value] < 0) {
    const int result = add(layout_op(Layout::channels_last), {value});
    converted_[value] = result;
  }
  return converted_[value];
}

int Graph::quantized_rows(int value) {
  value = channels_last(value);
  if (quantized_rows_[value] < 0) {
    const int result = add(quantize_rows_op(), {value});
    quantized_rows_[value] = result;
  }
  return quantized_rows_[value];
}

// Marks a value as an output of the graph; float images are converted to planes (NCHW) for the caller.
void Graph::add_output(int value) {
  check_value(value);
  // Floats of known size are converted to planes in the caller's array. Other values are computed there directly.
  const bool is_input = std::count(inputs_.begin(), inputs_.end(), value) > 0;
  if (descs_[value].sized && !descs_[value].is_integer() && (is_input || descs_[value].layout != Layout::planes)) {
    value = add(layout_op(Layout::planes), {channels_last(value)});
  } else {
    require(!is_input, "an input cannot be an output");
  }
  require(std::count(outputs_.begin(), outputs_.end(), value) == 0, "this value is an output already");
  outputs_.push_back(value);
}

void Graph::add_output_channels_last(int value) { outputs_.push_back(add(dense_op(), {channels_last(value)})); }

void Graph::check_value(int value) const {
  require(value >= 0 && value < static_cast<int>(descs_.size()), "there is no such value in this graph");
}

const TensorDesc& Graph::desc(int value) const {
  check_value(value);
  require(descs_[value].sized, "the size of this value is known at run time only");
  return descs_[value];
}

const Op* Graph::producer(int value) const {
  check_value(value);
  for (const Node& node : nodes_) {
    if (node.output == value) return node.op.get();
  }
  return nullptr;
}

// Replaces pairs of an operator and its only reader by one fused operator, where `fuse_with` offers one. The fused
// operator takes the reader's place in the order.
void Graph::fuse_pairs() {
  std::vector<int> readers(descs_.size(), 0);
  for (const Node& node : nodes_) {
    for (int value : node.inputs) ++readers[value];
  }
  for (int value : outputs_) ++readers[value];
  for (std::size_t i = 0; i < nodes_.size();) {
    const Node& first = nodes_[i];
    const auto next = std::find_if(nodes_.begin() + static_cast<std::ptrdiff_t>(i), nodes_.end(),
                                   [&](const Node& node) { return node.inputs[0] == first.output; });
    const bool is_input = std::count(inputs_.begin(), inputs_.end(), first.inputs[0]) > 0;
    const bool sole_consumer = readers[first.output] == 1 && first.inputs.size() == 1 && !is_input;
    std::unique_ptr<Op> fused = sole_consumer && next != nodes_.end() ? first.op->fuse_with(*next->op) : nullptr;
    if (fused == nullptr) {
      ++i;
      continue;
    }
    next->op = std::move(fused);
    next->inputs[0] = first.inputs[0];
    nodes_.erase(nodes_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

void Graph::finish() {
  if (finished_) return;
  require(!outputs_.empty(), "a graph has an output");
  fuse_pairs();
  finished_ = true;
}

}  // namespace tw
