// TileRanker's slates against plain loops in double, on arrays of exactly the needed size so that the sanitizer sees
// any touch beyond them; gradients against differences of those loops.
#include <algorithm>
#include <cmath>
#include <vector>

#include "common/slates.h"
#include "common/thread_pool.h"
#include "tests/random.h"
#include "tests/tests.h"

namespace {

using Doubles = std::vector<double>;

// Two kernels, of `nodes` nodes and of one.
struct Problem {
  int64_t slots, members, columns, width;
  std::vector<int64_t> first_node;
  Floats configs, wide, first, keys, offsets, values, last;
  std::vector<Floats> weights, biases;

  Problem(int64_t nodes, int64_t slots, int64_t members, int64_t columns, int64_t width, unsigned blocks)
      : slots(slots), members(members), columns(columns), width(width), first_node{0, nodes, nodes + 1} {
    const float narrow = 1.0f / std::sqrt(static_cast<float>(width));
    configs = random_floats(2 * slots * columns, 1, 1.0f);
    wide = random_floats(columns * members * width, 2, 0.4f);
    first = random_floats(2 * width, 3, 0.5f);
    keys = random_floats((nodes + 1) * width, 4, narrow);
    offsets = random_floats(nodes + 1, 5, 0.5f);
    values = random_floats((nodes + 1) * width, 6, 0.5f);
    last = random_floats(members * width * members, 7, 0.5f);
    for (unsigned l = 0; l < blocks; ++l) {
      weights.push_back(random_floats(2 * width * width, 10 + l, narrow));
      biases.push_back(random_floats(2 * width, 30 + l, 0.3f));
    }
  }

  tw::Slates slates() const {
    tw::Slates s;
    s.kernels = 2;
    s.slots = slots;
    s.members = members;
    s.columns = s.config_row = columns;
    s.config_slate = slots * columns;
    s.width = width;
    s.configs = configs.data();
    s.wide = wide.data();
    s.first = first.data();
    s.first_node = first_node.data();
    s.keys = keys.data();
    s.offsets = offsets.data();
    s.values = values.data();
    s.last = last.data();
    for (const Floats& w : weights) s.weights.push_back(w.data());
    for (const Floats& b : biases) s.biases.push_back(b.data());
    return s;
  }
};

void attend(const Problem& p, size_t kernel, Doubles* h) {
  const size_t from = static_cast<size_t>(p.first_node[kernel]), to = static_cast<size_t>(p.first_node[kernel + 1]);
  const size_t width = h->size();
  Doubles weight;
  double total = 0.0;
  for (size_t n = from; n < to; ++n) {
    double logit = p.offsets[n];
    for (size_t i = 0; i < width; ++i) logit += (*h)[i] * p.keys[n * width + i];
    weight.push_back(std::exp(logit));
    total += weight.back();
  }
  for (size_t n = from; n < to; ++n) {
    for (size_t i = 0; i < width; ++i) (*h)[i] += weight[n - from] / total * p.values[n * width + i];
  }
}

// The last hidden row of one configuration and member.
Doubles hidden(const Problem& p, size_t kernel, size_t slot, size_t member) {
  const size_t width = static_cast<size_t>(p.width), across = width * static_cast<size_t>(p.members);
  const size_t columns = static_cast<size_t>(p.columns);
  const float* config = p.configs.data() + (kernel * static_cast<size_t>(p.slots) + slot) * columns;
  Doubles h(width);
  for (size_t i = 0; i < width; ++i) {
    double sum = p.first[kernel * width + i];
    for (size_t d = 0; d < columns; ++d)
      sum += static_cast<double>(config[d]) * p.wide[d * across + member * width + i];
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

Doubles plain(const Problem& p) {
  const size_t members = static_cast<size_t>(p.members), width = static_cast<size_t>(p.width);
  Doubles scores;
  for (size_t kernel = 0; kernel < 2; ++kernel) {
    for (size_t slot = 0; slot < static_cast<size_t>(p.slots); ++slot) {
      Doubles of_slot(members, 0.0);
      for (size_t m = 0; m < members; ++m) {
        const Doubles h = hidden(p, kernel, slot, m);
        for (size_t o = 0; o < members; ++o) {
          for (size_t i = 0; i < width; ++i) of_slot[o] += h[i] * p.last[(m * width + i) * members + o];
        }
      }
      scores.insert(scores.end(), of_slot.begin(), of_slot.end());
    }
  }
  return scores;
}

double weighted(const Problem& p, const Floats& weights) {
  const Doubles scores = plain(p);
  double total = 0.0;
  for (size_t i = 0; i < scores.size(); ++i) total += scores[i] * weights[i];
  return total;
}

// The slope by one number of the problem, from differences.
double slope(Problem* p, float* number, const Floats& weights) {
  const float kept = *number, step = 2e-5f;  // small: there are many kinks
  *number = kept + step;
  const double above = weighted(*p, weights), high = *number;
  *number = kept - step;
  const double below = weighted(*p, weights), low = *number;
  *number = kept;
  return (above - below) / (high - low);
}

bool close(double a, double b, double tolerance) {
  return std::fabs(a - b) <= tolerance * std::fmax(1.0, std::fabs(b));
}

// At the first, the last and one in between.
void check(Problem* p, Floats* numbers, const Floats& found, const Floats& weights) {
  for (size_t i : {size_t{0}, numbers->size() / 2, numbers->size() - 1}) {
    TW_CHECK(close(found[i], slope(p, numbers->data() + i, weights), 2e-3));
  }
}

}  // namespace

TW_TEST(slates_are_right_and_so_are_their_gradients) {
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
      Floats saved(static_cast<size_t>(tw::slates_saved_size(p.slates())));
      tw::slates_forward(p.slates(), scores.data(), saved.data());
      const Doubles expected = plain(p);
      for (size_t i = 0; i < scores.size(); ++i) TW_CHECK(close(scores[i], expected[i], 2e-4));
      const Floats weights = random_floats(static_cast<int64_t>(scores.size()), 40, 1.0f);
      Floats to_hidden(static_cast<size_t>(2 * c.slots * c.members * c.width)), to_first(p.first.size());
      Floats to_keys(p.keys.size()), to_offsets(p.offsets.size()), to_values(p.values.size()),
          to_last(2 * p.last.size());
      std::vector<Floats> to_weights(p.weights), to_biases(p.biases);
      tw::SlateGradients grads{
          to_hidden.data(), to_first.data(), to_keys.data(), to_offsets.data(), to_values.data(), {}, {},
          to_last.data()};
      for (Floats& w : to_weights) grads.weights.push_back(w.data());
      for (Floats& b : to_biases) grads.biases.push_back(b.data());
      tw::slates_backward(p.slates(), weights.data(), saved.data(), grads);
      for (size_t i = 0; i < p.last.size(); ++i) to_last[i] += to_last[p.last.size() + i];
      check(&p, &p.first, to_first, weights);
      check(&p, &p.keys, to_keys, weights);
      check(&p, &p.offsets, to_offsets, weights);
      check(&p, &p.values, to_values, weights);
      check(&p, &p.last, to_last, weights);
      for (size_t l = 0; l < p.weights.size(); ++l) {
        check(&p, &p.weights[l], to_weights[l], weights);
        check(&p, &p.biases[l], to_biases[l], weights);
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
