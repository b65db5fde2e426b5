// Attention of a decoder: a query attends to the keys and values of the KV cache. Also the conversion of a row of
// floats to the cache's data type and back.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

enum class CacheKind { float32 = 0, float16 = 1, int8 = 2 };

// Rows of one head: `data` has (length, width) elements of the kind; for int8, `scales` has one scale per row.
struct CachedRows {
  const void* data = nullptr;
  const float* scales = nullptr;
};

// How products of a query and a key become scores: times `scale`, then cap * tanh(score / cap) if `cap` is not 0.
struct ScoreRule {
  ScoreRule(float scale, float cap = 0.0f) : scale(scale), cap(cap) {}
  float scale, cap;
};

struct KvAttentionKernels {
  // out (width) = softmax(rule(q . keys)) values over the first `length` rows; `scores` has room for length floats.
  void (*attend)(CacheKind kind, const float* q, CachedRows keys, CachedRows values, int64_t length, int64_t width,
                 ScoreRule rule, float* scores, float* out);
  // Stores `width` floats as row `row` of a cache; for int8 also their scale.
  void (*store)(CacheKind kind, const float* x, int64_t width, void* data, float* scales, int64_t row);
  // Converts `count` rows of a cache to floats.
  void (*read)(CacheKind kind, CachedRows rows, int64_t count, int64_t width, float* to);
};

TW_TABLE(KvAttentionKernels, kv_attention)

}  // namespace tw
