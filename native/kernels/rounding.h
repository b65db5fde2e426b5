// Rounds to the nearest integer, ties to even, by adding and subtracting 1.5 * 2^23: for |x| < 2^22 the same on every
// instruction set, and vectorized on all. For kernel files only.
#pragma once

#include "common/simd.h"

namespace tw {
namespace TW_ISA {

TW_INLINE vf round_even(vf x) {
  const vf magic = splat(12582912.0f);
  return (x + magic) - magic;
}

TW_INLINE float round_even(float x) {
  const float magic = 12582912.0f;
  return (x + magic) - magic;
}

}  // namespace TW_ISA
}  // namespace tw
