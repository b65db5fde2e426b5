// The kernels of block_dot.h. A block of 32 values and 16 columns has 8 groups of four values. With VNNI a group is one
// dot-product instruction, whose unsigned operand is the codes and whose signed operand is a row's int8. With AVX2 it
// is one vpmaddubsw, whose pairs of products are added in 16 bits as long as nothing can saturate: 8 groups of 4-bit
// codes (8 * 2 * 15 * 127 = 30480), two groups of 5 or 6 bits. Codes of 8 bits are multiplied as |code| * (sign(code)
// x), whose pairs just fit (2 * 128 * 127 = 32512).
//
// This file is compiled with -ffp-contract=off: see block_dot.h.
#include "kernels/block_dot.h"

#include "common/block_words.h"
#include "common/scratch.h"
#include "common/simd.h"
#include "kernels/half.h"
#include "kernels/math.h"
#include "kernels/prefetch.h"
#include "kernels/rounding.h"

namespace tw {
namespace TW_ISA {
namespace {

constexpr int kVectors = kBlockPanel / kLanes;           // vectors of a panel
constexpr int kSteps = kBlock / 8;                       // pairs of groups of a block: values 4 g ... and 16 + 4 g ...
constexpr float kLargestFloat = 3.4028234663852886e38f;  // definition: FLT_MAX

// --- rows of floats to int8 ---

// Returns 127 / top; 0 if that overflows, so that values this small become zeros.
TW_INLINE float block_inverse(float top) {
  const float inverse = 127.0f / top;
  return top > 0.0f && inverse <= kLargestFloat ? inverse : 0.0f;
}

// Rotates the lanes down by `By`.
template <int By>
TW_INLINE vi moved_down(vi v) {
  vi index = {};
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) index[i] = (i + By) % kLanes;
  return __builtin_shuffle(v, index);
}

template <int By = kLanes / 2>
TW_INLINE int32_t sum_of(vi v) {
  v += moved_down<By>(v);
  if constexpr (By > 1) return sum_of<By / 2>(v);
  return v[0];
}

template <int By = kLanes / 2>
TW_INLINE float max_of(vf v) {
  v = vmax(v, (vf)moved_down<By>((vi)v));
  if constexpr (By > 1) return max_of<By / 2>(v);
  return v[0];
}

// Quantizes one block, returns its scale, and stores the sums of its two halves in `sums`.
TW_INLINE float quantize_block(const float* x, int n, int8_t* values, int32_t (&sums)[2]) {
  constexpr int kParts = kBlock / kLanes;
  vf part[kParts], most = {};  // a NaN becomes 0
  for (int v = 0; v < kParts; ++v) {
    const int remaining = n - v * kLanes, lanes = remaining < 0 ? 0 : remaining < kLanes ? remaining : kLanes;
    part[v] = lanes == kLanes ? load(x + v * kLanes) : load_first(x + (lanes > 0 ? v * kLanes : 0), lanes);
    part[v] = select(part[v] == part[v], part[v], vf{});
    most = vmax(select(part[v] < splat(0.0f), -part[v], part[v]), most);
  }
  const float top = max_of(most), inverse = block_inverse(top);
  vi half[2] = {};
  for (int v = 0; v < kParts; ++v) {
    const vf scaled = part[v] * splat(inverse);  // infinity times zero is NaN, which has no integer
    const vi q = __builtin_convertvector(round_even(select(scaled == scaled, scaled, vf{})), vi);
    store_low_bytes(values + v * kLanes, q);
    half[v * 2 / kParts] += q;
  }
  sums[0] = sum_of(half[0]);
  sums[1] = sum_of(half[1]);
  return top / 127.0f;
}

// Quantizes a row block by block, with the sums that a format needs.
void quantize(const float* x, int64_t n, int64_t blocks, int sums, int32_t factor, int8_t* values, float* scale,
              int32_t* offset, float* total) {
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t remaining = n - b * kBlock;
    const int count = remaining >= kBlock ? kBlock : remaining > 0 ? static_cast<int>(remaining) : 0;
    int32_t half[2];
    scale[b] = quantize_block(count > 0 ? x + b * kBlock : x, count, values + b * kBlock, half);
    total[b] = scale[b] * static_cast<float>(half[0] + half[1]);
    if (sums == 2) {
      offset[2 * b] = factor * half[0];
      offset[2 * b + 1] = factor * half[1];
    } else {
      offset[b] = factor * (half[0] + half[1]);
    }
  }
}

// --- weights of the file to a panel ---

// Packs one panel of format kF. Returns false if a scale is NaN or infinite.
template <int kF>
bool pack(const uint8_t* data, int64_t row_bytes, int columns, int64_t blocks, uint8_t* panel) {
  constexpr BlockPacking F = kBlockPacking[kF];
  bool finite = true;
  // Unit by unit across the columns, so that the unit stays in the first-level cache while it is filled.
  for (int64_t first = 0; first < blocks; first += F.unit_blocks(), panel += F.unit_bytes()) {
    const int count = blocks - first < F.unit_blocks() ? static_cast<int>(blocks - first) : F.unit_blocks();
    for (int lane = 0; lane < columns; ++lane) {
      for (int at = 0; at < count; ++at) {
        const BlockWords words = block_words(F, data + lane * row_bytes, first + at);
        finite = finite && (words.scale & 0x7c00) != 0x7c00 && (words.minimum & 0x7c00) != 0x7c00;
        for_each_field(
            F, at, lane, words, [&](int offset, const void* field, int size) __attribute__((always_inline)) {
              std::memcpy(panel + offset, field, size);
            });
      }
    }
  }
  return finite;
}

// --- codes of one vector of columns, and their products with four values of a row ---

#if defined(__AVX512F__)
typedef __m512i Codes;  // unsigned bytes, four a column
typedef __m512i Sums;

TW_INLINE Codes load_run(const uint8_t* p) { return _mm512_loadu_si512(p); }

// Adds the bits above four to the codes of a group; second: of the group 16 values further.
template <int kStep, int kBits>
TW_INLINE Codes with_high_bits(Codes low, const uint8_t* planes, bool second) {
  // Bit g of a plane's byte belongs to group g (5 bits); bits 2 g and 2 g + 1 to group g of each plane (6 bits).
  const int from = kBits == 5 ? kStep + (second ? 4 : 0) : 2 * kStep;
  const Codes plane = load_run(planes + (kBits == 6 && second ? kBlockRun : 0));
  const Codes shifted = from < 4 ? _mm512_slli_epi16(plane, 4 - from) : _mm512_srli_epi16(plane, from - 4);
  const Codes mask = _mm512_set1_epi8(kBits == 5 ? 0x10 : 0x30);
  return _mm512_ternarylogic_epi32(low, shifted, mask, 0xf8);  // low | (shifted & mask)
}

// Loads the codes of values 4 kStep ... (low) and 16 + 4 kStep ... (high) as bytes. kLookup: IQ4_NL values plus 128.
template <int kStep, int kBits, bool kLookup>
TW_INLINE void load_codes(const uint8_t* p, Codes& low, Codes& high) {
  if constexpr (kBits == 8) {
    low = load_run(p + 2 * kStep * kBlockRun);
    high = load_run(p + (2 * kStep + 1) * kBlockRun);
  } else {
    const __m512i mask = _mm512_set1_epi8(15), both = load_run(p + (kBits - 4 + kStep) * kBlockRun);
    low = _mm512_and_si512(both, mask);
    high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
    if constexpr (kBits > 4) {
      low = with_high_bits<kStep, kBits>(low, p, false);
      high = with_high_bits<kStep, kBits>(high, p, true);
    }
    if constexpr (kLookup) {
      const __m128i signed_table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kNonLinear));
      const __m512i table = _mm512_maskz_broadcast_i32x4(0xffff, _mm_xor_si128(signed_table, _mm_set1_epi8(-128)));
      low = _mm512_shuffle_epi8(table, low);
      high = _mm512_shuffle_epi8(table, high);
    }
  }
}

TW_INLINE Sums first_sums(int32_t offset) { return _mm512_set1_epi32(offset); }

// Adds the products of two groups of codes with values x[0 ... 3] and x[16 ... 19] of a row.
template <int kF>
TW_INLINE void dot_pair(Sums& sums, Sums& other, Codes low, Codes high, const int8_t* x) {
  // Inline assembly because gcc 12 copies and spills accumulators around the intrinsic.
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(low), "m"(*reinterpret_cast<const int32_t*>(x)));
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(other) : "v"(high), "m"(*reinterpret_cast<const int32_t*>(x + 16)));
}

// Multiplies two panels at once: each group of four values of the row is loaded once for both.
template <int kSums>
TW_INLINE void dot_two(Sums (&sums)[2][kSums], const Codes (&low)[2], const Codes (&high)[2], const int8_t* x) {
  const __m512i first = _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(x)),
                second = _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(x + 16));
  asm("vpdpbusd %2, %1, %0" : "+v"(sums[0][0]) : "v"(low[0]), "v"(first));
  asm("vpdpbusd %2, %1, %0" : "+v"(sums[1][0]) : "v"(low[1]), "v"(first));
  asm("vpdpbusd %2, %1, %0" : "+v"(sums[0][kSums - 1]) : "v"(high[0]), "v"(second));
  asm("vpdpbusd %2, %1, %0" : "+v"(sums[1][kSums - 1]) : "v"(high[1]), "v"(second));
}

template <int kF>
TW_INLINE vi whole(const Sums& sums, int32_t /*offset*/) {
  return (vi)sums;
}
#elif defined(__AVX2__)
typedef __m256i Codes;
typedef __m256i Sums;  // 4-bit codes: 16-bit numbers, two per column; others: 32-bit numbers

TW_INLINE Codes load_run(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

template <int kStep, int kBits>
TW_INLINE Codes with_high_bits(Codes low, const uint8_t* planes, bool second) {
  const int from = kBits == 5 ? kStep + (second ? 4 : 0) : 2 * kStep;  // as with AVX-512
  const Codes plane = load_run(planes + (kBits == 6 && second ? kBlockRun : 0));
  const Codes shifted = from < 4 ? _mm256_slli_epi16(plane, 4 - from) : _mm256_srli_epi16(plane, from - 4);
  return _mm256_or_si256(low, _mm256_and_si256(shifted, _mm256_set1_epi8(kBits == 5 ? 0x10 : 0x30)));
}

// As with AVX-512, but codes of 8 bits become signed.
template <int kStep, int kBits, bool kLookup>
TW_INLINE void load_codes(const uint8_t* p, Codes& low, Codes& high) {
  if constexpr (kBits == 8) {
    const __m256i sign = _mm256_set1_epi8(-128);
    low = _mm256_xor_si256(load_run(p + 2 * kStep * kBlockRun), sign);
    high = _mm256_xor_si256(load_run(p + (2 * kStep + 1) * kBlockRun), sign);
  } else {
    const __m256i mask = _mm256_set1_epi8(15), both = load_run(p + (kBits - 4 + kStep) * kBlockRun);
    low = _mm256_and_si256(both, mask);
    high = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
    if constexpr (kBits > 4) {
      low = with_high_bits<kStep, kBits>(low, p, false);
      high = with_high_bits<kStep, kBits>(high, p, true);
    }
    if constexpr (kLookup) {
      const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kNonLinear)));
      low = _mm256_shuffle_epi8(table, low);
      high = _mm256_shuffle_epi8(table, high);
    }
  }
}

TW_INLINE Sums first_sums(int32_t /*offset*/) { return _mm256_setzero_si256(); }

// Products of signed bytes, added in pairs. vpmaddubsw takes one unsigned factor: the signs of the codes move to x.
TW_INLINE __m256i signed_products(Codes codes, __m256i x) {
  return _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes));
}

// Adds the products of two groups of codes with the int8 inputs x[0 ... 3] and x[16 ... 19] of a row (AVX2).
template <int kF>
TW_INLINE void dot_pair(Sums& sums, Sums& other, Codes low, Codes high, const int8_t* x) {
  constexpr BlockPacking F = kBlockPacking[kF];
  const __m256i a = (__m256i)_mm256_broadcast_ss(reinterpret_cast<const float*>(x)),
                b = (__m256i)_mm256_broadcast_ss(reinterpret_cast<const float*>(x + 16)), ones = _mm256_set1_epi16(1);
  if constexpr (F.bits == 8 || F.lookup) {
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(signed_products(low, a), ones));
    other = _mm256_add_epi32(other, _mm256_madd_epi16(signed_products(high, b), ones));
  } else if constexpr (F.bits == 4) {
    // Inline assembly: gcc 12 would compute all products of a block before it adds them, and spill registers.
    asm("vpaddw %1, %0, %0" : "+x"(sums) : "x"(_mm256_maddubs_epi16(low, a)));
    asm("vpaddw %1, %0, %0" : "+x"(other) : "x"(_mm256_maddubs_epi16(high, b)));
  } else if constexpr (F.sums() == 2) {
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(low, a), ones));
    other = _mm256_add_epi32(other, _mm256_madd_epi16(_mm256_maddubs_epi16(high, b), ones));
  } else {
    const __m256i both = _mm256_add_epi16(_mm256_maddubs_epi16(low, a), _mm256_maddubs_epi16(high, b));
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(both, ones));
  }
}

template <int kF>
TW_INLINE vi whole(const Sums& sums, int32_t offset) {
  constexpr BlockPacking F = kBlockPacking[kF];
  if constexpr (F.bits == 8 || F.lookup) return (vi)sums;  // the codes were signed already
  const __m256i all = F.bits == 4 ? _mm256_madd_epi16(sums, _mm256_set1_epi16(1)) : sums;
  return (vi)all + (vi)_mm256_set1_epi32(offset);
}
#else
struct Codes {
  uint8_t v[4 * kLanes];
};
typedef vi Sums;

// Unpacks two vectors of codes (4, 5, 6 or 8 bits) of step `kStep` of a block; portable version.
template <int kStep, int kBits, bool kLookup>
TW_INLINE void load_codes(const uint8_t* p, Codes& low, Codes& high) {
  const uint8_t* low_bits = p + (kBits - 4 + kStep) * kBlockRun;
  for (int i = 0; i < 4 * kLanes; ++i) {
    if constexpr (kBits == 8) {
      low.v[i] = p[2 * kStep * kBlockRun + i];
      high.v[i] = p[(2 * kStep + 1) * kBlockRun + i];
    } else {
      low.v[i] = low_bits[i] & 15;
      high.v[i] = static_cast<uint8_t>(low_bits[i] >> 4);
      if constexpr (kBits == 5) {
        low.v[i] |= static_cast<uint8_t>((p[i] >> kStep & 1) << 4);
        high.v[i] |= static_cast<uint8_t>((p[i] >> (kStep + 4) & 1) << 4);
      }
      if constexpr (kBits == 6) {
        low.v[i] |= static_cast<uint8_t>((p[i] >> 2 * kStep & 3) << 4);
        high.v[i] |= static_cast<uint8_t>((p[kBlockRun + i] >> 2 * kStep & 3) << 4);
      }
      if constexpr (kLookup) {
        low.v[i] = static_cast<uint8_t>(kNonLinear[low.v[i]] + 128);
        high.v[i] = static_cast<uint8_t>(kNonLinear[high.v[i]] + 128);
      }
    }
  }
}

TW_INLINE void add_products(Sums& sums, const Codes& codes, const int8_t* x) {
  vi products = {};
  for (int i = 0; i < kLanes; ++i) {
    const uint8_t* c = codes.v + 4 * i;
    products[i] = c[0] * x[0] + c[1] * x[1] + c[2] * x[2] + c[3] * x[3];
  }
  sums += products;
}

template <int kF>
TW_INLINE void dot_pair(Sums& sums, Sums& other, const Codes& low, const Codes& high, const int8_t* x) {
  add_products(sums, low, x);
  add_products(other, high, x + 16);
}
TW_INLINE Sums first_sums(int32_t offset) { return Sums{} + offset; }

template <int kF>
TW_INLINE vi whole(const Sums& sums, int32_t /*offset*/) {
  return sums;
}
#endif

// --- scales of one vector of columns ---

// The header of a unit: the float16 scales of its blocks, then their minimums; or the shared float16 scale and minimum,
// then one byte (two for halves) per block and column.
template <int kF>
struct UnitScales {
  static constexpr BlockPacking F = kBlockPacking[kF];
  const uint8_t* header = nullptr;
  vf scale = {}, minimum = {};  // shared by the unit

  TW_INLINE void set(const uint8_t* unit, int column) {
    header = unit;
    if (F.grouped()) scale = load_half(halves(column));
    if (F.grouped() && F.minimum()) minimum = load_half(halves(kBlockPanel + column));
  }
  TW_INLINE const uint16_t* halves(int at) const { return reinterpret_cast<const uint16_t*>(header) + at; }
  TW_INLINE vf bytes(int run, int column) const {
    const uint8_t* at = header + 4 * kBlockPanel + run * kBlockPanel + column;
    const vi codes = F.minimum() ? widen_bytes(at) : widen_bytes(reinterpret_cast<const int8_t*>(at));
    return __builtin_convertvector(codes, vf);
  }
  TW_INLINE vf block_scale(int b, int column) const {
    if (F.scales == BlockScales::super_halves) return scale;
    return F.grouped() ? scale * bytes(b, column) : load_half(halves(b * kBlockPanel + column));
  }
  TW_INLINE vf block_minimum(int b, int column) const {
    return F.grouped() ? -(minimum * bytes(F.unit_blocks() + b, column))
                       : load_half(halves((F.unit_blocks() + b) * kBlockPanel + column));
  }
};

// A register tile of R rows by V vectors of columns.
template <int kF, int R, int V, bool kUnpacked = false>
struct Tile {
  static constexpr BlockPacking F = kBlockPacking[kF];
  const BlockProblem& p;
  const int8_t* x;
  const float* scale;
  const float* total;
  const int32_t* offset;
  int64_t panel_bytes;
  const uint8_t* unpacked = nullptr;  // if kUnpacked: the panels' codes as one byte each, 8 runs per block
  vf acc[R][V] = {};

  // With 16 lanes a vector is a panel, else part of one. Returns its bytes in a unit's run, and its first column.
  TW_INLINE const uint8_t* vector_at(const uint8_t* p, int v) const {
    return kVectors == 1 ? p + v * panel_bytes : p + v * kLanes * 4;
  }
  static constexpr int column_of(int column, int v) { return kVectors == 1 ? column : column + v * kLanes; }

  TW_INLINE Tile(const BlockProblem& problem, int64_t row)
      : p(problem),
        x(p.x.values + row * p.blocks * kBlock),
        scale(p.x.scale + row * p.blocks),
        total(p.x.total + row * p.blocks),
        offset(p.x.offset + row * p.blocks * F.sums()),
        panel_bytes(p.blocks / F.unit_blocks() * F.unit_bytes()) {}

  TW_INLINE int32_t row_offset(int r, int64_t b, int half) const {
    return F.minimum() ? 0 : offset[(r * p.blocks + b) * F.sums() + half];
  }

  // Adds the products of one pair of groups of block b.
  template <int kStep>
  TW_INLINE void step(const uint8_t* codes, int64_t b, Sums (&sums)[R][V][F.sums()]) {
    if (R == 1) fetch_ahead(codes + kStep * kBlockRun);
    Codes low[V], high[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      if constexpr (kUnpacked) {
        load_codes<kStep, 8, false>(codes + v * p.blocks * 8 * kBlockRun, low[v], high[v]);
      } else {
        load_codes<kStep, F.bits, F.lookup>(vector_at(codes, v), low[v], high[v]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const int8_t* four = x + (r * p.blocks + b) * kBlock + 4 * kStep;
#if defined(__AVX512F__)
      if constexpr (V == 2) {
        dot_two(sums[r], low, high, four);
        continue;
      }
#endif
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        dot_pair<kF>(sums[r][v][0], sums[r][v][F.sums() - 1], low[v], high[v], four);
      }
    }
  }

  // Scales the integer sums of block b, number `at` of its unit, and adds them to the accumulators.
  TW_INLINE void add_block(const UnitScales<kF> (&scales)[V], int at, int column, int64_t b,
                           const Sums (&sums)[R][V][F.sums()]) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const int c = column_of(column, v);
      const vf block_scale = scales[v].block_scale(at, c);
      vf minimum = {}, first = {}, second = {};
      if (F.minimum()) minimum = scales[v].block_minimum(at, c);
      if (F.sums() == 2) first = scales[v].bytes(2 * at, c), second = scales[v].bytes(2 * at + 1, c);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        vf sum = __builtin_convertvector(whole<kF>(sums[r][v][0], row_offset(r, b, 0)), vf);
        if constexpr (F.sums() == 2) {  // integers below 2^24: exact in float32
          const vf other = __builtin_convertvector(whole<kF>(sums[r][v][1], row_offset(r, b, 1)), vf);
          sum = sum * first + other * second;
        }
        acc[r][v] = acc[r][v] + sum * (block_scale * splat(scale[r * p.blocks + b]));
        if (F.minimum()) acc[r][v] = acc[r][v] + minimum * splat(total[r * p.blocks + b]);
      }
    }
  }

  // Adds all blocks of a unit, whose first block is number `first` of the row.
  TW_INLINE void add_unit(const uint8_t* unit, int column, int64_t first) {
    UnitScales<kF> scales[V];
    for (int v = 0; v < V; ++v) {
      scales[v].set(kVectors == 1 ? unit + v * panel_bytes : unit, column_of(column, v));
    }
    for (int at = 0; at < F.unit_blocks(); ++at) {
      const uint8_t* codes = unit + F.header_bytes() + at * F.code_runs() * kBlockRun + column * 4;
      if (kUnpacked) codes = unpacked + (first + at) * 8 * kBlockRun;
      if (R == 1) fetch_ahead(at == 0 ? unit : codes + kSteps * kBlockRun);
      Sums sums[R][V][F.sums()] = {};
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          sums[r][v][0] = first_sums(row_offset(r, first + at, 0));
          if (F.sums() == 2) sums[r][v][F.sums() - 1] = first_sums(row_offset(r, first + at, F.sums() - 1));
        }
      }
      step<0>(codes, first + at, sums);
      step<1>(codes, first + at, sums);
      step<2>(codes, first + at, sums);
      step<3>(codes, first + at, sums);
      add_block(scales, at, column, first + at, sums);
    }
  }

  // Stores the tile at columns from `first` on, times the columns' scales.
  TW_INLINE void store_columns(int64_t row, int64_t first) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const int64_t column = first + v * kLanes, left = p.columns - column;
      if (left <= 0) break;
      const vf by = p.column_scale == nullptr ? splat(1.0f) : load(p.column_scale + column);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        store_first(p.y + (row + r) * p.y_row + column, acc[r][v] * by,
                    left < kLanes ? static_cast<int>(left) : kLanes);
      }
    }
  }
};

// Multiplies R rows by a panel, V vectors of columns per load of four row values. `unpacked`: see Tile.
template <int kF, int R, int V = kVectors == 2 ? 2 : 1, bool kUnpacked = false>
void panel_rows(const BlockProblem& p, int64_t row, int64_t panel, const uint8_t* unpacked = nullptr) {
  constexpr BlockPacking F = kBlockPacking[kF];
  const int64_t units = p.blocks / F.unit_blocks();
  const uint8_t* weights = p.weights + panel * units * F.unit_bytes();
  for (int column = 0; column < kBlockPanel; column += V * kLanes) {
    Tile<kF, R, V, kUnpacked> tile(p, row);
    tile.unpacked = unpacked;
    for (int64_t u = 0; u < units; ++u) tile.add_unit(weights + u * F.unit_bytes(), column, u * F.unit_blocks());
    tile.store_columns(row, panel * kBlockPanel + column);
  }
}

// Multiplies up to `count` rows by a panel; returns how many were computed.
template <int kF>
int64_t some_rows(const BlockProblem& p, int64_t row, [[maybe_unused]] int64_t count, int64_t panel) {
#if defined(__AVX512F__)
  if (count >= 8) return panel_rows<kF, 8>(p, row, panel), 8;
#endif
#if defined(__AVX2__)
  if (count >= 4) return panel_rows<kF, 4>(p, row, panel), 4;
  if (count == 3) return panel_rows<kF, 3>(p, row, panel), 3;
  if (count == 2) return panel_rows<kF, 2>(p, row, panel), 2;
#endif
  return panel_rows<kF, 1>(p, row, panel), 1;
}

#if defined(__AVX512F__)
template <int kF, int kStep>
TW_INLINE void unpack_step(const uint8_t* codes, uint8_t* to) {
  Codes low, high;
  load_codes<kStep, kBlockPacking[kF].bits, kBlockPacking[kF].lookup>(codes, low, high);
  _mm512_storeu_si512(to + 2 * kStep * kBlockRun, low);
  _mm512_storeu_si512(to + (2 * kStep + 1) * kBlockRun, high);
}

// Unpacks the codes of a panel to one byte each, in the order of 8-bit codes.
template <int kF>
void unpack_panel(const BlockProblem& p, int64_t panel, uint8_t* to) {
  constexpr BlockPacking F = kBlockPacking[kF];
  const int64_t units = p.blocks / F.unit_blocks();
  const uint8_t* unit = p.weights + panel * units * F.unit_bytes();
  for (int64_t b = 0; b < p.blocks; ++b, to += 8 * kBlockRun) {
    const int64_t at = b % F.unit_blocks();
    const uint8_t* codes =
        unit + b / F.unit_blocks() * F.unit_bytes() + F.header_bytes() + at * F.code_runs() * kBlockRun;
    unpack_step<kF, 0>(codes, to);
    unpack_step<kF, 1>(codes, to);
    unpack_step<kF, 2>(codes, to);
    unpack_step<kF, 3>(codes, to);
  }
}
#endif

// Multiplies a strip of rows, which stays in the cache, by all panels, then the next strip.
template <int kF>
void rows(const BlockProblem& p, int64_t first, int64_t last, int64_t first_panel, int64_t last_panel) {
  constexpr int64_t kStrip = 256;  // chosen: rows
  for (int64_t strip = first; strip < last; strip += kStrip) {
    const int64_t end = last - strip < kStrip ? last : strip + kStrip;
    int64_t panel = first_panel;
#if defined(__AVX512F__)
    constexpr int kTwo =
        4;  // definition: rows of a tile of two panels; fewer than two tiles read one stream of weights
    // Codes with planes are unpacked once for a strip of rows; two panels of them fit the second-level cache.
    constexpr bool kPlanes = kBlockPacking[kF].plane_runs() > 0;
    uint8_t* unpacked = nullptr;
    if (kPlanes && end - strip >= 8 * kTwo) {
      unpacked = reinterpret_cast<uint8_t*>(thread_scratch(2 * p.blocks * 8 * kBlockRun / 4));
    }
    for (; end - strip >= 2 * kTwo && panel + 2 <= last_panel; panel += 2) {
      int64_t row = strip;
      if (unpacked != nullptr) {
        unpack_panel<kF>(p, panel, unpacked);
        unpack_panel<kF>(p, panel + 1, unpacked + p.blocks * 8 * kBlockRun);
        for (; row + kTwo <= end; row += kTwo) panel_rows<kF, kTwo, 2, kPlanes>(p, row, panel, unpacked);
      }
      for (; row + kTwo <= end; row += kTwo) panel_rows<kF, kTwo, 2>(p, row, panel);
      for (int64_t next = row; next < end;) next += some_rows<kF>(p, next, end - next, panel);
      while (row < end) row += some_rows<kF>(p, row, end - row, panel + 1);
    }
#endif
    for (; panel < last_panel; ++panel) {
      for (int64_t row = strip; row < end;) row += some_rows<kF>(p, row, end - row, panel);
    }
  }
}

}  // namespace

const BlockKernels block_dot = {quantize,
                                {pack<0>, pack<1>, pack<2>, pack<3>, pack<4>, pack<5>, pack<6>, pack<7>, pack<8>},
                                {rows<0>, rows<1>, rows<2>, rows<3>, rows<4>, rows<5>, rows<6>, rows<7>, rows<8>}};

}  // namespace TW_ISA
}  // namespace tw
