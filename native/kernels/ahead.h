// Weights that are read once, front to back. Where much is computed from each byte, an out-of-order core looks too few bytes
// ahead to keep the memory busy: asking for the line two kilobytes on makes it so. With AVX2 only, where it was measured.
#pragma once

#include "common/simd.h"

namespace tw {
namespace TW_ISA {

TW_INLINE void fetch_ahead([[maybe_unused]] const void* line) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  __builtin_prefetch(static_cast<const char*>(line) + 2048);
#endif
}

}  // namespace TW_ISA
}  // namespace tw
