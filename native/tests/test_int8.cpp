// Compares integer products and graphs with plain loops. Buffers have exactly the needed size, so that the sanitizers
// report any access beyond them.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "common/ladder.h"
#include "common/thread_pool.h"
#include "graph/schedule.h"
#include "kernels/int8.h"
#include "kernels/int8_ops.h"
#include "kernels/kv_attention.h"
#include "ops/ops.h"
#include "tests/tests.h"

namespace {

std::mt19937 rng(1);

std::vector<uint8_t> bytes(int64_t n) {
  std::vector<uint8_t> out(n);
  for (uint8_t& b : out) b = static_cast<uint8_t>(rng());
  return out;
}

// Rounds up to whole groups of four bytes, which one dot-product instruction multiplies.
int64_t up4(int64_t n) { return (n + 3) / 4 * 4; }

tw::IntegerGeometry matrix(int64_t columns, int64_t k) {
  tw::IntegerGeometry g;
  g.columns = columns;
  g.group_channels = k;
  return g;
}

// Compares rows x k times k x columns with a plain loop; every sum starts at the offset 7.
void check_product(int rows, int columns, int k) {
  const int64_t padded = up4(k);
  const std::vector<uint8_t> x = bytes(rows * padded);
  std::vector<int8_t> w(columns * k);
  for (int8_t& v : w) v = static_cast<int8_t>(rng());
  const tw::PackedPanels<int8_t> packed(matrix(columns, k), w.data());
  std::vector<int32_t> offset((columns + 15) / 16 * 16, 7), out(rows * columns);
  tw::Int8Problem p;
  p.in = x.data();
  p.in_grid.column_step = padded;
  p.width = rows;
  p.groups_per_run = static_cast<int>(padded / 4);
  p.weights = packed.data();
  p.columns = p.out_columns = columns;
  p.offset = offset.data();
  p.out = out.data();
  p.out_grid.column_step = columns;
  tw::run_int8(p);
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; ++j) {
      int32_t sum = 7;
      for (int c = 0; c < k; ++c) sum += x[i * padded + c] * w[j * k + c];
      TW_CHECK(out[i * columns + j] == sum);
    }
  }
}

}  // namespace

TW_TEST(int8_products_are_exact) {
  // Some sizes leave partial tiles: rows around 8, columns around 16, and k not divisible by 4.
  for (int rows : {1, 2, 7, 8, 9, 130}) {
    for (int columns : {1, 15, 16, 17, 33, 48}) {
      for (int k : {1, 4, 7, 64}) check_product(rows, columns, k);
    }
  }
}

namespace {

// Bytes of one kind: any value, only the largest, mostly small ones (as after ReLU), or around a zero point of 128.
uint8_t byte_of(int kind) {
  const int b = static_cast<int>(rng() % 256);
  if (kind == 0) return static_cast<uint8_t>(b);
  if (kind == 1) return 255;
  if (kind == 2) return static_cast<uint8_t>(b % 9 == 0 ? b : b % 60);
  return static_cast<uint8_t>(b % 31 == 0 ? b : 100 + b % 57);
}

// Weights of one kind: any value, only the smallest or largest, or so small that pairs of products cannot saturate
// int16.
int8_t weight_of(int kind) {
  const int w = static_cast<int>(rng() % 256) - 128;
  return static_cast<int8_t>(kind == 0   ? w
                             : kind == 1 ? -128
                             : kind == 2 ? 127
                             : kind == 3 ? w / 4
                             : kind == 4 ? -32
                                         : w / 2);
}

// Compares a product over a grid of pixels, read in `runs` runs per pixel as a convolution reads its input rows, with a
// plain loop. `gap` unused bytes separate neighbouring pixels.
void check_grid(int height, int width, int columns, int runs, int groups, int gap, int bytes_kind, int weights_kind) {
  const int64_t run_bytes = groups * 4, column_step = runs > 1 ? 4 : run_bytes + gap;
  const int64_t row_step = (width - 1) * column_step + run_bytes, all = (height + runs - 2) * row_step + row_step;
  std::vector<uint8_t> x(all);
  for (uint8_t& b : x) b = byte_of(bytes_kind);
  const int64_t k = runs * run_bytes;
  std::vector<int8_t> w(columns * k);
  for (int8_t& v : w) v = weight_of(weights_kind);
  const tw::PackedPanels<int8_t> packed(matrix(columns, k), w.data());
  std::vector<int32_t> offset((columns + 15) / 16 * 16, -3), out(height * width * columns);
  tw::Int8Problem p;
  p.in = x.data();
  p.in_grid = {0, row_step, column_step};
  p.height = height;
  p.width = width;
  p.runs = runs;
  p.run_step = row_step;
  p.groups_per_run = groups;
  p.weights = packed.data();
  p.max_pair_sum = tw::int8_max_pair_sum(packed.data(), packed.size());
  p.quads_fit = tw::int8_quads_fit(packed.data(), (columns + 15) / 16, runs, groups);
  p.columns = p.out_columns = columns;
  p.offset = offset.data();
  p.out = out.data();
  p.out_grid = {0, int64_t{width} * columns, columns};
  tw::run_int8(p);
  for (int i = 0; i < height * width * columns; ++i) {
    const uint8_t* from = x.data() + i / columns / width * row_step + i / columns % width * column_step;
    int32_t sum = -3;
    for (int64_t c = 0; c < k; ++c) sum += from[c / run_bytes * row_step + c % run_bytes] * w[i % columns * k + c];
    TW_CHECK(out[i] == sum);
  }
}

}  // namespace

TW_TEST(int8_products_on_emulated_amx_tiles_are_exact) {
  const tw::Amx before = tw::active_amx();
  tw::set_amx(tw::Amx::emulated);
  for (int rows : {16, 17, 31, 33, 300}) {
    for (int columns : {1, 16, 33, 64}) {
      for (int k : {4, 60, 64, 129}) check_product(rows, columns, k);
    }
  }
  check_product(40, 48, 2500);  // several slices of K
  for (int bytes : {0, 1}) {
    for (int weights : {0, 1, 2}) {
      check_grid(2, 20, 33, 3, 16, 0, bytes, weights);  // rows in place, and rows around a corner
      check_grid(3, 16, 16, 2, 16, 0, bytes, weights);
      check_grid(5, 9, 40, 3, 9, 0, bytes, weights);
      check_grid(2, 40, 20, 1, 16, 12, bytes, weights);  // with gaps
    }
  }
  tw::set_amx(before);
}

TW_TEST(int8_products_of_any_bytes_are_exact) {
  for (int bytes : {0, 1, 2, 3}) {
    for (int weights : {0, 1, 2, 3, 4, 5}) {
      check_grid(3, 7, 17, 3, 3, 0, bytes, weights);  // short runs
      check_grid(5, 9, 33, 3, 9, 0, bytes, weights);
      check_grid(1, 2, 16, 1, 40, 0, bytes, weights);
      check_grid(4, 40, 20, 1, 11, 0, bytes, weights);  // more than a block of rows
      check_grid(2, 13, 16, 1, 5, 12, bytes, weights);  // with gaps
      check_grid(1, 6, 1, 7, 7, 0, bytes, weights);
    }
  }
}

TW_TEST(the_largest_safe_pair_sum_depends_on_the_weights) {
  // vpmaddubsw adds two products in int16: the larger the weights, the smaller the inputs that cannot saturate it.
  const auto max_sum = [](std::vector<int8_t> w) {
    return tw::int8_max_pair_sum(w.data(), static_cast<int64_t>(w.size()));
  };
  TW_CHECK(max_sum({-128, -128}) == 255 && max_sum({127, 127, 1, 1}) == 258 && max_sum({100, 29}) == 327);
  TW_CHECK(max_sum({64, 64}) == 510 && max_sum({127, -127}) == 510 && max_sum({0, 0}) == 510 && max_sum({}) == 510);
}

TW_TEST(two_pairs_fit_where_four_weights_of_a_run_do) {
  // Four products in int16 are safe if the positive and the negative weights of a quad each sum to at most 128.
  const auto fits = [](int runs, int groups, std::vector<std::pair<int, int>> weights) {
    std::vector<int8_t> packed(runs * groups * 64);
    for (const auto& [at, weight] : weights) packed[at] = static_cast<int8_t>(weight);
    return tw::int8_quads_fit(packed.data(), 1, runs, groups);
  };
  TW_CHECK(fits(1, 2, {{0, 32}, {1, 32}, {64, 32}, {65, 32}}) && !fits(1, 2, {{0, 32}, {1, 32}, {64, 32}, {65, 33}}));
  TW_CHECK(fits(1, 2, {{0, 32}, {1, 32}, {64, 33}, {65, -127}}) && !fits(1, 2, {{0, -127}, {65, -2}}));
  TW_CHECK(fits(1, 2, {{1, 127}, {2, 127}}) && fits(1, 3, {{64, 127}, {128, 127}}));  // of other lanes, of other quads
  TW_CHECK(fits(2, 1, {{0, 127}, {64, 127}}) && !fits(1, 2, {{0, 127}, {64, 127}}));  // of other runs
  TW_CHECK(fits(0, 0, {}));
}

TW_TEST(int8_images_are_quantized_and_pooled_inside_their_buffers) {
  const int64_t c = 3, h = 5, w = 7, pixel = 4;
  std::vector<float> x(c * h * w);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i) - 50.0f;
  std::vector<uint8_t> image(h * w * pixel), pooled(2 * 3 * pixel);
  const tw::BytePlane plane{h, w, w * pixel, pixel};
  tw::active_int8_ops().quantize_image(x.data(), c, 2.0f, 100, plane, image.data());
  for (int64_t y = 0; y < h; ++y) {
    for (int64_t col = 0; col < w; ++col) {
      for (int64_t ch = 0; ch < c; ++ch) {
        const float real = x[(ch * h + y) * w + col] * 2.0f + 100.0f;
        const float clamped = real < 0.0f ? 0.0f : real > 255.0f ? 255.0f : real;
        TW_CHECK(image[(y * w + col) * pixel + ch] == static_cast<uint8_t>(clamped));
      }
      TW_CHECK(image[(y * w + col) * pixel + 3] == 100);
    }
  }
  // With increasing inputs, the maximum of a window is its last pixel.
  tw::active_int8_ops().max_pool(image.data(), plane, pixel, {2, 2, 2, 2, 0, 0}, pooled.data(),
                                 {2, 3, 3 * pixel, pixel});
  TW_CHECK(pooled[0] == image[(1 * w + 1) * pixel]);
}

namespace {

// A layer with random weights; unpacking its packed weights restores them.
std::shared_ptr<tw::Int8Layer> random_layer(int64_t columns, int64_t kernel, int64_t channels) {
  tw::IntegerGeometry g = matrix(columns, channels);
  g.taps.kernel_h = g.taps.kernel_w = kernel;
  g.top = g.left = g.bottom = g.right = kernel / 2;
  std::vector<int8_t> w(g.columns * g.tap_count() * channels);
  for (int8_t& v : w) v = static_cast<int8_t>(rng());
  const std::vector<int32_t> offset(g.columns, -50);
  const std::vector<float> scale(g.columns, 0.002f);
  auto layer = std::make_shared<tw::Int8Layer>(g, w.data(), offset.data(), scale.data(), nullptr);
  layer->set_uint8_stage({3, 0, 255, {}, tw::Approximation::none, {}, {}});
  layer->set_residual(0.5f, 3);
  std::vector<int8_t> again(w.size());
  layer->unpack(again.data());
  TW_CHECK(again == w);
  return layer;
}

}  // namespace

TW_TEST(a_graph_gives_an_image_the_same_numbers_in_every_batch) {
  const int64_t h = 5, w = 7, images = 6;
  tw::TensorDesc shape;
  shape.sized = false;
  shape.channels = 3;
  tw::Graph graph;
  const int x = graph.add(tw::quantize_op(0.1f, 3, 1), {graph.add_input(shape)});
  const int first = graph.add(tw::conv_op(random_layer(21, 3, 3), false, 1), {x});
  const int second = graph.add(tw::conv_op(random_layer(21, 3, 21), true, 0), {first, first});
  const int pooled = graph.add(tw::pool_op({2, 2, 2, 2, 0, 0}, false, 0), {second});
  const int mean = graph.add(tw::pool_op({2, 2, 1, 1, 1, 1, 1, 1}, true, 0), {pooled});
  const int rows = graph.add(tw::flatten_op(), {mean});
  graph.add_output(graph.add(tw::linear_op(random_layer(5, 1, 21 * 3 * 4), true, false), {rows}));
  graph.add_output(graph.add(tw::dequantize_op(0.2f), {second}));

  std::vector<float> in(images * 3 * h * w);
  for (float& v : in) v = static_cast<float>(rng() % 200) / 10.0f - 10.0f;
  shape.height = h;
  shape.width = w;
  const auto schedule = graph.schedule({shape});
  TW_CHECK(schedule == graph.schedule({shape}));
  // One batch of six images against six batches of one.
  std::vector<float> whole(images * 5), skip(images * 21 * h * w), one(5), one_skip(21 * h * w);
  graph.run(*schedule, images, {in.data()}, {whole.data(), skip.data()});
  for (int64_t i = 0; i < images; ++i) {
    graph.run(*schedule, 1, {in.data() + i * 3 * h * w}, {one.data(), one_skip.data()});
    for (int j = 0; j < 5; ++j) TW_CHECK(one[j] == whole[i * 5 + j]);
    for (int64_t j = 0; j < 21 * h * w; ++j) TW_CHECK(one_skip[j] == skip[i * 21 * h * w + j]);
  }
}

TW_TEST(a_graph_split_at_a_view_gives_what_it_gives_without_the_view) {
  const int64_t channels = 256, side = 7, columns = 256, images = 3;  // large enough for two batch stages
  tw::TensorDesc shape;
  shape.sized = false;
  shape.channels = channels;
  const auto layer = random_layer(columns, 1, channels);
  std::vector<float> in(images * channels * side * side), expected(images * columns), result(images * columns);
  for (float& v : in) v = static_cast<float>(rng() % 200) / 10.0f;
  for (bool with_view : {false, true}) {
    tw::Graph graph;
    const int x = graph.add(tw::quantize_op(0.1f, 3, 0), {graph.add_input(shape)});
    const int scaled = graph.add(
        tw::affine_op(std::vector<float>(channels, 1.5f), std::vector<float>(channels, 0.0f), tw::OutputStage{}, 0),
        {x});
    int mean = graph.add(tw::global_mean_op({0.1f, 0.1f, 3, 0}, with_view, 0), {scaled});
    if (with_view) mean = graph.add(tw::pixel_as_row_op(false, 0), {mean});
    graph.add_output(graph.add(tw::dequantize_op(0.2f), {graph.add(tw::conv_op(layer, false, 0), {mean})}));
    tw::TensorDesc sized = shape;
    sized.height = sized.width = side;
    const auto schedule = graph.schedule({sized});
    graph.run(*schedule, images, {in.data()}, {(with_view ? result : expected).data()});
  }
  TW_CHECK(result == expected);
}

TW_TEST(a_flattened_image_is_stored_in_either_order) {
  const int64_t channels = 5, height = 2, width = 3;
  tw::TensorDesc shape;
  shape.sized = false;
  shape.channels = channels;
  shape.height = height;
  shape.width = width;
  std::vector<float> in(2 * channels * height * width);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i);  // (N, C, H, W)
  for (bool channels_first : {false, true}) {
    for (bool int16 : {false, true}) {
      tw::Graph graph;
      const int input = graph.add_input(shape);
      const int x = graph.add(int16 ? tw::quantize_int16_op(1.0f, 1000, 1) : tw::quantize_op(1.0f, 3, 1), {input});
      const int row = graph.add(tw::flatten_op(channels_first), {x});
      graph.add_output(graph.add(tw::dequantize_op(1.0f), {row}));
      std::vector<float> result(in.size());
      graph.run(*graph.schedule({shape}), 2, {in.data()}, {result.data()});
      for (int64_t n = 0; n < 2; ++n) {
        for (int64_t c = 0; c < channels; ++c) {
          for (int64_t pixel = 0; pixel < height * width; ++pixel) {
            const int64_t first = (n * channels + c) * height * width + pixel;
            const int64_t last = (n * height * width + pixel) * channels + c;
            TW_CHECK(result[channels_first ? first : last] == in[first]);
          }
        }
      }
    }
  }
}

TW_TEST(a_graph_gives_the_same_numbers_with_any_tile_in_every_slot) {
  const int64_t images = 700, width = 90;
  tw::TensorDesc shape;
  shape.sized = false;
  shape.rows = true;
  shape.channels = width;
  tw::Graph graph;
  const int x = graph.add(tw::quantize_op(0.1f, 3, 0), {graph.add_input(shape)});
  const int hidden = graph.add(tw::linear_op(random_layer(301, 1, width), false, false), {x});
  graph.add_output(graph.add(tw::linear_op(random_layer(37, 1, 301), true, true), {hidden}));
  std::vector<float> in(images * width), expected(images * 37), result(images * 37);
  for (float& v : in) v = static_cast<float>(rng() % 200) / 10.0f - 10.0f;
  const auto schedule = graph.schedule({shape});
  const int before = tw::num_threads();
  // The default tiles give the expected rows; then small tiles, for all rows and for some, must give the same.
  graph.run(*schedule, images, {in.data()}, {expected.data()});
  for (int threads : {1, 2, 3}) {
    tw::set_num_threads(threads);
    for (int64_t some : {int64_t{1}, int64_t{5}, images}) {
      const auto products = graph.products(*schedule, some);
      TW_CHECK(!products.empty() && graph.products(*schedule, 0).empty());
      std::vector<tw::Int8Tile> tiles(graph.slots());
      for (const tw::GraphProduct& p : products) {
        TW_CHECK(p.slot < tiles.size() && tiles[p.slot].mr == 0 && p.m >= 1 && p.m <= some);
        tiles[p.slot] = {1, 16, 3, 32, 8, p.threads, 1};
        TW_CHECK(tw::int8_tile_problem(tiles[p.slot], p.k) == nullptr);
      }
      std::fill(result.begin(), result.end(), -1.0f);
      graph.run(*schedule, some, {in.data()}, {result.data()}, tiles);
      TW_CHECK(std::equal(result.begin(), result.begin() + some * 37, expected.begin()));
    }
  }
  tw::set_num_threads(before);
}

TW_TEST(a_fingerprint_shows_any_changed_float) {
  for (int64_t n : {1, 17, 127, 129, 400}) {
    std::vector<float> x(n, 0.25f);
    const uint64_t before = tw::active_int8_ops().fingerprint(x.data(), n);
    for (int64_t i = 0; i < n; ++i) {
      x[i] = 0.25000003f;
      TW_CHECK(tw::active_int8_ops().fingerprint(x.data(), n) != before);
      x[i] = 0.25f;
    }
    TW_CHECK(tw::active_int8_ops().fingerprint(x.data(), n) == before);
  }
}

TW_TEST(a_fingerprint_shows_changed_signs) {
  for (int64_t n : {64, 128, 256, 512, 1024}) {
    std::vector<float> x(n, 0.25f), negative(n, -0.25f);
    TW_CHECK(tw::active_int8_ops().fingerprint(x.data(), n) != tw::active_int8_ops().fingerprint(negative.data(), n));
  }
}

TW_TEST(cached_attention_reads_its_rows_and_no_more) {
  for (int64_t width : {1, 5, 16, 33, 64}) {
    for (int64_t length : {1, 2, 17, 40}) {
      std::vector<float> q(width, 0.1f), row(width), scores(length), out(width), scales(2 * length);
      for (tw::CacheKind kind : {tw::CacheKind::float32, tw::CacheKind::float16, tw::CacheKind::int8}) {
        const int64_t size = kind == tw::CacheKind::float32 ? 4 : kind == tw::CacheKind::float16 ? 2 : 1;
        std::vector<char> keys(length * width * size), values(length * width * size);
        for (int64_t t = 0; t < length; ++t) {
          for (float& v : row) v = static_cast<float>(rng() % 1000) / 1000.0f;
          tw::active_kv_attention().store(kind, row.data(), width, keys.data(), scales.data(), t);
          for (float& v : row) v = 0.5f;
          tw::active_kv_attention().store(kind, row.data(), width, values.data(), scales.data() + length, t);
        }
        tw::active_kv_attention().attend(kind, q.data(), {keys.data(), scales.data()},
                                         {values.data(), scales.data() + length}, length, width, 0.3f, scores.data(),
                                         out.data());
        for (float v : out) TW_CHECK(std::fabs(v - 0.5f) < 1e-3f);  // the mean of equal values is that value
      }
    }
  }
}

TW_TEST(the_ladders_rungs_agree) {
  for (int m : {1, 5, 33}) {
    for (int n : {1, 7, 40}) {
      const int k = 29;
      std::vector<float> a(m * k), b(k * n), first(m * n), other(m * n);
      for (float& v : a) v = static_cast<float>(rng() % 9) - 4.0f;
      for (float& v : b) v = static_cast<float>(rng() % 9) - 4.0f;
      tw::ladder_naive(a.data(), b.data(), first.data(), m, n, k);
      tw::ladder_reordered(a.data(), b.data(), other.data(), m, n, k);
      TW_CHECK(first == other);
      tw::ladder_blocked(a.data(), b.data(), other.data(), m, n, k, 8, 16, 4);
      TW_CHECK(first == other);
      tw::ladder_packed(a.data(), b.data(), other.data(), m, n, k);
      TW_CHECK(first == other);
    }
  }
}
