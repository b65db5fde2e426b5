// Compares attention and its gradients with their formulas in double precision: rows apart in memory, masks, and sizes
// around those of the blocks.
#include <cmath>
#include <random>
#include <vector>

#include "common/attention_ops.h"
#include "common/thread_pool.h"
#include "tests/tests.h"

namespace {

using Floats = std::vector<float>;

constexpr int64_t kHeads = 2, kGap = 3;  // definition: heads, and rows between two of them

// (batch 1, heads, rows, dim) with a gap after every row, ending right after the last element.
struct Field {
  int64_t rows, dim;
  Floats data;

  Field(int64_t rows, int64_t dim, unsigned seed) : rows(rows), dim(dim), data(static_cast<size_t>(size())) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    for (float& v : data) v = normal(generator);
  }
  int64_t stride() const { return dim + kGap; }
  int64_t size() const { return rows == 0 ? 0 : kHeads * rows * stride() - kGap; }
  float at(int64_t h, int64_t r, int64_t c) const { return data[static_cast<size_t>((h * rows + r) * stride() + c)]; }
  tw::HeadStrides strides() const { return {0, rows * stride()}; }
  tw::StridedRows in() const { return {data.data(), stride()}; }
  tw::BatchRows batch() const { return {in(), strides()}; }
  tw::BatchRowsOut out() { return {{data.data(), stride()}, strides()}; }
};

struct Case {
  int64_t queries, keys, dim;
  bool causal, masked;
};

bool allowed(const Case& c, const std::vector<unsigned char>& mask, int64_t t, int64_t j) {
  if (c.causal && j > c.keys - c.queries + t) return false;
  return !c.masked || mask[static_cast<size_t>(t * c.keys + j)] != 0;
}

bool close(double a, double b) { return std::fabs(a - b) <= 2e-5 * std::fmax(1.0, std::fabs(b)); }

void check(const Case& c) {
  Field q(c.queries, c.dim, 1), k(c.keys, c.dim, 2), v(c.keys, c.dim, 3), gout(c.queries, c.dim, 4);
  Field out(c.queries, c.dim, 5), gq(c.queries, c.dim, 6), gk(c.keys, c.dim, 7), gv(c.keys, c.dim, 8);
  std::vector<unsigned char> mask(static_cast<size_t>(c.queries * c.keys));
  for (size_t i = 0; i < mask.size(); ++i) mask[i] = i % 3 != 0;
  Floats logsumexp(static_cast<size_t>(kHeads * c.queries));

  tw::AttentionBatch p = {};
  p.batch = 1;
  p.heads = kHeads;
  p.first = {c.queries,   c.keys, c.dim, c.dim,    q.in(),
             k.in(),      v.in(), 0.5f,  c.causal, c.masked ? tw::MaskKind::boolean : tw::MaskKind::none,
             mask.data(), c.keys, 1};
  p.q = q.strides();
  p.k = k.strides();
  p.v = v.strides();
  tw::attention_forward(p, out.out(), logsumexp.data());
  tw::attention_backward(p, gout.batch(), out.batch(), logsumexp.data(), gq.out(), gk.out(), gv.out());

  for (int64_t h = 0; h < kHeads; ++h) {
    std::vector<double> ek(static_cast<size_t>(c.keys * c.dim)), ev(ek.size());
    for (int64_t t = 0; t < c.queries; ++t) {
      std::vector<double> w(static_cast<size_t>(c.keys)), g(w.size());
      double total = 0.0, delta = 0.0;
      for (int64_t j = 0; j < c.keys; ++j) {
        double score = 0.0;
        for (int64_t d = 0; d < c.dim; ++d) score += 0.5 * q.at(h, t, d) * k.at(h, j, d);
        w[j] = allowed(c, mask, t, j) ? std::exp(score) : 0.0;
        total += w[j];
      }
      for (int64_t j = 0; j < c.keys; ++j) {
        w[j] = total > 0.0 ? w[j] / total : 0.0;
        for (int64_t d = 0; d < c.dim; ++d) g[j] += gout.at(h, t, d) * v.at(h, j, d);
        delta += w[j] * g[j];
      }
      for (int64_t d = 0; d < c.dim; ++d) {
        double y = 0.0, grad = 0.0;
        for (int64_t j = 0; j < c.keys; ++j) {
          y += w[j] * v.at(h, j, d);
          grad += 0.5 * w[j] * (g[j] - delta) * k.at(h, j, d);
          ek[static_cast<size_t>(j * c.dim + d)] += 0.5 * w[j] * (g[j] - delta) * q.at(h, t, d);
          ev[static_cast<size_t>(j * c.dim + d)] += w[j] * gout.at(h, t, d);
        }
        TW_CHECK(close(out.at(h, t, d), y) && close(gq.at(h, t, d), grad));
      }
    }
    for (int64_t j = 0; j < c.keys; ++j) {
      for (int64_t d = 0; d < c.dim; ++d) {
        TW_CHECK(close(gk.at(h, j, d), ek[static_cast<size_t>(j * c.dim + d)]));
        TW_CHECK(close(gv.at(h, j, d), ev[static_cast<size_t>(j * c.dim + d)]));
      }
    }
  }
}

}  // namespace

TW_TEST(attention_and_its_gradients_are_right) {
  for (int threads : {1, 2}) {
    tw::set_num_threads(threads);
    for (int64_t queries : {0, 1, 5, 64, 67}) {
      for (int64_t keys : {0, 1, 5, 64, 70, 129}) {
        for (int64_t dim : {1, 8, 33}) {
          for (bool causal : {false, true}) check({queries, keys, dim, causal, false});
          check({queries, keys, dim, true, true});
        }
      }
    }
  }
}
