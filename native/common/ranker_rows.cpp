#include "common/ranker_rows.h"

#include <new>
#include <utility>

#include "common/matmul.h"
#include "common/scratch.h"
#include "common/thread_pool.h"
#include "kernels/elementwise.h"
#include "kernels/sage.h"
#include "kernels/softmax.h"

namespace tw {
namespace {

// A matrix with strides.
struct View {
  const float* data;
  int64_t row, col;
  View transposed() const { return {data, col, row}; }
};

// c (m, n), contiguous = epilogue(a b).
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

Epilogue with_residual(const float* residual, int64_t row) {
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

// One kernel's part of the inputs.
struct KernelRows {
  const RankerRows& all;
  int64_t kernel;
  int64_t node, nodes;  // index of its first node, and their number

  KernelRows(const RankerRows& all, int64_t kernel)
      : all(all), kernel(kernel), node(all.first_node[kernel]), nodes(all.first_node[kernel + 1] - node) {}

  int64_t rows() const { return all.rows_per_kernel(); }
  int64_t hidden_columns() const { return all.members * all.width; }
  View configs() const { return {all.configs + kernel * all.kernel_stride, all.config_stride, 1}; }
  View first_weight() const { return {all.first_weight, hidden_columns(), 1}; }
  View keys() const { return {all.keys + node * all.width, all.width, 1}; }
  View values() const { return {all.values + node * all.width, all.width, 1}; }
  View out_weight() const { return {all.out_weight, all.members, 1}; }
  const float* block_bias(std::size_t block) const { return all.block_biases[block] + kernel * all.width; }
  View block_weight(std::size_t block) const {
    return {all.block_weights[block] + kernel * all.width * all.width, all.width, 1};
  }
};

// Layout of one kernel's saved activations: h0, h1, ..., then the ReLU output of each block, then the attention
// weights.
struct SavedActivations {
  float* begin;
  int64_t area;  // rows * width
  std::size_t blocks;
  float* hidden(std::size_t i) const { return begin + static_cast<int64_t>(i) * area; }
  float* relu_output(std::size_t block) const { return hidden(blocks + 2 + block); }
  float* attention() const { return hidden(2 * blocks + 2); }
};

SavedActivations saved_activations(const KernelRows& rows, float* saved) {
  const std::size_t blocks = rows.all.block_weights.size();
  const int64_t area = rows.rows() * rows.all.width;
  const int64_t offset = rows.kernel * static_cast<int64_t>(2 * blocks + 2) * area + rows.node * rows.rows();
  return {saved + offset, area, blocks};
}

// Computes the scores of one kernel's configurations, layer by layer as in ranker_rows.h.
void forward(const KernelRows& kernel, const SavedActivations& saved, float* scores) {
  const RankerRows& all = kernel.all;
  const int64_t rows = kernel.rows(), width = all.width;
  // First layer. The members share one bias, which is repeated for each of them.
  float* first_bias = thread_scratch(kernel.hidden_columns());
  if (first_bias == nullptr) throw std::bad_alloc();
  for (int64_t i = 0; i < kernel.hidden_columns(); ++i)
    first_bias[i] = all.first_bias[kernel.kernel * width + i % width];
  multiply(all.slots, kernel.hidden_columns(), all.columns, kernel.configs(), kernel.first_weight(), saved.hidden(0),
           with_bias(first_bias, Activation::relu));
  // Attention over the kernel's nodes. The buffer of h1 is free until the end of this step, so it holds the logits
  // unless the kernel has more nodes than hidden units.
  float* attention = saved.attention();
  const View h0{saved.hidden(0), width, 1};
  float* logits = kernel.nodes <= width ? saved.hidden(1) : thread_scratch(rows * kernel.nodes);
  if (logits == nullptr) throw std::bad_alloc();
  multiply(rows, kernel.nodes, width, h0, kernel.keys().transposed(), logits,
           with_bias(all.key_bias + kernel.node, Activation::none));
  active_softmax_kernels().softmax(logits, attention, rows, kernel.nodes);
  multiply(rows, width, kernel.nodes, {attention, kernel.nodes, 1}, kernel.values(), saved.hidden(1),
           with_residual(saved.hidden(0), width));
  // Residual blocks.
  for (std::size_t l = 0; l < saved.blocks; ++l) {
    multiply(rows, width, width, {saved.hidden(l + 1), width, 1}, kernel.block_weight(l), saved.relu_output(l),
             with_bias(kernel.block_bias(l), Activation::relu));
    active_elementwise().add(saved.hidden(l + 1), saved.relu_output(l), saved.hidden(l + 2), saved.area);
  }
  multiply(all.slots, all.members, kernel.hidden_columns(),
           {saved.hidden(saved.blocks + 1), kernel.hidden_columns(), 1}, kernel.out_weight(),
           scores + kernel.kernel * rows);
}

// Computes the gradients of one kernel; `work` holds 3 * area + 2 * rows * nodes floats.
void backward(const KernelRows& kernel, const SavedActivations& saved, const float* grad_scores,
              const RankerRowsGradients& grads, float* work) {
  const RankerRows& all = kernel.all;
  const int64_t rows = kernel.rows(), width = all.width, k = kernel.kernel, node = kernel.node, nodes = kernel.nodes;
  float* grad = work;  // gradient of the current h, from the last layer to the first
  float* next = work + saved.area;
  float* grad_relu = work + 2 * saved.area;
  // Output layer.
  const View scores_grad{grad_scores + k * rows, all.members, 1};
  multiply(kernel.hidden_columns(), all.members, all.slots,
           View{saved.hidden(saved.blocks + 1), kernel.hidden_columns(), 1}.transposed(), scores_grad,
           grads.out_weight + k * kernel.hidden_columns() * all.members);
  multiply(all.slots, kernel.hidden_columns(), all.members, scores_grad, kernel.out_weight().transposed(), grad);
  // Residual blocks.
  for (std::size_t l = saved.blocks; l-- > 0;) {
    active_elementwise().relu_grad(saved.relu_output(l), grad, grad_relu, saved.area);
    const View inner{grad_relu, width, 1};
    multiply(width, width, rows, View{saved.hidden(l + 1), width, 1}.transposed(), inner,
             grads.block_weights[l] + k * width * width);
    active_sage().sum_rows(grad_relu, rows, width, grads.block_biases[l] + k * width);
    multiply(rows, width, width, inner, kernel.block_weight(l).transposed(), next, with_residual(grad, width));
    std::swap(grad, next);
  }
  // Attention: first the values, then through the softmax to the keys and to h0.
  const View h0{saved.hidden(0), width, 1}, grad_h1{grad, width, 1};
  const View attention{saved.attention(), nodes, 1};
  float* grad_attention = work + 3 * saved.area;
  float* grad_logits = grad_attention + rows * nodes;
  multiply(nodes, width, rows, attention.transposed(), grad_h1, grads.values + node * width);
  multiply(rows, nodes, width, grad_h1, kernel.values().transposed(), grad_attention);
  active_softmax_kernels().softmax_grad(saved.attention(), grad_attention, grad_logits, rows, nodes);
  multiply(nodes, width, rows, View{grad_logits, nodes, 1}.transposed(), h0, grads.keys + node * width);
  active_sage().sum_rows(grad_logits, rows, nodes, grads.key_bias + node);
  multiply(rows, width, nodes, {grad_logits, nodes, 1}, kernel.keys(), next, with_residual(grad, width));
  // First layer.
  float* hidden = grads.hidden + k * saved.area;
  active_elementwise().relu_grad(saved.hidden(0), next, hidden, saved.area);
  active_sage().sum_rows(hidden, rows, width, grads.first_bias + k * width);
}

// Runs `f` on every kernel in parallel. A failed allocation in any thread makes the whole call throw.
template <class F>
void for_each_kernel(const RankerRows& rows, F&& f) {
  bool failed = false;
  parallel_for(static_cast<int>(rows.kernels), [&](int kernel) {
    try {
      f(KernelRows(rows, kernel));
    } catch (const std::bad_alloc&) {
      __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
    }
  });
  if (failed) throw std::bad_alloc();
}

}  // namespace

int64_t ranker_rows_saved_size(const RankerRows& rows) {
  const int64_t per_kernel =
      static_cast<int64_t>(2 * rows.block_weights.size() + 2) * rows.rows_per_kernel() * rows.width;
  return rows.kernels * per_kernel + rows.first_node[rows.kernels] * rows.rows_per_kernel();
}

void ranker_rows_forward(const RankerRows& rows, float* scores, float* saved) {
  for_each_kernel(rows, [&](const KernelRows& kernel) { forward(kernel, saved_activations(kernel, saved), scores); });
}

// Computes the gradients of the ranker's weights and inputs, one task per kernel of the batch.
void ranker_rows_backward(const RankerRows& rows, const float* grad_scores, const float* saved,
                          const RankerRowsGradients& grads) {
  for_each_kernel(rows, [&](const KernelRows& kernel) {
    const SavedActivations activations = saved_activations(kernel, const_cast<float*>(saved));  // only read
    float* work = thread_scratch(3 * activations.area + 2 * kernel.rows() * kernel.nodes);
    if (work == nullptr) throw std::bad_alloc();
    backward(kernel, activations, grad_scores, grads, work);
  });
}

}  // namespace tw
