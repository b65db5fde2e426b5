// Max and average pooling of NCHW planes, and their gradients. Windows of 2x2 with stride 2, and windows as large as
// the plane, have vector paths; others run window by window.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

struct PoolShape {
  int64_t planes, h, w;
  int64_t kh, kw, sh, sw, ph, pw;
  int64_t oh, ow;
};

struct PoolKernels {
  // argmax: the index of the maximum in its plane. As in PyTorch, the first of equal values, and NaN is largest.
  void (*max)(const PoolShape& s, const float* x, float* y, int32_t* argmax);
  // Returns false if an argmax is outside the plane; gx is then unspecified.
  bool (*max_grad)(const PoolShape& s, const float* gy, const int32_t* argmax, float* gx);
  void (*average)(const PoolShape& s, const float* x, float* y);  // padding counts as zeros
  void (*average_grad)(const PoolShape& s, const float* gy, float* gx);
};

TW_TABLE(PoolKernels, pool)

}  // namespace tw
