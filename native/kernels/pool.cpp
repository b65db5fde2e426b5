#include "kernels/pool.h"

#include <cmath>

#include "common/simd.h"
#include "common/thread_pool.h"

namespace tw {
namespace TW_ISA {
namespace {

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Calls f(plane) for every plane, in tasks of about 16 K input values.
template <class F>
void for_planes(const PoolShape& s, F&& f) {
  const int64_t tasks = larger(1, smaller(s.planes, s.planes * s.h * s.w / 16384));
  parallel_for(static_cast<int>(smaller(tasks, 4096)), [&](int task) {
    const int64_t shares = smaller(tasks, 4096);
    for (int64_t p = s.planes * task / shares; p < s.planes * (task + 1) / shares; ++p) f(p);
  });
}

struct Window {
  int64_t y0, y1, x0, x1;  // inside the plane
};

Window window_at(const PoolShape& s, int64_t oy, int64_t ox) {
  const int64_t y = oy * s.sh - s.ph, x = ox * s.sw - s.pw;
  return {larger(y, 0), smaller(y + s.kh, s.h), larger(x, 0), smaller(x + s.kw, s.w)};
}

// Splits two consecutive vectors into their even and their odd elements.
#if defined(__AVX512F__)
TW_INLINE void split_even_odd(vf a, vf b, vf& even, vf& odd) {
  even = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  odd = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
#elif defined(__AVX2__)
TW_INLINE void split_even_odd(vf a, vf b, vf& even, vf& odd) {
  even = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
  odd = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
}
#else
TW_INLINE void split_even_odd(vf a, vf b, vf& even, vf& odd) {
  even = __builtin_shufflevector(a, b, 0, 2, 4, 6);
  odd = __builtin_shufflevector(a, b, 1, 3, 5, 7);
}
#endif

// Replaces the lanes of the maximum and of its index where v is larger or NaN.
TW_INLINE void take_larger(vf v, vi at, vf& best, vi& best_at) {
  const vi better = (v > best) | (v != v);
  best = select(better, v, best);
  best_at = (better & at) | (~better & best_at);
}

// Loads kLanes floats that are `step` apart, and nothing behind the last of them.
TW_INLINE vf load_spaced(const float* x, int64_t step) {
  if (step == 1) return load(x);
  vf out, even, odd;
  for (int i = 0; i < kLanes && step != 2; ++i) out[i] = x[i * step];
  if (step != 2) return out;
  split_even_odd(load(x), load(x + kLanes - 1), even, odd);
  for (int i = 0; i < kLanes; ++i) out[i] = i < kLanes / 2 ? even[i] : odd[i];
  return out;
}

// Computes kLanes outputs of a row whose windows are inside the plane from left to right; the first one is `w`.
TW_INLINE void max_windows(const PoolShape& s, const Window& w, const float* x, float* y, int32_t* argmax) {
  vf best;
  vi first, best_at;
  for (int i = 0; i < kLanes; ++i) best[i] = -HUGE_VALF, first[i] = static_cast<int32_t>(i * s.sw);
  best_at = first + static_cast<int32_t>(w.y0 * s.w + w.x0);
  for (int64_t iy = w.y0; iy < w.y1; ++iy) {
    for (int64_t at = iy * s.w + w.x0; at < iy * s.w + w.x1; ++at)
      take_larger(load_spaced(x + at, s.sw), first + static_cast<int32_t>(at), best, best_at);
  }
  store(y, best);
  std::memcpy(argmax, &best_at, sizeof best_at);
}

// Pools one output by a window that may reach over the sides of the plane.
TW_INLINE void max_window(const PoolShape& s, const Window& w, const float* x, float* y, int32_t* argmax) {
  float best = -HUGE_VALF;
  int64_t best_at = smaller(w.y0, s.h - 1) * s.w + smaller(w.x0, s.w - 1);
  for (int64_t iy = w.y0; iy < w.y1; ++iy) {
    for (int64_t at = iy * s.w + w.x0; at < iy * s.w + w.x1; ++at) {
      if (!(x[at] > best || x[at] != x[at])) continue;
      best = x[at];
      best_at = at;
    }
  }
  *y = best;
  *argmax = static_cast<int32_t>(best_at);
}

// Pools one plane: vectors of windows, the last of a row overlapping the one before, and those at its sides one by one.
void max_plane(const PoolShape& s, const float* x, float* y, int32_t* argmax) {
  for (int64_t oy = 0; oy < s.oh; ++oy, y += s.ow, argmax += s.ow) {
    for (int64_t ox = 0; ox < s.ow;) {
      const int64_t first = smaller(ox, s.ow - kLanes), end = (first + kLanes - 1) * s.sw - s.pw + s.kw;
      if (first >= 0 && first * s.sw >= s.pw && end <= s.w) {
        max_windows(s, window_at(s, oy, first), x, y + first, argmax + first);
        ox = first + kLanes;
      } else {
        max_window(s, window_at(s, oy, ox), x, y + ox, argmax + ox);
        ++ox;
      }
    }
  }
}

// Computes kLanes outputs: the first half from the rows at `left`, the second from those at `right`. `at` has the index
// of each output's first value.
TW_INLINE void max_2x2(const float* left, const float* right, int64_t row, vi at, vf& best, vi& best_at) {
  vf even, odd, even_below, odd_below;
  split_even_odd(load(left), load(right), even, odd);
  split_even_odd(load(left + row), load(right + row), even_below, odd_below);
  const int32_t below = static_cast<int32_t>(row);
  best = even;
  best_at = at;
  take_larger(odd, at + 1, best, best_at);
  take_larger(even_below, at + below, best, best_at);
  take_larger(odd_below, at + below + 1, best, best_at);
}

// Outputs are computed in halves of a vector, so that planes of width 16 fill vectors of 16 from two rows.
constexpr int64_t kHalf = kLanes / 2;

bool is_2x2(const PoolShape& s) {
  return s.kh == 2 && s.kw == 2 && s.sh == 2 && s.sw == 2 && s.ph == 0 && s.pw == 0 && s.ow % kHalf == 0 &&
         s.oh * s.ow % kLanes == 0;
}

// Pools one plane with windows of 2x2 and stride 2, two half vectors of outputs at a time.
void max_plane_2x2(const PoolShape& s, const float* x, float* y, int32_t* argmax) {
  const int64_t halves_a_row = s.ow / kHalf;
  for (int64_t half = 0; half < s.oh * halves_a_row; half += 2) {
    const int64_t first = half / halves_a_row * 2 * s.w + half % halves_a_row * kLanes;
    const int64_t second = (half + 1) / halves_a_row * 2 * s.w + (half + 1) % halves_a_row * kLanes;
    vi at;
    for (int i = 0; i < kLanes; ++i) at[i] = static_cast<int32_t>(i < kHalf ? first + 2 * i : second + 2 * (i - kHalf));
    vf best;
    vi best_at;
    max_2x2(x + first, x + second, s.w, at, best, best_at);
    store(y + half * kHalf, best);
    std::memcpy(argmax + half * kHalf, &best_at, sizeof best_at);
  }
}

void max_pool(const PoolShape& s, const float* x, float* y, int32_t* argmax) {
  const bool fast = is_2x2(s);
  for_planes(s, [&](int64_t p) {
    const int64_t in = p * s.h * s.w, out = p * s.oh * s.ow;
    (fast ? max_plane_2x2 : max_plane)(s, x + in, y + out, argmax + out);
  });
}

bool max_grad(const PoolShape& s, const float* gy, const int32_t* argmax, float* gx) {
  const int64_t size = s.h * s.w, outputs = s.oh * s.ow;
  bool inside = true;
  for_planes(s, [&](int64_t p) {
    float* to = gx + p * size;
    std::memset(to, 0, static_cast<size_t>(size) * sizeof(float));
    for (int64_t i = p * outputs; i < (p + 1) * outputs; ++i) {
      const int64_t at = argmax[i];
      if (at < 0 || at >= size) {
        __atomic_store_n(&inside, false, __ATOMIC_RELAXED);
      } else {
        to[at] += gy[i];
      }
    }
  });
  return inside;
}

float sum_all(const float* x, int64_t n) {
  vf total = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) total += load(x + i);
  if (i < n) total += load_first(x + i, static_cast<int>(n - i));
  return sum_lanes(total);
}

bool is_global(const PoolShape& s) {
  return s.oh == 1 && s.ow == 1 && s.kh == s.h && s.kw == s.w && s.ph == 0 && s.pw == 0;
}

// Average pooling of planes (NCHW); padding counts as zeros.
void average(const PoolShape& s, const float* x, float* y) {
  const float count = static_cast<float>(s.kh * s.kw);
  const bool global = is_global(s);
  for_planes(s, [&](int64_t p) {
    const float* from = x + p * s.h * s.w;
    float* to = y + p * s.oh * s.ow;
    if (global) {
      *to = sum_all(from, s.h * s.w) / count;
      return;
    }
    for (int64_t oy = 0; oy < s.oh; ++oy) {
      for (int64_t ox = 0; ox < s.ow; ++ox) {
        const Window w = window_at(s, oy, ox);
        float sum = 0.0f;
        for (int64_t iy = w.y0; iy < w.y1; ++iy) {
          for (int64_t ix = w.x0; ix < w.x1; ++ix) sum += from[iy * s.w + ix];
        }
        *to++ = sum / count;
      }
    }
  });
}

// Distributes each gradient of an average pooling equally over its window.
void average_grad(const PoolShape& s, const float* gy, float* gx) {
  const float count = static_cast<float>(s.kh * s.kw);
  const bool global = is_global(s);
  for_planes(s, [&](int64_t p) {
    float* to = gx + p * s.h * s.w;
    const float* from = gy + p * s.oh * s.ow;
    if (global) {
      const float share = *from / count;
      for (int64_t i = 0; i < s.h * s.w; ++i) to[i] = share;
      return;
    }
    std::memset(to, 0, static_cast<size_t>(s.h * s.w) * sizeof(float));
    for (int64_t oy = 0; oy < s.oh; ++oy) {
      for (int64_t ox = 0; ox < s.ow; ++ox) {
        const Window w = window_at(s, oy, ox);
        const float share = *from++ / count;
        for (int64_t iy = w.y0; iy < w.y1; ++iy) {
          for (int64_t ix = w.x0; ix < w.x1; ++ix) to[iy * s.w + ix] += share;
        }
      }
    }
  });
}

}  // namespace

const PoolKernels pool = {max_pool, max_grad, average, average_grad};

}  // namespace TW_ISA
}  // namespace tw
