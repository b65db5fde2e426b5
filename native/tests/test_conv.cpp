// Compares convolution and pooling with plain loops. Arrays have exactly the needed size, so that AddressSanitizer
// reports any access beyond them.
#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <memory>

#include "common/convolution.h"
#include "common/thread_pool.h"
#include "common/weight_cache.h"
#include "kernels/pool.h"
#include "tests/tests.h"

namespace {

using Floats = std::unique_ptr<float[]>;

// Pseudo-random floats in [-1, 1) from a linear congruential generator, the same on every platform.
Floats numbers(int64_t count, unsigned seed) {
  Floats out(new float[static_cast<std::size_t>(count)]);
  for (int64_t i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    out[i] = static_cast<float>(seed >> 8) / 8388608.0f - 1.0f;
  }
  return out;
}

tw::ConvShape shape(int64_t n, int64_t c, int64_t h, int64_t w, int64_t o, int64_t k, int64_t stride, int64_t pad,
                    int64_t groups) {
  return {n,
          c,
          h,
          w,
          o,
          k,
          k,
          stride,
          stride,
          pad,
          pad,
          groups,
          (h + 2 * pad - k) / stride + 1,
          (w + 2 * pad - k) / stride + 1};
}

// Calls f(input index, weight index, output index) for every multiplication of the convolution.
template <class F>
void each_product(const tw::ConvShape& s, F&& f) {
  const int64_t gc = s.group_c(), go = s.group_o();
  for (int64_t n = 0; n < s.n; ++n)
    for (int64_t o = 0; o < s.o; ++o)
      for (int64_t y = 0; y < s.oh; ++y)
        for (int64_t x = 0; x < s.ow; ++x)
          for (int64_t c = 0; c < gc; ++c)
            for (int64_t ky = 0; ky < s.kh; ++ky)
              for (int64_t kx = 0; kx < s.kw; ++kx) {
                const int64_t iy = y * s.sh + ky - s.ph, ix = x * s.sw + kx - s.pw;
                if (iy < 0 || iy >= s.h || ix < 0 || ix >= s.w) continue;
                f(((n * s.c + o / go * gc + c) * s.h + iy) * s.w + ix, ((o * gc + c) * s.kh + ky) * s.kw + kx,
                  ((n * s.o + o) * s.oh + y) * s.ow + x);
              }
}

bool near(const float* result, const double* expected, int64_t count) {
  double largest = 1.0, worst = 0.0;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::fmax(largest, std::fabs(expected[i]));
    worst = std::fmax(worst, std::fabs(result[i] - expected[i]));
  }
  return worst <= 1e-5 * largest;
}

void check_all(const tw::ConvShape& s) {
  const int64_t xs = s.n * s.c * s.h * s.w, ws = s.o * s.group_c() * s.kh * s.kw, ys = s.n * s.o * s.oh * s.ow;
  const Floats x = numbers(xs, 1), w = numbers(ws, 2), gy = numbers(ys, 3), y = numbers(ys, 4), gx = numbers(xs, 5),
               gw = numbers(ws, 6);
  std::vector<double> y_ref(static_cast<std::size_t>(ys)), gx_ref(static_cast<std::size_t>(xs)),
      gw_ref(static_cast<std::size_t>(ws));
  each_product(s, [&](int64_t i, int64_t j, int64_t k) {
    y_ref[static_cast<std::size_t>(k)] += double{x[i]} * w[j];
    gx_ref[static_cast<std::size_t>(i)] += double{gy[k]} * w[j];
    gw_ref[static_cast<std::size_t>(j)] += double{gy[k]} * x[i];
  });
  const tw::ConvEpilogue plain{nullptr, nullptr, tw::ConvActivation::none};
  tw::conv_forward(s, x.get(), w.get(), true, plain, tw::ConvConfig{tw::ConvAlgorithm::direct}, y.get());
  TW_CHECK(near(y.get(), y_ref.data(), ys));
  if (tw::winograd_applies(s)) {
    for (tw::ConvAlgorithm algorithm :
         {tw::ConvAlgorithm::winograd, tw::ConvAlgorithm::winograd2, tw::ConvAlgorithm::winograd_late}) {
      tw::conv_forward(s, x.get(), w.get(), false, plain, tw::ConvConfig{algorithm}, y.get());
      TW_CHECK(near(y.get(), y_ref.data(), ys));
    }
  }
  tw::conv_grad_input(s, gy.get(), w.get(), gx.get());
  TW_CHECK(near(gx.get(), gx_ref.data(), xs));
  tw::conv_grad_weight(s, gy.get(), x.get(), gw.get());
  TW_CHECK(near(gw.get(), gw_ref.data(), ws));
}

}  // namespace

TW_TEST(convolutions_equal_their_definition_and_stay_inside_their_arrays) {
  for (int threads : {1, 3}) {
    tw::set_num_threads(threads);
    check_all(shape(2, 3, 9, 7, 5, 3, 1, 1, 1));
    check_all(shape(1, 17, 6, 11, 19, 3, 1, 1, 1));
    check_all(shape(1, 33, 5, 5, 35, 3, 1, 2, 1));
    check_all(shape(2, 16, 8, 8, 32, 3, 2, 1, 1));
    check_all(shape(1, 6, 7, 9, 8, 1, 2, 0, 2));
    check_all(shape(1, 5, 5, 5, 5, 3, 1, 1, 5));
    check_all(shape(1, 6, 13, 12, 12, 5, 3, 4, 6));
    check_all(shape(1, 1, 1, 1, 1, 1, 1, 3, 1));
    check_all(shape(1, 2, 3, 3, 4, 3, 1, 4, 1));
  }
  tw::set_num_threads(1);
  tw::clear_weight_cache();
}

TW_TEST(kept_weights_follow_changes_in_place) {
  const tw::ConvShape s = shape(1, 16, 8, 8, 16, 3, 1, 1, 1);
  const Floats x = numbers(1024, 1), w = numbers(2304, 2), first = numbers(1024, 3), second = numbers(1024, 3);
  const tw::ConvEpilogue plain{nullptr, nullptr, tw::ConvActivation::none};
  tw::conv_forward(s, x.get(), w.get(), true, plain, {}, first.get());
  for (int i = 0; i < 2304; ++i) w[i] *= 2.0f;
  tw::conv_forward(s, x.get(), w.get(), true, plain, {}, second.get());
  bool doubled = true;
  for (int i = 0; i < 1024; ++i) doubled = doubled && std::fabs(second[i] - 2.0f * first[i]) < 1e-4f;
  TW_CHECK(doubled);
  tw::clear_weight_cache();
  TW_CHECK(tw::weight_cache_bytes() == 0);
}

TW_TEST(pooling_stays_inside_its_arrays) {
  for (int64_t size : {2, 7, 16, 32}) {
    const tw::PoolShape s{3, size, size, 2, 2, 2, 2, 0, 0, size / 2, size / 2};
    const int64_t xs = 3 * size * size, ys = 3 * s.oh * s.ow;
    const Floats x = numbers(xs, 1), y = numbers(ys, 2), gx = numbers(xs, 3);
    std::unique_ptr<int32_t[]> argmax(new int32_t[static_cast<std::size_t>(ys)]);
    tw::active_pool().max(s, x.get(), y.get(), argmax.get());
    bool right = true;
    for (int64_t i = 0; i < ys; ++i) right = right && y[i] == x[i / (s.oh * s.ow) * size * size + argmax[i]];
    TW_CHECK(right);
    TW_CHECK(tw::active_pool().max_grad(s, y.get(), argmax.get(), gx.get()));
    tw::active_pool().average(s, x.get(), y.get());
    tw::active_pool().average_grad(s, y.get(), gx.get());
  }
}
