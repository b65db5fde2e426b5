// Compiled with -ffp-contract=off, like int8.cpp: every instruction set produces the same integers.
#include "kernels/int16.h"

#include "kernels/int16_depthwise.h"
#include "kernels/int16_elementwise.h"
#include "kernels/int16_products.h"

namespace tw {
namespace TW_ISA {
namespace {

// --- floats, pooling, sums ---

#if defined(__AVX2__)
// Rounds eight pixels of a plane to integers. NaN becomes 0.
TW_INLINE __m256i round_eight(const float* x, __m256 inverse, __m256 most) {
  __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x), inverse);
  v = _mm256_and_ps(v, _mm256_cmp_ps(v, v, _CMP_ORD_Q));
  return _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(v, _mm256_sub_ps(_mm256_setzero_ps(), most)), most));
}

// Quantizes three or four planes to pixels of four values (the fourth is 0 for three planes). Returns the number of
// pixels written, a multiple of eight.
int64_t quantize_fours(const float* x, int64_t channels, int64_t pixels, int64_t plane, float inverse, int most,
                       int16_t* to) {
  const __m256 by = _mm256_set1_ps(inverse), end = _mm256_set1_ps(static_cast<float>(most));
  const __m256i low = _mm256_set1_epi32(0xffff);
  int64_t i = 0;
  for (; i + 8 <= pixels; i += 8) {
    __m256i two[2];
    for (int c = 0; c < 4; c += 2) {
      const __m256i a = round_eight(x + c * plane + i, by, end);
      const __m256i b = c + 1 < channels ? round_eight(x + (c + 1) * plane + i, by, end) : _mm256_setzero_si256();
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

// Quantizes planes to pixels, channel by channel.
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
      const vi whole = round_to_range(v, -most, most);
      int32_t numbers[kLanes];
      std::memcpy(numbers, &whole, sizeof numbers);
      for (int j = 0; j < n; ++j) to[(i + j) * step + c] = static_cast<int16_t>(numbers[j]);
    }
  }
}

void dequantize(const int16_t* x, int64_t step, int64_t channels, int64_t pixels, float scale, float* to,
                int64_t plane) {
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t i = 0; i < pixels; ++i) to[c * plane + i] = static_cast<float>(x[i * step + c]) * scale;
  }
}

// Pools one row of windows; the caller's pad_h moves the first window to this row.
void pool(const int16_t* x, const BytePlane& in, int64_t channels, const PoolWindow& w, bool mean, int16_t* y,
          const BytePlane& out) {
  const int64_t first_y = -w.pad_h < 0 ? 0 : -w.pad_h,
                end_y = -w.pad_h + w.kernel_h > in.height ? in.height : -w.pad_h + w.kernel_h;
  for (int64_t ox = 0; ox < out.width; ++ox) {
    const int64_t begin = ox * w.stride_w - w.pad_w, end = begin + w.kernel_w;
    const int64_t first_x = begin < 0 ? 0 : begin, end_x = end > in.width ? in.width : end;
    const int64_t inside = (end_y - first_y) * (end_x - first_x);
    const int64_t cells = w.count_padding ? w.kernel_h * w.kernel_w : inside > 0 ? inside : 1;
    for (int64_t c = 0; c < channels; c += kLanes) {
      const int n = channels - c < kLanes ? static_cast<int>(channels - c) : kLanes;
      vi acc = (mean ? 0 : -kInt16Limit) - vi{};
      for (int64_t iy = first_y; iy < end_y; ++iy) {
        for (int64_t ix = first_x; ix < end_x; ++ix) {
          const vi v = load_int16(x + iy * in.row_step + ix * in.pixel_step + c, n);
          acc = mean ? acc + v : (vi)select(v > acc, (vf)v, (vf)acc);
        }
      }
      if (mean) acc = round_to_range(as_floats(acc) / splat(static_cast<float>(cells)), -kInt16Limit, kInt16Limit);
      store_int16(y + ox * out.pixel_step + c, acc, n);
    }
  }
}

#if defined(__AVX2__)
// Sums sixteen channels over a plane, two pixels at a time.
TW_INLINE void sums_of_sixteen(const int16_t* x, const BytePlane& in, int32_t* to) {
  const __m256i one = _mm256_set1_epi16(1), none = _mm256_setzero_si256();
  __m256i low = none, high = none;
  for (int64_t iy = 0; iy < in.height; ++iy) {
    const int16_t* row = x + iy * in.row_step;
    for (int64_t ix = 0; ix < in.width; ix += 2) {
      const __m256i a = load_sixteen(row + ix * in.pixel_step),
                    b = ix + 1 < in.width ? load_sixteen(row + (ix + 1) * in.pixel_step) : none;
      low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_unpacklo_epi16(a, b), one));
      high = _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_unpackhi_epi16(a, b), one));
    }
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute2x128_si256(low, high, 0x20));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8), _mm256_permute2x128_si256(low, high, 0x31));
}
#endif

// Sums each channel over a plane.
void sums(const void* x, bool is_int16, const BytePlane& in, int64_t channels, int32_t* y) {
  MixedPixels pixels{x, in.pixel_step, 1.0f, 0, is_int16};
  int64_t c = 0;
#if defined(__AVX2__)
  for (; is_int16 && c + kInt8Panel <= channels; c += kInt8Panel)
    sums_of_sixteen(static_cast<const int16_t*>(x) + c, in, y + c);
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
