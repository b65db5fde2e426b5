// EarlyJoinSAGE compared with plain loops in double precision, and its gradients with finite differences. Arrays have
// exactly the needed size, so that the address sanitizer reports any access beyond them.
#include <algorithm>
#include <cmath>
#include <vector>

#include "common/sage.h"
#include "common/thread_pool.h"
#include "tests/random.h"
#include "tests/tests.h"

namespace {

// Two graphs: a ring with chords, and one node that is its own neighbour.
struct Problem {
  int64_t slots, width;
  std::vector<int64_t> first_node, first_edge{0};
  std::vector<int32_t> neighbours;
  Floats nodes, configs, bias;
  std::vector<Floats> kernels, biases;

  Problem(int64_t ring, int64_t slots, int64_t width, int layers) : slots(slots), width(width) {
    first_node = {0, ring, ring + 1};
    std::vector<std::vector<int32_t>> lists(static_cast<size_t>(ring + 1));
    auto connect = [&](int64_t first, int64_t a, int64_t b) {  // numbered within the graph that begins at `first`
      lists[static_cast<size_t>(first + a)].push_back(static_cast<int32_t>(b));
      lists[static_cast<size_t>(first + b)].push_back(static_cast<int32_t>(a));
    };
    for (int64_t i = 0; i < ring; ++i) {
      for (int64_t step : {1, 2}) connect(0, i, (i + step) % ring);
      if (i % 3 == 0) connect(0, i, (i + 1) % ring);  // the same neighbour twice
    }
    connect(ring, 0, 0);
    for (const std::vector<int32_t>& list : lists) {
      neighbours.insert(neighbours.end(), list.begin(), list.end());
      first_edge.push_back(static_cast<int64_t>(neighbours.size()));
    }
    nodes = random_floats((ring + 1) * 2 * width, 1, 0.5f);
    configs = random_floats(2 * slots * 2 * width, 2, 0.5f);
    bias = random_floats(width, 3, 0.5f);
    for (int l = 0; l < layers; ++l) {
      kernels.push_back(random_floats(2 * width * width, 4 + static_cast<unsigned>(l), 0.3f));
      biases.push_back(random_floats(width, 20 + static_cast<unsigned>(l), 0.3f));
    }
  }

  tw::SageBatch batch() const {
    tw::SageBatch b;
    b.graphs = 2;
    b.slots = slots;
    b.width = width;
    b.first_node = first_node.data();
    b.first_edge = first_edge.data();
    b.neighbours = neighbours.data();
    b.nodes = nodes.data();
    b.configs = configs.data();
    b.bias = bias.data();
    return b;
  }

  tw::SageLayers layers() const {
    tw::SageLayers layers;
    for (const Floats& kernel : kernels) layers.kernels.push_back(kernel.data());
    for (const Floats& own : biases) layers.biases.push_back(own.data());
    return layers;
  }
};

using Rows = std::vector<std::vector<double>>;

void leaky_relu_normalize(std::vector<double>* row) {
  double squares = 0.0;
  for (double& v : *row) {
    v = v > 0 ? v : 0.2 * v;
    squares += v * v;
  }
  const double norm = std::fmax(std::sqrt(squares), 1e-6);
  for (double& v : *row) v /= norm;
}

Rows neighbour_sums(const Problem& p, int64_t graph, const Rows& x) {
  Rows sums(x.size(), std::vector<double>(x[0].size(), 0.0));
  for (size_t i = 0; i < x.size(); ++i) {
    const int64_t node = p.first_node[static_cast<size_t>(graph)] + static_cast<int64_t>(i);
    for (int64_t e = p.first_edge[static_cast<size_t>(node)]; e < p.first_edge[static_cast<size_t>(node) + 1]; ++e) {
      const std::vector<double>& from = x[static_cast<size_t>(p.neighbours[static_cast<size_t>(e)])];
      for (size_t h = 0; h < from.size(); ++h) sums[i][h] += from[h];
    }
  }
  return sums;
}

// The pooled result of one graph and slot.
std::vector<double> reference_pooled(const Problem& p, int64_t graph, int64_t slot) {
  const size_t width = static_cast<size_t>(p.width);
  const int64_t first = p.first_node[static_cast<size_t>(graph)];
  const size_t count = static_cast<size_t>(p.first_node[static_cast<size_t>(graph) + 1] - first);
  const float* config = p.configs.data() + (graph * p.slots + slot) * 2 * p.width;
  Rows shifted(count, std::vector<double>(width)), x = shifted;
  for (size_t i = 0; i < count; ++i) {
    const float* node = p.nodes.data() + (first + static_cast<int64_t>(i)) * 2 * p.width;
    for (size_t h = 0; h < width; ++h) shifted[i][h] = static_cast<double>(node[h]) + config[h];
  }
  const Rows near_sums = neighbour_sums(p, graph, shifted);
  for (size_t i = 0; i < count; ++i) {
    const float* node = p.nodes.data() + (first + static_cast<int64_t>(i)) * 2 * p.width;
    for (size_t h = 0; h < width; ++h) x[i][h] = near_sums[i][h] + node[width + h] + config[width + h] + p.bias[h];
    leaky_relu_normalize(&x[i]);
  }
  for (size_t l = 0; l < p.kernels.size(); ++l) {
    const Rows sums = neighbour_sums(p, graph, x);
    Rows z(count, std::vector<double>(width));
    for (size_t i = 0; i < count; ++i) {
      for (size_t h = 0; h < width; ++h) {
        z[i][h] = p.biases[l][h];
        for (size_t k = 0; k < width; ++k) {
          z[i][h] += sums[i][k] * p.kernels[l][k * width + h] + x[i][k] * p.kernels[l][(width + k) * width + h];
        }
      }
      leaky_relu_normalize(&z[i]);
    }
    x = z;
  }
  std::vector<double> pooled(width, 0.0);
  for (const std::vector<double>& row : x) {
    for (size_t h = 0; h < width; ++h) pooled[h] += row[h];
  }
  return pooled;
}

double weighted(const Problem& p, const Floats& weights) {
  double total = 0.0;
  for (int64_t g = 0; g < 2; ++g) {
    for (int64_t c = 0; c < p.slots; ++c) {
      const std::vector<double> pooled = reference_pooled(p, g, c);
      for (size_t h = 0; h < pooled.size(); ++h) {
        total += pooled[h] * weights[static_cast<size_t>((g * p.slots + c) * p.width) + h];
      }
    }
  }
  return total;
}

// Derivative of the weighted result by one number of the problem, by central differences.
double finite_difference(Problem* p, float* number, const Floats& weights) {
  const float original = *number, step = 1e-3f;
  *number = original + step;
  const double above = weighted(*p, weights), high = *number;
  *number = original - step;
  const double below = weighted(*p, weights), low = *number;
  *number = original;
  return (above - below) / (high - low);
}

bool close(double a, double b, double tolerance) {
  return std::fabs(a - b) <= tolerance * std::fmax(1.0, std::fabs(b));
}

}  // namespace

TW_TEST(early_join_sage_matches_plain_loops_and_finite_differences) {
  struct Case {
    int64_t ring, slots, width;
    int layers;
  };
  for (int threads : {1, 2}) {
    tw::set_num_threads(threads);
    for (const Case& c : {Case{5, 3, 7, 2}, Case{9, 2, 16, 1}, Case{4, 1, 21, 0}, Case{300, 4, 5, 2}}) {
      Problem p(c.ring, c.slots, c.width, c.layers);
      const int64_t count = c.ring + 1;
      Floats pooled(static_cast<size_t>(2 * c.slots * c.width)), again(pooled.size());
      Floats saved(static_cast<size_t>(tw::sage_saved_size(p.batch(), c.layers)));
      tw::sage_forward(p.batch(), p.layers(), pooled.data(), saved.data());
      tw::sage_forward(p.batch(), p.layers(), again.data(), nullptr);
      TW_CHECK(pooled == again);
      for (int64_t g = 0; g < 2; ++g) {
        const std::vector<double> expected = reference_pooled(p, g, c.slots - 1);
        for (int64_t h = 0; h < c.width; ++h) {
          TW_CHECK(close(pooled[static_cast<size_t>((g * c.slots + c.slots - 1) * c.width + h)],
                         expected[static_cast<size_t>(h)], 2e-4));
        }
      }
      const Floats weights = random_floats(2 * c.slots * c.width, 40, 1.0f);
      Floats nodes(static_cast<size_t>(count * 2 * c.width)), configs(p.configs.size()), bias(p.bias.size());
      std::vector<Floats> kernels(p.kernels), biases(p.biases);
      tw::SageGradients grads;
      grads.nodes = nodes.data();
      grads.configs = configs.data();
      grads.bias = bias.data();
      for (Floats& kernel : kernels) grads.kernels.push_back(kernel.data());
      for (Floats& own : biases) grads.biases.push_back(own.data());
      tw::sage_backward(p.batch(), p.layers(), weights.data(), saved.data(), grads);
      auto check = [&](Floats* values, const Floats& numbers) {
        const size_t step = c.ring > 100 ? numbers.size() : std::max<size_t>(1, numbers.size() / 7);
        for (size_t i = 0; i < numbers.size(); i += step) {
          TW_CHECK(close(numbers[i], finite_difference(&p, values->data() + i, weights), 0.03));
        }
      };
      check(&p.nodes, nodes);
      check(&p.configs, configs);
      check(&p.bias, bias);
      for (size_t l = 0; l < kernels.size(); ++l) {
        check(&p.kernels[l], kernels[l]);
        check(&p.biases[l], biases[l]);
      }
    }
  }
  tw::set_num_threads(1);
}
