// The forward pass by online softmax (Milakov and Gimelshein 2018): a block of queries is multiplied by the keys block
// by block. Each row keeps its largest score so far, the sum of its exponentials and the weighted sum of values; the
// two sums are rescaled whenever the largest score grows.
#include "kernels/attention_block.h"

#include "kernels/attention_grad.h"
#include "kernels/softmax_weight.h"

namespace tw {
namespace TW_ISA {
namespace {

// Keys per block. Without gradients, more keys fit the second-level cache than in attention_block.h: fewer rescalings
// and longer products. Rows of scores and of transposed keys are 16 floats more than a power of two apart, so that they
// do not share cache sets.
constexpr int kManyKeys = 256;  // chosen
constexpr int kKeyStep = kManyKeys + 16;

int64_t forward_workspace(int64_t dim, int64_t value_dim) {
  return kQueryBlock * dim + kKeyStep * dim + kQueryBlock * kKeyStep + kQueryBlock * value_dim;
}

// The state of the online softmax of one row.
struct RunningRow {
  float top;     // largest score so far
  double total;  // sum of exp(score - top)
};

// Adds one block of keys to a row: replaces its scores by exp(score - top) and rescales the earlier sums if `top` has
// risen.
TW_INLINE void add_block(float* scores, int64_t count, RunningRow& state, float* gathered, int64_t value_dim) {
  const float block_top = row_max(scores, count);
  const float top = block_top > state.top ? block_top : state.top;
  const float shift = top == -__builtin_inff() ? 0.0f : top;
  const double total = sum_over(count, [&](int64_t j, auto lanes) {
    const vf e = softmax_weight(lanes.get(scores + j) - shift);
    lanes.put(scores + j, e);
    return e;
  });
  if (top != state.top) {
    const float factor = vexp(splat(state.top - top))[0];
    state.total *= factor;
    each_vector(value_dim, [&](int64_t c, auto lanes) { lanes.put(gathered + c, lanes.get(gathered + c) * factor); });
  }
  state.top = top;
  state.total += total;
}

// Divides the weighted sum of values by the sum of exponentials. A row without any visible key becomes 0.
void normalize_row(const RunningRow& state, const float* gathered, int64_t value_dim, float* out, float* logsumexp) {
  const bool is_empty = state.total == 0.0;
  const float share = is_empty ? 0.0f : static_cast<float>(1.0 / state.total);
  each_vector(value_dim, [&](int64_t c, auto lanes) { lanes.put(out + c, lanes.get(gathered + c) * share); });
  if (logsumexp != nullptr)
    *logsumexp = is_empty ? -__builtin_inff() : static_cast<float>(state.top + __builtin_log(state.total));
}

// Workspace: scaled queries (queries, dim), transposed keys (dim, kKeyStep), scores (queries, kKeyStep) and weighted
// sums of values (queries, value_dim).
void forward(const AttentionHead& head, int64_t first, int64_t last, RowsOut out, float* logsumexp, float* workspace) {
  const int64_t queries = last - first, dim = head.dim, value_dim = head.value_dim;
  float* q = workspace;
  float* keys = q + kQueryBlock * dim;
  float* scores = keys + kKeyStep * dim;
  float* gathered = scores + kQueryBlock * kKeyStep;
  RunningRow state[kQueryBlock];
  for (int64_t i = 0; i < queries; ++i) state[i] = {-__builtin_inff(), 0.0};
  __builtin_memset(gathered, 0, static_cast<size_t>(queries * value_dim) * sizeof(float));
  copy_scaled(head.q, first, queries, dim, head.scale, q);

  const int64_t begin = first_key(head, first), end = visible_keys(head, last - 1);
  // Keys in [some_hidden_before, all_visible_until) are visible to all of these queries and need no causal mask.
  const int64_t all_visible_until = visible_keys(head, first), some_hidden_before = first_key(head, last - 1);
  const int64_t blocks = (end - begin + kManyKeys - 1) / kManyKeys;
  const int64_t even = blocks <= 0 ? 0 : (end - begin + blocks - 1) / blocks;
  const int64_t step = (even + kLanes - 1) / kLanes * kLanes;  // blocks of about one size, of whole vectors
  for (int64_t j = begin; j < end; j += step) {
    const int64_t count = end - j < step ? end - j : step;
    transpose_rows(head.k, j, count, dim, kKeyStep, keys);
    multiply(queries, count, dim, {q, dim, 1}, {keys, kKeyStep}, {scores, kKeyStep}, false);
    for (int64_t i = 0; head.cap > 0.0f && i < queries; ++i) soft_cap(scores + i * kKeyStep, head.cap, count);
    if (j + count > all_visible_until || j < some_hidden_before || head.mask_kind != MaskKind::none) {
      mask_scores(head, first, queries, j, count, kKeyStep, scores);
    }
    for (int64_t i = 0; i < queries; ++i) {
      add_block(scores + i * kKeyStep, count, state[i], gathered + i * value_dim, value_dim);
    }
    multiply(queries, value_dim, count, {scores, kKeyStep, 1}, {head.v.data + j * head.v.stride, head.v.stride},
             {gathered, value_dim}, true);
  }
  for (int64_t i = 0; i < queries; ++i) {
    normalize_row(state[i], gathered + i * value_dim, value_dim, out.data + (first + i) * out.stride,
                  logsumexp == nullptr ? nullptr : logsumexp + first + i);
  }
}

}  // namespace

const AttentionKernels attention = {forward_workspace, backward_workspace, kQueryBlock, forward, backward};

}  // namespace TW_ISA
}  // namespace tw
