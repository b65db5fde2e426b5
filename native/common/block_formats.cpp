#include "common/block_formats.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/half_dot.h"

namespace tw {
const BlockFormat* block_format(int code) {
  for (const BlockFormat& format : kBlockFormats) {
    if (format.code == code) return &format;
  }
  return nullptr;
}

void block_codes(const BlockPacking& packing, const BlockWords& words, uint8_t* codes) {
  for (int v = 0; v < kBlock; ++v) {
    const int group = v / 4, shift = v % 4 * 8;
    if (packing.bits == 8) {
      codes[v] = static_cast<uint8_t>(words.low[group % 4 * 2 + group / 4] >> shift);
      continue;
    }
    uint32_t code = words.low[group % 4] >> (shift + group / 4 * 4) & 15;
    if (packing.bits == 5) code |= (words.plane[0] >> shift >> group & 1) << 4;
    if (packing.bits == 6) code |= (words.plane[group / 4] >> shift >> 2 * (group % 4) & 3) << 4;
    codes[v] = static_cast<uint8_t>(packing.lookup ? kNonLinear[code] + 128 : static_cast<int>(code));
  }
}

// Dequantizes a block: value = scale * code + minimum, as its format defines scale and minimum.
void block_values(const BlockPacking& packing, const BlockWords& words, float* values) {
  uint8_t codes[kBlock];
  block_codes(packing, words, codes);
  float scale[2] = {half_value(words.scale), half_value(words.scale)}, minimum = 0.0f;
  if (packing.minimum()) minimum = half_value(words.minimum);
  if (packing.scales == BlockScales::super_minimum) {
    scale[0] = scale[1] = scale[0] * words.multiple[0];
    minimum = -(minimum * words.multiple[1]);
  } else if (packing.scales == BlockScales::super_halves) {
    for (int i = 0; i < 2; ++i) scale[i] *= static_cast<int8_t>(words.multiple[i]);
  }
  for (int v = 0; v < kBlock; ++v) values[v] = scale[v / 16] * static_cast<float>(codes[v] - packing.offset) + minimum;
}

void row_values(const BlockFormat& format, const uint8_t* row, int64_t n, float* values) {
  if (format.code == kF32) {
    std::memcpy(values, row, n * sizeof(float));
  } else if (format.packing < 0) {
    const auto kind = format.code == kF16 ? HalfKind::float16 : HalfKind::bfloat16;
    active_half_dot().widen(kind, reinterpret_cast<const uint16_t*>(row), n, values);
  } else {
    for (int64_t b = 0; b * kBlock < n; ++b) {
      float block[kBlock];
      block_values(kBlockPacking[format.packing], block_words(kBlockPacking[format.packing], row, b), block);
      std::copy(block, block + std::min<int64_t>(kBlock, n - b * kBlock), values + b * kBlock);
    }
  }
}

// Converts float16 to float32 in portable code (kernels/half.h has the fast one).
float half_value(uint16_t half) {
  const int exponent = half >> 10 & 31, mantissa = half & 0x3ff;
  if (exponent == 31) return mantissa != 0 ? NAN : half & 0x8000 ? -INFINITY : INFINITY;
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                   : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
  return half & 0x8000 ? -size : size;
}

// Rounds a float32 to float16, ties to even.
uint16_t half_bits(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float size = std::fabs(value);
  if (size < 6.103515625e-5f) return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(size, 24)));  // < 2^-14
  int exponent;
  const float mantissa = std::frexp(size, &exponent);                           // in [0.5, 1)
  const int bits = static_cast<int>(std::nearbyint(std::ldexp(mantissa, 11)));  // a carry moves to the exponent below
  if (exponent > 16 || !(size < 65520.0f)) return sign | 0x7c00;
  return sign | static_cast<uint16_t>((exponent + 13) * 1024 + bits);
}

}  // namespace tw
