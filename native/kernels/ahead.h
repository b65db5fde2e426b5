// Weights asked for ahead of their use. Those that are read once, front to back: where much is computed from each byte, an
// out-of-order core looks too few bytes ahead to keep the memory busy, and asking for the line two kilobytes on makes it so. With
// AVX2 only, where it was measured.
#pragma once

#include "common/simd.h"

namespace tw {
namespace TW_ISA {

TW_INLINE void fetch_ahead([[maybe_unused]] const void* line) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  __builtin_prefetch(static_cast<const char*>(line) + 2048);
#endif
}

// The weights of the next panel, asked for while this one is multiplied: a part with each of the `tiles` that pass by it.
class NextPanel {
 public:
  NextPanel(const void* weights, int64_t bytes, int tiles)
      : at_(static_cast<const char*>(weights)), end_(at_ + bytes), step_(tiles > 0 ? bytes / tiles + 64 : 0) {}
  TW_INLINE void fetch() {
    const char* until = at_ + step_ < end_ ? at_ + step_ : end_;
    for (; at_ < until; at_ += 64) __builtin_prefetch(at_);
  }

 private:
  const char *at_, *end_;
  int64_t step_;
};

}  // namespace TW_ISA
}  // namespace tw
