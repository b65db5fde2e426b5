// This file, like int8.cpp, is compiled with -ffp-contract=off: every number is the same on every instruction set.
#include "kernels/int16.h"

#include "kernels/ahead.h"
#include "kernels/int8_sums.h"

namespace tw {
namespace TW_ISA {
namespace {

// --- products ---

#if defined(__AVX512F__)
constexpr int kTallest = 12;  // pixels of a register tile, by a panel
#elif defined(__AVX2__)
constexpr int kTallest = 6;
#else
constexpr int kTallest = 2;
#endif
constexpr int kBlock = 96;  // pixels that all panels are multiplied with in turn: a multiple of every kTallest

TW_INLINE vi load_lanes(const int32_t* p) {
  vi v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

TW_INLINE vf as_floats(vi v) { return __builtin_convertvector(v, vf); }

// acc + the sums of the products of neighbouring 16-bit numbers, of a lane two.
TW_INLINE vi add_products(vi acc, vi a, vi w) {
#if defined(__AVX512F__)
  asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(w));
  return acc;
#elif defined(__AVX2__)
  acc += (vi)_mm256_madd_epi16((__m256i)a, (__m256i)w);
  asm("" : "+x"(acc));  // left to itself, the compiler adds products to each other first, and keeps them on the stack
  return acc;
#else
  return acc + ((a << 16) >> 16) * ((w << 16) >> 16) + (a >> 16) * (w >> 16);
#endif
}

#if defined(__AVX2__)
// Whether results are bent after they are stored, as whole numbers: one after the other by itself each waits for the one before.
bool bends_later(const Int8Problem& p) { return p.kind == Int8Out::int16 && p.wide.curve == WideCurve::pieces; }

WideFinish whole_numbers(const WideFinish& bent) {
  WideFinish whole;
  whole.low = -32767;
  whole.high = bent.pieces.most;
  return whole;
}

// Columns [first, last) of `count` pixels, sixteen of them at a time; those left over beside the result.
void bend(const Int8Problem& p, const RowOffsets& at, int count, int first, int last) {
  const SixteenWide curve(p.wide);
  int16_t* out = static_cast<int16_t*>(p.out);
  int c = first;
  for (; c + kInt8Panel <= last; c += kInt8Panel) {
    for (int i = 0; i < count; ++i) {
      __m256i* to = reinterpret_cast<__m256i*>(out + at.out[i] + c);
      _mm256_storeu_si256(to, curve.pieces(_mm256_loadu_si256(to)));
    }
  }
  for (int i = 0; c < last && i < count; ++i) {
    alignas(32) int16_t held[kInt8Panel] = {};
    std::memcpy(held, out + at.out[i] + c, 2 * (last - c));
    _mm256_store_si256(reinterpret_cast<__m256i*>(held), curve.pieces(_mm256_load_si256(reinterpret_cast<const __m256i*>(held))));
    std::memcpy(out + at.out[i] + c, held, 2 * (last - c));
  }
}
#else
bool bends_later(const Int8Problem&) { return false; }
WideFinish whole_numbers(const WideFinish& bent) { return bent; }
void bend(const Int8Problem&, const RowOffsets&, int, int, int) {}
#endif

// V vectors of a panel for R pixels.
template <int R, int V>
TW_INLINE void multiply(const WideProblem& p, const RowOffsets& at, int first, int panel, vi (&acc)[R][V]) {
  const WideWindow window = p.windows[panel];
  const int16_t* w = p.weights + window.weights;
  const int16_t* rows[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    rows[r] = p.x + at.in[first + r] + window.first;
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[r][v] = load_lanes(p.to.offset + panel * kInt8Panel + v * kLanes);
  }
  for (int64_t ky = 0; ky < p.kernel_h; ++ky) {
    for (int64_t kx = 0; kx < p.kernel_w; ++kx) {
      const int64_t tap = ky * p.tap_row + kx * p.tap_step;
      for (int64_t c = tap; c < tap + kWideGroup * window.pairs; c += kWideGroup, w += kInt8Panel * kWideGroup) {
        vi weight[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) std::memcpy(&weight[v], w + v * kLanes * kWideGroup, sizeof weight[v]);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          int32_t two;
          std::memcpy(&two, rows[r] + c, sizeof two);
          const vi a = two - vi{};
#pragma GCC unroll 4
          for (int v = 0; v < V; ++v) acc[r][v] = add_products(acc[r][v], a, weight[v]);
        }
      }
    }
  }
}

#if defined(__AVX2__)
// V vectors of a panel, finished by way W, for whole tiles of the block's pixels; how many pixels that are.
template <int R, int V, ByteWay W>
__attribute__((noinline)) int strip(const WideProblem& given, const RowOffsets& at, int count, int panel, int last_panel) {
  const WideProblem p = given;  // of its own: for all that is known, what is stored might be a part of `given`
  const WideWindow window = p.windows[panel];
  const int64_t numbers = p.kernel_h * p.kernel_w * window.pairs * kInt8Panel * kWideGroup;
  NextPanel next(p.weights + window.weights + numbers, panel + 1 < last_panel ? 2 * numbers : 0, count / R);
  int i = 0;
  for (; i + R <= count; i += R) {
    vi acc[R][V];
    next.fetch();
    multiply<R, V>(p, at, i, panel, acc);
    finish_whole<R, V, W>(p.to, acc, at, i, panel * kInt8Panel);
  }
  return i;
}

int whole_tiles(const WideProblem& p, const RowOffsets& at, int count, int panel, int last_panel) {
  const int left = whole_columns(p.to) - panel * kInt8Panel;
  int done = 0;
  with_way(p.to, [&](auto known) {
    if (left >= kInt8Panel) {
      done = strip<kTallest, kVectors, known.value>(p, at, count, panel, last_panel);
    } else if constexpr (kVectors == 2) {
      if (left == kLanes) done = strip<8, 1, known.value>(p, at, count, panel, last_panel);
    }
  });
  return done;
}
#else
int whole_tiles(const WideProblem&, const RowOffsets&, int, int, int) { return 0; }
#endif

template <int R = kTallest>
TW_INLINE void last_rows(const WideProblem& p, const RowOffsets& at, int first, int64_t row, int panel, int count) {
  if constexpr (R > 0) {
    if (count != R) return last_rows<R - 1>(p, at, first, row, panel, count);
    vi acc[R][kVectors];
    multiply<R, kVectors>(p, at, first, panel, acc);
    finish_tile<R, 1>(p.to, acc, at, first, row, panel);
  }
}

void rows(const WideProblem& given, int64_t first, int64_t last, int first_panel, int last_panel) {
  RowOffsets at;
  WideProblem p = given;
  const bool later = bends_later(given.to);
  if (later) p.to.wide = whole_numbers(given.to.wide);
  for (int64_t row = first; row < last; row += kBlock) {
    const int count = last - row < kBlock ? static_cast<int>(last - row) : kBlock;
    fill_offsets(p.to, row, count, at);
    for (int panel = first_panel; panel < last_panel; ++panel) {
      for (int i = whole_tiles(p, at, count, panel, last_panel); i < count; i += kTallest) {
        last_rows(p, at, i, row + i, panel, count - i < kTallest ? count - i : kTallest);
      }
      const int column = panel * kInt8Panel, end = p.to.columns - column < kInt8Panel ? p.to.columns : column + kInt8Panel;
      if (later) bend(given.to, at, count, column, end);
    }
  }
}

// --- depthwise ---

// Numbers of 16 bits, or bytes less their zero point.
template <bool kBytes>
TW_INLINE vi numbers(const WideProblem& p, int64_t at, int lanes) {
  if constexpr (kBytes) return first_bytes(p.bytes + at, lanes) - p.zero;
  return first_shorts(p.x + at, lanes);
}

// Where the weights of a block begin.
TW_INLINE const int16_t* block_weights(const WideProblem& p, int64_t block) {
  return p.weights + block * ((p.kernel_h + 1) / 2) * p.kernel_w * 2 * kDepthwiseBlock;
}

// A vector of channels, a whole number of vectors from the block's first: of two rows, those of the first (0) or second one.
TW_INLINE vi channel_weights(const int16_t* tap, int channel, int row) {
  int32_t held[kLanes];
#pragma GCC unroll 4
  for (int g = 0; g < kLanes / 4; ++g) std::memcpy(held + 4 * g, tap + 8 * kBlockOrder[channel / 4 + g], 16);
  const vi two = load_lanes(held);
  return row == 0 ? two & 0xffff : (two >> 16) & 0xffff;  // the number beside a number is multiplied by 0
}

// A vector of a block's channels at one pixel, for every geometry.
template <bool kBytes>
void depthwise_pixel(const WideProblem& p, const RowOffsets& at, int i, int64_t row, int64_t block) {
  const int64_t first = block_at(block, p.to.columns);
  for (int c = 0; c < kDepthwiseBlock && first + c < p.to.columns; c += kLanes) {
    const int64_t column = first + c, left = p.to.columns - column;
    vi acc = load_lanes(p.to.offset + column);
    const int16_t* w = block_weights(p, block);
    for (int64_t ky = 0; ky < p.kernel_h; ++ky) {
      for (int64_t kx = 0; kx < p.kernel_w; ++kx) {
        const int16_t* tap = w + (ky / 2 * p.kernel_w + kx) * 2 * kDepthwiseBlock;
        const vi x = numbers<kBytes>(p, at.in[i] + ky * p.tap_row + kx * p.tap_step + column, left < kLanes ? static_cast<int>(left) : kLanes);
        acc = add_products(acc, x, channel_weights(tap, c, static_cast<int>(ky % 2)));
      }
    }
    finish(p.to, acc, row, at.out[i], at.residual[i], static_cast<int>(column));
  }
}

#if defined(__AVX2__)
// Sixteen channels of a pixel, in 16 bits.
template <bool kBytes>
TW_INLINE __m256i sixteen(const WideProblem& p, int64_t at) {
  if constexpr (kBytes) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p.bytes + at));
    return _mm256_sub_epi16(_mm256_cvtepu8_epi16(bytes), _mm256_set1_epi16(static_cast<int16_t>(p.zero)));
  }
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p.x + at));
}

TW_INLINE __m256i load_sixteen(const int16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

TW_INLINE __m256i add_pairs(__m256i acc, __m256i a, __m256i w) {
#if defined(__AVX512F__)
  asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(w));
#else
  acc = _mm256_add_epi32(acc, _mm256_madd_epi16(a, w));
  asm("" : "+x"(acc));  // as in add_products
#endif
  return acc;
}

// Eight numbers of 32 bits from each of two places.
TW_INLINE __m256i two_fours(const void* a, const void* b) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(a))),
                                 _mm_loadu_si128(static_cast<const __m128i*>(b)), 1);
}

// What becomes of a block's sums: channels 0-3 and 8-11 in one half, 4-7 and 12-15 in the other, as packing takes them.
class BlockFinish {
 public:
  BlockFinish(const Int8Problem& p, int64_t column)
      : p_(p), column_(static_cast<int>(column)), most_(_mm256_set1_ps(SixteenWide::most(p.wide))),
        low_(_mm256_set1_epi16(static_cast<int16_t>(p.wide.low))) {
    for (int half = 0; half < 2; ++half) {
      offset[half] = two_fours(p.offset + column + 4 * half, p.offset + column + 4 * half + 8);
      scale_[half] = _mm256_castsi256_ps(two_fours(p.scale + column + 4 * half, p.scale + column + 4 * half + 8));
    }
    quick = p.kind == Int8Out::int16 && p.residual == nullptr && p.wide.curve == WideCurve::straight;
  }

  template <int Pixels>
  TW_INLINE void whole(__m256i (&sums)[Pixels], int half) const {
#pragma GCC unroll 8
    for (int j = 0; j < Pixels; ++j) {
      sums[j] = _mm256_cvtps_epi32(_mm256_min_ps(most_, _mm256_mul_ps(_mm256_cvtepi32_ps(sums[j]), scale_[half])));
    }
  }

  // Both halves, whole numbers already where it is quick.
  TW_INLINE void store(__m256i low, __m256i high, const RowOffsets& at, int i, int64_t row) const {
    if (!quick) return store_each(low, high, at, i, row);
    int16_t* to = static_cast<int16_t*>(p_.out) + at.out[i] + column_;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_max_epi16(_mm256_packs_epi32(low, high), low_));
  }

  __m256i offset[2];
  bool quick;

 private:
  __attribute__((noinline)) void store_each(__m256i low, __m256i high, const RowOffsets& at, int i, int64_t row) const {
    alignas(32) int32_t sums[kDepthwiseBlock];
    _mm256_store_si256(reinterpret_cast<__m256i*>(sums), _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_store_si256(reinterpret_cast<__m256i*>(sums + 8), _mm256_permute2x128_si256(low, high, 0x31));
    for (int c = 0; c < kDepthwiseBlock; c += kLanes) finish(p_, load_lanes(sums + c), row, at.out[i], at.residual[i], column_ + c);
  }

  const Int8Problem& p_;
  int column_;
  __m256 most_, scale_[2];
  __m256i low_;
};

// Of two rows of pixels, the numbers of half of the channels side by side.
template <int Half>
TW_INLINE __m256i side_by_side(__m256i a, __m256i b) {
  return Half == 0 ? _mm256_unpacklo_epi16(a, b) : _mm256_unpackhi_epi16(a, b);
}

// Half of a block's channels at neighbouring pixels: as many as leave room in the registers for a row of weights. Two rows of taps
// are multiplied at once; pixels that lie in several windows are read once. Taps 0: any number of them, and any distance.
template <bool kBytes, int Taps, int Stride, int Pixels, int Half>
TW_INLINE void half_block(const WideProblem& p, const BlockFinish& end, const int16_t* w, int64_t x, __m256i (&acc)[Pixels]) {
#pragma GCC unroll 8
  for (int j = 0; j < Pixels; ++j) acc[j] = end.offset[Half];
  w += Half * kDepthwiseBlock;
  for (int64_t ky = 0; ky < p.kernel_h; ky += 2, x += 2 * p.tap_row) {
    const int64_t below = x + (ky + 1 < p.kernel_h ? p.tap_row : 0);
    if constexpr (Taps > 0) {
      __m256i weight[Taps];
#pragma GCC unroll 7
      for (int k = 0; k < Taps; ++k) weight[k] = load_sixteen(w + k * 2 * kDepthwiseBlock);
#pragma GCC unroll 32
      for (int n = 0; n < (Pixels - 1) * Stride + Taps; ++n) {
        const __m256i two = side_by_side<Half>(sixteen<kBytes>(p, x + n * p.tap_step), sixteen<kBytes>(p, below + n * p.tap_step));
#pragma GCC unroll 7
        for (int k = 0; k < Taps; ++k) {
          if (n < k || (n - k) % Stride != 0 || (n - k) / Stride >= Pixels) continue;
          acc[(n - k) / Stride] = add_pairs(acc[(n - k) / Stride], two, weight[k]);
        }
      }
      w += Taps * 2 * kDepthwiseBlock;
    } else {
      for (int64_t k = 0; k < p.kernel_w; ++k, w += 2 * kDepthwiseBlock) {
        const __m256i weight = load_sixteen(w);
#pragma GCC unroll 8
        for (int j = 0; j < Pixels; ++j) {
          const int64_t n = k * p.tap_step + j * p.to.in_grid.column_step;
          acc[j] = add_pairs(acc[j], side_by_side<Half>(sixteen<kBytes>(p, x + n), sixteen<kBytes>(p, below + n)), weight);
        }
      }
    }
  }
  if (end.quick) end.whole(acc, Half);
}

template <bool kBytes, int Taps, int Stride, int Pixels>
TW_INLINE void block_tile(const WideProblem& p, const BlockFinish& end, const int16_t* w, int64_t x, const RowOffsets& at, int i,
                          int64_t row) {
  __m256i low[Pixels], high[Pixels];
  half_block<kBytes, Taps, Stride, Pixels, 0>(p, end, w, x, low);
  half_block<kBytes, Taps, Stride, Pixels, 1>(p, end, w, x, high);
#pragma GCC unroll 8
  for (int j = 0; j < Pixels; ++j) end.store(low[j], high[j], at, i + j, row + j);
}

// Pixels [row, row + count), all of one row of the image.
template <bool kBytes, int Taps, int Stride>
void depthwise_row(const WideProblem& given, const RowOffsets& at, int64_t row, int count) {
  constexpr int kFew = 4, kMany = 8;
  const WideProblem p = given;  // of its own: for all that is known, what is stored might be a part of `given`
  for (int64_t block = 0; block * kDepthwiseBlock < p.to.columns; ++block) {
    const int64_t column = block_at(block, p.to.columns);
    const BlockFinish end(p.to, column);
    const int16_t* w = block_weights(p, block);
    for (int done = 0; done < count;) {
      const int left = count - done;
      const int tile = left > kFew && count >= kMany ? kMany : count >= kFew ? kFew : 1;
      const int i = left < tile ? count - tile : done;  // the last ones twice rather than one by one
      if (tile == kMany) {
        block_tile<kBytes, Taps, Stride, kMany>(p, end, w, at.in[i] + column, at, i, row + i);
      } else if (tile == kFew) {
        block_tile<kBytes, Taps, Stride, kFew>(p, end, w, at.in[i] + column, at, i, row + i);
      } else {
        block_tile<kBytes, Taps, Stride, 1>(p, end, w, at.in[i] + column, at, i, row + i);
      }
      done = i + tile;
    }
  }
}

template <bool kBytes>
void whole_blocks(const WideProblem& p, const RowOffsets& at, int64_t row, int count) {
  const int64_t step = p.to.in_grid.column_step, taps = p.kernel_w;
  if (taps == 3 && step == p.tap_step) return depthwise_row<kBytes, 3, 1>(p, at, row, count);
  if (taps == 3 && step == 2 * p.tap_step) return depthwise_row<kBytes, 3, 2>(p, at, row, count);
  if (taps == 5 && step == p.tap_step) return depthwise_row<kBytes, 5, 1>(p, at, row, count);
  if (taps == 5 && step == 2 * p.tap_step) return depthwise_row<kBytes, 5, 2>(p, at, row, count);
  if (taps == 7 && step == p.tap_step) return depthwise_row<kBytes, 7, 1>(p, at, row, count);
  depthwise_row<kBytes, 0, 0>(p, at, row, count);
}
#endif

template <bool kBytes>
void row_of_pixels(const WideProblem& p, const RowOffsets& at, int64_t row, int count) {
#if defined(__AVX2__)
  if (p.to.columns >= kDepthwiseBlock) return whole_blocks<kBytes>(p, at, row, count);
#endif
  for (int64_t block = 0; block * kDepthwiseBlock < p.to.columns; ++block) {
    for (int i = 0; i < count; ++i) depthwise_pixel<kBytes>(p, at, i, row + i, block);
  }
}

void depthwise(const WideProblem& given, int64_t first, int64_t last) {
  RowOffsets at;
  WideProblem p = given;
  const bool later = bends_later(given.to);
  if (later) p.to.wide = whole_numbers(given.to.wide);
  for (int64_t row = first; row < last;) {
    const int64_t left = p.to.width - row % p.to.width, most = last - row < left ? last - row : left;
    const int count = most < kBlock ? static_cast<int>(most) : kBlock;
    fill_offsets(p.to, row, count, at);
    p.bytes != nullptr ? row_of_pixels<true>(p, at, row, count) : row_of_pixels<false>(p, at, row, count);
    if (later) bend(given.to, at, count, 0, p.to.columns);
    row += count;
  }
}

// --- pixel by pixel ---

TW_INLINE vi numbers_at(const MixedPixels& x, int64_t pixel, int64_t c, int lanes) {
  const int64_t at = pixel * x.step + c;
  return (x.wide ? first_shorts(static_cast<const int16_t*>(x.data) + at, lanes)
                 : first_bytes(static_cast<const uint8_t*>(x.data) + at, lanes)) - x.zero;
}

#if defined(__AVX2__)
// Sixteen channels, as so many vectors.
struct Sixteen {
  vf v[kVectors];
};
struct SixteenWhole {
  vi v[kVectors];
};

template <bool kWide>
TW_INLINE vi sixteenth_part(const MixedPixels& x, int64_t pixel, int64_t c) {
  MixedPixels known = x;
  known.wide = kWide;
  return numbers_at(known, pixel, c, kLanes);
}

// Calls make(channel), then what it gives with every pixel: for sixteen channels at a time, the last ones of them twice where they
// are no multiple. What a channel has for all pixels is read once.
template <class Make>
TW_INLINE void each_sixteen(int64_t pixels, int64_t channels, const WideFinish& given, const MixedTarget& to, Make make) {
  const SixteenWide curve(given);
  const vf most = splat(SixteenWide::most(given));
  const bool pieces = given.curve == WideCurve::pieces;
  for (int64_t block = 0; block * kInt8Panel < channels; ++block) {
    const int64_t c = block_at(block, channels);
    const auto value = make(c);
    for (int64_t pixel = 0; pixel < pixels; ++pixel) {
      const Sixteen values = value(pixel);
#if defined(__AVX512F__)
      const __m256i whole = sixteen_whole(values.v[0], most);
      const __m256i numbers = pieces ? curve.pieces(whole) : curve.straight(whole);
#else
      const __m256i whole = sixteen_whole(values.v[0], values.v[1], most);
      const __m256i numbers = _mm256_permute4x64_epi64(pieces ? curve.pieces(whole) : curve.straight(whole), 0xd8);
#endif
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<int16_t*>(to.data) + pixel * to.step + c), numbers);
    }
  }
}

bool by_sixteen(int64_t channels, const MixedFinish& finish, const MixedTarget& to) {
  return to.wide && channels >= kInt8Panel && SixteenWide::takes(finish.wide);
}

template <bool kValue>
struct Known {
  static constexpr bool value = kValue;
};

// Calls f with two booleans as constants.
template <class F>
TW_INLINE void with_known(bool a, bool b, F&& f) {
  if (a) return b ? f(Known<true>(), Known<true>()) : f(Known<true>(), Known<false>());
  b ? f(Known<false>(), Known<true>()) : f(Known<false>(), Known<false>());
}
#endif

// Calls value(pixel, channel, lanes) for every vector of channels and stores what it gives.
template <class Value>
TW_INLINE void each_vector(int64_t pixels, int64_t channels, const MixedFinish& given, const MixedTarget& to, Value value) {
  const MixedFinish finish = given;
  with_curve(finish.bytes, [&](auto known) {
    for (int64_t pixel = 0; pixel < pixels; ++pixel) {
      for (int64_t c = 0; c < channels; c += kLanes) {
        const int lanes = channels - c < kLanes ? static_cast<int>(channels - c) : kLanes;
        const vf v = value(pixel, c, lanes);
        if (to.wide) {
          store_wide(static_cast<int16_t*>(to.data) + pixel * to.step + c, v, finish.wide, lanes);
        } else {
          store_finished<known.value>(static_cast<uint8_t*>(to.data) + pixel * to.step + c, v, finish.bytes, lanes);
        }
      }
    }
  });
}

void add(const MixedPixels& a, const MixedPixels& b, int64_t pixels, int64_t channels, const MixedFinish& finish,
         const MixedTarget& to) {
#if defined(__AVX2__)
  if (by_sixteen(channels, finish, to)) {
    return with_known(a.wide, b.wide, [&](auto a_wide, auto b_wide) {
      each_sixteen(pixels, channels, finish.wide, to, [&](int64_t c) {
        return [=](int64_t pixel) {
          Sixteen sum;
          for (int v = 0; v < kVectors; ++v) {
            sum.v[v] = as_floats(sixteenth_part<a_wide.value>(a, pixel, c + v * kLanes)) * splat(a.scale) +
                       as_floats(sixteenth_part<b_wide.value>(b, pixel, c + v * kLanes)) * splat(b.scale);
          }
          return sum;
        };
      });
    });
  }
#endif
  each_vector(pixels, channels, finish, to, [=](int64_t pixel, int64_t c, int lanes) {
    return as_floats(numbers_at(a, pixel, c, lanes)) * splat(a.scale) + as_floats(numbers_at(b, pixel, c, lanes)) * splat(b.scale);
  });
}

void mul(const MixedPixels& a, const MixedPixels& b, int64_t pixels, int64_t channels, const MixedFinish& finish,
         const MixedTarget& to) {
#if defined(__AVX2__)
  if (b.step == 0 && by_sixteen(channels, finish, to)) {  // a gate
    return with_known(a.wide, b.wide, [&](auto a_wide, auto b_wide) {
      each_sixteen(pixels, channels, finish.wide, to, [&](int64_t c) {
        SixteenWhole gate;
        for (int v = 0; v < kVectors; ++v) gate.v[v] = sixteenth_part<b_wide.value>(b, 0, c + v * kLanes) & 0xffff;
        return [=](int64_t pixel) {
          Sixteen product;
          for (int v = 0; v < kVectors; ++v) {
            const vi whole = add_products(vi{}, sixteenth_part<a_wide.value>(a, pixel, c + v * kLanes), gate.v[v]);
            product.v[v] = as_floats(whole) * splat(a.scale);
          }
          return product;
        };
      });
    });
  }
#endif
  each_vector(pixels, channels, finish, to, [=](int64_t pixel, int64_t c, int lanes) {
    const vi product = add_products(vi{}, numbers_at(a, pixel, c, lanes), numbers_at(b, pixel, c, lanes) & 0xffff);
    return as_floats(product) * splat(a.scale);
  });
}

void affine(const MixedPixels& x, const float* scale, const float* shift, int64_t pixels, int64_t channels,
            const MixedFinish& finish, const MixedTarget& to) {
  each_vector(pixels, channels, finish, to, [=](int64_t pixel, int64_t c, int lanes) {
    return as_floats(numbers_at(x, pixel, c, lanes)) * load_first(scale + c, lanes) + load_first(shift + c, lanes);
  });
}

// --- floats, pooling ---

#if defined(__AVX2__)
// Eight pixels of a plane, as whole numbers.
TW_INLINE __m256i eight_whole(const float* x, __m256 inverse, __m256 most) {
  __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x), inverse);
  v = _mm256_and_ps(v, _mm256_cmp_ps(v, v, _CMP_ORD_Q));
  return _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(v, _mm256_sub_ps(_mm256_setzero_ps(), most)), most));
}

// Three or four planes to pixels of four numbers, the last of three being 0; how many pixels that are.
int64_t quantize_fours(const float* x, int64_t channels, int64_t pixels, int64_t plane, float inverse, int most, int16_t* to) {
  const __m256 by = _mm256_set1_ps(inverse), end = _mm256_set1_ps(static_cast<float>(most));
  const __m256i low = _mm256_set1_epi32(0xffff);
  int64_t i = 0;
  for (; i + 8 <= pixels; i += 8) {
    __m256i two[2];
    for (int c = 0; c < 4; c += 2) {
      const __m256i a = eight_whole(x + c * plane + i, by, end);
      const __m256i b = c + 1 < channels ? eight_whole(x + (c + 1) * plane + i, by, end) : _mm256_setzero_si256();
      two[c / 2] = _mm256_or_si256(_mm256_and_si256(a, low), _mm256_slli_epi32(b, 16));
    }
    const __m256i first = _mm256_unpacklo_epi32(two[0], two[1]), second = _mm256_unpackhi_epi32(two[0], two[1]);
    __m256i* pixel = reinterpret_cast<__m256i*>(to + 4 * i);
    _mm256_storeu_si256(pixel, _mm256_permute2x128_si256(first, second, 0x20));
    _mm256_storeu_si256(pixel + 1, _mm256_permute2x128_si256(first, second, 0x31));
  }
  return i;
}
#endif

void quantize(const float* x, int64_t channels, int64_t pixels, int64_t plane, float inverse, int most, int16_t* to,
              int64_t step) {
  int64_t done = 0;
#if defined(__AVX2__)
  if (step == 4 && channels >= 3 && channels <= 4) done = quantize_fours(x, channels, pixels, plane, inverse, most, to);
#endif
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t i = done; i < pixels; i += kLanes) {
      const int n = pixels - i < kLanes ? static_cast<int>(pixels - i) : kLanes;
      vf v = load_first(x + c * plane + i, n) * splat(inverse);
      v = select(v == v, v, splat(0.0f));
      const vi whole = whole_in(v, -most, most);
      int32_t numbers[kLanes];
      std::memcpy(numbers, &whole, sizeof numbers);
      for (int j = 0; j < n; ++j) to[(i + j) * step + c] = static_cast<int16_t>(numbers[j]);
    }
  }
}

void dequantize(const int16_t* x, int64_t step, int64_t channels, int64_t pixels, float scale, float* to, int64_t plane) {
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t i = 0; i < pixels; ++i) to[c * plane + i] = static_cast<float>(x[i * step + c]) * scale;
  }
}

void pool(const int16_t* x, const BytePlane& in, int64_t channels, const PoolWindow& w, bool mean, int16_t* y,
          const BytePlane& out) {
  const int64_t above = -w.pad_h < 0 ? 0 : -w.pad_h, below = -w.pad_h + w.kernel_h > in.height ? in.height : -w.pad_h + w.kernel_h;
  for (int64_t ox = 0; ox < out.width; ++ox) {
    const int64_t begin = ox * w.stride_w - w.pad_w, end = begin + w.kernel_w;
    const int64_t left = begin < 0 ? 0 : begin, right = end > in.width ? in.width : end;
    const int64_t inside = (below - above) * (right - left);
    const int64_t cells = w.count_padding ? w.kernel_h * w.kernel_w : inside > 0 ? inside : 1;
    for (int64_t c = 0; c < channels; c += kLanes) {
      const int n = channels - c < kLanes ? static_cast<int>(channels - c) : kLanes;
      vi most = (mean ? 0 : -kWideMost) - vi{};
      for (int64_t iy = above; iy < below; ++iy) {
        for (int64_t ix = left; ix < right; ++ix) {
          const vi v = first_shorts(x + iy * in.row_step + ix * in.pixel_step + c, n);
          most = mean ? most + v : (vi)select(v > most, (vf)v, (vf)most);
        }
      }
      if (mean) most = whole_in(as_floats(most) / splat(static_cast<float>(cells)), -kWideMost, kWideMost);
      store_first_shorts(y + ox * out.pixel_step + c, most, n);
    }
  }
}

#if defined(__AVX2__)
// Sums of sixteen channels over a plane, two pixels at a time.
TW_INLINE void sums_of_sixteen(const int16_t* x, const BytePlane& in, int32_t* to) {
  const __m256i one = _mm256_set1_epi16(1), none = _mm256_setzero_si256();
  __m256i low = none, high = none;
  for (int64_t iy = 0; iy < in.height; ++iy) {
    const int16_t* row = x + iy * in.row_step;
    for (int64_t ix = 0; ix < in.width; ix += 2) {
      const __m256i a = load_sixteen(row + ix * in.pixel_step), b = ix + 1 < in.width ? load_sixteen(row + (ix + 1) * in.pixel_step) : none;
      low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_unpacklo_epi16(a, b), one));
      high = _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_unpackhi_epi16(a, b), one));
    }
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute2x128_si256(low, high, 0x20));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8), _mm256_permute2x128_si256(low, high, 0x31));
}
#endif

void sums(const void* x, bool wide, const BytePlane& in, int64_t channels, int32_t* y) {
  MixedPixels pixels{x, in.pixel_step, 1.0f, 0, wide};
  int64_t c = 0;
#if defined(__AVX2__)
  for (; wide && c + kInt8Panel <= channels; c += kInt8Panel) sums_of_sixteen(static_cast<const int16_t*>(x) + c, in, y + c);
#endif
  for (; c < channels; c += kLanes) {
    const int n = channels - c < kLanes ? static_cast<int>(channels - c) : kLanes;
    vi sum = {};
    for (int64_t iy = 0; iy < in.height; ++iy) {
      for (int64_t ix = 0; ix < in.width; ++ix) sum += numbers_at(pixels, ix, iy * in.row_step + c, n);
    }
    store_first(reinterpret_cast<float*>(y + c), (vf)sum, n);
  }
}

}  // namespace

const Int16Kernels int16 = {rows, depthwise, add, mul, affine, quantize, dequantize, pool, sums};

}  // namespace TW_ISA
}  // namespace tw
