#include "kernels/norm.h"

#include "kernels/row_loops.h"

namespace tw {
namespace TW_ISA {
namespace {

// Layer norm of each row, also returning its mean and 1 / standard deviation for the backward pass.
void layer_norm(const float* x, const float* weight, const float* bias, float eps, float* y, float* mean, float* rstd,
                int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r, x += columns, y += columns) {
    const float centre = static_cast<float>(sum_over(columns, [&](int64_t i, auto lanes) { return lanes.get(x + i); }) /
                                            static_cast<double>(columns));
    const double squares = sum_over(columns, [&](int64_t i, auto lanes) {
      const vf d = lanes.get(x + i) - centre;
      return d * d;
    });
    const float scale = static_cast<float>(1.0 / __builtin_sqrt(squares / static_cast<double>(columns) + eps));
    each_vector(columns, [&](int64_t i, auto lanes) {
      const vf normed = (lanes.get(x + i) - centre) * scale;
      lanes.put(y + i, normed * lanes.get(weight + i) + lanes.get(bias + i));
    });
    mean[r] = centre;
    rstd[r] = scale;
  }
}

void flush(float* sums, double* totals, int64_t n) {
  for (int64_t i = 0; i < n; ++i) totals[i] += sums[i];
  __builtin_memset(sums, 0, static_cast<size_t>(n) * sizeof(float));
}

// With n = (x - mean) * rstd and g = gy * weight: gx = (g - mean(g) - n * mean(g * n)) * rstd, over each row.
void layer_norm_grad(const float* gy, const float* x, const float* weight, const float* mean, const float* rstd,
                     float* gx, double* gweight, double* gbias, float* scratch, int64_t rows, int64_t columns) {
  float* gw = scratch;
  float* gb = scratch + columns;
  __builtin_memset(scratch, 0, static_cast<size_t>(2 * columns) * sizeof(float));
  for (int64_t r = 0; r < rows; ++r, gy += columns, x += columns, gx += columns) {
    const float centre = mean[r], scale = rstd[r];
    const TwoSums sums = two_sums_over(columns, [&](int64_t i, auto lanes, vf& plain, vf& along) {
      const vf g = lanes.get(gy + i) * lanes.get(weight + i);
      plain += g;
      along += g * ((lanes.get(x + i) - centre) * scale);
    });
    const float g_mean = static_cast<float>(sums.first / static_cast<double>(columns));
    const float g_along = static_cast<float>(sums.second / static_cast<double>(columns));
    each_vector(columns, [&](int64_t i, auto lanes) {
      const vf g = lanes.get(gy + i);
      const vf normed = (lanes.get(x + i) - centre) * scale;
      lanes.put(gx + i, (g * lanes.get(weight + i) - g_mean - normed * g_along) * scale);
      lanes.put(gw + i, lanes.get(gw + i) + g * normed);
      lanes.put(gb + i, lanes.get(gb + i) + g);
    });
    if (r % kRowsInFloat == kRowsInFloat - 1 || r == rows - 1) {
      flush(gw, gweight, columns);
      flush(gb, gbias, columns);
    }
  }
}

double channel_sum(const float* x, ChannelShape shape) {
  double total = 0.0;
  for (int64_t n = 0; n < shape.images; ++n) {
    const float* p = x + n * shape.stride;
    total += sum_over(shape.plane, [&](int64_t i, auto lanes) { return lanes.get(p + i); });
  }
  return total;
}

void channel_moments(const float* x, ChannelShape shape, float* mean, float* variance) {
  const double count = static_cast<double>(shape.images) * static_cast<double>(shape.plane);
  const float centre = static_cast<float>(channel_sum(x, shape) / count);
  double squares = 0.0;
  for (int64_t n = 0; n < shape.images; ++n) {
    const float* p = x + n * shape.stride;
    squares += sum_over(shape.plane, [&](int64_t i, auto lanes) {
      const vf d = lanes.get(p + i) - centre;
      return d * d;
    });
  }
  *mean = centre;
  *variance = static_cast<float>(squares / count);
}

void channel_affine(const float* x, ChannelShape shape, float mean, float scale, float shift, float* y) {
  for (int64_t n = 0; n < shape.images; ++n) {
    const float* p = x + n * shape.stride;
    float* q = y + n * shape.stride;
    each_vector(shape.plane,
                [&](int64_t i, auto lanes) { lanes.put(q + i, (lanes.get(p + i) - mean) * scale + shift); });
  }
}

void channel_grad_sums(const float* gy, const float* x, ChannelShape shape, float mean, double* sum_gy,
                       double* sum_gy_x) {
  *sum_gy = *sum_gy_x = 0.0;
  for (int64_t n = 0; n < shape.images; ++n) {
    const float* g = gy + n * shape.stride;
    const float* p = x + n * shape.stride;
    const TwoSums sums = two_sums_over(shape.plane, [&](int64_t i, auto lanes, vf& plain, vf& along) {
      const vf v = lanes.get(g + i);
      plain += v;
      along += v * (lanes.get(p + i) - mean);
    });
    *sum_gy += sums.first;
    *sum_gy_x += sums.second;
  }
}

void channel_grad(const float* gy, const float* x, ChannelShape shape, float mean, float a, float b, float c,
                  float* gx) {
  for (int64_t n = 0; n < shape.images; ++n) {
    const float* g = gy + n * shape.stride;
    const float* p = x + n * shape.stride;
    float* q = gx + n * shape.stride;
    each_vector(shape.plane, [&](int64_t i, auto lanes) {
      lanes.put(q + i, lanes.get(g + i) * a + ((lanes.get(p + i) - mean) * b + c));
    });
  }
}

}  // namespace

const NormKernels norm_kernels = {layer_norm,     layer_norm_grad,   channel_sum, channel_moments,
                                  channel_affine, channel_grad_sums, channel_grad};

}  // namespace TW_ISA
}  // namespace tw
