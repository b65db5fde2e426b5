#include "common/block_formats.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/half_dot.h"

namespace tw {
namespace {

constexpr uint32_t kNibbles = 0x0f0f0f0fu;

template <class T>
T load_as(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Four bits a value, the first 16 values in the low halves: the packed layout's own order.
void copy_nibbles(const uint8_t* codes, BlockWords& words) { std::memcpy(words.low, codes, 16); }

// 32 bits, one a value, to one byte per i = 0 ... 3 whose bit g belongs to value 4 g + i.
uint32_t plane_of_bits(uint32_t bits) {
  uint32_t plane = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t every_fourth = bits >> i & 0x11111111u;
    every_fourth = (every_fourth | every_fourth >> 3) & 0x03030303u;
    every_fourth = (every_fourth | every_fourth >> 6) & 0x000f000fu;
    every_fourth = (every_fourth | every_fourth >> 12) & 0xffu;
    plane |= every_fourth << 8 * i;
  }
  return plane;
}

// Q4_K and Q5_K: 12 bytes hold eight 6-bit scales and eight 6-bit minimums.
void group_multiples(const uint8_t* packed, int b, uint8_t* multiple) {
  if (b < 4) {
    multiple[0] = packed[b] & 63;
    multiple[1] = packed[b + 4] & 63;
  } else {
    multiple[0] = static_cast<uint8_t>((packed[b + 4] & 15) | packed[b - 4] >> 6 << 4);
    multiple[1] = static_cast<uint8_t>(packed[b + 4] >> 4 | packed[b] >> 6 << 4);
  }
}

// 32 bytes with a code each in their low (shift 0) or high halves.
void gather_nibbles(const uint8_t* codes, int shift, BlockWords& words) {
  for (int g = 0; g < 4; ++g) {
    const uint32_t first = load_as<uint32_t>(codes + 4 * g) >> shift & kNibbles;
    const uint32_t second = load_as<uint32_t>(codes + 16 + 4 * g) >> shift & kNibbles;
    words.low[g] = first | second << 4;
  }
}

// super: scale, minimum, 12 bytes of multiples, (Q5_K: 32 bytes of fifth bits,) 128 bytes of codes.
void words_of_k(const uint8_t* super, int b, bool five_bits, BlockWords& words) {
  words.scale = load_as<uint16_t>(super);
  words.minimum = load_as<uint16_t>(super + 2);
  group_multiples(super + 4, b, words.multiple);
  gather_nibbles(super + (five_bits ? 48 : 16) + b / 2 * 32, b % 2 * 4, words);
  if (!five_bits) return;
  for (int g = 0; g < 8; ++g) words.plane[0] |= (load_as<uint32_t>(super + 16 + 4 * g) >> b & 0x01010101u) << g;
}

// super: 128 bytes of low halves, 64 of upper pairs of bits, 16 scales, one scale. Four blocks share 64 and 32 bytes.
void words_of_q6_k(const uint8_t* super, int b, BlockWords& words) {
  const int quarter = b % 4;
  words.scale = load_as<uint16_t>(super + 208);
  std::memcpy(words.multiple, super + 192 + 2 * b, 2);
  gather_nibbles(super + b / 4 * 64 + quarter % 2 * 32, quarter / 2 * 4, words);
  const uint8_t* upper = super + 128 + b / 4 * 32;
  for (int g = 0; g < 8; ++g) {
    words.plane[g / 4] |= (load_as<uint32_t>(upper + 4 * g) >> 2 * quarter & 0x03030303u) << 2 * (g % 4);
  }
}

// Blocks of 32: scale, (minimum,) (fifth bits,) codes.
void words_of_32(const BlockPacking& packing, const uint8_t* block, BlockWords& words) {
  words.scale = load_as<uint16_t>(block);
  block += 2;
  if (packing.minimum()) {
    words.minimum = load_as<uint16_t>(block);
    block += 2;
  }
  if (packing.bits == 8) {
    for (int g = 0; g < 8; ++g) words.low[g % 4 * 2 + g / 4] = load_as<uint32_t>(block + 4 * g) ^ 0x80808080u;
    return;
  }
  if (packing.bits == 5) {
    words.plane[0] = plane_of_bits(load_as<uint32_t>(block));
    block += 4;
  }
  copy_nibbles(block, words);
}

}  // namespace

const BlockFormat* block_format(int code) {
  for (const BlockFormat& format : kBlockFormats) {
    if (format.code == code) return &format;
  }
  return nullptr;
}

BlockWords block_words(const BlockFormat& format, const uint8_t* row, int64_t b) {
  const BlockPacking& packing = kBlockPacking[format.packing];
  BlockWords words = {};
  if (!packing.grouped()) {
    words_of_32(packing, row + b * format.bytes, words);
  } else if (packing.minimum()) {
    words_of_k(row + b / 8 * format.bytes, static_cast<int>(b % 8), packing.bits == 5, words);
  } else {
    words_of_q6_k(row + b / 8 * format.bytes, static_cast<int>(b % 8), words);
  }
  return words;
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
      block_values(kBlockPacking[format.packing], block_words(format, row, b), block);
      std::copy(block, block + std::min<int64_t>(kBlock, n - b * kBlock), values + b * kBlock);
    }
  }
}

float half_value(uint16_t half) {
  const int exponent = half >> 10 & 31, mantissa = half & 0x3ff;
  if (exponent == 31) return mantissa != 0 ? NAN : half & 0x8000 ? -INFINITY : INFINITY;
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                   : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
  return half & 0x8000 ? -size : size;
}

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
