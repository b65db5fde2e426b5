// A quantized network as one call: operations on bytes, the buffers between them planned once per image size.
//
// A batch is cut into chunks of a few images, and a chunk goes through all operations before the next begins: what a
// layer writes is still in the cache when the next one reads it. Chunks are shared among the threads; a batch with
// fewer images than threads goes through as one chunk, whose products then use the threads. An image's numbers do not
// depend on the cut.
//
// Two values share a buffer only where they have the same shape, frame and zero point, so frames are written once. A
// concatenation is such a buffer, and its parts are computed in their places in it; a slice of channels is a place in
// another value's buffer.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "common/alloc.h"
#include "common/int16_layer.h"
#include "common/int8_grouped_layer.h"
#include "common/int8_layer.h"

namespace tw {

// One image (or row) of a value.
struct PlanShape {
  bool bytes = false;  // integers in a frame, channels last; or float32, channels first
  int size = 1;        // of an integer: a byte, or two (kernels/int16.h)
  bool rows = false;   // (N, channels): one pixel
  int64_t channels = 0, height = 1, width = 1;
  int border = 0, zero = 0;
  int64_t pitch = 0;  // bytes from pixel to pixel, where they are another value's; 0: the channels rounded up to 4

  bool wide() const { return size == 2; }
  int64_t tight() const { return size * round_up(channels, kInt8Group); }
  int64_t pixel() const { return pitch > 0 ? pitch : tight(); }
  bool is_tight() const { return pitch == 0 || pitch == tight(); }
  Int8Image image(int64_t images) const { return {images, height, width, pixel(), border}; }  // in bytes
  Int8Image numbers(int64_t images) const { return {images, height, width, pixel() / size, border}; }
  int64_t floats() const { return channels * height * width; }
  int64_t storage() const { return bytes ? image(1).image_step() : 4 * floats(); }
  bool same_buffer(const PlanShape& other) const;
};

// Of an operation that can make some rows of its result alone: row r is made of the rows [r * step + first, r * step +
// first + rows) of its first input, and of row r of its second one. No rows: it cannot.
struct RowReach {
  int64_t first = 0, rows = 0, step = 1;
};

struct Chain;  // common/int8_plan_bands.h
struct BandStep;

// Something that can stand in a plan. It must give the same numbers for an image whatever lies beside it in the batch.
class Int8Op {
 public:
  virtual ~Int8Op() = default;
  virtual PlanShape result(const std::vector<PlanShape>& in) const = 0;  // throws std::invalid_argument on a misfit
  virtual bool is_view(const PlanShape&) const { return false; }         // the result is the input's bytes as they are
  virtual bool is_concat() const { return false; }                       // run() copies one part to its place
  virtual int64_t slice_from() const { return -1; }                      // of a slice: its first channel
  virtual bool reads_wide() const { return false; }                      // numbers of two bytes
  virtual bool in_place(const PlanShape&, const PlanShape&) const {
    return false;
  }  // the result may lie where its first input did
  virtual bool reads_any_pitch() const { return true; }                // of its first input
  virtual bool writes_any_pitch() const { return true; }               // and nothing beside its channels
  virtual int64_t multiply_adds(const PlanShape&) const { return 0; }  // per image of the result
  virtual RowReach reach() const { return {}; }
  virtual int64_t weight_bytes() const { return 0; }
  virtual void run(int64_t images, const PlanShape* const* in_shapes, const void* const* in, const PlanShape& out_shape,
                   void* out) const = 0;
  // Of an operation that is one plain product of rows: its layer, and a run with a tile that fits.
  virtual const Int8Layer* product() const { return nullptr; }
  virtual void run_tiled(int64_t, const void*, void*, const Int8Tile&) const {}
};

// A plain product that a step makes in a run of a plan: rows x columns x k on so many threads. `slot` is its tile's
// place in the tiles that the run is given.
struct PlanProduct {
  std::size_t step, slot;
  int64_t rows, columns, k;
  int threads;
};

class Int8Plan {
 public:
  class Schedule;

  int add_input(const PlanShape& shape);  // height and width may be anything at run time
  int add(std::unique_ptr<Int8Op> op, std::vector<int> inputs);
  void add_output(int value);

  const std::vector<PlanShape>& inputs() const { return inputs_; }
  std::size_t outputs() const { return outputs_.size(); }

  // Shapes and buffers for inputs of these sizes, made at first use; throws std::invalid_argument where they do not
  // fit.
  std::shared_ptr<Schedule> schedule(const std::vector<PlanShape>& inputs) const;
  static const PlanShape& output_shape(const Schedule& schedule, std::size_t index);

  // The products of a run with the threads there are now, and how many slots its tiles have.
  std::vector<PlanProduct> products(const Schedule& schedule, int64_t images) const;
  std::size_t slots() const { return 2 * steps_.size(); }

  // Any number of threads may run one plan at a time. Frames of outputs are the caller's to fill. `tiles` is empty, or
  // holds a tile in each slot; one of no rows stands for the default.
  void run(Schedule& schedule, int64_t images, const std::vector<const void*>& in, const std::vector<void*>& out,
           const std::vector<Int8Tile>& tiles = {}) const;

 private:
  struct Step {
    std::unique_ptr<Int8Op> op;
    std::vector<int> inputs;
  };
  struct Families;  // values that lie in one buffer
  Families families(Schedule& schedule) const;
  void find_chains(Schedule& schedule, const Families& families) const;
  struct Spaces;
  int space_for(Schedule& schedule, const Families& families, Spaces& spaces, std::size_t step, int root) const;
  int replaces(const Schedule& schedule, const Families& families, const Spaces& spaces, std::size_t step) const;
  std::vector<BandStep> steps_of(const Schedule& schedule, std::size_t first, std::size_t last) const;
  struct Tail {
    std::size_t first;  // step
    int value;          // the root value whose buffer they begin with
  };
  int64_t image_bytes(const Schedule& schedule, std::size_t first, std::size_t last) const;
  Tail find_tail(const Schedule& schedule, const Families& families) const;
  struct Run;
  void check_value(int value) const;

  std::vector<PlanShape> inputs_;
  std::vector<Step> steps_;   // step i computes value inputs_.size() + i
  std::vector<int> outputs_;  // values
  mutable std::mutex mutex_;
  mutable std::vector<std::shared_ptr<Schedule>> schedules_;  // the most recently used first
};

// --- operations ---

std::unique_ptr<Int8Op> quantize_op(float scale, int zero, int border);
std::unique_ptr<Int8Op> dequantize_op(float scale);
std::unique_ptr<Int8Op> conv_op(std::shared_ptr<const Int8Layer> layer, bool residual, int border);
std::unique_ptr<Int8Op> grouped_conv_op(std::shared_ptr<const Int8GroupedLayer> layer, bool residual, int border);
std::unique_ptr<Int8Op> linear_op(std::shared_ptr<const Int8Layer> layer, bool to_float, bool relu);
std::unique_ptr<Int8Op> max_pool_op(const PoolWindow& window, int border);
std::unique_ptr<Int8Op> avg_pool_op(const PoolWindow& window, int border);
std::unique_ptr<Int8Op> global_pool_op(float scale, float out_scale, int out_zero, bool rows, int border);
std::unique_ptr<Int8Op> flatten_op(bool channels_first = false);  // the order of the row: (C, H, W) or (H, W, C)
// scales: what each side's bytes are multiplied by; of a product, the first is of both
std::unique_ptr<Int8Op> add_op(float a_scale, float b_scale, const ByteFinish& finish, int border);
std::unique_ptr<Int8Op> mul_op(float scale, const ByteFinish& finish, int border);
std::unique_ptr<Int8Op> affine_op(const std::vector<float>& scale, const std::vector<float>& shift,
                                  const ByteFinish& finish, int border);
std::unique_ptr<Int8Op> same_op(bool rows, int border);
std::unique_ptr<Int8Op> concat_op(int border);
std::unique_ptr<Int8Op> slice_op(int64_t first, int64_t count, int border);
std::unique_ptr<Int8Op> take_op(const std::vector<int>& channels, int border);
std::unique_ptr<Int8Op> upsample_op(int64_t by_h, int64_t by_w, int border);
std::unique_ptr<Int8Op> spread_op(int64_t by_h, int64_t by_w, int border);  // runs of channels become pixels

// --- operations that read or give numbers of two bytes ---

// What a step's values become: bytes, or numbers of two bytes.
struct MixedEnd {
  bool wide = false;
  ByteFinish bytes;
  WideFinish numbers;
};

std::unique_ptr<Int8Op> wide_quantize_op(float scale, int most, int border);
std::unique_ptr<Int8Op> wide_dequantize_op(float scale);
std::unique_ptr<Int8Op> wide_layer_op(std::shared_ptr<const Int16Layer> layer, bool residual, bool relu, int border);
std::unique_ptr<Int8Op> wide_pool_op(const PoolWindow& window, bool mean, int border);
// By the scale that a mean of what is read has; to bytes (most: 0), or to two, of `most` at most.
std::unique_ptr<Int8Op> wide_global_pool_op(float scale, float out_scale, int out_zero, int most, bool rows,
                                            int border);
std::unique_ptr<Int8Op> wide_add_op(float a_scale, float b_scale, const MixedEnd& end, int border);
std::unique_ptr<Int8Op> wide_mul_op(float scale, float fraction, const MixedEnd& end, int border);
std::unique_ptr<Int8Op> wide_affine_op(const std::vector<float>& scale, const std::vector<float>& shift,
                                       const MixedEnd& end, int border);

}  // namespace tw
