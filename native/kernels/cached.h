// One new position of a transformer: attention of a query over the keys and values stored so far, and the conversion
// of a row of floats to what a cache stores.
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

struct CachedKernels {
  // out (width) = softmax(q . keys * scale) values, over the first `length` rows; `scores` holds length floats.
  void (*attend)(CacheKind kind, const float* q, CachedRows keys, CachedRows values, int64_t length, int64_t width,
                 float scale, float* scores, float* out);
  // One row of width floats into row `row` of a cache; for int8 also its scale.
  void (*store)(CacheKind kind, const float* x, int64_t width, void* data, float* scales, int64_t row);
};

TW_TABLE(CachedKernels, cached)

}  // namespace tw
