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

constexpr int64_t kRowsAtOnce = 512;  // of 2 x 64 floats: two layers of them and the products fit L2
constexpr int kMostGroups = 16;       // of tasks that add up their gradients of the layers' weights

struct Task {
  int64_t graph, slot, slots;    // slots [slot, slot + slots) of one graph
  int64_t node, nodes;           // its first node, and how many
  int64_t first_row, first_sum;  // rows of all tasks before, and their nodes
  int64_t rows() const { return nodes * slots; }
};

std::vector<Task> cut(const SageBatch& batch) {
  std::vector<Task> tasks;
  int64_t rows = 0, sums = 0;
  for (int64_t g = 0; g < batch.graphs; ++g) {
    const int64_t node = batch.first_node[g], nodes = batch.first_node[g + 1] - node;
    const int64_t most = std::max<int64_t>(1, kRowsAtOnce / std::max<int64_t>(1, nodes));
    const int64_t parts = (batch.slots + most - 1) / most;
    for (int64_t p = 0; p < parts; ++p) {
      const int64_t from = p * batch.slots / parts, to = (p + 1) * batch.slots / parts;
      tasks.push_back({g, from, to - from, node, nodes, rows, sums});
      rows += nodes * (to - from);
      sums += nodes;
    }
  }
  return tasks;
}

// Where the rows of one task lie: for each layer but the last (x, sums over neighbours beside it), the last result, and
// each layer's factors.
struct Place {
  std::vector<float*> joined;  // (rows, 2 width): [S x, x]
  float* last;                 // (rows, width)
  std::vector<float*> scale;   // (rows) each
};

int64_t floats_a_row(int64_t width, int64_t layers) { return 2 * width * layers + width + layers + 1; }

Place place_of(float* begin, int64_t rows, int64_t width, int64_t layers) {
  Place place;
  for (int64_t l = 0; l < layers; ++l, begin += 2 * width * rows) place.joined.push_back(begin);
  place.last = begin;
  begin += width * rows;
  for (int64_t l = 0; l <= layers; ++l, begin += rows) place.scale.push_back(begin);
  return place;
}

// Without a way back only two layers are alive at any time; they take turns.
Place passing_place(float* begin, int64_t rows, int64_t width, int64_t layers) {
  Place place;
  for (int64_t l = 0; l < layers; ++l) place.joined.push_back(begin + (l % 2) * 2 * width * rows);
  place.last = begin + 4 * width * rows;
  for (int64_t l = 0; l <= layers; ++l) place.scale.push_back(place.last + width * rows);
  return place;
}

float* scratch(int64_t floats) { return thread_scratch<float>(Scratch::sage, floats); }

void multiply(Gemm g) {
  if (!matmul(g, Batch(), nullptr)) throw std::bad_alloc();
}

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

const int32_t* near(const SageBatch& batch, int64_t node) { return batch.neighbours + batch.first_edge[node]; }
int64_t degree(const SageBatch& batch, int64_t node) { return batch.first_edge[node + 1] - batch.first_edge[node]; }

// Layer one of a task: `z` rows z_row apart.
void first_layer(const SageBatch& batch, const Task& task, float* z, int64_t z_row, float* scale, float* node_part) {
  const SageKernels& kernels = active_sage();
  const int64_t width = batch.width;
  const float* nodes = batch.nodes + task.node * 2 * width;
  const float* configs = batch.configs + (task.graph * batch.slots + task.slot) * 2 * width;
  for (int64_t i = 0; i < task.nodes; ++i) {
    const int64_t node = task.node + i;
    kernels.gather(nodes, 2 * width, near(batch, node), degree(batch, node), 1, width, node_part, width);
    kernels.add(nodes + i * 2 * width + width, width, 1, width, node_part, width);
    kernels.add(batch.bias, width, 1, width, node_part, width);
    kernels.join(node_part, static_cast<float>(degree(batch, node)), configs, task.slots, width,
                 z + i * task.slots * z_row, z_row);
  }
  kernels.finish(z, z_row, task.rows(), width, scale);
}

void forward_task(const SageBatch& batch, const SageLayers& layers, const Task& task, const Place& place,
                  float* node_part, float* pooled) {
  const SageKernels& kernels = active_sage();
  const int64_t width = batch.width, rows = task.rows();
  const std::size_t count = layers.kernels.size();
  auto result = [&](std::size_t l) { return l < count ? place.joined[l] + width : place.last; };
  auto apart = [&](std::size_t l) { return l < count ? 2 * width : width; };
  first_layer(batch, task, result(0), apart(0), place.scale[0], node_part);
  for (std::size_t l = 0; l < count; ++l) {
    for (int64_t i = 0; i < task.nodes; ++i) {
      const int64_t node = task.node + i;
      kernels.gather(place.joined[l] + width, 2 * width, near(batch, node), degree(batch, node), task.slots, width,
                     place.joined[l] + i * task.slots * 2 * width, 2 * width);
    }
    Gemm g = row_major(rows, width, 2 * width, place.joined[l], layers.kernels[l], result(l + 1), apart(l + 1));
    g.epilogue.bias = layers.biases[l];
    multiply(g);
    kernels.finish(result(l + 1), apart(l + 1), rows, width, place.scale[l + 1]);
  }
  float* to = pooled + (task.graph * batch.slots + task.slot) * width;
  std::memset(to, 0, static_cast<std::size_t>(task.slots * width) * sizeof(float));
  for (int64_t i = 0; i < task.nodes; ++i) {
    kernels.add(result(count) + i * task.slots * apart(count), apart(count), task.slots, width, to, width);
  }
}

// What the tasks of one group add up: gradients of the later layers' weights, in two copies that take turns.
struct Sums {
  float* kernels[2];  // (layers, 2 width, width)
  float* biases;      // (layers, width)
  int filled = 0;
};

struct Way {
  const SageBatch& batch;
  const SageLayers& layers;
  const float* turned;  // (layers, width, 2 width): the transposed kernels
  const float* grad_pooled;
  float* node_sums;  // a row of `width` for every node of every task
  const SageGradients& grads;
};

void backward_task(const Way& way, const Task& task, const Place& place, Sums* sums, float* work) {
  const SageKernels& kernels = active_sage();
  const SageBatch& batch = way.batch;
  const int64_t width = batch.width, rows = task.rows();
  const std::size_t count = way.layers.kernels.size();
  float* dz = work;                    // (rows, width)
  float* mixed = work + rows * width;  // (rows, 2 width)
  float* column = mixed + 2 * rows * width;
  const float* grad = way.grad_pooled + (task.graph * batch.slots + task.slot) * width;
  for (int64_t i = 0; i < task.nodes; ++i) {
    const int64_t at = i * task.slots;
    kernels.unfinish(grad, width, place.last + at * width, width, place.scale[count] + at, task.slots, width,
                     dz + at * width);
  }
  for (std::size_t l = count; l-- > 0;) {
    const int64_t area = 2 * width * width, at = static_cast<int64_t>(l) * area;
    Gemm g = row_major(2 * width, width, rows, place.joined[l], dz, sums->kernels[1 - sums->filled] + at, width);
    g.a_row = 1;
    g.a_col = 2 * width;
    g.epilogue.residual = sums->kernels[sums->filled] + at;
    g.epilogue.residual_row = width;
    multiply(g);
    kernels.sum(dz, rows, width, column);
    kernels.add(column, width, 1, width, sums->biases + static_cast<int64_t>(l) * width, width);
    multiply(row_major(rows, 2 * width, width, dz, way.turned + at, mixed, 2 * width));
    for (int64_t i = 0; i < task.nodes; ++i) {
      const int64_t node = task.node + i, row = i * task.slots;
      float* dy = dz + row * width;
      kernels.gather(mixed, 2 * width, near(batch, node), degree(batch, node), task.slots, width, dy, width);
      kernels.add(mixed + row * 2 * width + width, 2 * width, task.slots, width, dy, width);
      kernels.unfinish(dy, width, place.joined[l] + row * 2 * width + width, 2 * width, place.scale[l] + row,
                       task.slots, width, dy);
    }
  }
  if (count) sums->filled = 1 - sums->filled;
  float* configs = way.grads.configs + (task.graph * batch.slots + task.slot) * 2 * width;
  std::memset(configs, 0, static_cast<std::size_t>(task.slots * 2 * width) * sizeof(float));
  for (int64_t i = 0; i < task.nodes; ++i) {
    kernels.unjoin(dz + i * task.slots * width, static_cast<float>(degree(batch, task.node + i)), task.slots, width,
                   way.node_sums + (task.first_sum + i) * width, configs);
  }
}

// The nodes' gradients of one graph, from the sums of its tasks: [sum over neighbours of s, s].
void node_gradients(const Way& way, const std::vector<Task>& tasks, int64_t graph, float* total) {
  const SageKernels& kernels = active_sage();
  const int64_t width = way.batch.width;
  int64_t node = way.batch.first_node[graph], nodes = way.batch.first_node[graph + 1] - node;
  std::memset(total, 0, static_cast<std::size_t>(nodes * width) * sizeof(float));
  for (const Task& task : tasks) {
    if (task.graph == graph) kernels.add(way.node_sums + task.first_sum * width, width, nodes, width, total, width);
  }
  for (int64_t i = 0; i < nodes; ++i) {
    float* to = way.grads.nodes + (node + i) * 2 * width;
    kernels.gather(total, width, near(way.batch, node + i), degree(way.batch, node + i), 1, width, to, 2 * width);
    std::memcpy(to + width, total + i * width, static_cast<std::size_t>(width) * sizeof(float));
  }
}

// One thread's failure to allocate is the call's.
template <class F>
void guarded_for(int64_t tasks, F&& f) {
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
  return batch.first_node[batch.graphs] * batch.slots * floats_a_row(batch.width, layers);
}

void sage_forward(const SageBatch& batch, const SageLayers& layers, float* pooled, float* saved) {
  const std::vector<Task> tasks = cut(batch);
  const int64_t width = batch.width, count = static_cast<int64_t>(layers.kernels.size());
  guarded_for(static_cast<int64_t>(tasks.size()), [&](int t) {
    const Task& task = tasks[static_cast<std::size_t>(t)];
    const int64_t rows = task.rows();
    float* work = scratch(width + (saved ? 0 : rows * (5 * width + 1)));
    const Place place = saved ? place_of(saved + task.first_row * floats_a_row(width, count), rows, width, count)
                              : passing_place(work + width, rows, width, count);
    forward_task(batch, layers, task, place, work, pooled);
  });
}

void sage_backward(const SageBatch& batch, const SageLayers& layers, const float* grad_pooled, float* saved,
                   const SageGradients& grads) {
  const std::vector<Task> tasks = cut(batch);
  const int64_t width = batch.width, count = static_cast<int64_t>(layers.kernels.size());
  const int64_t area = 2 * width * width, all = count * (area + width);
  const int64_t sum_rows = tasks.empty() ? 0 : tasks.back().first_sum + tasks.back().nodes;
  const int64_t groups = std::min<int64_t>(kMostGroups, static_cast<int64_t>(tasks.size()));
  Buffer<float> turned(static_cast<std::size_t>(count * area)), node_sums(static_cast<std::size_t>(sum_rows * width));
  Buffer<float> sums(static_cast<std::size_t>(groups * (count * area + all)));
  for (int64_t l = 0; l < count; ++l) {
    active_gemm().transpose(layers.kernels[static_cast<std::size_t>(l)], 2 * width, width, width,
                            turned.data() + l * area, 2 * width);
  }
  const Way way{batch, layers, turned.data(), grad_pooled, node_sums.data(), grads};
  std::vector<Sums> found(static_cast<std::size_t>(groups));
  const int64_t total = static_cast<int64_t>(tasks.size());
  guarded_for(groups, [&](int g) {
    float* own = sums.data() + g * (count * area + all);
    if (count > 0) std::memset(own, 0, static_cast<std::size_t>(count * area + all) * sizeof(float));
    Sums& mine = found[static_cast<std::size_t>(g)];
    mine.kernels[0] = own;
    mine.kernels[1] = own + count * area;
    mine.biases = own + 2 * count * area;
    for (int64_t t = g * total / groups; t < (g + 1) * total / groups; ++t) {
      const Task& task = tasks[static_cast<std::size_t>(t)];
      const int64_t rows = task.rows();
      float* work = scratch(rows * 3 * width + width);
      backward_task(way, task, place_of(saved + task.first_row * floats_a_row(width, count), rows, width, count), &mine,
                    work);
    }
  });
  const SageKernels& kernels = active_sage();
  for (int64_t l = 0; l < count; ++l) {
    float* kernel = grads.kernels[static_cast<std::size_t>(l)];
    float* bias = grads.biases[static_cast<std::size_t>(l)];
    std::memset(kernel, 0, static_cast<std::size_t>(area) * sizeof(float));
    std::memset(bias, 0, static_cast<std::size_t>(width) * sizeof(float));
    for (const Sums& s : found) {
      kernels.add(s.kernels[s.filled] + l * area, area, 1, area, kernel, area);
      kernels.add(s.biases + l * width, width, 1, width, bias, width);
    }
  }
  guarded_for(batch.graphs, [&](int g) {
    const int64_t nodes = batch.first_node[g + 1] - batch.first_node[g];
    node_gradients(way, tasks, g, scratch(std::max<int64_t>(1, nodes * width)));
  });
  kernels.sum(node_sums.data(), sum_rows, width, grads.bias);
}

}  // namespace tw
