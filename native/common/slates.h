// The part of TileRanker that every configuration of a kernel goes through, for slates of several kernels at once:
// forward, and back. A slate has `slots` configurations, each seen by `members` heads; a row is one configuration of
// one head. With all that is the kernel's own already folded into its weights (see models/ranker.py), a slate is
//
//   h0 = relu(configs wide + first),  h1 = h0 + softmax(h0 keys^T + offsets) values   (over the kernel's nodes),
//   h <- h + relu(h W + b)  for each block,  scores = h last.
//
// One task is one slate: its rows stay in the L2 cache from layer to layer, no sum crosses slates, and so results do
// not depend on the number of threads.
#pragma once

#include <cstdint>
#include <vector>

namespace tw {

struct Slates {
  int64_t kernels = 0, slots = 0, members = 0, columns = 0, width = 0;
  const float* configs = nullptr;  // (kernels, slots, columns), rows config_row apart and slates config_slate
  int64_t config_row = 0, config_slate = 0;
  const float* wide = nullptr;          // (columns, members * width)
  const float* first = nullptr;         // (kernels, width)
  const int64_t* first_node = nullptr;  // (kernels + 1); every kernel has a node
  const float* keys = nullptr;          // (nodes, width)
  const float* offsets = nullptr;       // (nodes)
  const float* values = nullptr;        // (nodes, width)
  std::vector<const float*> weights;    // (kernels, width, width) each
  std::vector<const float*> biases;     // (kernels, width) each
  const float* last = nullptr;          // (members * width, members)
  int64_t rows() const { return slots * members; }
};

struct SlateGradients {
  float* hidden = nullptr;  // (kernels, slots, members * width): of what the first layer's ReLU takes
  float* first = nullptr;   // the others as in Slates
  float* keys = nullptr;
  float* offsets = nullptr;
  float* values = nullptr;
  std::vector<float*> weights, biases;
  float* last = nullptr;  // (kernels, members * width, members), to be added up
};

// Floats that `saved` must have.
int64_t slates_saved_size(const Slates& slates);

// scores (kernels, slots, members); `saved` is filled with what the way back needs.
void slates_forward(const Slates& slates, float* scores, float* saved);

void slates_backward(const Slates& slates, const float* grad_scores, const float* saved, const SlateGradients& grads);

}  // namespace tw
