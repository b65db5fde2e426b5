// What stands between layers of 16 bits, pixel by pixel: sums, gates, scales by channel. For int16.cpp, compiled with
// -ffp-contract=off.
#pragma once

#include "kernels/int16_products.h"

namespace tw {
namespace TW_ISA {
namespace {

constexpr int64_t kGateChannels = 512;  // that all pixels are multiplied with before the next ones

TW_INLINE vi numbers_at(const MixedPixels& x, int64_t pixel, int64_t c, int lanes) {
  const int64_t at = pixel * x.step + c;
  return (x.wide ? first_shorts(static_cast<const int16_t*>(x.data) + at, lanes)
                 : first_bytes(static_cast<const uint8_t*>(x.data) + at, lanes)) -
         x.zero;
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

// Calls make(channel), then what it gives with every pixel: for sixteen channels at a time, the last ones of them twice
// where they are no multiple. What a channel has for all pixels is read once.
template <class Make>
TW_INLINE void each_sixteen(int64_t pixels, int64_t channels, const Int16Stage& given, const MixedTarget& to,
                            Make make) {
  const Int16PiecewiseVectors curve(given);
  const vf most = splat(Int16PiecewiseVectors::most(given));
  const bool pieces = given.curve == Int16Activation::piecewise;
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

bool by_sixteen(int64_t channels, const MixedStage& finish, const MixedTarget& to) {
  return to.wide && channels >= kInt8Panel && Int16PiecewiseVectors::takes(finish.wide);
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
TW_INLINE void each_vector(int64_t pixels, int64_t channels, const MixedStage& given, const MixedTarget& to,
                           Value value) {
  const MixedStage finish = given;
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

void add(const MixedPixels& a, const MixedPixels& b, int64_t pixels, int64_t channels, const MixedStage& finish,
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
    return as_floats(numbers_at(a, pixel, c, lanes)) * splat(a.scale) +
           as_floats(numbers_at(b, pixel, c, lanes)) * splat(b.scale);
  });
}

TW_INLINE vi fraction_at(const MixedPixels& gate, int64_t c, int lanes) {
  return whole_in(as_floats(numbers_at(gate, 0, c, lanes)) * splat(gate.scale), -kInt16Limit, kInt16Limit);
}

// Every pixel by the fractions of 32768 that the gate has for its channels.
void gate_by_fractions(const MixedPixels& a, const MixedPixels& gate, int64_t pixels, int64_t channels,
                       const Int16Stage& finish, const MixedTarget& to) {
  const int16_t* x = static_cast<const int16_t*>(a.data);
  int16_t* out = static_cast<int16_t*>(to.data);
#if defined(__AVX2__)
  if (channels >= kInt8Panel) {
    const __m256i low = _mm256_set1_epi16(static_cast<int16_t>(finish.low)),
                  high = _mm256_set1_epi16(static_cast<int16_t>(finish.high));
    int16_t fractions[kGateChannels];
    for (int64_t begin = 0; begin < channels; begin += kGateChannels) {
      const int64_t count = channels - begin < kGateChannels ? channels - begin : kGateChannels;
      const int64_t some = count < kInt8Panel ? kInt8Panel : count,
                    c = begin + count - some;  // of the last few, those before them too
      for (int64_t i = 0; i < some; i += kLanes) {
        const int lanes = some - i < kLanes ? static_cast<int>(some - i) : kLanes;
        store_first_shorts(fractions + i, fraction_at(gate, c + i, lanes), lanes);
      }
      for (int64_t pixel = 0; pixel < pixels; ++pixel) {
        for (int64_t block = 0; block * kInt8Panel < some; ++block) {
          const int64_t i = block_at(block, some);
          const __m256i product =
              _mm256_mulhrs_epi16(load_sixteen(x + pixel * a.step + c + i), load_sixteen(fractions + i));
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + pixel * to.step + c + i),
                              _mm256_min_epi16(_mm256_max_epi16(product, low), high));
        }
      }
    }
    return;
  }
#endif
  const vi zeros = {};
  for (int64_t c = 0; c < channels; c += kLanes) {
    const int lanes = channels - c < kLanes ? static_cast<int>(channels - c) : kLanes;
    const vi fraction = fraction_at(gate, c, lanes);
    for (int64_t pixel = 0; pixel < pixels; ++pixel) {
      const vi product = high_product(first_shorts(x + pixel * a.step + c, lanes), fraction);
      store_first_shorts(out + pixel * to.step + c, smaller(larger(product, zeros + finish.low), zeros + finish.high),
                         lanes);
    }
  }
}

void mul(const MixedPixels& a, const MixedPixels& b, int64_t pixels, int64_t channels, const MixedStage& finish,
         const MixedTarget& to) {
  if (b.step == 0 && b.scale != 0.0f) return gate_by_fractions(a, b, pixels, channels, finish.wide, to);
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
            const MixedStage& finish, const MixedTarget& to) {
  each_vector(pixels, channels, finish, to, [=](int64_t pixel, int64_t c, int lanes) {
    return as_floats(numbers_at(x, pixel, c, lanes)) * load_first(scale + c, lanes) + load_first(shift + c, lanes);
  });
}

}  // namespace
}  // namespace TW_ISA
}  // namespace tw
