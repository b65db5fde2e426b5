// The weights of a softmax. Kernel files only.
#pragma once

#include "kernels/math.h"

namespace tw {
namespace TW_ISA {
namespace {

// exp(x), or 0 where that is below the smallest normal number, 2^-126. Products with subnormal numbers take a hundred
// times as long on Intel's CPUs, and masks of -100 (Swin) produce many.
TW_INLINE vf softmax_weight(vf x) { return select(x < -87.3365448f, vf{}, vexp(x)); }

}  // namespace
}  // namespace TW_ISA
}  // namespace tw
