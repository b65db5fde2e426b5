// Loops over one row of floats by vectors, the last of which may be partial. The body is written once, as a generic
// lambda: it receives the position and a `lanes` object, whole or partial, through which it loads and stores. Sums run
// in four vector accumulators, which are added to a double every few thousand elements: accurate for any length. For
// kernel files only.
#pragma once

#include "kernels/math.h"

namespace tw {
namespace TW_ISA {
namespace {

constexpr int64_t kRowsInFloat =
    32;  // chosen: rows of a sum over rows that are added in float, before memory or double

struct Whole {
  TW_INLINE vf get(const float* p) const { return load(p); }
  TW_INLINE void put(float* p, vf v) const { store(p, v); }
  TW_INLINE vf or_else(vf v, float) const { return v; }
};

struct Partial {
  int n;
  TW_INLINE vf get(const float* p) const { return load_first(p, n); }
  TW_INLINE void put(float* p, vf v) const { store_first(p, v, n); }
  // Replaces the lanes past the end by `fill`, so that they do not count in a sum or a maximum.
  TW_INLINE vf or_else(vf v, float fill) const {
    vi lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    return select(lane < n, v, splat(fill));
  }
};

// Calls body(position, lanes) for every vector of a row of n floats.
template <class Body>
TW_INLINE void each_vector(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, Whole{});
  if (i < n) body(i, Partial{static_cast<int>(n - i)});
}

// Logit soft-capping: x <- cap * tanh(x / cap). Values far below the cap hardly change, none exceeds it.
inline void soft_cap(float* x, float cap, int64_t n) {
  each_vector(n, [&](int64_t i, auto lanes) {
    lanes.put(x + i, cap - 2.0f * cap / (1.0f + vexp(lanes.get(x + i) * (2.0f / cap))));
  });
}

// Calls body like each_vector, for long arrays that are read and written once: a partial vector comes first, so that
// the others do not straddle cache lines. NumPy aligns all large arrays alike, 16 bytes past a page.
template <class Body>
TW_INLINE void each_aligned_vector(const float* written, int64_t n, const Body& body) {
  constexpr uintptr_t kBytes = sizeof(vf);
  const int64_t past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(written) % kBytes / sizeof(float));
  const int64_t head = past == 0 ? 0 : kLanes - past;
  if (head == 0 || n < 4 * kLanes) {
    each_vector(n, body);
    return;
  }
  body(0, Partial{static_cast<int>(head)});
  each_vector(n - head, [&](int64_t i, auto lanes) { body(head + i, lanes); });
}

// Sums body(i, lanes) over a row of n floats. Floats are added to a double every kFlush elements.
template <class Body>
TW_INLINE double sum_over(int64_t n, const Body& body) {
  constexpr int64_t kBlock = 4 * kLanes;
  constexpr int64_t kFlush = 64 * kBlock;
  double total = 0.0;
  int64_t i = 0;
  while (i + kLanes <= n) {
    const int64_t end = i + kFlush < n ? i + kFlush : n;
    vf acc[4] = {};
    for (; i + kBlock <= end; i += kBlock) {
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u) acc[u] += body(i + u * kLanes, Whole{});
    }
    for (; i + kLanes <= end; i += kLanes) acc[0] += body(i, Whole{});
    total += sum_lanes((acc[0] + acc[1]) + (acc[2] + acc[3]));
  }
  if (i < n) {
    const Partial last{static_cast<int>(n - i)};
    total += sum_lanes(last.or_else(body(i, last), 0.0f));
  }
  return total;
}

// Two sums in one pass: body(i, lanes, first, second) adds to its two accumulators.
struct TwoSums {
  double first, second;
};

// Computes two sums over n elements: body(i, lanes, a, b) adds the vector at i to both. Sums of 64 blocks are added to
// doubles, so that the rounding errors of long rows do not grow.
template <class Body>
TW_INLINE TwoSums two_sums_over(int64_t n, const Body& body) {
  constexpr int64_t kBlock = 2 * kLanes;
  constexpr int64_t kFlush = 64 * kBlock;
  TwoSums total = {0.0, 0.0};
  int64_t i = 0;
  while (i + kLanes <= n) {
    const int64_t end = i + kFlush < n ? i + kFlush : n;
    vf a0 = {}, a1 = {}, b0 = {}, b1 = {};
    for (; i + kBlock <= end; i += kBlock) {
      body(i, Whole{}, a0, b0);
      body(i + kLanes, Whole{}, a1, b1);
    }
    for (; i + kLanes <= end; i += kLanes) body(i, Whole{}, a0, b0);
    total.first += sum_lanes(a0 + a1);
    total.second += sum_lanes(b0 + b1);
  }
  if (i < n) {
    const Partial last{static_cast<int>(n - i)};
    vf a = {}, b = {};
    body(i, last, a, b);
    total.first += sum_lanes(last.or_else(a, 0.0f));
    total.second += sum_lanes(last.or_else(b, 0.0f));
  }
  return total;
}

// The maximum of a row, ignoring NaN; -inf for an empty row.
TW_INLINE float row_max(const float* x, int64_t n) {
  vf best[4];
  for (int u = 0; u < 4; ++u) best[u] = splat(-__builtin_inff());
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) best[u] = vmax(load(x + i + u * kLanes), best[u]);
  }
  for (; i + kLanes <= n; i += kLanes) best[0] = vmax(load(x + i), best[0]);
  if (i < n) {
    const Partial last{static_cast<int>(n - i)};
    best[1] = vmax(last.or_else(last.get(x + i), -__builtin_inff()), best[1]);
  }
  return max_lanes(vmax(vmax(best[0], best[1]), vmax(best[2], best[3])));
}

}  // namespace
}  // namespace TW_ISA
}  // namespace tw
