// The graph runtime: memory planning, alias analysis, in-place operators and graphs of floats.
#include <cmath>
#include <random>
#include <vector>

#include "graph/memory_planner.h"
#include "graph/schedule.h"
#include "ops/ops.h"
#include "tests/tests.h"

namespace {

tw::TensorDesc planes(int64_t n, int64_t c, int64_t h, int64_t w) {
  tw::TensorDesc desc;
  desc.n = n, desc.channels = c, desc.height = h, desc.width = w;
  return desc;
}

std::vector<float> ramp(int64_t count) {
  std::vector<float> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = static_cast<float>(i % 97) - 40.0f;
  return values;
}

tw::OpPtr relu() { return tw::affine_op(std::vector<float>(), std::vector<float>(), tw::ConvActivation::relu); }

}  // namespace

TW_TEST(buffers_that_are_alive_together_do_not_overlap) {
  std::mt19937 rng(3);
  for (int round = 0; round < 50; ++round) {
    std::vector<tw::Lifetime> buffers(1 + rng() % 30);
    int64_t sum = 0;
    for (tw::Lifetime& b : buffers) {
      b.first = rng() % 20;
      b.last = b.first + rng() % 6;
      b.bytes = 64 * (1 + rng() % 9);
      sum += b.bytes;
    }
    const int64_t total = tw::allocate_buffers(buffers);
    TW_CHECK(total <= sum);
    for (const tw::Lifetime& a : buffers) {
      TW_CHECK(a.offset >= 0 && a.offset + a.bytes <= total);
      for (const tw::Lifetime& b : buffers) {
        const bool together = a.first <= b.last && b.first <= a.last;
        const bool overlap = a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
        TW_CHECK(&a == &b || !together || !overlap);
      }
    }
  }
}

TW_TEST(elementwise_operators_on_floats_run_in_place) {
  const int64_t n = 2, c = 24, h = 5, w = 3;
  tw::Graph graph;
  const int input = graph.add_input(planes(n, c, h, w));
  int value = graph.channels_last(input);
  for (int i = 0; i < 6; ++i) value = graph.add(relu(), {value});
  graph.add_output(value);
  const auto schedule = graph.schedule();
  TW_CHECK(schedule->buffers.size() == 1);
  const std::vector<float> x = ramp(n * c * h * w);
  std::vector<float> y(x.size());
  graph.run(*schedule, 1, {x.data()}, {y.data()});
  for (std::size_t i = 0; i < x.size(); ++i) TW_CHECK(y[i] == std::fmax(x[i], 0.0f));
}

TW_TEST(slices_and_inputs_of_a_concatenation_share_its_buffer) {
  const int64_t c = 20, h = 3, w = 4;
  tw::Graph graph;
  const int x = graph.channels_last(graph.add_input(planes(1, c, h, w)));
  const int first = graph.add(tw::slice_op(0, 7, 0), {x}), second = graph.add(tw::slice_op(7, 13, 0), {x});
  const int whole = graph.add(tw::concat_op(0), {first, second});  // is x itself
  const int changed = graph.add(relu(), {second});
  const int joined = graph.add(tw::concat_op(0), {changed, whole});  // `changed` is computed there, `whole` copied
  graph.add_output(joined);
  const auto schedule = graph.schedule();
  TW_CHECK(schedule->buffers.size() == 2);
  const std::vector<float> in = ramp(c * h * w);
  std::vector<float> out((13 + c) * h * w);
  graph.run(*schedule, 1, {in.data()}, {out.data()});
  for (int64_t i = 0; i < 13 * h * w; ++i) TW_CHECK(out[i] == std::fmax(in[7 * h * w + i], 0.0f));
  for (int64_t i = 0; i < c * h * w; ++i) TW_CHECK(out[13 * h * w + i] == in[i]);
}

TW_TEST(a_misfit_is_refused_when_the_operator_is_added) {
  tw::Graph graph;
  const int a = graph.channels_last(graph.add_input(planes(1, 4, 3, 3)));
  const int b = graph.channels_last(graph.add_input(planes(1, 5, 3, 3)));
  bool has_thrown = false;
  try {
    graph.add(tw::binary_op(tw::BinaryKind::add, tw::ConvActivation::none), {a, b});
  } catch (const std::invalid_argument&) {
    has_thrown = true;
  }
  TW_CHECK(has_thrown);
}
