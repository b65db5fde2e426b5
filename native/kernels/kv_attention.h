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
// there is a cap. Queries that slide (in attend_rows) see equally many keys: each leaves out one more of the first.
struct ScoreRule {
  ScoreRule(float scale, float cap = 0.0f, bool slides = false) : scale(scale), cap(cap), slides(slides) {}
  float scale, cap;
  bool slides;
};

constexpr int kAttendRows = 4;  // queries that go over the keys together

struct KvAttentionKernels {
  // out (width) = softmax(rule(q . keys)) values, over the first `length` rows; `scores` holds length floats.
  void (*attend)(CacheKind kind, const float* q, CachedRows keys, CachedRows values, int64_t length, int64_t width,
                 ScoreRule rule, float* scores, float* out);
  // The same for kAttendRows queries, `q_row` floats apart, of positions one after the other: the first sees `length`
  // rows and each of the others one more. `scores` holds kAttendRows runs of `length + kAttendRows` floats. Every query
  // gets the floats it would get alone.
  void (*attend_rows)(CacheKind kind, const float* q, int64_t q_row, CachedRows keys, CachedRows values, int64_t length,
                      int64_t width, ScoreRule rule, float* scores, float* out, int64_t out_row);
  // One row of width floats into row `row` of a cache; for int8 also its scale.
  void (*store)(CacheKind kind, const float* x, int64_t width, void* data, float* scales, int64_t row);
};

TW_TABLE(KvAttentionKernels, kv_attention)

}  // namespace tw
