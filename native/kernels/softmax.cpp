// Each row is read from memory once and stays in the first-level cache for its three passes: maximum, exponentials and
// their sum, scaling. A row of only -inf, or with +inf or NaN, becomes NaN, as in PyTorch.
#include "kernels/softmax.h"

#include "common/unaligned.h"
#include "kernels/row_loops.h"
#include "kernels/softmax_weight.h"

namespace tw {
namespace TW_ISA {
namespace {

// Computes the softmax of each row; the row's maximum is subtracted first, so that exp cannot overflow.
void softmax(const float* x, float* y, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r, x += columns, y += columns) {
    const vf top = splat(row_max(x, columns));
    const double total = sum_over(columns, [&](int64_t i, auto lanes) {
      const vf e = softmax_weight(lanes.get(x + i) - top);
      lanes.put(y + i, e);
      return e;
    });
    const float scale = static_cast<float>(1.0 / total);
    each_vector(columns, [&](int64_t i, auto lanes) { lanes.put(y + i, lanes.get(y + i) * scale); });
  }
}

void softmax_grad(const float* y, const float* gy, float* gx, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r, y += columns, gy += columns, gx += columns) {
    const float dot = static_cast<float>(
        sum_over(columns, [&](int64_t i, auto lanes) { return lanes.get(y + i) * lanes.get(gy + i); }));
    each_vector(columns,
                [&](int64_t i, auto lanes) { lanes.put(gx + i, lanes.get(y + i) * (lanes.get(gy + i) - dot)); });
  }
}

double sum_of_exp(const float* x, float top, int64_t columns) {
  return sum_over(columns, [&](int64_t i, auto lanes) { return vexp(lanes.get(x + i) - top); });
}

void log_softmax(const float* x, float* y, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r, x += columns, y += columns) {
    const float top = row_max(x, columns);
    const float log_total = static_cast<float>(__builtin_log(sum_of_exp(x, top, columns)));
    each_vector(columns, [&](int64_t i, auto lanes) { lanes.put(y + i, (lanes.get(x + i) - top) - log_total); });
  }
}

void log_softmax_grad(const float* y, const float* gy, float* gx, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r, y += columns, gy += columns, gx += columns) {
    const float total = static_cast<float>(sum_over(columns, [&](int64_t i, auto lanes) { return lanes.get(gy + i); }));
    each_vector(columns,
                [&](int64_t i, auto lanes) { lanes.put(gx + i, lanes.get(gy + i) - vexp(lanes.get(y + i)) * total); });
  }
}

// Computes the loss log(sum(exp(logits))) - logits[target] of each row; `logsumexp` is for the backward pass.
void cross_entropy(const float* logits, const int64_t* targets, float* losses, float* logsumexp, int64_t rows,
                   int64_t columns) {
  for (int64_t r = 0; r < rows; ++r, logits += columns) {
    const float largest = row_max(logits, columns);
    const float top = largest == -__builtin_inff() ? 0.0f : largest;
    const double log_total = __builtin_log(sum_of_exp(logits, top, columns));
    logsumexp[r] = static_cast<float>(top + log_total);
    // (top - logit) first: with logits in the thousands, logsumexp - logit would keep three digits.
    losses[r] = static_cast<float>((static_cast<double>(top) - at(logits, at(targets, r))) + log_total);
  }
}

// Computes the gradient (softmax(logits) - one_hot(target)) * weight of each row.
void cross_entropy_grad(const float* logits, const int64_t* targets, const float* logsumexp, const float* weights,
                        float* glogits, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r, logits += columns, glogits += columns) {
    const float total = at(logsumexp, r), weight = at(weights, r);
    each_vector(columns,
                [&](int64_t i, auto lanes) { lanes.put(glogits + i, vexp(lanes.get(logits + i) - total) * weight); });
    glogits[at(targets, r)] -= weight;
  }
}

}  // namespace

const SoftmaxKernels softmax_kernels = {softmax,          softmax_grad,  log_softmax,
                                        log_softmax_grad, cross_entropy, cross_entropy_grad};

}  // namespace TW_ISA
}  // namespace tw
