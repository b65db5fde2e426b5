// Products with four-bit weights against plain loops, on rows with no float to spare: the sanitizers see any read
// outside.
#include <cmath>
#include <cstdint>
#include <vector>

#include "common/int4_layer.h"
#include "common/thread_pool.h"
#include "kernels/llama.h"
#include "tests/random.h"
#include "tests/tests.h"

namespace {

constexpr uint16_t kHalf = 0x3800;  // 0.5

void check_product(int64_t rows, int64_t outputs, int64_t inputs, bool minimum) {
  const int64_t blocks = (inputs + tw::kInt4Block - 1) / tw::kInt4Block;
  std::vector<uint8_t> codes(outputs * inputs);
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 7 % 16);
  const std::vector<uint16_t> scales(outputs * blocks, kHalf);
  const std::vector<float> units(outputs, 2.0f);
  tw::Int4Weights weights(outputs, inputs, codes.data(), scales.data(), minimum ? scales.data() : nullptr,
                          units.data());
  const Floats x = random_floats(rows * inputs, 3, 1.0f);
  Floats y(rows * outputs), again(rows * outputs);
  tw::Int4Scratch scratch;
  weights.apply(weights.place(), x.data(), rows, y.data(), outputs, scratch);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < outputs; ++o) {
      double sum = 0.0, size = 0.0;
      for (int64_t k = 0; k < inputs; ++k) {
        const double w = minimum ? codes[o * inputs + k] + 1.0 : codes[o * inputs + k] - 8.0;
        sum += w * x[r * inputs + k];
        size += std::fabs(w * x[r * inputs + k]);
      }
      TW_CHECK(std::fabs(y[r * outputs + o] - sum) <= 0.05 * size + 1e-6);
    }
  }
  tw::set_num_threads(3);
  weights.apply(weights.place(), x.data(), rows, again.data(), outputs, scratch);
  tw::set_num_threads(1);
  TW_CHECK(y == again);
}

}  // namespace

TW_TEST(int4_products_are_close_and_the_same_on_three_threads) {
  for (int64_t rows : {1, 2, 5, 9, 70}) {
    for (int64_t outputs : {1, 16, 33}) {
      for (int64_t inputs : {1, 31, 32, 64, 100}) {
        check_product(rows, outputs, inputs, false);
        check_product(rows, outputs, inputs, true);
      }
    }
  }
  check_product(1, 1024, 512, false);  // enough for more than one thread
}

TW_TEST(int4_weights_come_back_and_can_move) {
  const int64_t outputs = 17, inputs = 70, blocks = 3;
  std::vector<uint8_t> codes(outputs * inputs), found(codes.size());
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 5 % 16);
  std::vector<uint16_t> scales(outputs * blocks), found_scales(scales.size());
  for (std::size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<uint16_t>(i);
  const std::vector<float> units(outputs, 1.0f);
  std::vector<float> found_units(outputs);
  tw::Int4Weights weights(outputs, inputs, codes.data(), scales.data(), nullptr, units.data());
  auto memory = std::make_shared<tw::Buffer<uint8_t>>(weights.bytes());
  weights.move_to(memory, memory->data());
  weights.unpack(found.data(), found_scales.data(), nullptr, found_units.data());
  TW_CHECK(found == codes && found_scales == scales && found_units == units);
}

TW_TEST(llama_rows_stay_inside) {
  for (int64_t columns : {1, 7, 16, 33}) {
    const Floats x = random_floats(3 * columns, 1, 2.0f), weight = random_floats(columns, 2, 1.0f);
    Floats y(3 * columns), gate = random_floats(columns, 4, 3.0f);
    tw::active_llama().rms_norm(x.data(), weight.data(), 1e-5f, y.data(), 3, columns);
    double squares = 0.0;
    for (int64_t i = 0; i < columns; ++i) squares += static_cast<double>(x[i]) * x[i];
    TW_CHECK(std::fabs(y[0] - x[0] / std::sqrt(squares / columns + 1e-5) * weight[0]) < 1e-4);
    const float first = gate[0];
    tw::active_llama().silu_product(gate.data(), weight.data(), columns);
    TW_CHECK(std::fabs(gate[0] - first / (1.0f + std::exp(-first)) * weight[0]) < 1e-4f);
  }
  Floats head = {1.0f, 2.0f, 3.0f, 4.0f};
  const Floats cosines = {0.0f, 1.0f}, sines = {1.0f, 0.0f};
  tw::active_llama().rotate(head.data(), cosines.data(), sines.data(), 2, true);
  TW_CHECK((head == Floats{-2.0f, 1.0f, 3.0f, 4.0f}));
}
