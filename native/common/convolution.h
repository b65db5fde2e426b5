// Convolution as the bindings call it: chooses the algorithm, caches the packed weights, and computes gradients by the
// kernels of native/kernels/conv.h. Independent of Python. All functions throw std::bad_alloc if memory is exhausted.
#pragma once

#include <cstddef>

#include "kernels/conv.h"

namespace tw {

constexpr int64_t kMaxPlanarChannels = 16;  // chosen: a vector; inputs of a graph with so few channels stay planes

enum class ConvAlgorithm {
  automatic = 0,
  direct = 1,
  winograd = 2,       // F(4x4, 3x3)
  winograd2 = 3,      // F(2x2, 3x3)
  winograd_late = 4,  // F(4x4, 3x3) with filters that are transformed at each use
  sparse = 5          // skips zero weights
};
inline bool transforms(ConvAlgorithm algorithm) {
  return algorithm >= ConvAlgorithm::winograd && algorithm <= ConvAlgorithm::winograd_late;
}
inline const WinogradKernels& winograd_kernels(ConvAlgorithm algorithm) {
  if (algorithm == ConvAlgorithm::winograd_late) return active_winograd_late();
  return algorithm == ConvAlgorithm::winograd2 ? active_winograd2() : active_winograd();
}

// The names in Python.
constexpr const char* kAlgorithmNames[] = {"", "direct", "winograd", "winograd2", "winograd_late", "sparse"};
inline const char* algorithm_name(ConvAlgorithm algorithm) { return kAlgorithmNames[static_cast<int>(algorithm)]; }

// An algorithm and its tile; nr and channels count output channels, not vectors. Zero means the default of the cost
// model.
struct ConvConfig {
  ConvAlgorithm algorithm = ConvAlgorithm::automatic;
  int64_t mr = 0, nr = 0, block = 0, channels = 0, split = 0;
};

bool winograd_applies(const ConvShape& s);
// Returns the algorithm with the lowest cost, by vector instructions and by the bytes of filters that no cache holds;
// the same for every number of threads.
ConvAlgorithm choose_algorithm(const ConvShape& s);
// Estimates the cost of an algorithm in vector multiplications.
int64_t algorithm_cost(const ConvShape& s, ConvAlgorithm algorithm);

// Allows Winograd to be chosen (the default) or forbids it, for comparisons with direct convolution.
void allow_winograd(bool allow);

// Counts the transformations of filters that may be used again, since the start: one each, unless they change.
int64_t winograd_transforms();

// Frees this thread's memory for packing weights that are used once.
void forget_call_weights();

// Returns the configuration with every zero replaced by its default.
ConvConfig resolved(const ConvShape& s, const ConvConfig& config);
ConvTile resolved_tile(const ConvShape& s, ConvAlgorithm algorithm);  // the kernels' default tile

// Returns whether a configuration cannot be used for this shape, and writes why into `reason`.
bool config_problem(const ConvShape& s, const ConvConfig& config, char* reason, std::size_t size);

// Computes y. keep: the weights may be used again at the same address, so their packed form is cached. The
// configuration must be feasible (config_problem returns false).
void conv_forward(const ConvShape& s, const float* x, const float* w, bool keep, const ConvEpilogue& e,
                  const ConvConfig& config, float* y);
// The gradients; s is the shape of the forward convolution.
void conv_grad_input(const ConvShape& s, const float* gy, const float* w, float* gx);
void conv_grad_weight(const ConvShape& s, const float* gy, const float* x, float* gw);

}  // namespace tw
