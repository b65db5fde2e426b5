// Softmax, log-softmax and cross-entropy over the rows of a (rows, columns) matrix, with their gradients. All arrays
// are contiguous float32; outputs do not overlap inputs.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

struct SoftmaxKernels {
  void (*softmax)(const float* x, float* y, int64_t rows, int64_t columns);
  void (*softmax_grad)(const float* y, const float* gy, float* gx, int64_t rows, int64_t columns);
  void (*log_softmax)(const float* x, float* y, int64_t rows, int64_t columns);
  void (*log_softmax_grad)(const float* y, const float* gy, float* gx, int64_t rows, int64_t columns);
  // The caller has checked 0 <= targets[r] < columns.
  void (*cross_entropy)(const float* logits, const int64_t* targets, float* losses, float* logsumexp, int64_t rows,
                        int64_t columns);
  void (*cross_entropy_grad)(const float* logits, const int64_t* targets, const float* logsumexp, const float* weights,
                             float* glogits, int64_t rows, int64_t columns);
};

TW_TABLE(SoftmaxKernels, softmax_kernels)

}  // namespace tw
