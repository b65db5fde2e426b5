// The hyperbolic tangent and the logistic function. Kernel files only.
#pragma once

#include "kernels/math.h"

namespace tw {
namespace TW_ISA {
namespace {

// tanh: 1 - 2 / (exp(2x) + 1), or near 0, where that would cancel, an odd polynomial (Cephes).
TW_INLINE vf vtanh(vf x) {
  const vf size = select(x < 0.0f, -x, x), square = x * x;
  vf p = splat(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const vf near = x + x * square * p;
  const vf far = 1.0f - 2.0f / (vexp(size + size) + 1.0f);
  return select(size < 0.625f, near, select(x < 0.0f, -far, far));
}

TW_INLINE vf vsigmoid(vf x) { return 1.0f / (1.0f + vexp(-x)); }

}  // namespace
}  // namespace TW_ISA
}  // namespace tw
