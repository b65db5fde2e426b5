// The backward pass: scores are recomputed block by block from the saved logsumexp. The outer loop is over blocks of
// keys, so that their gradients and those of their values accumulate in the workspace; the gradients of the queries are
// accumulated in place.
#pragma once

#include "kernels/attention_block.h"

namespace tw {
namespace TW_ISA {
namespace {

// The floats of workspace. Per block of keys: transposed keys and values, gradients of both. Per block of queries:
// scaled queries, the incoming gradient, two blocks of scores. Per head: one number for every query (delta).
int64_t backward_workspace(int64_t queries, int64_t dim, int64_t value_dim) {
  return 2 * kKeyBlock * (dim + value_dim) + kQueryBlock * (dim + value_dim) + 2 * kQueryBlock * kKeyBlock + queries;
}

// The parts of the workspace.
struct GradientBlocks {
  float *keys, *values, *gkeys, *gvalues, *q, *gout, *weights, *gscores, *delta;

  GradientBlocks(float* at, int64_t dim, int64_t value_dim) {
    keys = at;
    values = keys + kKeyBlock * dim;
    gkeys = values + kKeyBlock * value_dim;
    gvalues = gkeys + kKeyBlock * dim;
    q = gvalues + kKeyBlock * value_dim;
    gout = q + kQueryBlock * dim;
    weights = gout + kQueryBlock * value_dim;
    gscores = weights + kQueryBlock * kKeyBlock;
    delta = gscores + kQueryBlock * kKeyBlock;
  }
};

void clear_rows(RowsOut rows, int64_t count, int64_t dim) {
  for (int64_t i = 0; i < count; ++i) __builtin_memset(rows.data + i * rows.stride, 0, static_cast<size_t>(dim) * 4);
}

void copy_out(const float* from, int64_t count, int64_t dim, RowsOut to) {
  for (int64_t i = 0; i < count; ++i) {
    __builtin_memcpy(to.data + i * to.stride, from + i * dim, static_cast<size_t>(dim) * 4);
  }
}

void scale_rows(RowsOut rows, int64_t count, int64_t dim, float factor) {
  for (int64_t i = 0; i < count; ++i) {
    float* row = rows.data + i * rows.stride;
    each_vector(dim, [&](int64_t c, auto lanes) { lanes.put(row + c, lanes.get(row + c) * factor); });
  }
}

// delta: the sum of gout * out over each row, which all scores of a row share in their gradient (Dao et al. 2022).
void dot_rows(StridedRows a, StridedRows b, int64_t count, int64_t dim, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    const float* x = a.data + i * a.stride;
    const float* y = b.data + i * b.stride;
    out[i] =
        static_cast<float>(sum_over(dim, [&](int64_t c, auto lanes) { return lanes.get(x + c) * lanes.get(y + c); }));
  }
}

// Turns scores into softmax weights, and the gradient of the weights into that of the unscaled scores, in place.
TW_INLINE void weights_and_gradient(float* weights, float* gscores, int64_t count, float logsumexp, float delta) {
  // A query with nothing to attend to has logsumexp = -inf; against +inf all its weights are 0.
  const float shift = logsumexp == -__builtin_inff() ? __builtin_inff() : logsumexp;
  each_vector(count, [&](int64_t j, auto lanes) {
    const vf w = vexp(lanes.get(weights + j) - shift);
    lanes.put(weights + j, w);
    lanes.put(gscores + j, w * (lanes.get(gscores + j) - delta));
  });
}

// Returns the first query that sees key j.
TW_INLINE int64_t first_query(const AttentionHead& head, int64_t j) {
  const int64_t t = head.causal ? j - (head.keys - head.queries) : 0;
  return t < 0 ? 0 : t;
}

// With S = scaled scores, W = softmax(S) and O = W V: gV = W' gO, gS = W (gO V' - delta), gQ = gS K, gK = gS' Q.
void backward(const AttentionHead& head, StridedRows gout, StridedRows out, const float* logsumexp, RowsOut gq,
              RowsOut gk, RowsOut gv, float* workspace) {
  const int64_t dim = head.dim, value_dim = head.value_dim;
  const GradientBlocks at(workspace, dim, value_dim);
  clear_rows(gq, head.queries, dim);
  dot_rows(gout, out, head.queries, value_dim, at.delta);
  for (int64_t j = 0; j < head.keys; j += kKeyBlock) {
    const int64_t keys = head.keys - j < kKeyBlock ? head.keys - j : kKeyBlock;
    transpose_rows(head.k, j, keys, dim, kKeyBlock, at.keys);
    transpose_rows(head.v, j, keys, value_dim, kKeyBlock, at.values);
    __builtin_memset(at.gkeys, 0, static_cast<size_t>(keys * dim) * 4);
    __builtin_memset(at.gvalues, 0, static_cast<size_t>(keys * value_dim) * 4);
    for (int64_t i = first_query(head, j) / kQueryBlock * kQueryBlock; i < head.queries; i += kQueryBlock) {
      const int64_t queries = head.queries - i < kQueryBlock ? head.queries - i : kQueryBlock;
      const StridedRows gout_block = {gout.data + i * gout.stride, gout.stride};
      copy_scaled(head.q, i, queries, dim, head.scale, at.q);
      multiply(queries, keys, dim, {at.q, dim, 1}, {at.keys, kKeyBlock}, {at.weights, kKeyBlock}, false);
      multiply(queries, keys, value_dim, {gout_block.data, gout.stride, 1}, {at.values, kKeyBlock},
               {at.gscores, kKeyBlock}, false);
      if (j + keys > visible_keys(head, i) || head.mask_kind != MaskKind::none) {
        mask_scores(head, i, queries, j, keys, kKeyBlock, at.weights);
      }
      for (int64_t r = 0; r < queries; ++r) {
        weights_and_gradient(at.weights + r * kKeyBlock, at.gscores + r * kKeyBlock, keys, logsumexp[i + r],
                             at.delta[i + r]);
      }
      multiply(keys, value_dim, queries, {at.weights, 1, kKeyBlock}, gout_block, {at.gvalues, value_dim}, true);
      multiply(keys, dim, queries, {at.gscores, 1, kKeyBlock}, {at.q, dim}, {at.gkeys, dim}, true);
      multiply(queries, dim, keys, {at.gscores, kKeyBlock, 1}, {head.k.data + j * head.k.stride, head.k.stride},
               {gq.data + i * gq.stride, gq.stride}, true);
    }
    copy_out(at.gkeys, keys, dim, {gk.data + j * gk.stride, gk.stride});
    copy_out(at.gvalues, keys, value_dim, {gv.data + j * gv.stride, gv.stride});
  }
  scale_rows(gq, head.queries, dim, head.scale);
}

}  // namespace
}  // namespace TW_ISA
}  // namespace tw
