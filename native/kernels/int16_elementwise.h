// Elementwise operators on int16 pixels: sums, gates, per-channel affine. Included by int16.cpp, which is compiled with
// -ffp-contract=off.
#pragma once

#include "kernels/int16_products.h"

namespace tw {
namespace TW_ISA {
namespace {

constexpr int64_t kGateChannels = 512;  // chosen: gate channels per pass over the pixels, 1 KiB of L1

// Loads a vector of channels minus their zero point.
TW_INLINE vi numbers_at(const MixedPixels& x, int64_t pixel, int64_t c, int lanes) {
  const int64_t at = pixel * x.step + c;
  return (x.is_int16 ? load_int16(static_cast<const int16_t*>(x.data) + at, lanes)
                     : load_bytes(static_cast<const uint8_t*>(x.data) + at, lanes)) -
         x.zero;
}

#if defined(__AVX2__)
// Sixteen channels in one or two vectors.
struct Sixteen {
  vf v[kVectors];
};
struct SixteenWhole {
  vi v[kVectors];
};

// Loads a vector of channels whose data type is known at compile time.
template <bool kInt16>
TW_INLINE vi load_sixteen_lanes(const MixedPixels& x, int64_t pixel, int64_t c) {
  MixedPixels typed = x;
  typed.is_int16 = kInt16;
  return numbers_at(typed, pixel, c, kLanes);
}

// For every block of sixteen channels, calls make(channel) once and the function it returns for every pixel.
// Per-channel operands are therefore loaded once. The last block overlaps the one before it if the channels are not a
// multiple of 16.
template <class Make>
TW_INLINE void each_sixteen(int64_t pixels, int64_t channels, const Int16Stage& stage, const MixedTarget& to,
                            Make make) {
  const Int16PiecewiseVectors curve(stage);
  const vf most = splat(Int16PiecewiseVectors::most(stage));
  const bool is_piecewise = stage.activation == Int16Activation::piecewise;
  for (int64_t block = 0; block * kInt8Panel < channels; ++block) {
    const int64_t c = block_at(block, channels);
    const auto value = make(c);
    for (int64_t pixel = 0; pixel < pixels; ++pixel) {
      const Sixteen values = value(pixel);
#if defined(__AVX512F__)
      const __m256i whole = round_sixteen(values.v[0], most);
      const __m256i numbers = is_piecewise ? curve.evaluate(whole) : curve.clamp(whole);
#else
      const __m256i whole = round_sixteen(values.v[0], values.v[1], most);
      const __m256i numbers = _mm256_permute4x64_epi64(is_piecewise ? curve.evaluate(whole) : curve.clamp(whole), 0xd8);
#endif
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<int16_t*>(to.data) + pixel * to.step + c), numbers);
    }
  }
}

// Returns whether each_sixteen applies.
bool fits_sixteen_lanes(int64_t channels, const MixedStage& stage, const MixedTarget& to) {
  return to.is_int16 && channels >= kInt8Panel && Int16PiecewiseVectors::supports(stage.int16_stage);
}

template <bool kValue>
struct BoolConstant {
  static constexpr bool value = kValue;
};

// Calls f with two booleans as compile-time constants.
template <class F>
TW_INLINE void dispatch_bools(bool a, bool b, F&& f) {
  if (a) return b ? f(BoolConstant<true>(), BoolConstant<true>()) : f(BoolConstant<true>(), BoolConstant<false>());
  b ? f(BoolConstant<false>(), BoolConstant<true>()) : f(BoolConstant<false>(), BoolConstant<false>());
}
#endif

// Calls value(pixel, channel, lanes) for every vector of channels and stores the requantized result.
template <class Value>
TW_INLINE void each_vector(int64_t pixels, int64_t channels, const MixedStage& stage, const MixedTarget& to,
                           Value value) {
  dispatch_approximation(stage.uint8_stage, [&](auto constant) {
    for (int64_t pixel = 0; pixel < pixels; ++pixel) {
      for (int64_t c = 0; c < channels; c += kLanes) {
        const int lanes = channels - c < kLanes ? static_cast<int>(channels - c) : kLanes;
        const vf v = value(pixel, c, lanes);
        if (to.is_int16) {
          requantize_store_int16(static_cast<int16_t*>(to.data) + pixel * to.step + c, v, stage.int16_stage, lanes);
        } else {
          requantize_store<constant.value>(static_cast<uint8_t*>(to.data) + pixel * to.step + c, v, stage.uint8_stage,
                                           lanes);
        }
      }
    }
  });
}

// a + b, dequantized by their scales; sixteen channels at a time where possible.
void add(const MixedPixels& a, const MixedPixels& b, int64_t pixels, int64_t channels, const MixedStage& stage,
         const MixedTarget& to) {
#if defined(__AVX2__)
  if (fits_sixteen_lanes(channels, stage, to)) {
    return dispatch_bools(a.is_int16, b.is_int16, [&](auto a_is_int16, auto b_is_int16) {
      each_sixteen(pixels, channels, stage.int16_stage, to, [&](int64_t c) {
        return [=](int64_t pixel) {
          Sixteen sum;
          for (int v = 0; v < kVectors; ++v) {
            sum.v[v] = as_floats(load_sixteen_lanes<a_is_int16.value>(a, pixel, c + v * kLanes)) * splat(a.scale) +
                       as_floats(load_sixteen_lanes<b_is_int16.value>(b, pixel, c + v * kLanes)) * splat(b.scale);
          }
          return sum;
        };
      });
    });
  }
#endif
  each_vector(pixels, channels, stage, to, [=](int64_t pixel, int64_t c, int lanes) {
    return as_floats(numbers_at(a, pixel, c, lanes)) * splat(a.scale) +
           as_floats(numbers_at(b, pixel, c, lanes)) * splat(b.scale);
  });
}

// A vector of the gate as fixed-point fractions of 2^15.
TW_INLINE vi gate_fraction_at(const MixedPixels& gate, int64_t c, int lanes) {
  return round_to_range(as_floats(numbers_at(gate, 0, c, lanes)) * splat(gate.scale), -kInt16Limit, kInt16Limit);
}

// Multiplies every pixel by the gate as fixed-point fractions of 2^15, one per channel. A short last block overlaps the
// one before it.
void gate_by_fractions(const MixedPixels& a, const MixedPixels& gate, int64_t pixels, int64_t channels,
                       const Int16Stage& stage, const MixedTarget& to) {
  const int16_t* x = static_cast<const int16_t*>(a.data);
  int16_t* out = static_cast<int16_t*>(to.data);
#if defined(__AVX2__)
  if (channels >= kInt8Panel) {
    const __m256i low = _mm256_set1_epi16(static_cast<int16_t>(stage.low)),
                  high = _mm256_set1_epi16(static_cast<int16_t>(stage.high));
    int16_t fractions[kGateChannels];
    for (int64_t begin = 0; begin < channels; begin += kGateChannels) {
      const int64_t count = channels - begin < kGateChannels ? channels - begin : kGateChannels;
      const int64_t width = count < kInt8Panel ? kInt8Panel : count, c = begin + count - width;
      for (int64_t i = 0; i < width; i += kLanes) {
        const int lanes = width - i < kLanes ? static_cast<int>(width - i) : kLanes;
        store_int16(fractions + i, gate_fraction_at(gate, c + i, lanes), lanes);
      }
      for (int64_t pixel = 0; pixel < pixels; ++pixel) {
        for (int64_t block = 0; block * kInt8Panel < width; ++block) {
          const int64_t i = block_at(block, width);
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
    const vi fraction = gate_fraction_at(gate, c, lanes);
    for (int64_t pixel = 0; pixel < pixels; ++pixel) {
      const vi product = high_product(load_int16(x + pixel * a.step + c, lanes), fraction);
      store_int16(out + pixel * to.step + c, smaller(larger(product, zeros + stage.low), zeros + stage.high), lanes);
    }
  }
}

// a * b; a gate (one broadcast pixel) is loaded once per block of channels.
void mul(const MixedPixels& a, const MixedPixels& b, int64_t pixels, int64_t channels, const MixedStage& stage,
         const MixedTarget& to) {
  if (b.step == 0 && b.scale != 0.0f) return gate_by_fractions(a, b, pixels, channels, stage.int16_stage, to);
#if defined(__AVX2__)
  if (b.step == 0 && fits_sixteen_lanes(channels, stage, to)) {  // a gate
    return dispatch_bools(a.is_int16, b.is_int16, [&](auto a_is_int16, auto b_is_int16) {
      each_sixteen(pixels, channels, stage.int16_stage, to, [&](int64_t c) {
        SixteenWhole gate;
        for (int v = 0; v < kVectors; ++v)
          gate.v[v] = load_sixteen_lanes<b_is_int16.value>(b, 0, c + v * kLanes) & 0xffff;
        return [=](int64_t pixel) {
          Sixteen product;
          for (int v = 0; v < kVectors; ++v) {
            const vi whole =
                add_products(vi{}, load_sixteen_lanes<a_is_int16.value>(a, pixel, c + v * kLanes), gate.v[v]);
            product.v[v] = as_floats(whole) * splat(a.scale);
          }
          return product;
        };
      });
    });
  }
#endif
  each_vector(pixels, channels, stage, to, [=](int64_t pixel, int64_t c, int lanes) {
    const vi product = add_products(vi{}, numbers_at(a, pixel, c, lanes), numbers_at(b, pixel, c, lanes) & 0xffff);
    return as_floats(product) * splat(a.scale);
  });
}

void affine(const MixedPixels& x, const float* scale, const float* shift, int64_t pixels, int64_t channels,
            const MixedStage& stage, const MixedTarget& to) {
  each_vector(pixels, channels, stage, to, [=](int64_t pixel, int64_t c, int lanes) {
    return as_floats(numbers_at(x, pixel, c, lanes)) * load_first(scale + c, lanes) + load_first(shift + c, lanes);
  });
}

}  // namespace
}  // namespace TW_ISA
}  // namespace tw
