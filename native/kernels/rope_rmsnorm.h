// Row operations of Llama-style decoders: RMS norm, rotary position embedding, gated activations, soft caps.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

struct RopeRmsNormKernels {
  // y = x / sqrt(mean(x^2) + eps) * weight, row by row.
  void (*rms_norm)(const float* x, const float* weight, float eps, float* y, int64_t rows, int64_t columns);
  // gate <- gate * sigmoid(gate) * up
  void (*silu_product)(float* gate, const float* up, int64_t n);
  // gate <- gelu(gate) * up, with the tanh approximation of GELU
  void (*gelu_product)(float* gate, const float* up, int64_t n);
  // x <- cap * tanh(x / cap)
  void (*soft_cap)(float* x, float cap, int64_t n);
  // Rotates pairs of a head (rotary position embedding, Su et al. 2021) by angles with these cosines and sines. Side by
  // side: the pairs are (2 i, 2 i + 1); otherwise (i, i + count), one of each half.
  void (*rotate)(float* head, const float* cosines, const float* sines, int64_t count, bool side_by_side);
};

TW_TABLE(RopeRmsNormKernels, rope_rmsnorm)

}  // namespace tw
