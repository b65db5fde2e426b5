// This file, like int8.cpp, is compiled with -ffp-contract=off: every byte is the same on every instruction set.
#include "kernels/int8_elementwise.h"

#include "kernels/int8_requantize.h"

namespace tw {
namespace TW_ISA {
namespace {

#if defined(__AVX2__) && !defined(__AVX512F__)
// Requantizes four vectors and stores them as 32 bytes.
template <Approximation C>
TW_INLINE void store_four(uint8_t* to, const vf (&values)[4], const Uint8Stage& f) {
  const __m256 highest = _mm256_set1_ps(static_cast<float>(f.high - f.zero));
  const __m256i zero = _mm256_set1_epi16(static_cast<int16_t>(f.zero)),
                lowest = _mm256_set1_epi8(static_cast<char>(f.low));
  __m256i part[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    part[i] = _mm256_cvtps_epi32(_mm256_min_ps(highest, (__m256)apply_parabola<C>(values[i], f.parabola)));
  const __m256i first = _mm256_packs_epi32(part[0], part[1]), second = _mm256_packs_epi32(part[2], part[3]);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), pack_uint8_in_order(first, second, zero, lowest));
}
#endif

// Calls value(pixel, channel, lanes) for every vector of channels and stores the requantized result.
template <class Value>
TW_INLINE void each_vector(int64_t pixels, int64_t channels, const Uint8Stage& argument, ByteTarget to, Value value) {
  dispatch_approximation(argument, [&](auto constant) {
    const Uint8Stage stage = argument;  // a local copy: byte stores may alias the argument
    for (int64_t pixel = 0; pixel < pixels; ++pixel) {
      uint8_t* out = to.data + pixel * to.step;
      int64_t c = 0;
#if defined(__AVX2__) && !defined(__AVX512F__)
      if constexpr (constant.value == Approximation::none || constant.value == Approximation::parabola) {
        for (; c + 4 * kLanes <= channels; c += 4 * kLanes) {
          const vf values[4] = {value(pixel, c, kLanes), value(pixel, c + kLanes, kLanes),
                                value(pixel, c + 2 * kLanes, kLanes), value(pixel, c + 3 * kLanes, kLanes)};
          store_four<constant.value>(out + c, values, stage);
        }
      }
#endif
      for (; c + kLanes <= channels; c += kLanes) {
        requantize_store<constant.value>(out + c, value(pixel, c, kLanes), stage, kLanes);
      }
      const int remaining = static_cast<int>(channels - c);
      if (remaining > 0) requantize_store<constant.value>(out + c, value(pixel, c, remaining), stage, remaining);
    }
  });
}

TW_INLINE vf first_floats(const float* p, int n) { return n == kLanes ? load(p) : load_first(p, n); }

// Loads and dequantizes a vector of channels.
TW_INLINE vf real_at(const BytePixels& x, int64_t pixel, int64_t channel, int lanes) {
  return dequantize_lanes(load_bytes(x.data + pixel * x.step + channel, lanes), x.zero, x.scale);
}

void add(const BytePixels& first, const BytePixels& second, int64_t pixels, int64_t channels, const Uint8Stage& stage,
         const ByteTarget& to) {
  const BytePixels a = first, b = second;
  each_vector(pixels, channels, stage, to, [=](int64_t pixel, int64_t c, int lanes) {
    return real_at(a, pixel, c, lanes) + real_at(b, pixel, c, lanes);
  });
}

// Multiplies lanes whose values fit 9 bits and a sign.
TW_INLINE vi times(vi a, vi b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)(b & 0xffff));
#else
  return a * b;
#endif
}

void mul(const BytePixels& first, const BytePixels& second, int64_t pixels, int64_t channels, const Uint8Stage& stage,
         const ByteTarget& to) {
  const BytePixels a = first, b = second;
  each_vector(pixels, channels, stage, to, [=](int64_t pixel, int64_t c, int lanes) {
    const vi other = load_bytes(b.data + pixel * b.step + c, lanes) - b.zero;
    const vi product = times(load_bytes(a.data + pixel * a.step + c, lanes) - a.zero, other);
    return __builtin_convertvector(product, vf) * splat(a.scale);
  });
}

void affine(const BytePixels& argument, const float* scale, const float* shift, int64_t pixels, int64_t channels,
            const Uint8Stage& stage, const ByteTarget& to) {
  const BytePixels x = argument;
  each_vector(pixels, channels, stage, to, [=](int64_t pixel, int64_t c, int lanes) {
    const vi bytes = load_bytes(x.data + pixel * x.step + c, lanes) - x.zero;
    return __builtin_convertvector(bytes, vf) * first_floats(scale + c, lanes) + first_floats(shift + c, lanes);
  });
}

}  // namespace

const Int8ElementwiseKernels int8_elementwise = {add, mul, affine};

}  // namespace TW_ISA
}  // namespace tw
