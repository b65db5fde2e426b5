// TileRanker's row network compared with plain loops in double precision, and its gradients with finite differences.
// Arrays have exactly the needed size, so that the address sanitizer reports any access beyond them.
#include <algorithm>
#include <cmath>
#include <vector>

#include "common/ranker_rows.h"
#include "common/thread_pool.h"
#include "tests/random.h"
#include "tests/tests.h"

namespace {

using Doubles = std::vector<double>;

// Two kernels: one with `nodes` nodes, one with a single node.
struct Problem {
  int64_t slots, members, columns, width;
  std::vector<int64_t> first_node;
  Floats configs, first_weight, first_bias, keys, key_bias, values, out_weight;
  std::vector<Floats> weights, biases;

  Problem(int64_t nodes, int64_t slots, int64_t members, int64_t columns, int64_t width, unsigned blocks)
      : slots(slots), members(members), columns(columns), width(width), first_node{0, nodes, nodes + 1} {
    const float narrow = 1.0f / std::sqrt(static_cast<float>(width));
    configs = random_floats(2 * slots * columns, 1, 1.0f);
    first_weight = random_floats(columns * members * width, 2, 0.4f);
    first_bias = random_floats(2 * width, 3, 0.5f);
    keys = random_floats((nodes + 1) * width, 4, narrow);
    key_bias = random_floats(nodes + 1, 5, 0.5f);
    values = random_floats((nodes + 1) * width, 6, 0.5f);
    out_weight = random_floats(members * width * members, 7, 0.5f);
    for (unsigned l = 0; l < blocks; ++l) {
      weights.push_back(random_floats(2 * width * width, 10 + l, narrow));
      biases.push_back(random_floats(2 * width, 30 + l, 0.3f));
    }
  }

  tw::RankerRows rows() const {
    tw::RankerRows s;
    s.kernels = 2;
    s.slots = slots;
    s.members = members;
    s.columns = s.config_stride = columns;
    s.kernel_stride = slots * columns;
    s.width = width;
    s.configs = configs.data();
    s.first_weight = first_weight.data();
    s.first_bias = first_bias.data();
    s.first_node = first_node.data();
    s.keys = keys.data();
    s.key_bias = key_bias.data();
    s.values = values.data();
    s.out_weight = out_weight.data();
    for (const Floats& w : weights) s.block_weights.push_back(w.data());
    for (const Floats& b : biases) s.block_biases.push_back(b.data());
    return s;
  }
};

void attend(const Problem& p, size_t kernel, Doubles* h) {
  const size_t from = static_cast<size_t>(p.first_node[kernel]), to = static_cast<size_t>(p.first_node[kernel + 1]);
  const size_t width = h->size();
  Doubles weight;
  double total = 0.0;
  for (size_t n = from; n < to; ++n) {
    double logit = p.key_bias[n];
    for (size_t i = 0; i < width; ++i) logit += (*h)[i] * p.keys[n * width + i];
    weight.push_back(std::exp(logit));
    total += weight.back();
  }
  for (size_t n = from; n < to; ++n) {
    for (size_t i = 0; i < width; ++i) (*h)[i] += weight[n - from] / total * p.values[n * width + i];
  }
}

// The last hidden row of one configuration and ensemble member.
Doubles hidden(const Problem& p, size_t kernel, size_t slot, size_t member) {
  const size_t width = static_cast<size_t>(p.width), across = width * static_cast<size_t>(p.members);
  const size_t columns = static_cast<size_t>(p.columns);
  const float* config = p.configs.data() + (kernel * static_cast<size_t>(p.slots) + slot) * columns;
  Doubles h(width);
  for (size_t i = 0; i < width; ++i) {
    double sum = p.first_bias[kernel * width + i];
    for (size_t d = 0; d < columns; ++d)
      sum += static_cast<double>(config[d]) * p.first_weight[d * across + member * width + i];
    h[i] = std::fmax(sum, 0.0);
  }
  attend(p, kernel, &h);
  for (size_t l = 0; l < p.weights.size(); ++l) {
    Doubles more(width);
    for (size_t i = 0; i < width; ++i) {
      double sum = p.biases[l][kernel * width + i];
      for (size_t k = 0; k < width; ++k) sum += h[k] * p.weights[l][(kernel * width + k) * width + i];
      more[i] = std::fmax(sum, 0.0);
    }
    for (size_t i = 0; i < width; ++i) h[i] += more[i];
  }
  return h;
}

Doubles reference_scores(const Problem& p) {
  const size_t members = static_cast<size_t>(p.members), width = static_cast<size_t>(p.width);
  Doubles scores;
  for (size_t kernel = 0; kernel < 2; ++kernel) {
    for (size_t slot = 0; slot < static_cast<size_t>(p.slots); ++slot) {
      Doubles slot_scores(members, 0.0);
      for (size_t m = 0; m < members; ++m) {
        const Doubles h = hidden(p, kernel, slot, m);
        for (size_t o = 0; o < members; ++o) {
          for (size_t i = 0; i < width; ++i) slot_scores[o] += h[i] * p.out_weight[(m * width + i) * members + o];
        }
      }
      scores.insert(scores.end(), slot_scores.begin(), slot_scores.end());
    }
  }
  return scores;
}

double weighted(const Problem& p, const Floats& weights) {
  const Doubles scores = reference_scores(p);
  double total = 0.0;
  for (size_t i = 0; i < scores.size(); ++i) total += scores[i] * weights[i];
  return total;
}

// Derivative of the weighted scores by one number of the problem, by central differences.
double finite_difference(Problem* p, float* number, const Floats& weights) {
  const float original = *number;
  const float step = 2e-5f;  // small, because the ReLUs make many kinks
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

// Checks the gradients of the first, the last and the middle number.
void check_gradient(Problem* p, Floats* numbers, const Floats& grads, const Floats& weights) {
  for (size_t i : {size_t{0}, numbers->size() / 2, numbers->size() - 1}) {
    TW_CHECK(close(grads[i], finite_difference(p, numbers->data() + i, weights), 2e-3));
  }
}

}  // namespace

TW_TEST(ranker_rows_match_plain_loops_and_finite_differences) {
  struct Case {
    int64_t nodes, slots, members, columns, width;
    unsigned blocks;
  };
  for (int threads : {1, 2}) {
    tw::set_num_threads(threads);
    for (const Case& c :
         {Case{3, 5, 2, 4, 7, 2}, Case{1, 1, 1, 1, 1, 1}, Case{40, 3, 3, 9, 16, 0}, Case{2, 20, 4, 33, 24, 3}}) {
      Problem p(c.nodes, c.slots, c.members, c.columns, c.width, c.blocks);
      Floats scores(static_cast<size_t>(2 * c.slots * c.members));
      Floats saved(static_cast<size_t>(tw::ranker_rows_saved_size(p.rows())));
      tw::ranker_rows_forward(p.rows(), scores.data(), saved.data());
      const Doubles expected = reference_scores(p);
      for (size_t i = 0; i < scores.size(); ++i) TW_CHECK(close(scores[i], expected[i], 2e-4));
      const Floats weights = random_floats(static_cast<int64_t>(scores.size()), 40, 1.0f);
      Floats to_hidden(static_cast<size_t>(2 * c.slots * c.members * c.width)), to_first(p.first_bias.size());
      Floats to_keys(p.keys.size()), to_offsets(p.key_bias.size()), to_values(p.values.size()),
          to_last(2 * p.out_weight.size());
      std::vector<Floats> to_weights(p.weights), to_biases(p.biases);
      tw::RankerRowsGradients grads{
          to_hidden.data(), to_first.data(), to_keys.data(), to_offsets.data(), to_values.data(), {}, {},
          to_last.data()};
      for (Floats& w : to_weights) grads.block_weights.push_back(w.data());
      for (Floats& b : to_biases) grads.block_biases.push_back(b.data());
      tw::ranker_rows_backward(p.rows(), weights.data(), saved.data(), grads);
      for (size_t i = 0; i < p.out_weight.size(); ++i) to_last[i] += to_last[p.out_weight.size() + i];
      check_gradient(&p, &p.first_bias, to_first, weights);
      check_gradient(&p, &p.keys, to_keys, weights);
      check_gradient(&p, &p.key_bias, to_offsets, weights);
      check_gradient(&p, &p.values, to_values, weights);
      check_gradient(&p, &p.out_weight, to_last, weights);
      for (size_t l = 0; l < p.weights.size(); ++l) {
        check_gradient(&p, &p.weights[l], to_weights[l], weights);
        check_gradient(&p, &p.biases[l], to_biases[l], weights);
      }
      float to_first_sum = 0.0f;
      for (size_t i = 0; i < to_hidden.size() / 2; ++i) to_first_sum += to_hidden[i];
      float sum = 0.0f;
      for (int64_t i = 0; i < c.width; ++i) sum += to_first[static_cast<size_t>(i)];
      TW_CHECK(close(to_first_sum, sum, 1e-3));
    }
  }
  tw::set_num_threads(1);
}
