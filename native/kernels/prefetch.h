// Software prefetch of weights, which are read once, front to back. If much is computed per byte, the out-of-order
// window is too short to keep the memory busy; prefetching two kilobytes ahead fixes it. AVX2 only, where it was
// measured.
#pragma once

#include "common/simd.h"

namespace tw {
namespace TW_ISA {

TW_INLINE void fetch_ahead([[maybe_unused]] const void* line) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  __builtin_prefetch(static_cast<const char*>(line) + 2048);
#endif
}

// Prefetches the next panel's weights while the current panel is multiplied, a share with each of `calls` calls of
// `fetch`. Requesting all lines at once would delay the loads that are needed now.
class NextPanel {
 public:
  NextPanel() = default;
  NextPanel(const void* weights, int64_t bytes, int64_t calls)
      : at_(static_cast<const char*>(weights)),
        end_(at_ + bytes),
        step_(calls > 0 ? (bytes + 64 * calls - 1) / (64 * calls) * 64 : 0) {}
  TW_INLINE void fetch() {
    if (at_ >= end_) return;
    for (const char* until = at_ + step_; at_ < until; at_ += 64) __builtin_prefetch(at_);
  }

 private:
  const char *at_ = nullptr, *end_ = nullptr;
  int64_t step_ = 0;
};

}  // namespace TW_ISA
}  // namespace tw
