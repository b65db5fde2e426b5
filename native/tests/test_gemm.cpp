// Compares the products with a plain loop in double precision: every path and layout, odd sizes, tiles, threads. Arrays
// have exactly the needed size, so that the sanitizers report any access beyond them.
#include <cmath>
#include <vector>

#include "common/matmul.h"
#include "common/thread_pool.h"
#include "tests/tests.h"

namespace {

struct Case {
  int64_t m, n, k;
  bool transposed_a, transposed_b;
};

std::vector<float> numbers(int64_t count, unsigned seed) {
  std::vector<float> x(static_cast<std::size_t>(count));
  for (float& v : x) {
    seed = seed * 1664525u + 1013904223u;
    v = static_cast<float>(seed >> 8) / 8388608.0f - 1.0f;
  }
  return x;
}

bool close_to_product(const Case& s, const std::vector<float>& a, const std::vector<float>& b, const tw::Gemm& g) {
  for (int64_t i = 0; i < s.m; ++i) {
    for (int64_t j = 0; j < s.n; ++j) {
      double exact = 0.0, size = 0.0;
      for (int64_t p = 0; p < s.k; ++p) {
        const double term = static_cast<double>(a[s.transposed_a ? p * s.m + i : i * s.k + p]) *
                            static_cast<double>(b[s.transposed_b ? j * s.k + p : p * s.n + j]);
        exact += term;
        size += std::fabs(term);
      }
      if (g.epilogue.bias) exact += static_cast<double>(g.epilogue.bias[j]);
      if (g.epilogue.activation == tw::Activation::relu) exact = std::fmax(exact, 0.0);
      if (!(std::fabs(static_cast<double>(g.c[i * s.n + j]) - exact) <= 2e-6 * size + 1e-6)) return false;
    }
  }
  return true;
}

bool product_is_right(const Case& s, const tw::GemmTile* tile, bool epilogue) {
  const std::vector<float> a = numbers(s.m * s.k, 1), b = numbers(s.k * s.n, 2), bias = numbers(s.n, 3);
  std::vector<float> c(static_cast<std::size_t>(s.m * s.n), NAN);
  tw::Gemm g;
  g.m = s.m;
  g.n = s.n;
  g.k = s.k;
  g.a = a.data();
  g.a_row = s.transposed_a ? 1 : s.k;
  g.a_col = s.transposed_a ? s.m : 1;
  g.b = b.data();
  g.b_row = s.transposed_b ? 1 : s.n;
  g.b_col = s.transposed_b ? s.k : 1;
  g.c = c.data();
  g.c_row = s.n;
  if (epilogue) {
    g.epilogue.bias = bias.data();
    g.epilogue.activation = tw::Activation::relu;
  }
  tw::ProductConfig config;
  if (tile) tw::config_of_tile(g, *tile, &config);
  return tw::matmul(g, tw::Batch(), tile ? &config : nullptr) && close_to_product(s, a, b, g);
}

// One row times a transposed matrix, whose rows are read one way or the other.
std::vector<float> row_product(int64_t n, int64_t k, bool stream) {
  const std::vector<float> a = numbers(k, 4), b = numbers(k * n, 5), bias = numbers(n, 6);
  std::vector<float> c(static_cast<std::size_t>(n), NAN);
  tw::Gemm g;
  g.m = 1, g.n = n, g.k = k;
  g.a = a.data(), g.a_row = k, g.a_col = 1;
  g.b = b.data(), g.b_row = 1, g.b_col = k;
  g.c = c.data(), g.c_row = n;
  g.epilogue.bias = bias.data();
  g.stream_b = stream;
  TW_CHECK(tw::matmul(g, tw::Batch(), nullptr));
  return c;
}

}  // namespace

TW_TEST(matmul_is_right_for_every_path_and_layout) {
  const int64_t sizes[][3] = {{1, 1, 1},    {1, 5, 40},   {1, 200, 33}, {40, 1, 70},  {2, 9, 30},   {5, 3, 64},
                              {7, 129, 33}, {13, 17, 9},  {15, 33, 80}, {20, 66, 65}, {31, 2, 100}, {66, 49, 70},
                              {3, 3, 2},    {60, 7, 5},   {9, 40, 800}, {70, 4, 21},  {67, 3, 9},   {35, 2, 15},
                              {2, 250, 41}, {3, 90, 12},  {5, 4, 301},  {8, 16, 130}, {7, 9, 64},   {37, 70, 8},
                              {99, 5, 3},   {40, 200, 1}, {1, 37, 6},   {53, 1, 8},   {300, 6, 40}, {130, 8, 20},
                              {1, 5, 100},  {6, 1, 90},   {4, 7, 70}};
  for (int threads : {1, 3}) {
    tw::set_num_threads(threads);
    for (const auto& s : sizes) {
      for (int layout = 0; layout < 4; ++layout) {
        const Case c = {s[0], s[1], s[2], (layout & 1) != 0, (layout & 2) != 0};
        TW_CHECK(product_is_right(c, nullptr, false));
        TW_CHECK(product_is_right(c, nullptr, true));
      }
    }
  }
}

TW_TEST(matmul_is_right_for_every_register_tile_packed_or_not) {
  const tw::GemmKernels& kernels = tw::active_gemm();
  for (int vectors = 1; vectors <= 4; ++vectors) {
    for (int mr = 1; mr <= kernels.max_rows[vectors]; ++mr) {
      for (int packing = 0; packing < 4; ++packing) {
        tw::GemmTile t;
        t.mr = mr;
        t.nr = vectors * kernels.lanes;
        t.mc = 2 * mr;
        t.nc = t.nr;
        t.kc = 7;
        t.pack_a = (packing & 1) != 0;
        t.pack_b = (packing & 2) != 0;
        t.threads_m = 2;
        TW_CHECK(product_is_right({2 * mr + 3, t.nr + 5, 17, false, false}, &t, true));
        if (t.pack_b) TW_CHECK(product_is_right({2 * mr + 3, t.nr + 5, 17, true, true}, &t, false));
      }
    }
  }
}

// Large enough that several rows of tasks share one packed B. Also with more threads than tasks, rows or cores.
TW_TEST(matmul_is_right_where_threads_share_a_packed_b) {
  const int64_t sizes[][3] = {{257, 193, 70}, {64, 515, 530}};
  for (int threads : {3, 16, 64}) {
    tw::set_num_threads(threads);
    for (const auto& s : sizes) {
      for (int layout : {0, 3}) {
        tw::GemmTile t;
        t.mr = 2;
        t.nr = tw::active_gemm().lanes;
        t.mc = 32;
        t.nc = 4 * t.nr;
        t.kc = 100;
        t.threads_m = 8;
        t.threads_n = threads;
        const Case c = {s[0], s[1], s[2], (layout & 1) != 0, (layout & 2) != 0};
        TW_CHECK(product_is_right(c, &t, true));
      }
    }
  }
  tw::set_num_threads(1);
}

// Streamed weights may take another path, which adds the same products in another order.
bool nearly_equal(const std::vector<float>& a, const std::vector<float>& b, int64_t k) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!(std::fabs(a[i] - b[i]) <= 1e-6f * static_cast<float>(k + 1))) return false;
  }
  return true;
}

TW_TEST(weights_that_are_streamed_give_the_same_product) {
  for (int threads : {1, 3}) {
    tw::set_num_threads(threads);
    for (int64_t n : {1, 2, 3, 15, 16, 17, 31, 33, 65, 300}) {
      for (int64_t k : {1, 7, 9, 16, 31, 48, 99, 100, 2048, 2049, 8000}) {
        TW_CHECK(nearly_equal(row_product(n, k, true), row_product(n, k, false), k));
      }
    }
  }
  tw::set_num_threads(1);
}

TW_TEST(an_empty_sum_is_the_epilogue_of_zero) {
  TW_CHECK(product_is_right({3, 4, 0, false, false}, nullptr, true));
  TW_CHECK(product_is_right({0, 4, 5, false, false}, nullptr, false));
  TW_CHECK(product_is_right({3, 0, 5, false, true}, nullptr, false));
}
