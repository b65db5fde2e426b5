// Row operations of today's decoders: RMS norm, rotary positions, gated units, soft caps.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

struct LlamaKernels {
  // y = x / sqrt(mean(x^2) + eps) * weight, row by row.
  void (*rms_norm)(const float* x, const float* weight, float eps, float* y, int64_t rows, int64_t columns);
  // gate <- gate * sigmoid(gate) * up
  void (*silu_product)(float* gate, const float* up, int64_t n);
  // gate <- gelu(gate) * up, with the tanh approximation of GELU
  void (*gelu_product)(float* gate, const float* up, int64_t n);
  // x <- cap * tanh(x / cap)
  void (*soft_cap)(float* x, float cap, int64_t n);
  // Turns the pairs (i, i + step) of a head by the angles whose cosines and sines are given: step = 1, pairs side by
  // side (2 i, 2 i + 1); else pairs of halves, (i, i + pairs).
  void (*rotate)(float* head, const float* cosines, const float* sines, int64_t pairs, bool side_by_side);
};

TW_TABLE(LlamaKernels, llama)

}  // namespace tw
