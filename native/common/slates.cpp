#include "common/slates.h"

#include <new>

#include "common/matmul.h"
#include "common/scratch.h"
#include "common/thread_pool.h"
#include "kernels/elementwise.h"
#include "kernels/sage.h"
#include "kernels/softmax.h"

namespace tw {
namespace {

// A matrix by its strides; `turned` is its transpose.
struct View {
  const float* data;
  int64_t row, col;
  View turned() const { return {data, col, row}; }
};

void multiply(int64_t m, int64_t n, int64_t k, View a, View b, float* c, const Epilogue& epilogue = {}) {
  Gemm g;
  g.m = m;
  g.n = n;
  g.k = k;
  g.a = a.data;
  g.a_row = a.row;
  g.a_col = a.col;
  g.b = b.data;
  g.b_row = b.row;
  g.b_col = b.col;
  g.c = c;
  g.c_row = n;
  g.epilogue = epilogue;
  if (!matmul(g, Batch(), nullptr)) throw std::bad_alloc();
}

Epilogue plus(const float* residual, int64_t row) {
  Epilogue e;
  e.residual = residual;
  e.residual_row = row;
  return e;
}

Epilogue with_bias(const float* bias, Activation activation) {
  Epilogue e;
  e.bias = bias;
  e.activation = activation;
  return e;
}

// One slate: its part of everything.
struct Slate {
  const Slates& all;
  int64_t kernel, node, nodes;

  Slate(const Slates& slates, int64_t kernel)
      : all(slates), kernel(kernel), node(slates.first_node[kernel]), nodes(slates.first_node[kernel + 1] - node) {}

  int64_t rows() const { return all.rows(); }
  int64_t across() const { return all.members * all.width; }
  View configs() const { return {all.configs + kernel * all.config_slate, all.config_row, 1}; }
  View wide() const { return {all.wide, across(), 1}; }
  View keys() const { return {all.keys + node * all.width, all.width, 1}; }
  View values() const { return {all.values + node * all.width, all.width, 1}; }
  View last() const { return {all.last, all.members, 1}; }
  const float* bias(std::size_t block) const { return all.biases[block] + kernel * all.width; }
  View weight(std::size_t block) const { return {all.weights[block] + kernel * all.width * all.width, all.width, 1}; }
};

// Where a slate keeps what it went through: h0, h1, ... and, of each block, what its ReLU gave; then the attention.
struct Kept {
  float* begin;
  int64_t area;  // rows * width
  std::size_t blocks;
  float* hidden(std::size_t i) const { return begin + static_cast<int64_t>(i) * area; }
  float* rectified(std::size_t block) const { return hidden(blocks + 2 + block); }
  float* attention() const { return hidden(2 * blocks + 2); }
};

Kept kept_by(const Slate& slate, float* saved) {
  const std::size_t blocks = slate.all.weights.size();
  const int64_t area = slate.rows() * slate.all.width;
  const int64_t before = slate.kernel * static_cast<int64_t>(2 * blocks + 2) * area + slate.node * slate.rows();
  return {saved + before, area, blocks};
}

void forward(const Slate& slate, const Kept& kept, float* scores) {
  const Slates& all = slate.all;
  const int64_t rows = slate.rows(), width = all.width;
  float* first = thread_scratch(slate.across());
  if (first == nullptr) throw std::bad_alloc();
  for (int64_t i = 0; i < slate.across(); ++i) first[i] = all.first[slate.kernel * width + i % width];
  multiply(all.slots, slate.across(), all.columns, slate.configs(), slate.wide(), kept.hidden(0),
           with_bias(first, Activation::relu));
  float* attention = kept.attention();
  const View h0{kept.hidden(0), width, 1};
  float* logits = kept.hidden(1);  // not used yet; a slate's nodes may be more than its width
  const bool roomy = slate.nodes <= width;
  if (!roomy) logits = thread_scratch(rows * slate.nodes);
  if (logits == nullptr) throw std::bad_alloc();
  multiply(rows, slate.nodes, width, h0, slate.keys().turned(), logits,
           with_bias(all.offsets + slate.node, Activation::none));
  active_softmax_kernels().softmax(logits, attention, rows, slate.nodes);
  multiply(rows, width, slate.nodes, {attention, slate.nodes, 1}, slate.values(), kept.hidden(1),
           plus(kept.hidden(0), width));
  for (std::size_t l = 0; l < kept.blocks; ++l) {
    multiply(rows, width, width, {kept.hidden(l + 1), width, 1}, slate.weight(l), kept.rectified(l),
             with_bias(slate.bias(l), Activation::relu));
    active_elementwise().add(kept.hidden(l + 1), kept.rectified(l), kept.hidden(l + 2), kept.area);
  }
  multiply(all.slots, all.members, slate.across(), {kept.hidden(kept.blocks + 1), slate.across(), 1}, slate.last(),
           scores + slate.kernel * rows);
}

void backward(const Slate& slate, const Kept& kept, const float* grad_scores, const SlateGradients& grads,
              float* work) {
  const Slates& all = slate.all;
  const int64_t rows = slate.rows(), width = all.width, k = slate.kernel, node = slate.node, nodes = slate.nodes;
  float* grad = work;  // of h, from the last to the first
  float* next = work + kept.area;
  float* inner = work + 2 * kept.area;
  const View by_score{grad_scores + k * rows, all.members, 1};
  multiply(slate.across(), all.members, all.slots, View{kept.hidden(kept.blocks + 1), slate.across(), 1}.turned(),
           by_score, grads.last + k * slate.across() * all.members);
  multiply(all.slots, slate.across(), all.members, by_score, slate.last().turned(), grad);
  for (std::size_t l = kept.blocks; l-- > 0;) {
    active_elementwise().relu_grad(kept.rectified(l), grad, inner, kept.area);
    const View in{inner, width, 1};
    multiply(width, width, rows, View{kept.hidden(l + 1), width, 1}.turned(), in, grads.weights[l] + k * width * width);
    active_sage().sum(inner, rows, width, grads.biases[l] + k * width);
    multiply(rows, width, width, in, slate.weight(l).turned(), next, plus(grad, width));
    float* const done = grad;
    grad = next;
    next = done;
  }
  const View h0{kept.hidden(0), width, 1}, above{grad, width, 1};
  const View attention{kept.attention(), nodes, 1};
  float* weights = work + 3 * kept.area;  // of the attention, then of what it is the softmax of
  float* logits = weights + rows * nodes;
  multiply(nodes, width, rows, attention.turned(), above, grads.values + node * width);
  multiply(rows, nodes, width, above, slate.values().turned(), weights);
  active_softmax_kernels().softmax_grad(kept.attention(), weights, logits, rows, nodes);
  multiply(nodes, width, rows, View{logits, nodes, 1}.turned(), h0, grads.keys + node * width);
  active_sage().sum(logits, rows, nodes, grads.offsets + node);
  multiply(rows, width, nodes, {logits, nodes, 1}, slate.keys(), next, plus(grad, width));
  float* hidden = grads.hidden + k * kept.area;
  active_elementwise().relu_grad(kept.hidden(0), next, hidden, kept.area);
  active_sage().sum(hidden, rows, width, grads.first + k * width);
}

// One thread's failure to allocate is the call's.
template <class F>
void each_slate(const Slates& slates, F&& f) {
  bool failed = false;
  parallel_for(static_cast<int>(slates.kernels), [&](int kernel) {
    try {
      f(Slate(slates, kernel));
    } catch (const std::bad_alloc&) {
      __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
    }
  });
  if (failed) throw std::bad_alloc();
}

}  // namespace

int64_t slates_saved_size(const Slates& slates) {
  const int64_t each = static_cast<int64_t>(2 * slates.weights.size() + 2) * slates.rows() * slates.width;
  return slates.kernels * each + slates.first_node[slates.kernels] * slates.rows();
}

void slates_forward(const Slates& slates, float* scores, float* saved) {
  each_slate(slates, [&](const Slate& slate) { forward(slate, kept_by(slate, saved), scores); });
}

void slates_backward(const Slates& slates, const float* grad_scores, const float* saved, const SlateGradients& grads) {
  each_slate(slates, [&](const Slate& slate) {
    const Kept kept = kept_by(slate, const_cast<float*>(saved));  // only read
    float* work = thread_scratch(3 * kept.area + 2 * slate.rows() * slate.nodes);
    if (work == nullptr) throw std::bad_alloc();
    backward(slate, kept, grad_scores, grads, work);
  });
}

}  // namespace tw
