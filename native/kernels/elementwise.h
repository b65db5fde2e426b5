// Elementwise functions of training: activations and their gradients, sums, and the Adam step. Each is one pass over
// memory.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

// The constants of one Adam step, computed in double and then rounded: 1 - 0.999f is wrong in the fifth digit.
struct AdamSettings {
  float decay;    // AdamW's decoupled decay: 1 - lr * weight_decay; 1 for Adam
  float penalty;  // Adam's weight_decay, which is added to the gradient; 0 for AdamW
  float beta2, eps;
  float one_minus_beta1, one_minus_beta2;
  float step_size;    // lr / (1 - beta1^step)
  float root_factor;  // 1 / sqrt(1 - beta2^step)
};

struct ElementwiseKernels {
  void (*gelu)(const float* x, float* y, int64_t n);
  void (*gelu_grad)(const float* x, const float* gy, float* gx, int64_t n);
  void (*relu)(const float* x, float* y, int64_t n);
  void (*relu_grad)(const float* y, const float* gy, float* gx, int64_t n);
  void (*add)(const float* a, const float* b, float* y, int64_t n);
  void (*scale)(float* x, float factor, int64_t n);
  double (*sum_of_squares)(const float* x, int64_t n);
  // totals[c] += sum over rows of x[r, c], for `columns` columns of rows `stride` floats apart
  void (*add_column_sums)(const float* x, int64_t rows, int64_t columns, int64_t stride, double* totals);
  // out[c] = sum over the listed rows of x[row, c]
  void (*sum_listed_rows)(const float* x, const int64_t* rows, int64_t count, int64_t columns, float* out);
  void (*adam)(float* param, const float* grad, float* m, float* v, const AdamSettings& settings, int64_t n);
};

TW_TABLE(ElementwiseKernels, elementwise)

}  // namespace tw
