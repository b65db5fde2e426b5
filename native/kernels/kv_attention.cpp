#include "kernels/kv_attention.h"

#include "common/simd.h"
#include "kernels/gemv.h"
#include "kernels/half.h"
#include "kernels/math.h"
#include "kernels/rounding.h"
#include "kernels/row_loops.h"

namespace tw {
namespace TW_ISA {
namespace {

TW_INLINE vf widen(const int8_t* bytes) { return __builtin_convertvector(widen_bytes(bytes), vf); }

// --- a vector of a kv_attention row, `n` lanes of it ---

template <CacheKind K>
struct Element;
template <>
struct Element<CacheKind::float32> {
  using type = float;
  static TW_INLINE vf get(const float* p, int n) { return n == kLanes ? load(p) : load_first(p, n); }
};
template <>
struct Element<CacheKind::float16> {
  using type = uint16_t;
  static TW_INLINE vf get(const uint16_t* p, int n) {
    if (n == kLanes) return load_half(p);
    uint16_t part[kLanes] = {};
    std::memcpy(part, p, n * sizeof(uint16_t));
    return load_half(part);
  }
};
template <>
struct Element<CacheKind::int8> {
  using type = int8_t;
  static TW_INLINE vf get(const int8_t* p, int n) {
    if (n == kLanes) return widen(p);
    int8_t part[kLanes] = {};
    std::memcpy(part, p, n);
    return widen(part);
  }
};

TW_INLINE int lanes_left(int64_t width, int64_t at) {
  return width - at < kLanes ? static_cast<int>(width - at) : kLanes;
}

template <CacheKind K>
TW_INLINE vf score_lanes(const float* q, const typename Element<K>::type* key, int64_t width) {
  vf sum = {};
  int64_t d = 0;
#pragma GCC unroll 4
  for (; d + kLanes <= width; d += kLanes) sum += load(q + d) * Element<K>::get(key + d, kLanes);
  if (d < width) sum += load_first(q + d, lanes_left(width, d)) * Element<K>::get(key + d, lanes_left(width, d));
  return sum;
}

// Computes the scores of all keys, eight at a time to share the horizontal sums, and prefetches the values of the same
// positions: weights evict the KV cache between tokens, and a head is too short for the hardware prefetcher.
template <CacheKind K>
void score_keys(const float* q, CachedRows keys, CachedRows values, int64_t length, int64_t width, float scale,
                float* scores) {
  using T = typename Element<K>::type;
  constexpr int kGroup = 8;
  const T* data = static_cast<const T*>(keys.data);
  const char* value = static_cast<const char*>(values.data);
  const int64_t row_bytes = width * static_cast<int64_t>(sizeof(T));
  for (int64_t t = 0; t < length; t += kGroup) {
    const int count = length - t < kGroup ? static_cast<int>(length - t) : kGroup;
    for (int64_t byte = 0; byte < count * row_bytes; byte += 64) __builtin_prefetch(value + t * row_bytes + byte);
    vf lanes[kGroup] = {};
    for (int i = 0; i < count; ++i) lanes[i] = score_lanes<K>(q, data + (t + i) * width, width);
    float sums[kGroup];
    store_sums(lanes, sums, kGroup);
    for (int i = 0; i < count; ++i) {
      scores[t + i] = sums[i] * (K == CacheKind::int8 ? scale * keys.scales[t + i] : scale);
    }
  }
}

// scores <- exp(scores - max); returns 1 / sum
float exponentials(float* scores, int64_t length) {
  vf most = splat(scores[0]);
  for (int64_t t = 0; t < length; t += kLanes) {
    const int n = lanes_left(length, t);
    if (n == kLanes) {
      most = vmax(most, load(scores + t));
    } else {
      for (int i = 0; i < n; ++i) most = vmax(most, splat(scores[t + i]));
    }
  }
  const float top = max_lanes(most);
  float total = 0.0f;
  vf sum = {};
  for (int64_t t = 0; t < length; t += kLanes) {
    const int n = lanes_left(length, t);
    if (n == kLanes) {
      const vf e = vexp(load(scores + t) - top);
      store(scores + t, e);
      sum += e;
    } else {
      float part[kLanes];
      store(part, vexp(load_first(scores + t, n) - top));
      for (int i = 0; i < n; ++i) total += scores[t + i] = part[i];
    }
  }
  return 1.0f / (total + sum_lanes(sum));
}

// V vectors of the mixed row, from column d on; the last of them has `lanes` lanes.
template <CacheKind K, int V>
void mix_columns(const float* weights, CachedRows values, int64_t length, int64_t width, int64_t d, int lanes,
                 float norm, float* out) {
  const auto* data = static_cast<const typename Element<K>::type*>(values.data) + d;
  vf acc[V] = {};
  for (int64_t t = 0; t < length; ++t, data += width) {
    const vf w = splat(K == CacheKind::int8 ? weights[t] * values.scales[t] : weights[t]);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[v] += w * Element<K>::get(data + v * kLanes, V == 1 ? lanes : kLanes);
  }
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) store_first(out + d + v * kLanes, acc[v] * norm, V == 1 ? lanes : kLanes);
}

template <CacheKind K>
void mix_values(const float* weights, CachedRows values, int64_t length, int64_t width, float norm, float* out) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= width; d += 4 * kLanes)
    mix_columns<K, 4>(weights, values, length, width, d, kLanes, norm, out);
  for (; d + 2 * kLanes <= width; d += 2 * kLanes)
    mix_columns<K, 2>(weights, values, length, width, d, kLanes, norm, out);
  for (; d < width; d += kLanes) mix_columns<K, 1>(weights, values, length, width, d, lanes_left(width, d), norm, out);
}

template <CacheKind K>
void attend_kind(const float* q, CachedRows keys, CachedRows values, int64_t length, int64_t width, ScoreRule rule,
                 float* scores, float* out) {
  score_keys<K>(q, keys, values, length, width, rule.scale, scores);
  if (rule.cap > 0.0f) soft_cap(scores, rule.cap, length);
  const float norm = exponentials(scores, length);
  mix_values<K>(scores, values, length, width, norm, out);
}

void attend(CacheKind kind, const float* q, CachedRows keys, CachedRows values, int64_t length, int64_t width,
            ScoreRule rule, float* scores, float* out) {
  switch (kind) {
    case CacheKind::float32:
      return attend_kind<CacheKind::float32>(q, keys, values, length, width, rule, scores, out);
    case CacheKind::float16:
      return attend_kind<CacheKind::float16>(q, keys, values, length, width, rule, scores, out);
    case CacheKind::int8:
      return attend_kind<CacheKind::int8>(q, keys, values, length, width, rule, scores, out);
  }
}

// --- several queries of positions one after the other: each key and value that is loaded serves all of them ---

template <CacheKind K>
void score_rows(const float* q, int64_t q_row, CachedRows keys, int64_t length, int64_t width, float scale,
                float* scores, int64_t scores_row) {
  constexpr int kKeys = 2, R = kAttendRows;
  const auto* data = static_cast<const typename Element<K>::type*>(keys.data);
  for (int64_t t = 0; t < length; t += kKeys) {
    const int count = length - t < kKeys ? static_cast<int>(length - t) : kKeys;
    const auto* first = data + t * width;
    const auto* second = first + (count - 1) * width;  // the first again where there is no other
    vf lanes[kKeys * R] = {};
    for (int64_t d = 0; d < width; d += kLanes) {
      const int n = lanes_left(width, d);
      const vf a = Element<K>::get(first + d, n), b = Element<K>::get(second + d, n);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const float* at = q + r * q_row + d;
        const vf x = n == kLanes ? load(at) : load_first(at, n);
        lanes[r] += x * a;
        lanes[R + r] += x * b;
      }
    }
    float sums[kKeys * R];
    store_sums(lanes, sums, kKeys * R);
    for (int i = 0; i < count; ++i) {
      const float by = K == CacheKind::int8 ? scale * keys.scales[t + i] : scale;
      for (int r = 0; r < R; ++r) scores[r * scores_row + t + i] = sums[i * R + r] * by;
    }
  }
}

// V vectors of all mixed rows, from column d on; the last of them has `lanes` lanes.
template <CacheKind K, int V>
void mix_rows_columns(const float* weights, int64_t weights_row, CachedRows values, int64_t length, int64_t width,
                      int64_t d, int lanes, const float* norms, float* out, int64_t out_row) {
  constexpr int R = kAttendRows;
  const auto* data = static_cast<const typename Element<K>::type*>(values.data) + d;
  vf acc[R][V] = {};
  const auto add = [&](int64_t t, int from) __attribute__((always_inline)) {
    vf part[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) part[v] = Element<K>::get(data + t * width + v * kLanes, V == 1 ? lanes : kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      if (r < from) continue;
      const float weight = weights[r * weights_row + t];
      const vf w = splat(K == CacheKind::int8 ? weight * values.scales[t] : weight);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[r][v] += w * part[v];
    }
  };
  for (int64_t t = 0; t < length; ++t) add(t, 0);
  for (int later = 1; later < R; ++later) add(length + later - 1, later);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      store_first(out + r * out_row + d + v * kLanes, acc[r][v] * norms[r], V == 1 ? lanes : kLanes);
    }
  }
}

template <CacheKind K>
void attend_rows_kind(const float* q, int64_t q_row, CachedRows keys, CachedRows values, int64_t length, int64_t width,
                      ScoreRule rule, float* scores, float* out, int64_t out_row) {
  const int64_t scores_row = length + kAttendRows;
  score_rows<K>(q, q_row, keys, length + kAttendRows - 1, width, rule.scale, scores, scores_row);
  float norms[kAttendRows];
  for (int r = 0; r < kAttendRows; ++r) {
    float* row = scores + r * scores_row;
    const int skipped = rule.slides ? r : 0;
    if (rule.cap > 0.0f) soft_cap(row + skipped, rule.cap, length + r - skipped);
    norms[r] = exponentials(row + skipped, length + r - skipped);
    for (int i = 0; i < skipped; ++i) row[i] = 0.0f;
  }
  int64_t d = 0;
  for (; d + 2 * kLanes <= width; d += 2 * kLanes) {
    mix_rows_columns<K, 2>(scores, scores_row, values, length, width, d, kLanes, norms, out, out_row);
  }
  for (; d < width; d += kLanes) {
    mix_rows_columns<K, 1>(scores, scores_row, values, length, width, d, lanes_left(width, d), norms, out, out_row);
  }
}

void attend_rows(CacheKind kind, const float* q, int64_t q_row, CachedRows keys, CachedRows values, int64_t length,
                 int64_t width, ScoreRule rule, float* scores, float* out, int64_t out_row) {
  const auto run = kind == CacheKind::float32   ? attend_rows_kind<CacheKind::float32>
                   : kind == CacheKind::float16 ? attend_rows_kind<CacheKind::float16>
                                                : attend_rows_kind<CacheKind::int8>;
  run(q, q_row, keys, values, length, width, rule, scores, out, out_row);
}

// Returns max|x|, ignoring NaN, which becomes 0 when it is quantized.
float largest(const float* x, int64_t n) {
  vf most = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    const vf v = load_first(x + i, lanes_left(n, i));
    most = vmax(select(v < splat(0.0f), -v, v), most);
  }
  return max_lanes(most);
}

void store(CacheKind kind, const float* x, int64_t width, void* data, float* scales, int64_t row) {
  if (kind == CacheKind::float32) {
    std::memcpy(static_cast<float*>(data) + row * width, x, width * sizeof(float));
  } else if (kind == CacheKind::float16) {
    uint16_t* to = static_cast<uint16_t*>(data) + row * width;
    for (int64_t d = 0; d < width; d += kLanes) {
      const int n = lanes_left(width, d);
      uint16_t part[kLanes];
      store_half(part, load_first(x + d, n));
      std::memcpy(to + d, part, n * sizeof(uint16_t));
    }
  } else {
    int8_t* to = static_cast<int8_t*>(data) + row * width;
    const float top = largest(x, width), inverse = top > 0.0f ? 127.0f / top : 0.0f;
    scales[row] = top / 127.0f;
    for (int64_t d = 0; d < width; d += kLanes) {
      const int n = lanes_left(width, d);
      int8_t bytes[kLanes];
      store_low_bytes(bytes, __builtin_convertvector(round_even(load_first(x + d, n) * inverse), vi));
      std::memcpy(to + d, bytes, n);
    }
  }
}

}  // namespace

const KvAttentionKernels kv_attention = {attend, attend_rows, store};

}  // namespace TW_ISA
}  // namespace tw
