#include "common/sage.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "common/alloc.h"
#include "common/matmul.h"
#include "common/thread_blocks.h"
#include "common/thread_pool.h"
#include "kernels/sage.h"

namespace tw {
namespace {

constexpr int64_t kTaskRows = 512;  // chosen: two layers of rows of 2 x 64 floats, and the products, fit 1 MiB of L2
constexpr int kMaxTaskGroups = 16;  // chosen: groups of tasks with their own copy of the weight gradients

struct Task {
  int64_t graph, slot, slots;    // slots [slot, slot + slots) of one graph
  int64_t node, nodes;           // first node and number of nodes of the graph
  int64_t first_row, first_sum;  // rows and nodes of all earlier tasks together
  int64_t rows() const { return nodes * slots; }
};

// Splits every graph's slots into tasks of about kTaskRows rows.
std::vector<Task> split_into_tasks(const SageBatch& batch) {
  std::vector<Task> tasks;
  int64_t rows = 0, sums = 0;
  for (int64_t g = 0; g < batch.graphs; ++g) {
    const int64_t node = batch.first_node[g], nodes = batch.first_node[g + 1] - node;
    const int64_t most = std::max<int64_t>(1, kTaskRows / std::max<int64_t>(1, nodes));
    const int64_t shares = (batch.slots + most - 1) / most;
    for (int64_t p = 0; p < shares; ++p) {
      const int64_t from = p * batch.slots / shares, to = (p + 1) * batch.slots / shares;
      tasks.push_back({g, from, to - from, node, nodes, rows, sums});
      rows += nodes * (to - from);
      sums += nodes;
    }
  }
  return tasks;
}

// Buffers of one task: the input of every layer after the first, the last result, and each layer's row scales.
struct TaskBuffers {
  std::vector<float*> joined;  // (rows, 2 width): [S x, x]
  float* last;                 // (rows, width)
  std::vector<float*> scale;   // (rows) each
};

int64_t floats_per_row(int64_t width, int64_t layers) { return 2 * width * layers + width + layers + 1; }

TaskBuffers saved_buffers(float* begin, int64_t rows, int64_t width, int64_t layers) {
  TaskBuffers buffers;
  for (int64_t l = 0; l < layers; ++l, begin += 2 * width * rows) buffers.joined.push_back(begin);
  buffers.last = begin;
  begin += width * rows;
  for (int64_t l = 0; l <= layers; ++l, begin += rows) buffers.scale.push_back(begin);
  return buffers;
}

// Returns two alternating buffers: without a backward pass only two layers are alive at any time.
TaskBuffers alternating_buffers(float* begin, int64_t rows, int64_t width, int64_t layers) {
  TaskBuffers buffers;
  for (int64_t l = 0; l < layers; ++l) buffers.joined.push_back(begin + (l % 2) * 2 * width * rows);
  buffers.last = begin + 4 * width * rows;
  for (int64_t l = 0; l <= layers; ++l) buffers.scale.push_back(buffers.last + width * rows);
  return buffers;
}

float* scratch(int64_t floats) { return thread_scratch<float>(Scratch::sage, floats); }

void multiply(Gemm g) {
  if (!matmul(g, Batch(), nullptr)) throw std::bad_alloc();
}

// c = a (m, k) times b (k, n), both contiguous; rows of c are c_row floats apart.
Gemm row_major(int64_t m, int64_t n, int64_t k, const float* a, const float* b, float* c, int64_t c_row) {
  Gemm g;
  g.m = m;
  g.n = n;
  g.k = k;
  g.a = a;
  g.a_row = k;
  g.a_col = 1;
  g.b = b;
  g.b_row = n;
  g.b_col = 1;
  g.c = c;
  g.c_row = c_row;
  return g;
}

const int32_t* neighbours(const SageBatch& batch, int64_t node) { return batch.neighbours + batch.first_edge[node]; }
int64_t degree(const SageBatch& batch, int64_t node) { return batch.first_edge[node + 1] - batch.first_edge[node]; }

// First layer of a task; rows of `z` are z_row floats apart.
void first_layer(const SageBatch& batch, const Task& task, float* z, int64_t z_row, float* scale, float* node_part) {
  const SageKernels& kernels = active_sage();
  const int64_t width = batch.width;
  const float* nodes = batch.nodes + task.node * 2 * width;
  const float* configs = batch.configs + (task.graph * batch.slots + task.slot) * 2 * width;
  for (int64_t i = 0; i < task.nodes; ++i) {
    const int64_t node = task.node + i;
    kernels.sum_neighbours(nodes, 2 * width, neighbours(batch, node), degree(batch, node), 1, width, node_part, width);
    kernels.add_rows(nodes + i * 2 * width + width, width, 1, width, node_part, width);
    kernels.add_rows(batch.bias, width, 1, width, node_part, width);
    kernels.join_config(node_part, static_cast<float>(degree(batch, node)), configs, task.slots, width,
                        z + i * task.slots * z_row, z_row);
  }
  kernels.leaky_relu_normalize(z, z_row, task.rows(), width, scale);
}

// Computes all layers of one task and the sum over nodes.
void forward_task(const SageBatch& batch, const SageLayers& layers, const Task& task, const TaskBuffers& buffers,
                  float* node_part, float* pooled) {
  const SageKernels& kernels = active_sage();
  const int64_t width = batch.width, rows = task.rows();
  const std::size_t count = layers.kernels.size();
  auto result = [&](std::size_t l) { return l < count ? buffers.joined[l] + width : buffers.last; };
  auto stride = [&](std::size_t l) { return l < count ? 2 * width : width; };
  first_layer(batch, task, result(0), stride(0), buffers.scale[0], node_part);
  for (std::size_t l = 0; l < count; ++l) {
    for (int64_t i = 0; i < task.nodes; ++i) {
      const int64_t node = task.node + i;
      kernels.sum_neighbours(buffers.joined[l] + width, 2 * width, neighbours(batch, node), degree(batch, node),
                             task.slots, width, buffers.joined[l] + i * task.slots * 2 * width, 2 * width);
    }
    Gemm g = row_major(rows, width, 2 * width, buffers.joined[l], layers.kernels[l], result(l + 1), stride(l + 1));
    g.epilogue.bias = layers.biases[l];
    multiply(g);
    kernels.leaky_relu_normalize(result(l + 1), stride(l + 1), rows, width, buffers.scale[l + 1]);
  }
  // Sum over nodes.
  float* to = pooled + (task.graph * batch.slots + task.slot) * width;
  std::memset(to, 0, static_cast<std::size_t>(task.slots * width) * sizeof(float));
  for (int64_t i = 0; i < task.nodes; ++i) {
    kernels.add_rows(result(count) + i * task.slots * stride(count), stride(count), task.slots, width, to, width);
  }
}

// Weight gradients of the later layers, summed over the tasks of one group. The product that adds a task reads one copy
// of the kernels' gradients as its residual and writes the other.
struct GroupGradients {
  float* kernels[2];  // (layers, 2 width, width)
  float* biases;      // (layers, width)
  int current = 0;    // the copy that holds the sum
};

struct BackwardInputs {
  const SageBatch& batch;
  const SageLayers& layers;
  const float* transposed_kernels;  // (layers, width, 2 width)
  const float* grad_pooled;
  float* node_sums;  // a row of `width` for every node of every task
  const SageGradients& grads;
};

// Computes the gradients of one task, from the last layer to the first.
void backward_task(const BackwardInputs& inputs, const Task& task, const TaskBuffers& buffers, GroupGradients* group,
                   float* work) {
  const SageKernels& kernels = active_sage();
  const SageBatch& batch = inputs.batch;
  const int64_t width = batch.width, rows = task.rows();
  const std::size_t count = inputs.layers.kernels.size();
  float* dz = work;                          // (rows, width)
  float* grad_joined = work + rows * width;  // (rows, 2 width): gradient of [S x, x]
  float* column_sum = grad_joined + 2 * rows * width;
  const float* grad = inputs.grad_pooled + (task.graph * batch.slots + task.slot) * width;
  // Every node receives the gradient of the pooled sum.
  for (int64_t i = 0; i < task.nodes; ++i) {
    const int64_t at = i * task.slots;
    kernels.leaky_relu_normalize_grad(grad, width, buffers.last + at * width, width, buffers.scale[count] + at,
                                      task.slots, width, dz + at * width);
  }
  for (std::size_t l = count; l-- > 0;) {
    const int64_t area = 2 * width * width, at = static_cast<int64_t>(l) * area;
    // Gradients of the weights, added to those of the group's earlier tasks.
    Gemm g = row_major(2 * width, width, rows, buffers.joined[l], dz, group->kernels[1 - group->current] + at, width);
    g.a_row = 1;
    g.a_col = 2 * width;
    g.epilogue.residual = group->kernels[group->current] + at;
    g.epilogue.residual_row = width;
    multiply(g);
    kernels.sum_rows(dz, rows, width, column_sum);
    kernels.add_rows(column_sum, width, 1, width, group->biases + static_cast<int64_t>(l) * width, width);
    // Gradient of the layer's input: S is symmetric, so the sum over neighbours is its own transpose.
    multiply(row_major(rows, 2 * width, width, dz, inputs.transposed_kernels + at, grad_joined, 2 * width));
    for (int64_t i = 0; i < task.nodes; ++i) {
      const int64_t node = task.node + i, row = i * task.slots;
      float* dy = dz + row * width;
      kernels.sum_neighbours(grad_joined, 2 * width, neighbours(batch, node), degree(batch, node), task.slots, width,
                             dy, width);
      kernels.add_rows(grad_joined + row * 2 * width + width, 2 * width, task.slots, width, dy, width);
      kernels.leaky_relu_normalize_grad(dy, width, buffers.joined[l] + row * 2 * width + width, 2 * width,
                                        buffers.scale[l] + row, task.slots, width, dy);
    }
  }
  if (count) group->current = 1 - group->current;
  float* configs = inputs.grads.configs + (task.graph * batch.slots + task.slot) * 2 * width;
  std::memset(configs, 0, static_cast<std::size_t>(task.slots * 2 * width) * sizeof(float));
  for (int64_t i = 0; i < task.nodes; ++i) {
    kernels.join_config_grad(dz + i * task.slots * width, static_cast<float>(degree(batch, task.node + i)), task.slots,
                             width, inputs.node_sums + (task.first_sum + i) * width, configs);
  }
}

// Computes the node gradients of one graph from the sums s of its tasks: [sum over neighbours of s, s].
void node_gradients(const BackwardInputs& inputs, const std::vector<Task>& tasks, int64_t graph, float* total) {
  const SageKernels& kernels = active_sage();
  const int64_t width = inputs.batch.width;
  int64_t node = inputs.batch.first_node[graph], nodes = inputs.batch.first_node[graph + 1] - node;
  std::memset(total, 0, static_cast<std::size_t>(nodes * width) * sizeof(float));
  for (const Task& task : tasks) {
    if (task.graph == graph)
      kernels.add_rows(inputs.node_sums + task.first_sum * width, width, nodes, width, total, width);
  }
  for (int64_t i = 0; i < nodes; ++i) {
    float* to = inputs.grads.nodes + (node + i) * 2 * width;
    kernels.sum_neighbours(total, width, neighbours(inputs.batch, node + i), degree(inputs.batch, node + i), 1, width,
                           to, 2 * width);
    std::memcpy(to + width, total + i * width, static_cast<std::size_t>(width) * sizeof(float));
  }
}

// Runs `f` on every task in parallel. A failed allocation in any thread makes the whole call throw.
template <class F>
void for_each_task(int64_t tasks, F&& f) {
  bool failed = false;
  parallel_for(static_cast<int>(tasks), [&](int task) {
    try {
      f(task);
    } catch (const std::bad_alloc&) {
      __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
    }
  });
  if (failed) throw std::bad_alloc();
}

}  // namespace

int64_t sage_saved_size(const SageBatch& batch, int layers) {
  return batch.first_node[batch.graphs] * batch.slots * floats_per_row(batch.width, layers);
}

// Runs the GraphSAGE layers over a batch of graphs and pools the nodes; a task has some slots of one graph.
void sage_forward(const SageBatch& batch, const SageLayers& layers, float* pooled, float* saved) {
  const std::vector<Task> tasks = split_into_tasks(batch);
  const int64_t width = batch.width, count = static_cast<int64_t>(layers.kernels.size());
  for_each_task(static_cast<int64_t>(tasks.size()), [&](int t) {
    const Task& task = tasks[static_cast<std::size_t>(t)];
    const int64_t rows = task.rows();
    float* work = scratch(width + (saved ? 0 : rows * (5 * width + 1)));
    const TaskBuffers buffers =
        saved ? saved_buffers(saved + task.first_row * floats_per_row(width, count), rows, width, count)
              : alternating_buffers(work + width, rows, width, count);
    forward_task(batch, layers, task, buffers, work, pooled);
  });
}

// Groups of consecutive tasks run in parallel, each with its own weight gradients, which are summed in a fixed order.
void sage_backward(const SageBatch& batch, const SageLayers& layers, const float* grad_pooled, float* saved,
                   const SageGradients& grads) {
  const std::vector<Task> tasks = split_into_tasks(batch);
  const int64_t width = batch.width, count = static_cast<int64_t>(layers.kernels.size());
  const int64_t area = 2 * width * width, all = count * (area + width);
  const int64_t sum_rows = tasks.empty() ? 0 : tasks.back().first_sum + tasks.back().nodes;
  const int64_t groups = std::min<int64_t>(kMaxTaskGroups, static_cast<int64_t>(tasks.size()));
  Buffer<float> transposed_kernels(static_cast<std::size_t>(count * area)),
      node_sums(static_cast<std::size_t>(sum_rows * width));
  Buffer<float> sums(static_cast<std::size_t>(groups * (count * area + all)));
  for (int64_t l = 0; l < count; ++l) {
    active_gemm().transpose(layers.kernels[static_cast<std::size_t>(l)], 2 * width, width, width,
                            transposed_kernels.data() + l * area, 2 * width);
  }
  const BackwardInputs inputs{batch, layers, transposed_kernels.data(), grad_pooled, node_sums.data(), grads};
  std::vector<GroupGradients> group_gradients(static_cast<std::size_t>(groups));
  const int64_t total = static_cast<int64_t>(tasks.size());
  for_each_task(groups, [&](int g) {
    float* own = sums.data() + g * (count * area + all);
    if (count > 0) std::memset(own, 0, static_cast<std::size_t>(count * area + all) * sizeof(float));
    GroupGradients& group = group_gradients[static_cast<std::size_t>(g)];
    group.kernels[0] = own;
    group.kernels[1] = own + count * area;
    group.biases = own + 2 * count * area;
    for (int64_t t = g * total / groups; t < (g + 1) * total / groups; ++t) {
      const Task& task = tasks[static_cast<std::size_t>(t)];
      const int64_t rows = task.rows();
      float* work = scratch(rows * 3 * width + width);
      backward_task(inputs, task,
                    saved_buffers(saved + task.first_row * floats_per_row(width, count), rows, width, count), &group,
                    work);
    }
  });
  // Sum the groups in a fixed order.
  const SageKernels& kernels = active_sage();
  for (int64_t l = 0; l < count; ++l) {
    float* kernel = grads.kernels[static_cast<std::size_t>(l)];
    float* bias = grads.biases[static_cast<std::size_t>(l)];
    std::memset(kernel, 0, static_cast<std::size_t>(area) * sizeof(float));
    std::memset(bias, 0, static_cast<std::size_t>(width) * sizeof(float));
    for (const GroupGradients& group : group_gradients) {
      kernels.add_rows(group.kernels[group.current] + l * area, area, 1, area, kernel, area);
      kernels.add_rows(group.biases + l * width, width, 1, width, bias, width);
    }
  }
  for_each_task(batch.graphs, [&](int g) {
    const int64_t nodes = batch.first_node[g + 1] - batch.first_node[g];
    node_gradients(inputs, tasks, g, scratch(std::max<int64_t>(1, nodes * width)));
  });
  kernels.sum_rows(node_sums.data(), sum_rows, width, grads.bias);
}

}  // namespace tw
