// Convolution as the bindings call it: picks the algorithm, keeps the packed weights, and turns the gradients into the
// kernels of native/kernels/conv.h. Knows nothing of Python. All functions throw std::bad_alloc when memory runs out.
#pragma once

#include "kernels/conv.h"

namespace tw {

enum class ConvAlgorithm { automatic = 0, direct = 1, winograd = 2 };

// Zero means the analytical default.
struct ConvConfig {
  ConvAlgorithm algorithm = ConvAlgorithm::automatic;
  int64_t block = 0;   // winograd: tiles a block; direct: output pixels a band
  int64_t split = 0;   // winograd: vectors of output channels a block; direct: tasks that share a band's channels
};

bool winograd_applies(const ConvShape& s);
ConvAlgorithm choose_algorithm(const ConvShape& s);

// Why a configuration cannot be used for this shape, or null.
const char* config_problem(const ConvShape& s, const ConvConfig& config);

// keep: the weights may be used again at the same address, so their packed form is worth keeping.
void conv_forward(const ConvShape& s, const float* x, const float* w, bool keep, const ConvEpilogue& e,
                  const ConvConfig& config, float* y);
// s is the shape of the forward convolution in all gradients.
void conv_grad_input(const ConvShape& s, const float* gy, const float* w, float* gx);
void conv_grad_weight(const ConvShape& s, const float* gy, const float* x, float* gw);

}  // namespace tw
