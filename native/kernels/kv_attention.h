// New positions of a transformer: attention of queries over the keys and values stored so far, and the conversion of a
// row of floats to what a cache stores.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

enum class CacheKind { float32 = 0, float16 = 1, int8 = 2 };

// Rows of one head: `data` holds length x width elements of the kind, `scales` one number per row for int8.
struct CachedRows {
  const void* data = nullptr;
  const float* scales = nullptr;
};

// From products of a query and keys to the scores under the softmax: times `scale`, then cap * tanh(score / cap) if
// there is a cap.
struct ScoreRule {
  ScoreRule(float scale, float cap = 0.0f) : scale(scale), cap(cap) {}
  float scale, cap;
};

struct KvAttentionKernels {
  // out (width) = softmax(rule(q . keys)) values, over the first `length` rows; `scores` holds length floats.
  void (*attend)(CacheKind kind, const float* q, CachedRows keys, CachedRows values, int64_t length, int64_t width,
                 ScoreRule rule, float* scores, float* out);
  // One row of width floats into row `row` of a cache; for int8 also its scale.
  void (*store)(CacheKind kind, const float* x, int64_t width, void* data, float* scales, int64_t row);
  // `count` rows of a cache as floats.
  void (*read)(CacheKind kind, CachedRows rows, int64_t count, int64_t width, float* to);
};

TW_TABLE(KvAttentionKernels, kv_attention)

}  // namespace tw
