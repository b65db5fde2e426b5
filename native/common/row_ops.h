// Whole operations on the row kernels: threads, workspaces and the order of sums. How the work is split depends on the
// shape alone, so every result is bit for bit the same with any number of threads. All matrices are contiguous float32;
// sizes may be 0.
#pragma once

#include <cstdint>

#include "kernels/elementwise.h"
#include "kernels/norm.h"
#include "kernels/softmax.h"

namespace tw {

using UnaryKernel = void (*)(const float*, float*, int64_t);
using BinaryKernel = void (*)(const float*, const float*, float*, int64_t);
using UnaryRowKernel = void (*)(const float*, float*, int64_t, int64_t);
using BinaryRowKernel = void (*)(const float*, const float*, float*, int64_t, int64_t);

void map_unary(UnaryKernel kernel, const float* x, float* y, int64_t n);
void map_binary(BinaryKernel kernel, const float* a, const float* b, float* y, int64_t n);
void map_rows(UnaryRowKernel kernel, const float* x, float* y, int64_t rows, int64_t columns);
void map_rows(BinaryRowKernel kernel, const float* a, const float* b, float* y, int64_t rows, int64_t columns);

void cross_entropy(const float* logits, const int64_t* targets, float* losses, float* logsumexp, int64_t rows,
                   int64_t columns);
void cross_entropy_grad(const float* logits, const int64_t* targets, const float* logsumexp, const float* weights,
                        float* glogits, int64_t rows, int64_t columns);

void layer_norm(const float* x, const float* weight, const float* bias, float eps, float* y, float* mean, float* rstd,
                int64_t rows, int64_t columns);
void layer_norm_grad(const float* gy, const float* x, const float* weight, const float* mean, const float* rstd,
                     float* gx, float* gweight, float* gbias, int64_t rows, int64_t columns);

// Batch normalization of x (images, channels, plane): moments over images and plane, the variance without Bessel's
// correction.
struct BatchShape {
  int64_t images, channels, plane;
};
void batch_norm(const float* x, const float* weight, const float* bias, float eps, float* y, float* mean,
                float* variance, BatchShape shape);
void batch_norm_grad(const float* gy, const float* x, const float* weight, const float* mean, const float* variance,
                     float eps, float* gx, float* gweight, float* gbias, BatchShape shape);
void sum_channels(const float* x, float* out, BatchShape shape);

void sum_rows(const float* x, float* out, int64_t rows, int64_t columns);
double sum_of_squares(const float* x, int64_t n);
void scale_in_place(float* x, float factor, int64_t n);
// out (table_rows, columns): row t is the sum of the rows r of gout with ids[r] == t. All ids must be within the table.
void embedding_grad(const float* gout, const int64_t* ids, float* out, int64_t rows, int64_t table_rows,
                    int64_t columns);
void adam_step(float* param, const float* grad, float* m, float* v, const AdamSettings& settings, int64_t n);

}  // namespace tw
