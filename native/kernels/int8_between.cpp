// This file, like int8.cpp, is compiled with -ffp-contract=off: every byte is the same on every instruction set.
#include "kernels/int8_between.h"

#include "kernels/int8_finish.h"

namespace tw {
namespace TW_ISA {
namespace {

// Calls value(pixel, channel, lanes) for every vector of channels and stores what it gives as bytes.
template <class Value>
TW_INLINE void each_vector(int64_t pixels, int64_t channels, const ByteFinish& given, ByteTarget to, Value value) {
  with_curve(given, [&](auto known) {
    const ByteFinish finish = given;  // of its own: for all that is known, a byte that is stored might be one of `given`
    for (int64_t pixel = 0; pixel < pixels; ++pixel) {
      uint8_t* out = to.data + pixel * to.step;
      int64_t c = 0;
      for (; c + kLanes <= channels; c += kLanes) {
        store_finished<known.value>(out + c, value(pixel, c, kLanes), finish, kLanes);
      }
      const int rest = static_cast<int>(channels - c);
      if (rest > 0) store_finished<known.value>(out + c, value(pixel, c, rest), finish, rest);
    }
  });
}

TW_INLINE vf first_floats(const float* p, int n) { return n == kLanes ? load(p) : load_first(p, n); }

TW_INLINE vf real_at(const BytePixels& x, int64_t pixel, int64_t channel, int lanes) {
  return real_of(first_bytes(x.data + pixel * x.step + channel, lanes), x.zero, x.scale);
}

void add(const BytePixels& first, const BytePixels& second, int64_t pixels, int64_t channels, const ByteFinish& finish,
         const ByteTarget& to) {
  const BytePixels a = first, b = second;
  each_vector(pixels, channels, finish, to, [=](int64_t pixel, int64_t c, int lanes) {
    return real_at(a, pixel, c, lanes) + real_at(b, pixel, c, lanes);
  });
}

// Of numbers of 9 bits and a sign, lane by lane.
TW_INLINE vi times(vi a, vi b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)(b & 0xffff));
#else
  return a * b;
#endif
}

void mul(const BytePixels& first, const BytePixels& second, int64_t pixels, int64_t channels, const ByteFinish& finish,
         const ByteTarget& to) {
  const BytePixels a = first, b = second;
  each_vector(pixels, channels, finish, to, [=](int64_t pixel, int64_t c, int lanes) {
    const vi other = first_bytes(b.data + pixel * b.step + c, lanes) - b.zero;
    const vi product = times(first_bytes(a.data + pixel * a.step + c, lanes) - a.zero, other);
    return __builtin_convertvector(product, vf) * splat(a.scale);
  });
}

void affine(const BytePixels& given, const float* scale, const float* shift, int64_t pixels, int64_t channels,
            const ByteFinish& finish, const ByteTarget& to) {
  const BytePixels x = given;
  each_vector(pixels, channels, finish, to, [=](int64_t pixel, int64_t c, int lanes) {
    const vi bytes = first_bytes(x.data + pixel * x.step + c, lanes) - x.zero;
    return __builtin_convertvector(bytes, vf) * first_floats(scale + c, lanes) + first_floats(shift + c, lanes);
  });
}

}  // namespace

const Int8BetweenKernels int8_between = {add, mul, affine};

}  // namespace TW_ISA
}  // namespace tw
