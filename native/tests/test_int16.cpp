// Compares int16 layers, and graphs of them in fused tile groups, with plain loops. Buffers have exactly the needed
// size, so that the sanitizers report any access beyond them.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "common/int16_layer.h"
#include "common/machine.h"
#include "common/thread_pool.h"
#include "graph/schedule.h"
#include "ops/ops.h"
#include "tests/tests.h"

namespace {

std::mt19937 rng(3);

int16_t small(int most) { return static_cast<int16_t>(static_cast<int>(rng() % (2 * most + 1)) - most); }

tw::IntegerGeometry geometry(int columns, int channels, int groups, int kernel, int stride) {
  tw::IntegerGeometry g;
  g.columns = columns;
  g.groups = groups;
  g.group_channels = channels / groups;
  g.taps = {kernel, kernel, stride, stride, 1, 1};
  g.top = g.left = g.bottom = g.right = kernel / 2;
  return g;
}

std::shared_ptr<tw::Int16Layer> layer(const tw::IntegerGeometry& g, std::vector<int16_t>& weights, bool piecewise) {
  weights.resize(g.columns * g.taps.kernel_h * g.taps.kernel_w * g.group_channels);
  for (int16_t& w : weights) w = small(300);
  const std::vector<int32_t> offset(g.columns, 11);
  const std::vector<float> scale(g.columns, 1.0f / 64);
  auto layer = std::make_shared<tw::Int16Layer>(g, weights.data(), offset.data(), scale.data(), nullptr);
  tw::Int16Stage stage;
  if (piecewise) {
    stage.activation = tw::Int16Activation::piecewise;
    stage.piecewise.far = 20000, stage.piecewise.turn = 26000, stage.piecewise.shift = 1;
    stage.piecewise.round = 16384, stage.piecewise.step = 10923, stage.piecewise.most = 32767;
    for (auto& row : stage.piecewise.c) {
      for (int16_t& c : row) c = small(2000);
    }
  }
  layer->set_int16_stage(stage);
  return layer;
}

// sum / 64, ties to even, clamped to int16.
int32_t clamped(int64_t sum) {
  const double value = static_cast<double>(sum) / 64, low = -32767, high = 32767;
  const double bounded = value < low ? low : value > high ? high : value;
  return static_cast<int32_t>(__builtin_nearbyint(bounded));
}

void check_layer(int size, int columns, int channels, int groups, int kernel, int stride) {
  const tw::IntegerGeometry g = geometry(columns, channels, groups, kernel, stride);
  std::vector<int16_t> weights;
  const auto packed = layer(g, weights, false);
  const int64_t padded = (channels + 1) / 2 * 2, padding = kernel / 2;
  const tw::Int8Image in{1, size, size + 3, padded, padding};
  std::vector<int16_t> x(in.image_step());
  for (int16_t& v : x) v = small(900);
  tw::Int8Image out = packed->conv_shape(in);
  out.pixel = columns;
  std::vector<int16_t> y(out.image_step());
  packed->conv(in, x.data(), {}, nullptr, out, false, y.data());
  for (int64_t oy = 0; oy < out.height; ++oy) {
    for (int64_t ox = 0; ox < out.width; ++ox) {
      for (int c = 0; c < columns; ++c) {
        const int64_t first = c / (columns / groups) * g.group_channels;
        int64_t sum = 11;
        for (int t = 0; t < kernel * kernel; ++t) {
          const int64_t row = oy * stride + t / kernel, column = ox * stride + t % kernel;  // the padding begins at 0
          for (int k = 0; k < g.group_channels; ++k) {
            sum += x[row * in.row_step() + column * padded + first + k] *
                   weights[(c * kernel * kernel + t) * g.group_channels + k];
          }
        }
        TW_CHECK(y[(oy * out.width + ox) * columns + c] == clamped(sum));
      }
    }
  }
  std::vector<int16_t> again(weights.size());
  packed->unpack(again.data());
  TW_CHECK(again == weights);
}

tw::TensorDesc unsized(tw::DType dtype) {
  tw::TensorDesc desc;
  desc.sized = false;
  desc.dtype = dtype;
  desc.layout = tw::Layout::channels_last;
  return desc;
}

// The result of a graph of two inverted bottlenecks on a machine with this second-level cache.
std::vector<int16_t> through_chain(int64_t l2, int threads, int height) {
  tw::pretend_machine(0, l2, 0, 0);
  tw::set_num_threads(threads);
  rng.seed(9);
  tw::Graph graph;
  tw::TensorDesc shape = unsized(tw::DType::int16);
  shape.channels = 20;
  int value = graph.add_input(shape);
  std::vector<int16_t> weights;
  for (int kernel : {3, 5}) {
    value = graph.add(tw::conv_op(layer(geometry(36, 20, 1, 1, 1), weights, true), false, false, kernel / 2), {value});
    value = graph.add(
        tw::conv_op(layer(geometry(36, 36, 36, kernel, kernel == 3 ? 1 : 2), weights, true), false, false, 0), {value});
    value = graph.add(tw::conv_op(layer(geometry(20, 36, 1, 1, 1), weights, false), false, false, 0), {value});
  }
  graph.add_output(value);
  shape.height = height;
  shape.width = 13;
  shape.sized = true;
  const auto schedule = graph.schedule({shape});
  const tw::TensorDesc& result = schedule->descs[graph.outputs()[0]];
  std::vector<int16_t> x(2 * shape.storage() / 2), y(2 * result.storage() / 2);
  for (int16_t& v : x) v = small(900);
  graph.run(*schedule, 2, {x.data()}, {y.data()});
  tw::pretend_machine(0, 0, 0, 0);
  tw::set_num_threads(1);
  return y;
}

// The result of a graph of a large image, a gate, and layers on small padded images, for a batch of different images.
std::vector<int16_t> through_gate(int channels, int images, int threads) {
  tw::set_num_threads(threads);
  rng.seed(5);
  tw::Graph graph;
  tw::TensorDesc shape = unsized(tw::DType::int16);
  shape.channels = channels;
  shape.padding = 1;
  tw::OutputStage stage;
  stage.is_int16 = true;
  std::vector<int16_t> weights;
  int value = graph.add_input(shape);
  value = graph.add(tw::conv_op(layer(geometry(channels, channels, channels, 3, 1), weights, true), false, false, 0),
                    {value});
  const int mean = graph.add(tw::global_mean_op({1.0f, 1.0f, 0, 20000}, false, 0), {value});
  value = graph.add(tw::mul_op(1.0f / 32768, 1.0f, stage, 0), {value, mean});
  value = graph.add(tw::conv_op(layer(geometry(24, channels, 1, 1, 8), weights, false), false, false, 1), {value});
  for (int i = 0; i < 2; ++i)
    value = graph.add(tw::conv_op(layer(geometry(24, 24, 1, 3, 1), weights, true), false, false, i == 0), {value});
  value = graph.add(tw::global_mean_op({1.0f, 1.0f, 0, 20000}, false, 0), {value});
  graph.add_output(graph.add(tw::conv_op(layer(geometry(7, 24, 1, 1, 1), weights, false), false, false, 0), {value}));
  shape.height = 45;
  shape.width = 41;
  shape.sized = true;
  const auto schedule = graph.schedule({shape});
  const int64_t in = shape.storage() / 2, out = schedule->descs[graph.outputs()[0]].storage() / 2;
  std::vector<int16_t> x(images * in), y(images * out);
  for (int16_t& v : x) v = small(900);
  graph.run(*schedule, images, {x.data()}, {y.data()});
  tw::set_num_threads(1);
  return y;
}

}  // namespace

TW_TEST(images_of_a_batch_are_those_alone) {
  for (int channels : {5, 16, 23, 48, 530}) {
    const std::vector<int16_t> batch = through_gate(channels, 9, 1);
    for (int images : {1, 4}) {
      const std::vector<int16_t> some = through_gate(channels, images, 1);
      TW_CHECK(std::equal(some.begin(), some.end(), batch.begin()));
    }
    TW_CHECK(through_gate(channels, 9, 3) == batch);
  }
}

TW_TEST(layers_of_16_bits_are_exact) {
  for (int size : {1, 5, 14}) {
    for (int columns : {3, 16, 24, 40}) check_layer(size, columns, 10, 1, 1, 1);
    check_layer(size, 18, 12, 3, 3, 1);
    check_layer(size, 33, 7, 1, 3, 2);
    for (int channels : {5, 16, 23, 48}) {
      for (int kernel : {1, 2, 3, 5, 7}) {
        for (int stride : {1, 2}) check_layer(size + kernel, channels, channels, channels, kernel, stride);
      }
    }
  }
}

TW_TEST(bands_give_the_numbers_of_whole_images) {
  for (int height : {1, 2, 9, 40}) {
    const std::vector<int16_t> whole = through_chain(int64_t{1} << 40, 1, height);
    for (int64_t l2 : {1 << 17, 1 << 14, 1 << 10}) {
      for (int threads : {1, 3}) TW_CHECK(through_chain(l2, threads, height) == whole);
    }
  }
}
