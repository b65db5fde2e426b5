#include "kernels/channels_last.h"

#include "common/thread_pool.h"
#include "kernels/activation.h"
#include "kernels/conv_layout.h"

namespace tw {
namespace TW_ISA {
namespace {

// Calls f(first, last) for runs of `count` items of `floats` floats each, divided among the threads.
template <class F>
void for_runs(int64_t count, int64_t floats, F&& f) {
  const int64_t threads = count * floats < kTaskElements ? 1 : num_threads();
  const int64_t runs = threads == 1 ? 1 : smaller(count, 4 * threads);
  parallel_near(static_cast<int>(runs), [&](int run) { f(cut(count, runs, run), cut(count, runs, run + 1)); });
}

TW_INLINE void put(float* to, vf v, int64_t count) {
  count >= kLanes ? store(to, v) : store_first(to, v, static_cast<int>(count));
}

// Converts NCHW to NHWC, a row of an image at a time.
void from_planes(const LastImage& x, const LastImage& y) {
  const int64_t plane = x.h * x.w;
  for_runs(x.n * x.h, x.w * x.c, [&](int64_t first, int64_t last) {
    Magnitude unused;
    for (int64_t row = first; row < last; ++row) {
      const float* image = x.data + row / x.h * x.c * plane;
      for (int64_t i = 0; i < x.w; i += kLanes) {
        const int64_t count = smaller(kLanes, x.w - i);
        int64_t offsets[kLanes];
        for (int64_t p = 0; p < count; ++p) offsets[p] = (row * x.w + i + p) * y.pitch;
        pack_pixels(image, plane, x.c, row % x.h * x.w + i, count, offsets, y.data, x.c, unused);
      }
    }
  });
}

// Writes each channel of an image as a row of its pixels; rows are `row` floats apart.
void to_rows(const LastImage& x, int64_t row, float* to) {
  const PlaneEpilogue none{nullptr, nullptr, ConvActivation::none};
  const int64_t plane = x.h * x.w, vectors = ceil_div(x.c, kLanes);
  for_runs(x.n * vectors, plane * kLanes, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t n = i / vectors, c = i % vectors * kLanes;
      unpack_pixels(x.data + n * plane * x.pitch + c, x.pitch, plane, smaller(kLanes, x.c - c), none,
                    to + (n * x.c + c) * row, row);
    }
  });
}

void transpose(const LastImage& x, const LastImage& y) { to_rows(x, y.pitch, y.data); }

void gather(const LastImage& x, const int32_t* pixels, int64_t count, const LastImage& y) {
  const size_t bytes = static_cast<size_t>(y.c) * sizeof(float);
  for_runs(y.pixels(), y.c, [&](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; ++p) {
      std::memcpy(y.data + p * y.pitch, x.data + (p / count * x.h * x.w + pixels[p % count]) * x.pitch, bytes);
    }
  });
}

// Copies channels-last images (NHWC, with pitch) to planes (NCHW).
void to_planes(const LastImage& x, const LastImage& y) {
  const int64_t plane = x.h * x.w;
  if (plane == 1) {
    for (int64_t i = 0; i < x.n; ++i) {
      std::memcpy(y.data + i * x.c, x.data + i * x.pitch, static_cast<size_t>(x.c) * sizeof(float));
    }
    return;
  }
  to_rows(x, plane, y.data);
}

struct Window {
  int64_t y0, y1, x0, x1;
};

Window window_at(const PoolShape& s, int64_t oy, int64_t ox) {
  const int64_t y = oy * s.sh - s.ph, x = ox * s.sw - s.pw;
  return {larger(0, y), smaller(s.h, y + s.kh), larger(0, x), smaller(s.w, x + s.kw)};
}

// Calls of_window(from, window, out) for every output pixel, with up to four vectors of channels in `out` to compute at
// once.
template <class F>
void pool_rows(const PoolShape& s, const LastImage& x, const LastImage& y, F&& of_window) {
  constexpr int kTogether = 4;  // definition: vectors of channels
  for_runs(x.n * s.oh, s.ow * x.c * s.kh * s.kw, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const float* image = x.data + row / s.oh * s.h * s.w * x.pitch;
      for (int64_t ox = 0; ox < s.ow; ++ox) {
        const Window w = window_at(s, row % s.oh, ox);
        float* to = y.data + (row * s.ow + ox) * y.pitch;
        int64_t c = 0;
        for (; c + kTogether * kLanes <= x.c; c += kTogether * kLanes) {
          vf out[kTogether];
          of_window(image + c, w, out);
          for (int v = 0; v < kTogether; ++v) store(to + c + v * kLanes, out[v]);
        }
        for (; c < x.c; c += kLanes) {
          vf out[1];
          of_window(image + c, w, out);
          put(to + c, out[0], x.c - c);
        }
      }
    }
  });
}

// Calls f(pointer) for the pixels of a window, with the address of the channel `from` points to.
template <class F>
TW_INLINE void for_pixels(const PoolShape& s, const LastImage& x, const Window& w, const float* from, F&& f) {
  for (int64_t iy = w.y0; iy < w.y1; ++iy) {
    const float* at = from + (iy * s.w + w.x0) * x.pitch;
    for (int64_t ix = w.x0; ix < w.x1; ++ix, at += x.pitch) f(at);
  }
}

// Max pooling of channels-last images.
void max_pool(const PoolShape& s, const LastImage& x, const LastImage& y) {
  pool_rows(s, x, y, [&](const float* from, const Window& w, auto& out) {
    constexpr int kVectors = sizeof(out) / sizeof(vf);
    vi nan[kVectors] = {};  // lanes that met a NaN, which the maximum instruction ignores
    for (int v = 0; v < kVectors; ++v) out[v] = splat(-__builtin_inff());
    for_pixels(s, x, w, from, [&](const float* at) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const vf value = load(at + v * kLanes);
        nan[v] |= value != value;
        out[v] = vmax(value, out[v]);
      }
    });
    for (int v = 0; v < kVectors; ++v) out[v] = select(nan[v], splat(__builtin_nanf("")), out[v]);
  });
}

// Average pooling of channels-last images; `count_padding` divides by the whole window, also at the edges.
void avg_pool(const PoolShape& s, bool count_padding, const LastImage& x, const LastImage& y) {
  pool_rows(s, x, y, [&](const float* from, const Window& w, auto& out) {
    constexpr int kVectors = sizeof(out) / sizeof(vf);
    const int64_t count = count_padding ? s.kh * s.kw : (w.y1 - w.y0) * (w.x1 - w.x0);
    for (int v = 0; v < kVectors; ++v) out[v] = vf{};
    for_pixels(s, x, w, from, [&](const float* at) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) out[v] += load(at + v * kLanes);
    });
    for (int v = 0; v < kVectors; ++v) out[v] = out[v] / static_cast<float>(count);
  });
}

// Sums rows first, then their sums: long sums of similar values lose less precision.
void global_mean(const LastImage& x, const LastImage& y) {
  const int64_t vectors = ceil_div(x.c, kLanes);
  for_runs(x.n * vectors, x.h * x.w * kLanes, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t n = i / vectors, c = i % vectors * kLanes;
      const float* from = x.data + n * x.h * x.w * x.pitch + c;
      vf total = {};
      for (int64_t row = 0; row < x.h; ++row) {
        vf sum = {};
        for (int64_t column = 0; column < x.w; ++column, from += x.pitch) sum += load(from);
        total += sum;
      }
      put(y.data + n * y.pitch + c, total / static_cast<float>(x.h * x.w), x.c - c);
    }
  });
}

// y = act(f(a, b)) by pixel.
template <class F>
void binary(const LastImage& a, const LastImage& b, ConvActivation activation, const LastImage& y, F&& f) {
  const bool one = b.h * b.w == 1 && a.h * a.w != 1;
  const int64_t plane = a.h * a.w;
  for_runs(a.pixels(), a.c, [&](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; ++p) {
      const float *from = a.data + p * a.pitch, *other = b.data + (one ? p / plane : p) * b.pitch;
      float* to = y.data + p * y.pitch;
      for (int64_t c = 0; c < a.c; c += kLanes)
        put(to + c, activated(f(load(from + c), load(other + c)), activation), a.c - c);
    }
  });
}

// Computes y = activation(a op b) pixel by pixel for channels-last images.
void binary_of_kind(BinaryKind kind, const LastImage& a, const LastImage& b, ConvActivation activation,
                    const LastImage& y) {
  switch (kind) {
    case BinaryKind::add:
      return binary(a, b, activation, y, [](vf p, vf q) { return p + q; });
    case BinaryKind::sub:
      return binary(a, b, activation, y, [](vf p, vf q) { return p - q; });
    case BinaryKind::mul:
      return binary(a, b, activation, y, [](vf p, vf q) { return p * q; });
  }
}

void affine(const LastImage& x, const float* scale, const float* shift, ConvActivation activation, const LastImage& y) {
  for_runs(x.pixels(), x.c, [&](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; ++p) {
      const float* from = x.data + p * x.pitch;
      float* to = y.data + p * y.pitch;
      for (int64_t c = 0; c < x.c; c += kLanes) {
        vf v = load(from + c);
        if (scale != nullptr) v = multiply_add(load(shift + c), v, load(scale + c));
        put(to + c, activated(v, activation), x.c - c);
      }
    }
  });
}

// Sums f(v) over a run of channels of all pixels of an image: rows first, then their sums.
template <class F>
float sum_of_run(const LastImage& x, const float* from, int64_t channels, F&& f) {
  vf total = {};
  float remainder = 0.0f;
  for (int64_t row = 0; row < x.h; ++row) {
    vf sum = {};
    float partial = 0.0f;
    for (int64_t column = 0; column < x.w; ++column, from += x.pitch) {
      int64_t c = 0;
      for (; c + kLanes <= channels; c += kLanes) sum += f(load(from + c));
      for (; c < channels; ++c) partial += f(splat(from[c]))[0];
    }
    total += sum;
    remainder += partial;
  }
  return sum_lanes(total) + remainder;
}

// Two passes over the data for mean and variance, which avoids cancellation, and one to normalize.
void group_norm(const LastImage& x, int64_t groups, const float* weight, const float* bias, float eps,
                const LastImage& y) {
  const int64_t each = x.c / groups, plane = x.h * x.w;
  const float count = static_cast<float>(each * plane);
  for_runs(x.n * groups, each * plane, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t n = i / groups, start = i % groups * each;
      const float* from = x.data + n * plane * x.pitch + start;
      const float mean = sum_of_run(x, from, each, [](vf v) { return v; }) / count;
      const float variance = sum_of_run(x, from, each, [=](vf v) { return (v - mean) * (v - mean); }) / count;
      const vf scale = splat(1.0f / __builtin_sqrtf(variance + eps));
      float* to = y.data + n * plane * y.pitch + start;
      for (int64_t p = 0; p < plane; ++p, from += x.pitch, to += y.pitch) {
        for (int64_t c = 0; c < each; c += kLanes) {
          put(to + c, multiply_add(load(bias + start + c), (load(from + c) - mean) * scale, load(weight + start + c)),
              each - c);
        }
      }
    }
  });
}

// Interleaves two vectors.
TW_INLINE void interleave(vf a, vf b, float* to) {
  const vf low = pairs_low(a, b),
           high = pairs_high(a, b);  // in every 128 bits: the first two lanes of both, and the last two
#if defined(__AVX512F__)
  store(to, __builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
  store(to + kLanes, __builtin_shufflevector(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
#elif defined(__AVX2__)
  store(to, __builtin_shufflevector(low, high, 0, 1, 2, 3, 8, 9, 10, 11));
  store(to + kLanes, __builtin_shufflevector(low, high, 4, 5, 6, 7, 12, 13, 14, 15));
#else
  store(to, low);
  store(to + kLanes, high);
#endif
}

// Returns whether the gather interleaves two halves: a channel shuffle of two groups.
bool is_two_group_shuffle(const int32_t* channels, int64_t count) {
  if (count % 2 != 0) return false;
  for (int64_t c = 2; c < count; ++c) {
    if (channels[c] != channels[c - 2] + 1) return false;
  }
  return true;
}

void gather_channels(const LastImage& x, const int32_t* channels, const LastImage& y) {
  // Vectors of each half; remaining channels are copied one by one.
  const int64_t vectors = is_two_group_shuffle(channels, y.c) ? y.c / (2 * kLanes) : 0;
  for_runs(y.pixels(), y.c, [&](int64_t first, int64_t last) {
    for (int64_t p = first; p < last; ++p) {
      const float* from = x.data + p * x.pitch;
      float* to = y.data + p * y.pitch;
      for (int64_t v = 0; v < vectors; ++v) {
        interleave(load(from + channels[0] + v * kLanes), load(from + channels[1] + v * kLanes), to + 2 * v * kLanes);
      }
      for (int64_t c = vectors * 2 * kLanes; c < y.c; ++c) to[c] = from[channels[c]];
    }
  });
}

}  // namespace

const ChannelsLastOps channels_last = {from_planes, to_planes,       max_pool,   avg_pool, global_mean, binary_of_kind,
                                       affine,      gather_channels, group_norm, gather,   transpose};

}  // namespace TW_ISA
}  // namespace tw
