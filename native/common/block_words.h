// One block of 32 weights of a GGUF file, as the 32-bit words of which the packed layout of kernels/block_dot.h
// consists. Layouts of the file: ggml-common.h and ggml-quants.c of llama.cpp. Always inlined, so that kernel files may
// use it: for a constant packing the compiler makes straight-line code for one format.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/block_dot.h"

#define TW_BLOCK_INLINE static inline __attribute__((always_inline))

namespace tw {

// A block of 32 weights. Each word has the codes of four values, the first in the lowest byte.
struct BlockWords {
  uint32_t low[8];      // 4 to 6 bits: word g has values 4 g ... in its low halves, 16 + 4 g ... in its high halves;
                        // 8 bits: words of the values 0, 16, 4, 20, ... on
  uint32_t plane[2];    // the bits above four, in the order of kernels/block_dot.h
  uint16_t scale;       // float16, of the block or shared by 8 blocks
  uint16_t minimum;     // float16, likewise
  uint8_t multiple[2];  // factors of shared numbers: of scale and minimum, or of the scales of both halves
};

constexpr uint32_t kNibbles = 0x0f0f0f0fu;  // definition: mask of the low half of every byte

template <class T>
TW_BLOCK_INLINE T load_as(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Codes of four bits, the first 16 values in the low halves of 16 bytes: already the packed layout's order.
TW_BLOCK_INLINE void copy_nibbles(const uint8_t* codes, BlockWords& words) { std::memcpy(words.low, codes, 16); }

// Converts one bit per value to a plane: byte i = 0 ... 3, whose bit g belongs to value 4 g + i.
TW_BLOCK_INLINE uint32_t plane_of_bits(uint32_t bits) {
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
TW_BLOCK_INLINE void group_multiples(const uint8_t* packed, int b, uint8_t* multiple) {
  if (b < 4) {
    multiple[0] = packed[b] & 63;
    multiple[1] = packed[b + 4] & 63;
  } else {
    multiple[0] = static_cast<uint8_t>((packed[b + 4] & 15) | packed[b - 4] >> 6 << 4);
    multiple[1] = static_cast<uint8_t>(packed[b + 4] >> 4 | packed[b] >> 6 << 4);
  }
}

// Gathers the codes of 32 bytes, which are in their low (shift 0) or high (shift 4) halves.
TW_BLOCK_INLINE void gather_nibbles(const uint8_t* codes, int shift, BlockWords& words) {
  for (int g = 0; g < 4; ++g) {
    const uint32_t first = load_as<uint32_t>(codes + 4 * g) >> shift & kNibbles;
    const uint32_t second = load_as<uint32_t>(codes + 16 + 4 * g) >> shift & kNibbles;
    words.low[g] = first | second << 4;
  }
}

// Block b of a superblock of Q4_K or Q5_K: scale, minimum, 12 bytes of multiples, (Q5_K: 32 bytes of fifth bits,) 128
// bytes of codes.
TW_BLOCK_INLINE void words_of_k(const uint8_t* super, int b, bool five_bits, BlockWords& words) {
  words.scale = load_as<uint16_t>(super);
  words.minimum = load_as<uint16_t>(super + 2);
  group_multiples(super + 4, b, words.multiple);
  gather_nibbles(super + (five_bits ? 48 : 16) + b / 2 * 32, b % 2 * 4, words);
  if (!five_bits) return;
  for (int g = 0; g < 8; ++g) words.plane[0] |= (load_as<uint32_t>(super + 16 + 4 * g) >> b & 0x01010101u) << g;
}

// Block b of a superblock of Q6_K: 128 bytes of low four bits, 64 bytes of upper two bits, 16 scales, one shared scale.
// Four blocks share 64 and 32 bytes.
TW_BLOCK_INLINE void words_of_q6_k(const uint8_t* super, int b, BlockWords& words) {
  const int quarter = b % 4;
  words.scale = load_as<uint16_t>(super + 208);
  std::memcpy(words.multiple, super + 192 + 2 * b, 2);
  gather_nibbles(super + b / 4 * 64 + quarter % 2 * 32, quarter / 2 * 4, words);
  const uint8_t* upper = super + 128 + b / 4 * 32;
  for (int g = 0; g < 8; ++g) {
    words.plane[g / 4] |= (load_as<uint32_t>(upper + 4 * g) >> 2 * quarter & 0x03030303u) << 2 * (g % 4);
  }
}

// A block of 32 values: scale, (minimum,) (fifth bits,) codes.
TW_BLOCK_INLINE void words_of_32(const BlockPacking& packing, const uint8_t* block, BlockWords& words) {
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

// Reads block `b` (of 32 values) of a row, as the file stores it.
TW_BLOCK_INLINE BlockWords block_words(const BlockPacking& packing, const uint8_t* row, int64_t b) {
  BlockWords words = {};
  if (!packing.grouped()) {
    words_of_32(packing, row + b * packing.file_bytes, words);
  } else if (packing.minimum()) {
    words_of_k(row + b / 8 * packing.file_bytes, static_cast<int>(b % 8), packing.bits == 5, words);
  } else {
    words_of_q6_k(row + b / 8 * packing.file_bytes, static_cast<int>(b % 8), words);
  }
  return words;
}

// Calls f(offset in the unit, pointer to the field, its size) for every stored field of the unit's block `at` in
// column `lane` of the panel.
template <class Words, class F>
TW_BLOCK_INLINE void for_each_field(const BlockPacking& packing, int at, int lane, Words& words, F f) {
  const int blocks = packing.unit_blocks();
  const int codes = packing.header_bytes() + at * packing.code_runs() * kBlockRun + 4 * lane;
  if (packing.grouped()) {
    f(2 * lane, &words.scale, 2);
    if (packing.minimum()) f(2 * (kBlockPanel + lane), &words.minimum, 2);
    const int first = packing.minimum() ? at : 2 * at, second = packing.minimum() ? blocks + at : first + 1;
    f((4 + first) * kBlockPanel + lane, &words.multiple[0], 1);
    f((4 + second) * kBlockPanel + lane, &words.multiple[1], 1);
  } else {
    f(2 * (at * kBlockPanel + lane), &words.scale, 2);
    if (packing.minimum()) f(2 * ((blocks + at) * kBlockPanel + lane), &words.minimum, 2);
  }
  const int planes = packing.plane_runs();
  for (int run = 0; run < planes; ++run) f(codes + run * kBlockRun, &words.plane[run], 4);
  for (int run = planes; run < packing.code_runs(); ++run) f(codes + run * kBlockRun, &words.low[run - planes], 4);
}

}  // namespace tw
