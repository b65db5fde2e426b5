// Compares the row kernels with plain loops in double precision. The arrays have exactly the needed size, so that the
// sanitizer sees every access outside them.
#include <cmath>
#include <random>
#include <vector>

#include "common/row_ops.h"
#include "common/thread_pool.h"
#include "tests/tests.h"

namespace {

using Floats = std::vector<float>;

Floats random_floats(int64_t n, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Floats x(static_cast<size_t>(n));
  for (float& v : x) v = normal(generator);
  return x;
}

bool close(double a, double b, double tolerance = 1e-5) {
  return std::fabs(a - b) <= tolerance * std::fmax(1.0, std::fabs(b));
}

const int64_t kRowCounts[] = {0, 1, 3, 37};
const int64_t kColumnCounts[] = {1, 7, 16, 33, 64, 129};

template <class F>
void each_shape(F f) {
  for (int threads : {1, 2}) {
    tw::set_num_threads(threads);
    for (int64_t rows : kRowCounts) {
      for (int64_t columns : kColumnCounts) f(rows, columns);
    }
  }
}

double logsumexp(const float* x, int64_t n) {
  double total = 0.0;
  for (int64_t i = 0; i < n; ++i) total += std::exp(static_cast<double>(x[i]));
  return std::log(total);
}

}  // namespace

TW_TEST(softmax_and_its_gradient_are_right) {
  each_shape([](int64_t rows, int64_t columns) {
    const Floats x = random_floats(rows * columns, 1), gy = random_floats(rows * columns, 2);
    Floats y(x.size()), gx(x.size()), logs(x.size());
    const tw::SoftmaxKernels& kernels = tw::active_softmax_kernels();
    tw::map_rows(kernels.softmax, x.data(), y.data(), rows, columns);
    tw::map_rows(kernels.log_softmax, x.data(), logs.data(), rows, columns);
    tw::map_rows(kernels.softmax_grad, y.data(), gy.data(), gx.data(), rows, columns);
    for (int64_t r = 0; r < rows; ++r) {
      const float* row = x.data() + r * columns;
      const double total = logsumexp(row, columns);
      // Gradient of softmax: p (gy - sum of p gy).
      double dot = 0.0;
      for (int64_t c = 0; c < columns; ++c) dot += std::exp(row[c] - total) * gy[r * columns + c];
      for (int64_t c = 0; c < columns; ++c) {
        const double p = std::exp(row[c] - total);
        TW_CHECK(close(y[r * columns + c], p));
        TW_CHECK(close(logs[r * columns + c], row[c] - total));
        TW_CHECK(close(gx[r * columns + c], p * (gy[r * columns + c] - dot)));
      }
    }
  });
}

TW_TEST(cross_entropy_and_its_gradient_are_right) {
  each_shape([](int64_t rows, int64_t columns) {
    const Floats x = random_floats(rows * columns, 3), weights = random_floats(rows, 4);
    std::vector<int64_t> targets(static_cast<size_t>(rows));
    for (int64_t r = 0; r < rows; ++r) targets[r] = (r * 5) % columns;
    Floats losses(targets.size()), totals(targets.size()), gx(x.size());
    tw::cross_entropy(x.data(), targets.data(), losses.data(), totals.data(), rows, columns);
    tw::cross_entropy_grad(x.data(), targets.data(), totals.data(), weights.data(), gx.data(), rows, columns);
    for (int64_t r = 0; r < rows; ++r) {
      const double total = logsumexp(x.data() + r * columns, columns);
      TW_CHECK(close(losses[r], total - x[r * columns + targets[r]]));
      for (int64_t c = 0; c < columns; ++c) {
        // Gradient of cross entropy: softmax minus the one-hot target.
        const double p = std::exp(x[r * columns + c] - total) - (c == targets[r] ? 1.0 : 0.0);
        TW_CHECK(close(gx[r * columns + c], p * weights[r]));
      }
    }
  });
}

TW_TEST(layer_norm_and_its_gradients_are_right) {
  each_shape([](int64_t rows, int64_t columns) {
    if (columns == 1) return;
    const Floats x = random_floats(rows * columns, 5), gy = random_floats(rows * columns, 6);
    const Floats weight = random_floats(columns, 7), bias = random_floats(columns, 8);
    Floats y(x.size()), gx(x.size()), mean(static_cast<size_t>(rows)), rstd(static_cast<size_t>(rows));
    Floats gweight(weight.size()), gbias(weight.size());
    tw::layer_norm(x.data(), weight.data(), bias.data(), 1e-5f, y.data(), mean.data(), rstd.data(), rows, columns);
    tw::layer_norm_grad(gy.data(), x.data(), weight.data(), mean.data(), rstd.data(), gx.data(), gweight.data(),
                        gbias.data(), rows, columns);
    std::vector<double> gw(weight.size()), gb(weight.size());
    for (int64_t r = 0; r < rows; ++r) {
      // g0 and g1 are the means of the weighted gradient and of its product with the normalized row.
      double m = 0.0, v = 0.0, g0 = 0.0, g1 = 0.0;
      for (int64_t c = 0; c < columns; ++c) m += x[r * columns + c] / static_cast<double>(columns);
      for (int64_t c = 0; c < columns; ++c) v += std::pow(x[r * columns + c] - m, 2) / static_cast<double>(columns);
      const double scale = 1.0 / std::sqrt(v + 1e-5);
      for (int64_t c = 0; c < columns; ++c) {
        const double normed = (x[r * columns + c] - m) * scale, g = gy[r * columns + c];
        TW_CHECK(close(y[r * columns + c], normed * weight[c] + bias[c], 3e-5));
        g0 += g * weight[c] / static_cast<double>(columns);
        g1 += g * weight[c] * normed / static_cast<double>(columns);
        gw[c] += g * normed;
        gb[c] += g;
      }
      for (int64_t c = 0; c < columns; ++c) {
        const double normed = (x[r * columns + c] - m) * scale;
        TW_CHECK(close(gx[r * columns + c], (gy[r * columns + c] * weight[c] - g0 - normed * g1) * scale, 1e-4));
      }
    }
    for (int64_t c = 0; c < columns; ++c) TW_CHECK(close(gweight[c], gw[c], 1e-4) && close(gbias[c], gb[c]));
  });
}

TW_TEST(batch_norm_gives_each_channel_mean_zero_and_variance_one) {
  for (int64_t plane : {1, 3, 16, 35}) {
    const tw::BatchShape shape = {4, 5, plane};
    const Floats x = random_floats(20 * plane, 9), weight(5, 1.0f), bias(5, 0.0f);
    Floats y(x.size()), gx(x.size()), mean(5), variance(5), gweight(5), gbias(5), sums(5);
    tw::batch_norm(x.data(), weight.data(), bias.data(), 0.0f, y.data(), mean.data(), variance.data(), shape);
    tw::sum_channels(y.data(), sums.data(), shape);
    for (float s : sums) TW_CHECK(std::fabs(s) < 1e-3);
    // The result does not change when a constant is added to a channel, so a constant gradient vanishes.
    const Floats ones(x.size(), 1.0f);
    tw::batch_norm_grad(ones.data(), x.data(), weight.data(), mean.data(), variance.data(), 0.0f, gx.data(),
                        gweight.data(), gbias.data(), shape);
    for (float g : gx) TW_CHECK(std::fabs(g) < 1e-4);
    for (float g : gbias) TW_CHECK(g == static_cast<float>(4 * plane));
  }
}

TW_TEST(activations_and_their_gradients_are_right) {
  for (int64_t n : {0, 1, 15, 16, 17, 1000, 40000}) {
    const Floats x = random_floats(n, 10), g = random_floats(n, 11);
    Floats y(x.size()), gx(x.size());
    const tw::ElementwiseKernels& kernels = tw::active_elementwise();
    tw::map_unary(kernels.gelu, x.data(), y.data(), n);
    tw::map_binary(kernels.gelu_grad, x.data(), g.data(), gx.data(), n);
    for (size_t i = 0; i < x.size(); ++i) {
      // GELU is x Phi(x), so its derivative is Phi(x) + x phi(x).
      const double cdf = 0.5 * std::erfc(-x[i] * std::sqrt(0.5));
      const double density = std::exp(-0.5 * x[i] * x[i]) / std::sqrt(2.0 * 3.141592653589793);
      TW_CHECK(close(y[i], x[i] * cdf, 2e-6) && close(gx[i], g[i] * (cdf + x[i] * density), 2e-6));
    }
    tw::map_unary(kernels.relu, x.data(), y.data(), n);
    tw::map_binary(kernels.relu_grad, y.data(), g.data(), gx.data(), n);
    for (size_t i = 0; i < x.size(); ++i) TW_CHECK(y[i] == std::fmax(x[i], 0.0f) && gx[i] == (x[i] > 0 ? g[i] : 0.0f));
  }
}

TW_TEST(column_sums_and_embedding_gradients_are_right) {
  each_shape([](int64_t rows, int64_t columns) {
    const Floats x = random_floats(rows * columns, 12);
    Floats sums(static_cast<size_t>(columns)), table(static_cast<size_t>(4 * columns), 9.0f);
    std::vector<int64_t> ids(static_cast<size_t>(rows));
    for (int64_t r = 0; r < rows; ++r) ids[r] = r % 3;
    tw::sum_rows(x.data(), sums.data(), rows, columns);
    tw::embedding_grad(x.data(), ids.data(), table.data(), rows, 4, columns);
    for (int64_t c = 0; c < columns; ++c) {
      double total = 0.0, by_id[4] = {};
      for (int64_t r = 0; r < rows; ++r) {
        total += x[r * columns + c];
        by_id[ids[r]] += x[r * columns + c];
      }
      TW_CHECK(close(sums[c], total));
      for (int64_t t = 0; t < 4; ++t) TW_CHECK(close(table[t * columns + c], by_id[t]));
    }
  });
}

TW_TEST(an_adam_step_is_right) {
  for (int64_t n : {1, 17, 33000}) {
    Floats param = random_floats(n, 13), m(param.size(), 0.1f), v(param.size(), 0.2f);
    const Floats grad = random_floats(n, 14), before = param;
    const tw::AdamSettings s = {0.99f, 0.0f, 0.999f, 1e-8f, 0.1f, 0.001f, 0.01f, 2.0f};
    tw::adam_step(param.data(), grad.data(), m.data(), v.data(), s, n);
    for (size_t i = 0; i < param.size(); ++i) {
      // AdamW (Loshchilov and Hutter 2019): 0.99 is the factor of decoupled weight decay.
      const double m1 = 0.1 + (grad[i] - 0.1) * 0.1, v1 = 0.2 * 0.999 + grad[i] * grad[i] * 0.001;
      TW_CHECK(close(param[i], before[i] * 0.99 - 0.01 * m1 / (std::sqrt(v1) / 0.5 + 1e-8)));
      TW_CHECK(close(m[i], m1) && close(v[i], v1));
    }
  }
}
