// A network as one native call: operators on values of any data type, scheduled once per input shape.
//
// A batch is split into chunks of a few elements. A chunk passes through all operators before the next chunk starts, so
// that an operator finds its input in the cache. Threads take chunks in turn; if the batch has fewer elements than
// there are threads, it is one chunk and the operators use the threads themselves. The results do not depend on the
// split.
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

// An m x n x k matrix product that a node computes during a run, on `threads` threads. `slot` is the index of its tile
// in the list of tiles that the run receives.
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

  // Each returns the number of a new value, or throws std::invalid_argument if shapes do not fit.
  int add_input(const TensorDesc& desc);
  int add(std::unique_ptr<Op> op, std::vector<int> inputs);
  int channels_last(int value);   // the value in the layout channels_last; adds a conversion if it has planes of floats
  int quantized_rows(int value);  // the value in uint8, quantized dynamically: every pixel has its own scale
  void add_output(int value);     // floats are converted to planes
  void add_output_channels_last(int value);

  void finish();  // fuses operators, after which none can be added; otherwise the first schedule does this

  const TensorDesc& desc(int value) const;  // throws if the size is known at run time only
  const Op* producer(int value) const;      // null for an input
  const TensorDesc& input_desc(std::size_t i) const { return descs_[inputs_[i]]; }
  const std::vector<int>& inputs() const { return inputs_; }
  const std::vector<int>& outputs() const { return outputs_; }
  std::size_t values() const { return descs_.size(); }

  // Returns the schedule for inputs of these sizes, built at first use. Throws std::invalid_argument if they do not
  // fit.
  std::shared_ptr<Schedule> schedule(const std::vector<TensorDesc>& inputs);
  std::shared_ptr<Schedule> schedule();  // for the sizes with which the inputs were added

  // The matrix products of a run with the current number of threads, and the number of slots in its list of tiles.
  std::vector<GraphProduct> products(const Schedule& schedule, int64_t batch) const;
  std::size_t slots() const { return 2 * nodes_.size(); }

  // Runs the graph; safe to call from several threads at once. The caller fills the padding of outputs. `tiles` is
  // empty or has a tile per slot; a tile of 0 rows means the default. `times_ns` is null or has one entry per value, to
  // which the time of its operator is added: the mean over the workers, so that the sum is at most the time of the run.
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
  std::vector<int> converted_;         // per value: its conversion to channels last, or -1
  std::vector<int> quantized_rows_;    // per value: its dynamically quantized form, or -1
  bool fixed_batch_ = false, finished_ = false;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Schedule>> schedules_;  // the most recently used first
};

}  // namespace tw
