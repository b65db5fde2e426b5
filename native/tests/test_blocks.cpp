// Compares products with weights in blocks with plain loops. Arrays have exactly the needed size, so that the
// sanitizers report any access beyond them.
#include <cmath>
#include <cstdint>
#include <vector>

#include "common/block_matrix.h"
#include "common/thread_pool.h"
#include "kernels/rope_rmsnorm.h"
#include "tests/random.h"
#include "tests/tests.h"

namespace {

// Random codes; scales and minimums of 0.5.
std::vector<uint8_t> random_blocks(const tw::BlockFormat& format, int64_t outputs, int64_t inputs) {
  std::vector<uint8_t> bytes(outputs * (inputs / format.values) * format.bytes);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 7919 >> 3);
  if (format.packing < 0) {  // finite numbers in float16 as well as in bfloat16
    for (std::size_t i = 1; i < bytes.size(); i += 2) bytes[i] = 0x3c;
    return bytes;
  }
  const uint16_t half = 0x3800;
  for (std::size_t block = 0; block < bytes.size(); block += format.bytes) {
    const int scale = format.code == 14 ? 208 : 0;
    std::memcpy(&bytes[block + scale], &half, 2);
    if (scale == 0 && tw::kBlockPacking[format.packing].minimum()) std::memcpy(&bytes[block + 2], &half, 2);
  }
  return bytes;
}

void check_product(const tw::BlockFormat& format, int64_t rows, int64_t outputs, int64_t inputs) {
  const std::vector<uint8_t> bytes = random_blocks(format, outputs, inputs);
  const tw::BlockMatrix weights(format.code, bytes.data(), outputs, inputs);
  const Floats x = random_floats(rows * inputs, 3, 1.0f);
  Floats y(rows * outputs), again(rows * outputs), weight(inputs);
  tw::BlockScratch scratch;
  TW_CHECK(weights.apply(x.data(), rows, y.data(), outputs, scratch));
  for (int64_t o = 0; o < outputs; ++o) {
    weights.row(o, weight.data());
    for (int64_t r = 0; r < rows; ++r) {
      double sum = 0.0, size = 0.0;
      for (int64_t k = 0; k < inputs; ++k) {
        sum += static_cast<double>(weight[k]) * x[r * inputs + k];
        size += std::fabs(weight[k] * x[r * inputs + k]);
      }
      TW_CHECK(std::fabs(y[r * outputs + o] - sum) <= 0.05 * size + 1e-6);
    }
  }
  tw::set_num_threads(3);
  TW_CHECK(weights.apply(x.data(), rows, again.data(), outputs, scratch));
  tw::set_num_threads(1);
  TW_CHECK(y == again);
}

}  // namespace

TW_TEST(block_products_are_close_and_the_same_on_three_threads) {
  for (const tw::BlockFormat& format : tw::kBlockFormats) {
    if (format.code == tw::kF32) continue;
    for (int64_t rows : {1, 3, 9, 70}) {
      for (int64_t outputs : {1, 16, 33}) check_product(format, rows, outputs, format.values == 256 ? 512 : 96);
    }
    check_product(format, 1, 1024, 512);  // enough for more than one thread
  }
}

TW_TEST(four_bit_codes_come_back) {
  const int64_t outputs = 17, inputs = 70, blocks = 3;
  std::vector<uint8_t> codes(outputs * inputs), unpacked(codes.size());
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 5 % 16);
  std::vector<uint16_t> scales(outputs * blocks), unpacked_scales(scales.size());
  for (std::size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<uint16_t>(i);
  const std::vector<float> units(outputs, 1.0f);
  std::vector<float> unpacked_units(outputs);
  const tw::BlockMatrix weights(outputs, inputs, codes.data(), scales.data(), nullptr, units.data());
  weights.unpack(unpacked.data(), unpacked_scales.data(), nullptr, unpacked_units.data());
  TW_CHECK(unpacked == codes && unpacked_scales == scales && unpacked_units == units);
}

TW_TEST(halves_round_like_the_hardware) {
  for (int bits = 0; bits < 0x7c00; ++bits) TW_CHECK(tw::half_bits(tw::half_value(bits)) == bits);
  TW_CHECK(tw::half_bits(65519.0f) == 0x7bff && tw::half_bits(65520.0f) == 0x7c00 && tw::half_bits(1e-9f) == 0);
}

TW_TEST(llama_rows_stay_inside) {
  for (int64_t columns : {1, 7, 16, 33}) {
    const Floats x = random_floats(3 * columns, 1, 2.0f), weight = random_floats(columns, 2, 1.0f);
    Floats y(3 * columns), gate = random_floats(columns, 4, 3.0f);
    tw::active_rope_rmsnorm().rms_norm(x.data(), weight.data(), 1e-5f, y.data(), 3, columns);
    double squares = 0.0;
    for (int64_t i = 0; i < columns; ++i) squares += static_cast<double>(x[i]) * x[i];
    TW_CHECK(std::fabs(y[0] - x[0] / std::sqrt(squares / columns + 1e-5) * weight[0]) < 1e-4);
    const float first = gate[0];
    tw::active_rope_rmsnorm().silu_product(gate.data(), weight.data(), columns);
    TW_CHECK(std::fabs(gate[0] - first / (1.0f + std::exp(-first)) * weight[0]) < 1e-4f);
  }
  Floats head = {1.0f, 2.0f, 3.0f, 4.0f};
  const Floats cosines = {0.0f, 1.0f}, sines = {1.0f, 0.0f};
  tw::active_rope_rmsnorm().rotate(head.data(), cosines.data(), sines.data(), 2, true);
  TW_CHECK((head == Floats{-2.0f, 1.0f, 3.0f, 4.0f}));
}
