#include "kernels/kv_attention.h"

#include "common/simd.h"
#include "kernels/gemv.h"
#include "kernels/half.h"
#include "kernels/math.h"
#include "kernels/rounding.h"
#include "kernels/row_loops.h"
#include "kernels/softmax_weight.h"

namespace tw {
namespace TW_ISA {
namespace {

TW_INLINE vf widen(const int8_t* bytes) { return __builtin_convertvector(widen_bytes(bytes), vf); }

// --- loading n lanes of a row of the cache as floats ---

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

// The products of a query and a key, lane by lane: their sum is the score.
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
// positions: the weights evict the KV cache between tokens, and a head is too short for the hardware prefetcher.
template <CacheKind K>
void score_keys(const float* q, CachedRows keys, CachedRows values, int64_t length, int64_t width, float scale,
                float* scores) {
  using T = typename Element<K>::type;
  constexpr int kGroup = 8;  // hardware: lanes of AVX2, so that eight sums are one vector
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

// Replaces the scores by exp(score - max) and returns 1 / their sum.
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
      const vf e = softmax_weight(load(scores + t) - top);
      store(scores + t, e);
      sum += e;
    } else {
      float part[kLanes];
      store(part, softmax_weight(load_first(scores + t, n) - top));
      for (int i = 0; i < n; ++i) total += scores[t + i] = part[i];
    }
  }
  return 1.0f / (total + sum_lanes(sum));
}

// Computes V vectors of the weighted sum of values, from column d on; a single vector has `lanes` lanes.
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

// Computes out (width) = norm * sum over t of weights[t] * values[t], the last step of attention for one query.
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

template <CacheKind K>
void read_kind(CachedRows rows, int64_t count, int64_t width, float* to) {
  const auto* from = static_cast<const typename Element<K>::type*>(rows.data);
  for (int64_t t = 0; t < count; ++t, from += width, to += width) {
    const float scale = K == CacheKind::int8 ? rows.scales[t] : 1.0f;
    for (int64_t d = 0; d < width; d += kLanes) {
      const int n = lanes_left(width, d);
      store_first(to + d, Element<K>::get(from + d, n) * scale, n);
    }
  }
}

void read(CacheKind kind, CachedRows rows, int64_t count, int64_t width, float* to) {
  const auto run = kind == CacheKind::float32   ? read_kind<CacheKind::float32>
                   : kind == CacheKind::float16 ? read_kind<CacheKind::float16>
                                                : read_kind<CacheKind::int8>;
  run(rows, count, width, to);
}

// Returns max|x|. A NaN is ignored here and becomes 0 when it is quantized.
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

const KvAttentionKernels kv_attention = {attend, store, read};

}  // namespace TW_ISA
}  // namespace tw
