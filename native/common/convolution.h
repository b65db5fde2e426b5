// Convolution as the bindings call it: picks the algorithm, keeps the packed weights, and turns the gradients into the
// kernels of native/kernels/conv.h. Knows nothing of Python. All functions throw std::bad_alloc when memory runs out.
#pragma once

#include <cstddef>

#include "kernels/conv.h"

namespace tw {

enum class ConvAlgorithm {
  automatic = 0,
  direct = 1,
  winograd = 2,
  winograd2 = 3,
  winograd_late = 4,
  sparse = 5
};  // F(4x4, 3x3), F(2x2, 3x3), the first with filters that are transformed as they are used, and skipping zero weights
inline bool transforms(ConvAlgorithm algorithm) {
  return algorithm >= ConvAlgorithm::winograd && algorithm <= ConvAlgorithm::winograd_late;
}
inline const WinogradKernels& winograd_kernels(ConvAlgorithm algorithm) {
  if (algorithm == ConvAlgorithm::winograd_late) return active_winograd_late();
  return algorithm == ConvAlgorithm::winograd2 ? active_winograd2() : active_winograd();
}

// As Python has them.
constexpr const char* kAlgorithmNames[] = {"", "direct", "winograd", "winograd2", "winograd_late", "sparse"};
inline const char* algorithm_name(ConvAlgorithm algorithm) { return kAlgorithmNames[static_cast<int>(algorithm)]; }

// An algorithm and its tile, output channels counted singly (nr, channels). Zero means the analytical default.
struct ConvConfig {
  ConvAlgorithm algorithm = ConvAlgorithm::automatic;
  int64_t mr = 0, nr = 0, block = 0, channels = 0, split = 0;
};

bool winograd_applies(const ConvShape& s);
// The cheapest by vector instructions and by the bytes of filters that no cache holds; the same for every number of
// threads.
ConvAlgorithm choose_algorithm(const ConvShape& s);
// The cost of an algorithm in vector multiplications.
int64_t algorithm_cost(const ConvShape& s, ConvAlgorithm algorithm);

// Whether Winograd may be chosen: it may, but for comparisons with direct convolutions.
void allow_winograd(bool allow);

// How often filters that may be used again were transformed since the start: once for each, unless they change.
int64_t winograd_transforms();

// Frees what this thread keeps to pack weights in that are used once.
void forget_call_weights();

// The configuration with every zero replaced by what is used for it.
ConvConfig resolved(const ConvShape& s, const ConvConfig& config);
ConvTile resolved_tile(const ConvShape& s, ConvAlgorithm algorithm);  // the kernels' default

// Why a configuration cannot be used for this shape, written into `reason`; false when it can.
bool config_problem(const ConvShape& s, const ConvConfig& config, char* reason, std::size_t size);

// keep: the weights may be used again at the same address, so their packed form is worth keeping. The configuration
// must be feasible (config_problem returns false).
void conv_forward(const ConvShape& s, const float* x, const float* w, bool keep, const ConvEpilogue& e,
                  const ConvConfig& config, float* y);
// s is the shape of the forward convolution in all gradients.
void conv_grad_input(const ConvShape& s, const float* gy, const float* w, float* gx);
void conv_grad_weight(const ConvShape& s, const float* gy, const float* x, float* gw);

}  // namespace tw
