// Layer norm over rows and batch norm over channels, with their gradients. Mean and variance are computed in two passes
// over cached data, so that a large mean does not cancel the digits of a small variance.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

// One channel of an (images, channels, plane) tensor: `images` planes, `stride` floats apart.
struct ChannelShape {
  int64_t images, plane, stride;
};

struct NormKernels {
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, float* y, float* mean,
                     float* rstd, int64_t rows, int64_t columns);
  // gx = the gradient of x. Adds the contribution of these rows to the parameters' gradients gweight and gbias.
  // `scratch` has room for 2 * columns floats.
  void (*layer_norm_grad)(const float* gy, const float* x, const float* weight, const float* mean, const float* rstd,
                          float* gx, double* gweight, double* gbias, float* scratch, int64_t rows, int64_t columns);
  double (*channel_sum)(const float* x, ChannelShape shape);
  // The mean and the biased variance of a channel; the variance from the differences to the mean, in a second pass.
  void (*channel_moments)(const float* x, ChannelShape shape, float* mean, float* variance);
  // y = (x - mean) * scale + shift
  void (*channel_affine)(const float* x, ChannelShape shape, float mean, float scale, float shift, float* y);
  // sum of gy, and of gy * (x - mean)
  void (*channel_grad_sums)(const float* gy, const float* x, ChannelShape shape, float mean, double* sum_gy,
                            double* sum_gy_x);
  // gx = gy * a + (x - mean) * b + c
  void (*channel_grad)(const float* gy, const float* x, ChannelShape shape, float mean, float a, float b, float c,
                       float* gx);
};

TW_TABLE(NormKernels, norm_kernels)

}  // namespace tw
