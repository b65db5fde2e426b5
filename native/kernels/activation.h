// The activations that convolutions fuse, one vector at a time. All of them propagate NaN.
#pragma once

#include "kernels/conv.h"
#include "kernels/math.h"

namespace tw {
namespace TW_ISA {
namespace {

TW_INLINE vf clipped(vf v, float low, float high) { return vmin(splat(high), vmax(splat(low), v)); }

// Applies an activation known at compile time. `slope` belongs to leaky ReLU.
template <ConvActivation::Kind kind>
TW_INLINE vf activate(vf v, [[maybe_unused]] float slope) {
  switch (kind) {
    case ConvActivation::relu:
      return max_nan(v, vf{});
    case ConvActivation::gelu:
      return vgelu(v);
    case ConvActivation::relu6:
      return clipped(v, 0.0f, 6.0f);
    case ConvActivation::silu:
      return v / (1.0f + vexp_of_sum(-v));
    case ConvActivation::hard_swish:
      return v * (clipped(v + 3.0f, 0.0f, 6.0f) * (1.0f / 6.0f));
    case ConvActivation::sigmoid:
      return 1.0f / (1.0f + vexp_of_sum(-v));
    case ConvActivation::hard_sigmoid:
      return clipped(v + 3.0f, 0.0f, 6.0f) * (1.0f / 6.0f);
    case ConvActivation::gelu_tanh:
      return vgelu_tanh(v);
    case ConvActivation::leaky_relu:
      return select(v > vf{}, v, v * slope);
    default:
      return v;
  }
}

template <ConvActivation::Kind kind>
struct KnownActivation {
  static constexpr ConvActivation::Kind value = kind;
};

// Calls f with the activation as a compile-time constant, so that a loop inside f does not branch.
template <class F>
TW_INLINE void with_activation(ConvActivation::Kind kind, F&& f) {
  switch (kind) {
    case ConvActivation::relu:
      return f(KnownActivation<ConvActivation::relu>());
    case ConvActivation::gelu:
      return f(KnownActivation<ConvActivation::gelu>());
    case ConvActivation::relu6:
      return f(KnownActivation<ConvActivation::relu6>());
    case ConvActivation::silu:
      return f(KnownActivation<ConvActivation::silu>());
    case ConvActivation::hard_swish:
      return f(KnownActivation<ConvActivation::hard_swish>());
    case ConvActivation::sigmoid:
      return f(KnownActivation<ConvActivation::sigmoid>());
    case ConvActivation::hard_sigmoid:
      return f(KnownActivation<ConvActivation::hard_sigmoid>());
    case ConvActivation::gelu_tanh:
      return f(KnownActivation<ConvActivation::gelu_tanh>());
    case ConvActivation::leaky_relu:
      return f(KnownActivation<ConvActivation::leaky_relu>());
    default:
      return f(KnownActivation<ConvActivation::none>());
  }
}

// Applies an activation known at run time.
TW_INLINE vf activated(vf v, ConvActivation kind) {
  if (kind == ConvActivation::none) return v;
  if (kind == ConvActivation::relu) return activate<ConvActivation::relu>(v, 0.0f);
  vf result = v;
  with_activation(kind, [&](auto constant) { result = activate<constant.value>(v, kind.slope); });
  return result;
}

}  // namespace
}  // namespace TW_ISA
}  // namespace tw
