// A float network as one call: steps on channels-last images, for one size of input, in an arena that is planned once.
//
// Values are made in the order of their steps. A concatenation owns a buffer and its inputs are computed in their
// places in it; a slice of channels is a place in another value's buffer. Buffers whose values are not needed at the
// same time share memory, so a run allocates nothing once its arena exists. Tokens (B, T, C) are images of one row: T
// pixels of C channels.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "common/alloc.h"
#include "common/plan_layers.h"

namespace tw {

// Heads in the channels of queries, keys and values: where the first head of each begins, how far the next is, how
// wide.
struct PlanHeads {
  int64_t count, first[3], step[3], dim, value_dim;
  float scale;
  bool causal;
};

class FloatPlan {
 public:
  struct Size {
    int64_t n, c, h, w;
  };

  // Each gives the number of a new value; std::invalid_argument where sizes do not fit.
  int input(const Size& size, bool last = false);  // planes (N, C, H, W) given to `run`, or channels last without gaps
  // residual -1: none; automatic: the default algorithm for this shape
  int conv(std::shared_ptr<const PlanConv> layer, int x, int residual, ConvAlgorithm wanted = ConvAlgorithm::automatic);
  int linear(std::shared_ptr<const PlanLinear> layer, int x);
  int pool(const PoolShape& window, int64_t end_h, int64_t end_w, bool mean, bool count_padding,
           int x);  // padding after the last row and column
  int global_mean(int x);
  int binary(BinaryKind kind, int a, int b, ConvActivation activation);
  int affine(int x, const std::vector<float>& scale, const std::vector<float>& shift, ConvActivation activation);
  int concat(const std::vector<int>& parts);
  int slice(int x, int64_t first, int64_t count);
  int take(int x, const std::vector<int>& channels);
  // (n, h, w) pixels: of every image those with these numbers, in this order; all of them where none is named
  int pixels(int x, const std::vector<int>& index, int64_t n, int64_t h, int64_t w);
  int transpose(int x);  // (N, C, H, W) to (N, H * W, 1, C): channels and pixels change places
  int upsample(int x, int64_t by_h, int64_t by_w);
  int spread(int x, int64_t by_h, int64_t by_w);  // runs of channels become pixels
  int flatten(int x);                             // (N, C, H, W) to (N, C * H * W, 1, 1), in that order
  int layer_norm(int x, const std::vector<float>& weight, const std::vector<float>& bias,
                 float eps);  // over a pixel's channels
  int group_norm(int x, int64_t groups, const std::vector<float>& weight, const std::vector<float>& bias, float eps);
  // mask -1: none; else (batch or 1, heads or 1, queries or 1, keys), added to the scores
  int attention(const int (&qkv)[3], const PlanHeads& heads, int mask = -1);
  void output(int value, bool last = false);  // as `input`

  void finish();  // places every value; no steps after it

  const std::vector<Size>& inputs() const { return input_sizes_; }
  std::vector<Size> outputs() const;
  ConvAlgorithm algorithm(int value) const;  // of a convolution's result
  int64_t arena_bytes() const { return arena_floats_ * 4; }

  // Any number of threads may run one plan at a time. `step_ns`: null, or room for the time of every value's step.
  void run(const std::vector<const float*>& in, const std::vector<float*>& out, int64_t* step_ns) const;
  std::size_t values() const { return values_.size(); }

 private:
  using Run = std::function<void(const LastImage* in, const LastImage& out)>;
  struct Value {
    Size size;
    int parent = -1;                                     // the value in whose buffer it lies
    int64_t first = 0;                                   // at this channel
    int input = -1;                                      // which input it is
    bool last = false;                                   // an input that comes channels last
    int64_t offset = 0;                                  // of a buffer in the arena, in floats
    ConvAlgorithm algorithm = ConvAlgorithm::automatic;  // of the convolution that makes it
  };
  struct Step {
    std::vector<int> in;
    int out;
    Run run;
    std::shared_ptr<const PlanConv> layer = nullptr;  // of a convolution
  };
  struct Place {
    int root;
    int64_t channel;
  };

  const Size& size(int value) const;
  int add(const Size& size);
  int add(const Size& size, std::vector<int> in, Run run);
  int last(int value);  // the value channels-last: itself, or converted
  Place place(int value) const;
  void join_pairs();
  std::vector<int> readers() const;
  void home_parts(std::size_t concat);
  void place_buffers();
  LastImage image(int value, const std::vector<const float*>& in, float* arena) const;
  int64_t pitch(int root) const;

  std::vector<Value> values_;
  std::vector<Step> steps_;
  struct Output {
    int value;
    bool last;
  };
  std::vector<Output> outputs_;
  std::vector<Size> input_sizes_;
  struct Concat {
    int value;
    std::vector<int> parts;
    std::size_t step;  // where the copies of parts that lie elsewhere go
  };
  std::vector<Concat> concats_;
  std::vector<int> converted_;  // of inputs: their channels-last form, or -1
  bool finished_ = false;
  int64_t arena_floats_ = 0;
  mutable std::mutex mutex_;
  mutable std::vector<Buffer<float>> free_;
};

}  // namespace tw
