// A network as one native call: operators on values of any data type, scheduled once per input shape.
//
// A batch is split into chunks of a few elements, and a chunk passes through all operators before the next begins, so
// that what one operator writes is still in the cache when the next one reads it. Chunks are distributed over the
// threads; a batch with fewer elements than threads is one chunk, whose operators then use the threads themselves. The
// results do not depend on the split.
//
// A graph whose inputs were added with their sizes has a fixed batch: each record describes all its images, and a run
// processes one element.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "graph/op.h"

namespace tw {

// A plain matrix product that a node computes in a run: m x n x k on `threads` threads. `slot` is the index of its tile
// in the tiles that the run receives.
struct GraphProduct {
  int value;
  std::size_t slot;
  int64_t m, n, k;
  int threads;
};

class Graph {
 public:
  class Schedule;
  struct Node {
    std::unique_ptr<Op> op;
    std::vector<int> inputs;  // values
    int output;               // value
  };

  // Each returns the number of a new value; std::invalid_argument where shapes do not fit.
  int add_input(const TensorDesc& desc);
  int add(std::unique_ptr<Op> op, std::vector<int> inputs);
  int channels_last(int value);   // the value with channels last: itself, or a conversion of planes of floats
  int quantized_rows(int value);  // the value with uint8 pixels, each by its own scale
  void add_output(int value);     // float values become planes
  void add_output_channels_last(int value);

  void finish();  // fuses operators; no operators after it. The first schedule does it otherwise.

  const TensorDesc& desc(int value) const;  // of a value whose size is known before a run
  const Op* producer(int value) const;      // null: an input
  const TensorDesc& input_desc(std::size_t i) const { return descs_[inputs_[i]]; }
  const std::vector<int>& inputs() const { return inputs_; }
  const std::vector<int>& outputs() const { return outputs_; }
  std::size_t values() const { return descs_.size(); }

  // Shapes and allocations for inputs of these sizes, made at first use; throws std::invalid_argument where they do not
  // fit.
  std::shared_ptr<Schedule> schedule(const std::vector<TensorDesc>& inputs);
  std::shared_ptr<Schedule> schedule();  // for the sizes that the inputs were added with

  // The products of a run with the current number of threads, and how many slots its tiles have.
  std::vector<GraphProduct> products(const Schedule& schedule, int64_t batch) const;
  std::size_t slots() const { return 2 * nodes_.size(); }

  // Any number of threads may run one graph at a time. The caller fills the padding of outputs. `tiles` is empty or has
  // a tile in each slot, where one without rows stands for the default. `times_ns` is null, or has an entry per value,
  // to which the time of its operator is added: the mean over the workers, so that the sum is at most the time of the
  // run.
  void run(Schedule& schedule, int64_t batch, const std::vector<const void*>& in, const std::vector<void*>& out,
           const std::vector<Int8Tile>& tiles = {}, int64_t* times_ns = nullptr) const;

 private:
  friend class ScheduleBuilder;
  friend class BatchRun;

  int add_value(const TensorDesc& desc);
  void check_value(int value) const;
  void fuse_pairs();

  std::vector<TensorDesc> descs_;
  std::vector<Node> nodes_;
  std::vector<int> inputs_, outputs_;  // values
  std::vector<int> converted_;         // per value: its channels-last form, or -1
  std::vector<int> quantized_rows_;    // per value: its pixels quantized by their own scales, or -1
  bool fixed_batch_ = false, finished_ = false;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Schedule>> schedules_;  // the most recently used first
};

}  // namespace tw
