// Operators on floats of any rank. Each operand is read through strides, so reshapes, permutations, slices and
// broadcasts of a value need no copy.
//
// The distance between pixels is chosen by memory planning, after the strides of an operand are known. An axis
// therefore has a step in pixels and a step in channels, one of which is 0; `resolve` turns both into floats.
#include <algorithm>
#include <array>
#include <cstring>

#include "common/attention_ops.h"
#include "common/matmul.h"
#include "common/thread_pool.h"
#include "kernels/rope_rmsnorm.h"
#include "kernels/softmax.h"
#include "kernels/strided.h"
#include "ops/ops.h"
#include "ops/rows.h"

namespace tw {
namespace {

constexpr int kMaxAxes = kMaxBatchDims;

// The address of an operand and its strides in floats.
struct View {
  float* data = nullptr;
  std::array<int64_t, kMaxAxes> step{};
};

View resolve(const Operand& operand, const StridedOperand& spec) {
  const int64_t pixel = operand->pixel() / 4;
  View view;
  view.data = static_cast<float*>(operand.data) + spec.first_pixel * pixel + spec.first_channel;
  for (std::size_t i = 0; i < spec.steps.size(); ++i) view.step[i] = spec.steps[i][0] * pixel + spec.steps[i][1];
  return view;
}

// Checks that every index of the loop is inside the value.
void require_inside(const StridedOperand& spec, const std::vector<int64_t>& sizes, const TensorDesc& desc) {
  require(is_float_pixels(desc), "a strided operator reads channels-last floats");
  require(spec.steps.size() == sizes.size() && sizes.size() <= kMaxAxes, "an operand has a step for every axis");
  int64_t pixel = spec.first_pixel, channel = spec.first_channel;
  require(pixel >= 0 && channel >= 0, "an operand begins before its value");
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    require(sizes[i] > 0 && spec.steps[i][0] >= 0 && spec.steps[i][1] >= 0, "an axis has a size and goes forward");
    pixel += (sizes[i] - 1) * spec.steps[i][0];
    channel += (sizes[i] - 1) * spec.steps[i][1];
  }
  require(pixel < desc.pixels() && channel < desc.channels, "an operand ends behind its value");
}

// Base of the strided operators: the loop, the operands' strides and the shape of the result.
class StridedOp : public Op {
 public:
  explicit StridedOp(StridedLoop loop) : loop_(std::move(loop)) {}

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    const TensorDesc out = float_pixels(loop_.n, loop_.channels, loop_.height, loop_.width);
    require(in.size() == loop_.operands.size(), "an operator has a view of every operand");
    for (std::size_t i = 0; i < in.size(); ++i) require_inside(loop_.operands[i], operand_sizes(i), in[i]);
    require_inside(loop_.result, result_sizes(), out);
    return out;
  }

 protected:
  virtual std::vector<int64_t> operand_sizes(std::size_t) const { return loop_.sizes; }
  virtual std::vector<int64_t> result_sizes() const { return loop_.sizes; }

  std::vector<View> views(const OpCall& call) const {
    std::vector<View> views;
    for (std::size_t i = 0; i < loop_.operands.size(); ++i) views.push_back(resolve(call.in[i], loop_.operands[i]));
    views.push_back(resolve(call.out, loop_.result));
    return views;
  }

  StridedLoop loop_;
};

// The number of indices of axes [first, last).
int64_t index_count(const std::vector<int64_t>& sizes, std::size_t first, std::size_t last) {
  int64_t count = 1;
  for (std::size_t i = first; i < last; ++i) count *= sizes[i];
  return count;
}

// Removes axes of size 1 and merges neighbouring axes that are contiguous to each other in every view, starting with
// the innermost. A merged axis has at most kTaskElements elements, so that threads can share the others.
void merge_axes(std::vector<int64_t>& sizes, std::vector<View>& views) {
  const std::size_t count = sizes.size();
  std::size_t first = count;  // merged axes are moved to the end
  for (std::size_t axis = count; axis-- > 0;) {
    if (sizes[axis] == 1) continue;
    bool continues = first < count && sizes[first] * sizes[axis] <= kTaskElements;
    for (std::size_t v = 0; continues && v < views.size(); ++v)
      continues = views[v].step[axis] == views[v].step[first] * sizes[first];
    if (continues) {
      sizes[first] *= sizes[axis];
      continue;
    }
    sizes[--first] = sizes[axis];
    for (View& view : views) view.step[first] = view.step[axis];
  }
  if (first == count) --first, sizes[first] = 1;
  sizes.erase(sizes.begin(), sizes.begin() + static_cast<std::ptrdiff_t>(first));
  for (View& view : views) std::copy(view.step.begin() + first, view.step.begin() + count, view.step.begin());
}

// Calls f(pointers, count) for all indices of axes [first, last); pointers[i] belongs to views[i]. Each call covers
// `count` neighbours along axis last - 1.
template <class F>
void for_each_run(const std::vector<int64_t>& sizes, std::size_t first, std::size_t last,
                  const std::vector<View>& views, int64_t floats_per_index, const F& f) {
  const int64_t count = index_count(sizes, first, last);
  const int64_t tasks = std::max<int64_t>(1, std::min(count, count * floats_per_index / kTaskElements));
  const auto visit = [&](int64_t begin, int64_t end) {
    std::array<float*, kMaxOperands + 1> at{};
    std::array<int64_t, kMaxAxes> index{};
    for (std::size_t v = 0; v < views.size(); ++v) at[v] = views[v].data;
    int64_t remainder = begin;  // the index of each axis, from the flat index `begin`
    for (std::size_t axis = last; axis-- > first;) {
      index[axis] = remainder % sizes[axis];
      remainder /= sizes[axis];
      for (std::size_t v = 0; v < views.size(); ++v) at[v] += index[axis] * views[v].step[axis];
    }
    for (int64_t i = begin; i < end;) {
      const int64_t run = last == first ? 1 : std::min(end - i, sizes[last - 1] - index[last - 1]);
      f(at, run);
      i += run;
      if (i == end) return;
      // Go back to the start of the innermost axis and advance the next outer one, with carry.
      for (std::size_t v = 0; v < views.size(); ++v) at[v] -= index[last - 1] * views[v].step[last - 1];
      index[last - 1] = 0;
      for (std::size_t axis = last - 1; axis-- > first;) {
        if (++index[axis] < sizes[axis]) {
          for (std::size_t v = 0; v < views.size(); ++v) at[v] += views[v].step[axis];
          break;
        }
        index[axis] = 0;
        for (std::size_t v = 0; v < views.size(); ++v) at[v] -= (sizes[axis] - 1) * views[v].step[axis];
      }
    }
  };
  if (tasks == 1) return visit(0, count);
  parallel_near(static_cast<int>(tasks), [&](int task) { visit(count * task / tasks, count * (task + 1) / tasks); });
}

// Calls f(pointers) for every single index of axes [first, last).
template <class F>
void for_each_index(const std::vector<int64_t>& sizes, std::size_t first, std::size_t last,
                    const std::vector<View>& views, int64_t floats_per_index, const F& f) {
  for_each_run(sizes, first, last, views, floats_per_index,
               [&](std::array<float*, kMaxOperands + 1> at, int64_t count) {
                 for (int64_t i = 0;; ++i) {
                   f(at);
                   if (i + 1 == count) return;
                   for (std::size_t v = 0; v < views.size(); ++v) at[v] += views[v].step[last - 1];
                 }
               });
}

// Computes y = f(rows) where neighbouring elements of y are `step` floats apart: into a buffer, then scattered.
void map_apart(MapKind kind, const StridedRow* x, std::size_t inputs, float low, float high, float* y, int64_t step,
               int64_t n) {
  float part[64];  // stays in the first-level cache
  constexpr int64_t size = sizeof(part) / sizeof(float);
  for (int64_t i = 0; i < n; i += size) {
    StridedRow rows[kMaxOperands];
    const int64_t count = std::min(size, n - i);
    for (std::size_t v = 0; v < inputs; ++v) rows[v] = {x[v].data + i * x[v].step, x[v].step};
    active_strided().map(kind, rows, low, high, part, 0, 1, count);
    for (int64_t j = 0; j < count; ++j) y[(i + j) * step] = part[j];
  }
}

// Computes y = f(operands) for a loop whose axes are merged already. The last view is y.
void map_merged(MapKind kind, const std::vector<int64_t>& sizes, const std::vector<View>& all, float low, float high) {
  const std::size_t inner = sizes.size() - 1, inputs = all.size() - 1;
  const int64_t n = sizes[inner], y_step = all[inputs].step[inner];
  const auto row_step = [&](std::size_t view) { return inner == 0 ? 0 : all[view].step[inner - 1]; };
  for_each_run(sizes, 0, inner, all, n, [&](const std::array<float*, kMaxOperands + 1>& at, int64_t count) {
    StridedRow rows[kMaxOperands];
    for (std::size_t v = 0; v < inputs; ++v) rows[v] = {at[v], all[v].step[inner], row_step(v)};
    if (y_step == 1) return active_strided().map(kind, rows, low, high, at[inputs], row_step(inputs), count, n);
    for (int64_t r = 0; r < count; ++r) {
      map_apart(kind, rows, inputs, low, high, at[inputs] + r * row_step(inputs), y_step, n);
      for (std::size_t v = 0; v < inputs; ++v) rows[v].data += rows[v].row;
    }
  });
}

// Computes y = f(operands) for any loop.
void map_views(MapKind kind, const std::vector<int64_t>& loop_sizes, std::vector<View>& all, float low, float high) {
  if (loop_sizes.size() > 1) {
    std::vector<int64_t> sizes = loop_sizes;
    merge_axes(sizes, all);
    return map_merged(kind, sizes, all, low, high);
  }
  map_merged(kind, loop_sizes, all, low, high);
}

// y = f(operands), element by element.
class Map : public StridedOp {
 public:
  Map(StridedLoop loop, MapKind kind, float low, float high)
      : StridedOp(std::move(loop)), kind_(kind), low_(low), high_(high) {}

  void run(const OpCall& call) const override {
    std::vector<View> all = views(call);
    if (kind_ == MapKind::copy && all[0].step[loop_.sizes.size() - 1] > 1 && copy_transposed(all)) return;
    map_views(kind_, loop_.sizes, all, low_, high_);
  }

 private:
  // A copy whose innermost axis is not contiguous in the operand, but another axis is: a batch of matrix
  // transpositions.
  bool copy_transposed(std::vector<View> all) const {
    std::vector<int64_t> sizes = loop_.sizes;
    const std::size_t inner = sizes.size() - 1;
    std::size_t contiguous = inner;
    for (std::size_t axis = 0; axis < inner; ++axis) {
      if (all[0].step[axis] == 1 && sizes[axis] > 1) contiguous = axis;
    }
    if (contiguous == inner) return false;
    std::swap(sizes[contiguous], sizes[inner - 1]);  // outer axes may be visited in any order
    for (View& view : all) std::swap(view.step[contiguous], view.step[inner - 1]);
    const int64_t rows = sizes[inner], cols = sizes[inner - 1];
    for_each_index(sizes, 0, inner - 1, all, rows * cols, [&](const std::array<float*, kMaxOperands + 1>& at) {
      active_gemm().transpose(at[0], rows, cols, all[0].step[inner], at[1], all[1].step[inner - 1]);
    });
    return true;
  }

  MapKind kind_;
  float low_, high_;
};

// A sum, mean or extremum over the last `reduced` axes.
class Reduce : public StridedOp {
 public:
  Reduce(StridedLoop loop, ReduceKind kind, std::size_t reduced)
      : StridedOp(std::move(loop)), kind_(kind), outer_(loop_.sizes.size() - reduced) {
    require(reduced < loop_.sizes.size() && outer_ > 0, "a reduction leaves an axis");
  }

  void run(const OpCall& call) const override {
    std::vector<View> all = views(call);
    const std::size_t rank = loop_.sizes.size(), inner = outer_ - 1;
    const int64_t n = loop_.sizes[inner], count = index_count(loop_.sizes, outer_, rank);
    const StridedKernels& kernels = active_strided();
    const float factor = kind_ == ReduceKind::mean ? 1.0f / static_cast<float>(count) : 1.0f;
    // If neighbouring results read neighbouring elements, whole rows are accumulated; else each result is a reduction
    // of its own.
    const bool by_rows = all[0].step[inner] == 1 && n >= 4;
    if (!by_rows && outer_ + 1 == rank && kind_ != ReduceKind::mean) {
      return for_each_run(loop_.sizes, 0, outer_, all, count, [&](const auto& at, int64_t rows) {
        kernels.reduce(kind_, {at[0], all[0].step[outer_], all[0].step[inner]}, at[1], all[1].step[inner], rows, count);
      });
    }
    for_each_index(loop_.sizes, 0, by_rows ? inner : outer_, all, count * n, [&](const auto& at) {
      by_rows ? reduce_row(kernels, all[0], at[0], at[1], n) : reduce_element(kernels, all[0], at[0], at[1]);
      const int64_t written = by_rows ? n : 1;
      if (kind_ == ReduceKind::mean) {
        for (int64_t i = 0; i < written; ++i) at[1][i] *= factor;
      }
    });
  }

 private:
  std::vector<int64_t> result_sizes() const override { return {loop_.sizes.begin(), loop_.sizes.begin() + outer_}; }

  // Reduces n neighbouring results together, one vector operation per index of the reduced axes.
  void reduce_row(const StridedKernels& kernels, const View& x, float* from, float* to, int64_t n) const {
    bool first = true;
    visit(x, from, outer_, loop_.sizes.size(), [&](float* row) {
      if (first) {
        std::memcpy(to, row, static_cast<std::size_t>(n) * sizeof(float));
      } else {
        kernels.accumulate(kind_, {row, 1}, to, n);
      }
      first = false;
    });
  }

  // Reduces one result: the innermost reduced axis by the kernel, the others by accumulating its values.
  void reduce_element(const StridedKernels& kernels, const View& x, float* from, float* to) const {
    const std::size_t last = loop_.sizes.size() - 1;
    bool first = true;
    visit(x, from, outer_, last, [&](float* row) {
      float value;
      kernels.reduce(kind_, {row, x.step[last]}, &value, 0, 1, loop_.sizes[last]);
      if (first) {
        *to = value;
      } else {
        kernels.accumulate(kind_, {&value, 1}, to, 1);
      }
      first = false;
    });
  }

  // Calls f(pointer) for every index of axes [first, last) of one view.
  template <class F>
  void visit(const View& x, float* at, std::size_t first, std::size_t last, const F& f) const {
    if (first == last) return f(at);
    for (int64_t i = 0; i < loop_.sizes[first]; ++i) visit(x, at + i * x.step[first], first + 1, last, f);
  }

  ReduceKind kind_;
  std::size_t outer_;
};

// Softmax along the last axis, which is contiguous.
class Softmax : public StridedOp {
 public:
  using StridedOp::StridedOp;

  void run(const OpCall& call) const override {
    const std::vector<View> all = views(call);
    const std::size_t inner = loop_.sizes.size() - 1;
    const int64_t n = loop_.sizes[inner];
    require(all[0].step[inner] == 1 || n == 1, "a softmax reads contiguous rows");
    const bool dense = inner > 0 && all[0].step[inner - 1] == n && all[1].step[inner - 1] == n;
    for_each_run(loop_.sizes, 0, inner, all, 4 * n, [&](const auto& at, int64_t count) {
      if (dense) return active_softmax_kernels().softmax(at[0], at[1], count, n);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t x_row = inner > 0 ? r * all[0].step[inner - 1] : 0,
                      y_row = inner > 0 ? r * all[1].step[inner - 1] : 0;
        active_softmax_kernels().softmax(at[0] + x_row, at[1] + y_row, 1, n);
      }
    });
  }
};

// Cumulative sum along one axis, each sum including its own element.
class CumulativeSum : public StridedOp {
 public:
  CumulativeSum(StridedLoop loop, std::size_t axis) : StridedOp(std::move(loop)), axis_(axis) {
    require(axis < loop_.sizes.size(), "there is no such axis");
  }

  void run(const OpCall& call) const override {
    const std::vector<View> all = views(call);
    std::vector<int64_t> sizes = loop_.sizes;
    const std::size_t inner = sizes.size() - 1;
    const int64_t length = sizes[axis_], x_step = all[0].step[axis_], y_step = all[1].step[axis_], n = sizes[inner];
    sizes[axis_] = 1;
    // If the innermost axis is contiguous, all its sums advance together: row i = row i - 1 + x[i].
    if (axis_ != inner && n > 1 && all[0].step[inner] == 1 && all[1].step[inner] == 1) {
      for_each_index(sizes, 0, inner, all, length * n, [&](const auto& at) {
        std::memcpy(at[1], at[0], static_cast<std::size_t>(n) * sizeof(float));
        for (int64_t i = 1; i < length; ++i) {
          const StridedRow rows[2] = {{at[1] + (i - 1) * y_step, 1}, {at[0] + i * x_step, 1}};
          active_strided().map(MapKind::add, rows, 0, 0, at[1] + i * y_step, 0, 1, n);
        }
      });
      return;
    }
    for_each_index(sizes, 0, sizes.size(), all, length, [&](const auto& at) {
      float total = 0.0f;
      for (int64_t i = 0; i < length; ++i) {
        total += at[0][i * x_step];
        at[1][i * y_step] = total;
      }
    });
  }

 private:
  std::size_t axis_;
};

// Batched matrix product. The last two axes of the loop are M and N; the operands have axes (batch ..., M, K) and
// (batch ..., K, N).
class MatMul : public StridedOp {
 public:
  MatMul(StridedLoop loop, int64_t k) : StridedOp(std::move(loop)), k_(k) {
    require(loop_.sizes.size() >= 2 && loop_.operands.size() == 2, "a product has two matrices");
  }

  int64_t multiply_adds(const TensorDesc&) const override {
    return index_count(loop_.sizes, 0, loop_.sizes.size()) * k_;
  }

  void run(const OpCall& call) const override {
    const std::vector<View> all = views(call);
    const std::size_t m = loop_.sizes.size() - 2, n = m + 1;
    const auto multiply = [&](const std::array<float*, kMaxOperands + 1>& at) {
      Gemm g;
      g.m = loop_.sizes[m], g.n = loop_.sizes[n], g.k = k_;
      g.a = at[0], g.a_row = all[0].step[m], g.a_col = all[0].step[n];
      g.b = at[1], g.b_row = all[1].step[m], g.b_col = all[1].step[n];
      g.c = at[2], g.c_row = all[2].step[m];
      if (!matmul(g, Batch{}, nullptr)) throw std::bad_alloc();
    };
    for_each_index(loop_.sizes, 0, m, all, loop_.sizes[m] * loop_.sizes[n] * k_ / 8, multiply);
  }

 private:
  std::vector<int64_t> operand_sizes(std::size_t i) const override {
    std::vector<int64_t> sizes = loop_.sizes;
    sizes[sizes.size() - (i == 0 ? 1 : 2)] = k_;
    return sizes;
  }

  int64_t k_;
};

// A result assembled from several operands: each is copied to its place by its own loop, and the rest has the value
// `fill`. Serves concatenation, padding and inserting zeros between pixels.
class Assemble : public Op {
 public:
  Assemble(std::vector<StridedLoop> loops, float fill, bool covered)
      : loops_(std::move(loops)), fill_(fill), covered_(covered) {}

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(!loops_.empty() && in.size() == loops_.size(), "an assembled value has loops");
    const TensorDesc out = float_pixels(loops_[0].n, loops_[0].channels, loops_[0].height, loops_[0].width);
    for (std::size_t i = 0; i < in.size(); ++i) {
      require_inside(loops_[i].operands[0], loops_[i].sizes, in[i]);
      require_inside(loops_[i].result, loops_[i].sizes, out);
    }
    return out;
  }

  void run(const OpCall& call) const override {
    if (!covered_) {
      const LastImage out = call.out.floats(call.batch);
      for (int64_t p = 0; p < out.pixels(); ++p) std::fill_n(out.data + p * out.pitch, out.c, fill_);
    }
    for (std::size_t i = 0; i < loops_.size(); ++i) copy(call.in[i], call.out, loops_[i]);
  }

 private:
  static void copy(const Operand& in, const Operand& out, const StridedLoop& part) {
    std::vector<View> both{resolve(in, part.operands[0]), resolve(out, part.result)};
    map_views(MapKind::copy, part.sizes, both, 0, 0);
  }

  std::vector<StridedLoop> loops_;
  float fill_;
  bool covered_;
};

// Scaled dot-product attention of heads with any strides. The loop has the axes (batch, groups, heads per group,
// queries, channels). The heads of a group share its keys and values (grouped-query attention, Ainslie et al. 2023).
class GroupedAttention : public StridedOp {
 public:
  GroupedAttention(StridedLoop loop, const GroupedHeads& heads) : StridedOp(std::move(loop)), heads_(heads) {
    require(loop_.sizes.size() == 5 && loop_.operands.size() >= 3, "attention has five axes and three operands");
  }

  void run(const OpCall& call) const override {
    const std::vector<View> all = views(call);
    const View &q = all[0], &k = all[1], &v = all[2], &out = all.back();
    const bool masked = all.size() > 4;
    const View mask = masked ? all[3] : View{};
    for (int64_t b = 0; b < loop_.sizes[0]; ++b) {
      const auto rows = [&](const View& x) { return StridedRows{x.data + b * x.step[0], x.step[3]}; };
      const auto strides = [](const View& x) { return HeadStrides{x.step[1], x.step[2]}; };
      const AttentionHead head{loop_.sizes[3],
                               heads_.keys,
                               heads_.dim,
                               loop_.sizes[4],
                               rows(q),
                               rows(k),
                               rows(v),
                               heads_.scale,
                               heads_.causal,
                               masked ? MaskKind::additive : MaskKind::none,
                               masked ? mask.data + b * mask.step[0] : nullptr,
                               mask.step[3],
                               mask.step[4]};
      const AttentionBatch batch{loop_.sizes[1], loop_.sizes[2], head,         strides(q),
                                 strides(k),     strides(v),     strides(mask)};
      attention_forward(batch, {{out.data + b * out.step[0], out.step[3]}, strides(out)}, nullptr);
    }
  }

 private:
  std::vector<int64_t> operand_sizes(std::size_t i) const override {
    std::vector<int64_t> sizes = loop_.sizes;
    if (i == 0) sizes[4] = heads_.dim;
    if (i == 1) sizes[3] = heads_.keys, sizes[4] = heads_.dim;
    if (i == 2) sizes[3] = heads_.keys;
    if (i == 3) sizes[4] = heads_.keys;
    return sizes;
  }

  GroupedHeads heads_;
};

// Root-mean-square normalization over the channels of each pixel.
class RmsNorm : public Op {
 public:
  RmsNorm(const std::vector<float>& weight, float eps) : weight_(weight), eps_(eps) {}

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(is_float_pixels(in[0]) && static_cast<int64_t>(weight_.size()) == in[0].channels,
            "RMS norm has a weight per channel");
    return like(in[0], 0, 0);
  }

  void run(const OpCall& call) const override {
    const LastImage x = call.in[0].floats(call.batch), y = call.out.floats(call.batch);
    const int64_t pixels = x.pixels(), tasks = std::min(pixels, 1 + pixels * x.c / kTaskElements);
    parallel_near(static_cast<int>(tasks), [&](int task) {
      for (int64_t p = pixels * task / tasks; p < pixels * (task + 1) / tasks; ++p)
        active_rope_rmsnorm().rms_norm(x.data + p * x.pitch, weight_.data(), eps_, y.data + p * y.pitch, 1, x.c);
    });
  }

 private:
  std::vector<float> weight_;
  float eps_;
};

// The names of MapKind and ReduceKind, in their order.
#define TW_NAME(name, value) #name,
const char* const kMapNames[] = {TW_UNARY_FUNCTIONS(TW_NAME) TW_BINARY_FUNCTIONS(TW_NAME) "select"};
#undef TW_NAME
const char* const kReduceNames[] = {"sum", "mean", "max", "min"};

template <class Kind, std::size_t N>
Kind kind_of(const char* const (&names)[N], const std::string& name) {
  for (std::size_t i = 0; i < N; ++i) {
    if (name == names[i]) return static_cast<Kind>(i);
  }
  throw std::invalid_argument("a graph has no function " + name);
}

}  // namespace

OpPtr map_op(StridedLoop loop, const std::string& kind, float low, float high) {
  return std::make_unique<Map>(std::move(loop), kind_of<MapKind>(kMapNames, kind), low, high);
}
OpPtr reduce_op(StridedLoop loop, const std::string& kind, std::size_t reduced) {
  return std::make_unique<Reduce>(std::move(loop), kind_of<ReduceKind>(kReduceNames, kind), reduced);
}
OpPtr softmax_op(StridedLoop loop) { return std::make_unique<Softmax>(std::move(loop)); }
OpPtr cumulative_sum_op(StridedLoop loop, std::size_t axis) {
  return std::make_unique<CumulativeSum>(std::move(loop), axis);
}
OpPtr matmul_op(StridedLoop loop, int64_t k) { return std::make_unique<MatMul>(std::move(loop), k); }
OpPtr assemble_op(std::vector<StridedLoop> loops, float fill, bool covered) {
  return std::make_unique<Assemble>(std::move(loops), fill, covered);
}
OpPtr grouped_attention_op(StridedLoop loop, const GroupedHeads& heads) {
  return std::make_unique<GroupedAttention>(std::move(loop), heads);
}
OpPtr rms_norm_op(const std::vector<float>& weight, float eps) { return std::make_unique<RmsNorm>(weight, eps); }

}  // namespace tw
