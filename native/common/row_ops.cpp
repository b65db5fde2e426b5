#include "common/row_ops.h"

#include <algorithm>
#include <cmath>

#include "common/alloc.h"
#include "common/thread_pool.h"
#include "common/unaligned.h"

namespace tw {
namespace {

// Sums over rows are split into at most this many parts, each with its own totals.
constexpr int64_t kPieces = 32;  // chosen
// Rows that the kernel for column sums adds per pass.
constexpr int64_t kRowsAtOnce = 16;  // definition: add_column_sums (kernels/elementwise.cpp)

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls f(begin, end) for ranges of `grain` that cover [0, n), on the threads.
template <class F>
void in_ranges(int64_t n, int64_t grain, const F& f) {
  if (n <= grain) {
    if (n > 0) f(int64_t{0}, n);
    return;
  }
  parallel_for(static_cast<int>(ceil_div(n, grain)), [&](int task) {
    const int64_t begin = task * grain;
    f(begin, std::min(n, begin + grain));
  });
}

// Elements per task: at most a million tasks, and a multiple of every vector length, so that only the last has a tail.
int64_t element_grain(int64_t n) { return std::max(kTaskElements, ceil_div(ceil_div(n, int64_t{1} << 20), 64) * 64); }

int64_t row_grain(int64_t rows, int64_t columns) {
  return std::max(ceil_div(kTaskElements, std::max<int64_t>(columns, 1)), ceil_div(rows, int64_t{1} << 20));
}

}  // namespace

void map_unary(UnaryKernel kernel, const float* x, float* y, int64_t n) {
  in_ranges(n, element_grain(n), [&](int64_t b, int64_t e) { kernel(x + b, y + b, e - b); });
}

void map_binary(BinaryKernel kernel, const float* a, const float* b, float* y, int64_t n) {
  in_ranges(n, element_grain(n), [&](int64_t i, int64_t e) { kernel(a + i, b + i, y + i, e - i); });
}

void map_rows(UnaryRowKernel kernel, const float* x, float* y, int64_t rows, int64_t columns) {
  in_ranges(rows, row_grain(rows, columns),
            [&](int64_t b, int64_t e) { kernel(x + b * columns, y + b * columns, e - b, columns); });
}

void map_rows(BinaryRowKernel kernel, const float* x1, const float* x2, float* y, int64_t rows, int64_t columns) {
  in_ranges(rows, row_grain(rows, columns),
            [&](int64_t b, int64_t e) { kernel(x1 + b * columns, x2 + b * columns, y + b * columns, e - b, columns); });
}

void cross_entropy(const float* logits, const int64_t* targets, float* losses, float* logsumexp, int64_t rows,
                   int64_t columns) {
  const SoftmaxKernels& kernels = active_softmax_kernels();
  in_ranges(rows, row_grain(rows, columns), [&](int64_t b, int64_t e) {
    kernels.cross_entropy(logits + b * columns, targets + b, losses + b, logsumexp + b, e - b, columns);
  });
}

void cross_entropy_grad(const float* logits, const int64_t* targets, const float* logsumexp, const float* weights,
                        float* glogits, int64_t rows, int64_t columns) {
  const SoftmaxKernels& kernels = active_softmax_kernels();
  in_ranges(rows, row_grain(rows, columns), [&](int64_t b, int64_t e) {
    kernels.cross_entropy_grad(logits + b * columns, targets + b, logsumexp + b, weights + b, glogits + b * columns,
                               e - b, columns);
  });
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, float* y, float* mean, float* rstd,
                int64_t rows, int64_t columns) {
  const NormKernels& kernels = active_norm_kernels();
  in_ranges(rows, row_grain(rows, columns), [&](int64_t b, int64_t e) {
    kernels.layer_norm(x + b * columns, weight, bias, eps, y + b * columns, mean + b, rstd + b, e - b, columns);
  });
}

// Each part of the rows adds the parameters' gradients to its own totals, which are summed in a fixed order.
void layer_norm_grad(const float* gy, const float* x, const float* weight, const float* mean, const float* rstd,
                     float* gx, float* gweight, float* gbias, int64_t rows, int64_t columns) {
  const NormKernels& kernels = active_norm_kernels();
  const int64_t grain = std::max(row_grain(rows, columns), ceil_div(rows, kPieces));
  const int64_t chunks = ceil_div(rows, grain);
  const size_t width = static_cast<size_t>(columns);
  Buffer<double> totals(static_cast<size_t>(chunks) * 2 * width);
  Buffer<float> scratch(static_cast<size_t>(chunks) * 2 * width);
  std::fill_n(totals.data(), totals.size(), 0.0);
  in_ranges(rows, grain, [&](int64_t b, int64_t e) {
    const size_t piece = static_cast<size_t>(b / grain);
    double* total = totals.data() + piece * 2 * width;
    kernels.layer_norm_grad(gy + b * columns, x + b * columns, weight, mean + b, rstd + b, gx + b * columns, total,
                            total + width, scratch.data() + piece * 2 * width, e - b, columns);
  });
  for (int64_t c = 0; c < columns; ++c) {
    double w = 0.0, bias = 0.0;
    for (int64_t p = 0; p < chunks; ++p) {
      w += totals[static_cast<size_t>(p * 2 * columns + c)];
      bias += totals[static_cast<size_t>((p * 2 + 1) * columns + c)];
    }
    gweight[c] = static_cast<float>(w);
    gbias[c] = static_cast<float>(bias);
  }
}

namespace {

int64_t channel_grain(BatchShape s) { return row_grain(s.channels, s.images * s.plane); }
ChannelShape one_channel(BatchShape s) { return {s.images, s.plane, s.channels * s.plane}; }

template <class F>
void each_channel(BatchShape shape, const F& f) {
  in_ranges(shape.channels, channel_grain(shape), [&](int64_t b, int64_t e) {
    for (int64_t c = b; c < e; ++c) f(c, c * shape.plane);
  });
}

}  // namespace

// Batch norm in training: normalizes each channel by its own mean and variance, which are returned.
void batch_norm(const float* x, const float* weight, const float* bias, float eps, float* y, float* mean,
                float* variance, BatchShape shape) {
  const NormKernels& kernels = active_norm_kernels();
  const ChannelShape channel = one_channel(shape);
  each_channel(shape, [&](int64_t c, int64_t at) {
    kernels.channel_moments(x + at, channel, mean + c, variance + c);
    const double scale = weight[c] / std::sqrt(static_cast<double>(variance[c]) + eps);
    kernels.channel_affine(x + at, channel, mean[c], static_cast<float>(scale), bias[c], y + at);
  });
}

// Computes the gradients of batch norm with respect to the input, the weight and the bias.
void batch_norm_grad(const float* gy, const float* x, const float* weight, const float* mean, const float* variance,
                     float eps, float* gx, float* gweight, float* gbias, BatchShape shape) {
  const NormKernels& kernels = active_norm_kernels();
  const ChannelShape channel = one_channel(shape);
  const double count = static_cast<double>(shape.images) * static_cast<double>(shape.plane);
  each_channel(shape, [&](int64_t c, int64_t at) {
    double sum_gy, sum_gy_x;
    kernels.channel_grad_sums(gy + at, x + at, channel, mean[c], &sum_gy, &sum_gy_x);
    const double rstd = 1.0 / std::sqrt(static_cast<double>(variance[c]) + eps);
    gweight[c] = static_cast<float>(sum_gy_x * rstd);
    gbias[c] = static_cast<float>(sum_gy);
    const double scale = weight[c] * rstd;
    kernels.channel_grad(gy + at, x + at, channel, mean[c], static_cast<float>(scale),
                         static_cast<float>(-scale * rstd * rstd * sum_gy_x / count),
                         static_cast<float>(-scale * sum_gy / count), gx + at);
  });
}

void sum_channels(const float* x, float* out, BatchShape shape) {
  const NormKernels& kernels = active_norm_kernels();
  const ChannelShape channel = one_channel(shape);
  each_channel(shape,
               [&](int64_t c, int64_t at) { out[c] = static_cast<float>(kernels.channel_sum(x + at, channel)); });
}

// Each part of the rows has its own totals, which are summed in a fixed order.
void sum_rows(const float* x, float* out, int64_t rows, int64_t columns) {
  const ElementwiseKernels& kernels = active_elementwise();
  const int64_t enough = std::max(4 * row_grain(rows, columns), ceil_div(rows, kPieces));
  const int64_t grain = ceil_div(enough, kRowsAtOnce) * kRowsAtOnce;
  const int64_t chunks = std::max<int64_t>(ceil_div(rows, grain), 1);
  const size_t width = static_cast<size_t>(columns);
  Buffer<double> totals(static_cast<size_t>(chunks) * width);
  std::fill_n(totals.data(), totals.size(), 0.0);
  in_ranges(rows, grain, [&](int64_t b, int64_t e) {
    kernels.add_column_sums(x + b * columns, e - b, columns, columns,
                            totals.data() + static_cast<size_t>(b / grain) * width);
  });
  for (size_t c = 0; c < width; ++c) {
    double total = 0.0;
    for (size_t p = 0; p < static_cast<size_t>(chunks); ++p) total += totals[p * width + c];
    out[c] = static_cast<float>(total);
  }
}

// Sums squares in at most 1024 ranges, so that the result does not depend on the number of threads.
double sum_of_squares(const float* x, int64_t n) {
  const ElementwiseKernels& kernels = active_elementwise();
  const int64_t grain = std::max(kTaskElements, ceil_div(n, int64_t{1024}));
  double totals[1024] = {};
  in_ranges(n, grain, [&](int64_t b, int64_t e) { totals[b / grain] = kernels.sum_of_squares(x + b, e - b); });
  double total = 0.0;
  for (double t : totals) total += t;
  return total;
}

void scale_in_place(float* x, float factor, int64_t n) {
  const ElementwiseKernels& kernels = active_elementwise();
  in_ranges(n, element_grain(n), [&](int64_t b, int64_t e) { kernels.scale(x + b, factor, e - b); });
}

// A counting sort lists, for each row of the table, the rows of gout that belong to it; each table row is then one sum.
void embedding_grad(const float* gout, const int64_t* ids, float* out, int64_t rows, int64_t table_rows,
                    int64_t columns) {
  const ElementwiseKernels& kernels = active_elementwise();
  Buffer<int64_t> starts(static_cast<size_t>(table_rows) + 2);
  Buffer<int64_t> order(static_cast<size_t>(rows));
  std::fill_n(starts.data(), starts.size(), int64_t{0});
  int64_t* next = starts.data() + 1;  // after filling, next[t] has moved to the start of t + 1
  for (int64_t r = 0; r < rows; ++r) ++starts[static_cast<size_t>(at(ids, r) + 2)];
  for (int64_t t = 0; t < table_rows; ++t) next[t + 1] += next[t];
  for (int64_t r = 0; r < rows; ++r) order[static_cast<size_t>(next[at(ids, r)]++)] = r;
  in_ranges(table_rows, row_grain(table_rows, columns), [&](int64_t b, int64_t e) {
    for (int64_t t = b; t < e; ++t) {
      const int64_t first = starts[static_cast<size_t>(t)], last = starts[static_cast<size_t>(t + 1)];
      kernels.sum_listed_rows(gout, order.data() + first, last - first, columns, out + t * columns);
    }
  });
}

void adam_step(float* param, const float* grad, float* m, float* v, const AdamSettings& settings, int64_t n) {
  const ElementwiseKernels& kernels = active_elementwise();
  in_ranges(n, element_grain(n),
            [&](int64_t b, int64_t e) { kernels.adam(param + b, grad + b, m + b, v + b, settings, e - b); });
}

}  // namespace tw
