// Compiled with -ffp-contract=off, like int8.cpp: every instruction set produces the same bytes.
#include "kernels/int8_ops.h"

#include "common/simd.h"
#include "kernels/int8_requantize.h"
#include "kernels/math.h"
#include "kernels/rounding.h"

namespace tw {
namespace TW_ISA {
namespace {

// round(x * inverse) + zero in [0, 255], ties to even; a NaN becomes the zero point. Plain arithmetic that the compiler
// vectorizes.
TW_INLINE int32_t to_byte(float x, float inverse, int zero) {
  const float scaled = x * inverse;
  const float low = static_cast<float>(-zero), high = static_cast<float>(255 - zero);
  float v = scaled == scaled ? scaled : 0.0f;
  v = v < low ? low : v;
  v = v > high ? high : v;
  return static_cast<int32_t>(round_even(v)) + zero;
}

void quantize(const float* x, int64_t n, float inverse, int zero, uint8_t* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<uint8_t>(to_byte(x[i], inverse, zero));
}

// Quantizes four channels of a row of pixels into the bytes of 32-bit words.
template <int kChannels>
TW_INLINE void four_channels(const float* x, int64_t plane, int64_t n, float inverse, int zero, int32_t* to) {
  for (int64_t i = 0; i < n; ++i) {
    int32_t four = 0;
    for (int c = 0; c < 4; ++c) four |= (c < kChannels ? to_byte(x[c * plane + i], inverse, zero) : zero) << (8 * c);
    to[i] = four;
  }
}

// Quantizes groups of four channels, a strip of a row at a time: each pixel's four bytes are stored as one 32-bit word.
void quantize_image(const float* x, int64_t channels, float inverse, int zero, const BytePlane& plane, uint8_t* to) {
  constexpr int64_t kStrip = 64;  // chosen: pixels
  int32_t strip[kStrip];
  const int64_t size = plane.height * plane.width;
  for (int64_t y = 0; y < plane.height; ++y) {
    for (int64_t c = 0; c < channels; c += 4) {
      for (int64_t left = 0; left < plane.width; left += kStrip) {
        const int64_t n = plane.width - left < kStrip ? plane.width - left : kStrip;
        const float* from = x + c * size + y * plane.width + left;
        switch (channels - c) {
          case 1:
            four_channels<1>(from, size, n, inverse, zero, strip);
            break;
          case 2:
            four_channels<2>(from, size, n, inverse, zero, strip);
            break;
          case 3:
            four_channels<3>(from, size, n, inverse, zero, strip);
            break;
          default:
            four_channels<4>(from, size, n, inverse, zero, strip);
        }
        uint8_t* at = to + y * plane.row_step + left * plane.pixel_step + c;
        for (int64_t i = 0; i < n; ++i) std::memcpy(at + i * plane.pixel_step, strip + i, 4);
      }
    }
  }
}

constexpr float kLargestFloat = 3.4028234663852886e38f;  // definition: FLT_MAX

float quantize_row(const float* x, int64_t n, int64_t padded, uint8_t* q) {
  vf most = {};  // the maximum ignores NaNs, which become 128, the zero point
  int64_t whole = n / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    const vf v = load(x + i);
    most = vmax(select(v < splat(0.0f), -v, v), most);
  }
  const vf remainder = load_first(x + whole, static_cast<int>(n - whole));
  const float top = max_lanes(vmax(select(remainder < splat(0.0f), -remainder, remainder), most));
  const float ratio = 127.0f / top;
  const float inverse = top > 0.0f && ratio <= kLargestFloat ? ratio : 0.0f;  // values this small become zero
  for (int64_t i = 0; i < n; ++i) q[i] = static_cast<uint8_t>(to_byte(x[i], inverse, 128));
  std::memset(q + n, 128, padded - n);
  return top / 127.0f;
}

// Multiplicative hashing in independent chains. Multiplication by an odd number is invertible modulo 2^32, so a single
// changed float always changes the hash. The rotation moves the sign into lower bits: without it two changed signs
// would cancel. The factors are 2^32 and 2^64 divided by the golden ratio (Knuth).
uint64_t fingerprint(const float* x, int64_t n) {
  typedef uint32_t vu __attribute__((vector_size(kLanes * 4)));
  constexpr int kChains = 8;  // chosen: hides the latency of the multiplication
  vu chain[kChains] = {};
  int64_t i = 0;
  for (; i + kChains * kLanes <= n; i += kChains * kLanes) {
#pragma GCC unroll 8
    for (int c = 0; c < kChains; ++c) {
      vu v;
      std::memcpy(&v, x + i + c * kLanes, sizeof(v));
      v += chain[c];
      chain[c] = ((v << 15) | (v >> 17)) * 0x9e3779b1u;
    }
  }
  uint64_t all = static_cast<uint64_t>(n);
  for (int c = 0; c < kChains; ++c) {
    for (int lane = 0; lane < kLanes; ++lane) all = (all + chain[c][lane]) * 0x9e3779b97f4a7c15u;
  }
  for (; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    all = (all + bits) * 0x9e3779b97f4a7c15u;
  }
  return all;
}

void dequantize_image(const uint8_t* x, const BytePlane& plane, int64_t channels, float scale, int zero, float* to) {
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t y = 0; y < plane.height; ++y) {
      const uint8_t* from = x + y * plane.row_step + c;
      for (int64_t i = 0; i < plane.width; ++i) *to++ = static_cast<float>(from[i * plane.pixel_step] - zero) * scale;
    }
  }
}

void dequantize(const uint8_t* x, int64_t n, float scale, int zero, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(x[i] - zero) * scale;
}

// --- windows ---

// The part of a window inside the image.
struct Window {
  int64_t top, bottom, left, right;
};

TW_INLINE Window window_at(const PoolWindow& w, const BytePlane& in, int64_t oy, int64_t ox) {
  const int64_t top = oy * w.stride_h - w.pad_h, left = ox * w.stride_w - w.pad_w;
  const int64_t bottom = top + w.kernel_h, right = left + w.kernel_w;
  return {top < 0 ? 0 : top, bottom > in.height ? in.height : bottom, left < 0 ? 0 : left,
          right > in.width ? in.width : right};
}

// The maximum over a window for N channels.
template <int N>
TW_INLINE void max_of_channels(const uint8_t* x, const BytePlane& in, const Window& w, uint8_t* y) {
  typedef uint8_t vbytes __attribute__((vector_size(N)));
  vbytes most = {};
  for (int64_t iy = w.top; iy < w.bottom; ++iy) {
    for (int64_t ix = w.left; ix < w.right; ++ix) {
      vbytes v;
      std::memcpy(&v, x + iy * in.row_step + ix * in.pixel_step, N);
      most = v > most ? v : most;
    }
  }
  std::memcpy(y, &most, N);
}

// Uses the widest vectors that the channels fill. The last vector overlaps the one before it if they do not divide
// evenly.
template <int N = 4 * kLanes>
TW_INLINE void max_of_window(const uint8_t* x, const BytePlane& in, int64_t channels, const Window& w, uint8_t* y) {
  if constexpr (N > 1) {
    if (channels < N) return max_of_window<N / 2>(x, in, channels, w, y);
  }
  for (int64_t first = 0; first < channels; first += N) {
    const int64_t c = first + N <= channels ? first : channels - N;
    max_of_channels<N>(x + c, in, w, y + c);
  }
}

void max_pool(const uint8_t* x, const BytePlane& in, int64_t channels, const PoolWindow& w, uint8_t* y,
              const BytePlane& out) {
  for (int64_t oy = 0; oy < out.height; ++oy) {
    for (int64_t ox = 0; ox < out.width; ++ox) {
      max_of_window(x, in, channels, window_at(w, in, oy, ox), y + oy * out.row_step + ox * out.pixel_step);
    }
  }
}

// Sums a window over `lanes` channels.
TW_INLINE vi sum_of_window(const uint8_t* x, const BytePlane& in, const Window& w, int lanes) {
  vi sum = {};
  for (int64_t iy = w.top; iy < w.bottom; ++iy) {
    for (int64_t ix = w.left; ix < w.right; ++ix) sum += load_bytes(x + iy * in.row_step + ix * in.pixel_step, lanes);
  }
  return sum;
}

// Division in float32 rounds exactly: a quotient of integers below 2^23 is either on a rounding boundary or at least 1
// / (2 n) away from it.
void avg_pool(const uint8_t* x, const BytePlane& in, int64_t channels, const PoolWindow& w, int zero, uint8_t* y,
              const BytePlane& out) {
  const int64_t cells = w.kernel_h * w.kernel_w;
  for (int64_t oy = 0; oy < out.height; ++oy) {
    for (int64_t ox = 0; ox < out.width; ++ox) {
      const Window part = window_at(w, in, oy, ox);
      const int64_t inside = (part.bottom - part.top) * (part.right - part.left);
      const int32_t outside = w.count_padding ? static_cast<int32_t>((cells - inside) * zero) : 0;
      const vf count = splat(static_cast<float>(w.count_padding ? cells : inside));
      uint8_t* to = y + oy * out.row_step + ox * out.pixel_step;
      for (int64_t c = 0; c < channels; c += kLanes) {
        const int lanes = channels - c < kLanes ? static_cast<int>(channels - c) : kLanes;
        const vf sum = __builtin_convertvector(sum_of_window(x + c, in, part, lanes) + outside, vf);
        store_bytes(to + c, __builtin_convertvector(round_even(sum / count), vi), lanes);
      }
    }
  }
}

constexpr int64_t kSumBlock = 64;  // hardware: bytes of a cache line; channels summed at a time

// Sums pixels in 16 bits as long as they cannot overflow, then in 32 bits.
TW_INLINE void sum_pixels(const uint8_t* x, const BytePlane& in, int64_t n, int32_t* sums) {
  constexpr int64_t kPixels = 65535 / 255;  // definition: the most bytes whose sum fits 16 bits
  for (int64_t c = 0; c < n; ++c) sums[c] = 0;
  for (int64_t iy = 0; iy < in.height; ++iy) {
    for (int64_t left = 0; left < in.width; left += kPixels) {
      const int64_t right = in.width - left < kPixels ? in.width : left + kPixels;
      uint16_t part[kSumBlock] = {};
      for (int64_t ix = left; ix < right; ++ix) {
        const uint8_t* pixel = x + iy * in.row_step + ix * in.pixel_step;
        for (int64_t c = 0; c < n; ++c) part[c] = static_cast<uint16_t>(part[c] + pixel[c]);
      }
      for (int64_t c = 0; c < n; ++c) sums[c] += part[c];
    }
  }
}

void global_pool(const uint8_t* x, const BytePlane& in, int64_t channels, float scale, int zero, float out_inverse,
                 int out_zero, uint8_t* y) {
  const float count = static_cast<float>(in.height * in.width), zero_point = static_cast<float>(zero);
  int32_t sums[kSumBlock];
  for (int64_t first = 0; first < channels; first += kSumBlock) {
    const int64_t n = channels - first < kSumBlock ? channels - first : kSumBlock;
    n == kSumBlock ? sum_pixels(x + first, in, kSumBlock, sums) : sum_pixels(x + first, in, n, sums);
    for (int64_t c = 0; c < n; ++c) {
      const float mean = (static_cast<float>(sums[c]) / count - zero_point) * scale;
      y[first + c] = static_cast<uint8_t>(to_byte(mean, out_inverse, out_zero));
    }
  }
  std::memset(y + channels, out_zero, (channels + 3) / 4 * 4 - channels);
}

// Returns whether the gather interleaves two halves: a channel shuffle of two groups.
bool is_two_group_shuffle(const int32_t* channels, int64_t count) {
  if (count % 2 != 0) return false;
  for (int64_t i = 0; i < count; ++i) {
    if (channels[i] != i % 2 * (count / 2) + i / 2) return false;
  }
  return true;
}

// y = a[0], b[0], a[1], b[1], ...
TW_INLINE void interleave(const uint8_t* a, const uint8_t* b, int64_t n, uint8_t* y) {
  int64_t i = 0;
#if defined(__x86_64__)
  for (; i + 16 <= n; i += 16) {
    const __m128i p = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a + i));
    const __m128i q = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b + i));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y + 2 * i), _mm_unpacklo_epi8(p, q));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y + 2 * i + 16), _mm_unpackhi_epi8(p, q));
  }
#endif
  for (; i < n; ++i) {
    y[2 * i] = a[i];
    y[2 * i + 1] = b[i];
  }
}

void gather_channels(const uint8_t* x, int64_t x_step, const int32_t* channels, int64_t count, int64_t pixels,
                     uint8_t* y, int64_t y_step) {
  const bool is_shuffle = is_two_group_shuffle(channels, count);
  for (int64_t p = 0; p < pixels; ++p, x += x_step, y += y_step) {
    if (is_shuffle) {
      interleave(x, x + count / 2, count / 2, y);
    } else {
      for (int64_t i = 0; i < count; ++i) y[i] = x[channels[i]];
    }
  }
}

}  // namespace

const Int8OpsKernels int8_ops = {quantize_image, quantize, quantize_row, fingerprint, dequantize_image,
                                 dequantize,     max_pool, avg_pool,     global_pool, gather_channels};

}  // namespace TW_ISA
}  // namespace tw
