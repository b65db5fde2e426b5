// EarlyJoinSAGE: several graphs, each of whose nodes is joined with each of its configurations ("slots"), through
// GraphSAGE layers x <- l2_normalize(leaky_relu([S x, x] W + b)), and the sum over nodes; forward, and back. S sums
// over neighbours. The first layer is linear in node and configuration before its activation, so its products are
// handed in: `nodes` (N, 2H) and `configs` (K, C, 2H), the left half of each for the sum over neighbours, the right
// half for itself.
//
// One task is one graph with some of its slots, so few that its rows stay in the L2 cache from layer to layer. The cut
// into tasks depends on the graphs alone, and so does every sum: results do not depend on the number of threads.
#pragma once

#include <cstdint>
#include <vector>

namespace tw {

struct SageBatch {
  int64_t graphs = 0, slots = 0, width = 0;
  const int64_t* first_node = nullptr;  // (graphs + 1)
  const int64_t* first_edge = nullptr;  // (nodes + 1): where each node's neighbours begin
  const int32_t* neighbours = nullptr;  // numbered within their graph; each is there on both sides, equally often
  const float* nodes = nullptr;         // (nodes, 2 width)
  const float* configs = nullptr;       // (graphs, slots, 2 width)
  const float* bias = nullptr;          // (width) of the first layer
};

// Layers after the first: (2 width, width) and (width) each.
struct SageLayers {
  std::vector<const float*> kernels, biases;
};

struct SageGradients {
  float* nodes = nullptr;  // as in the batch
  float* configs = nullptr;
  float* bias = nullptr;
  std::vector<float*> kernels, biases;
};

// Floats that `saved` must have.
int64_t sage_saved_size(const SageBatch& batch, int layers);

// pooled (graphs, slots, width). Where `saved` is not null it is filled with what the way back needs.
void sage_forward(const SageBatch& batch, const SageLayers& layers, float* pooled, float* saved);

// `saved` is used up.
void sage_backward(const SageBatch& batch, const SageLayers& layers, const float* grad_pooled, float* saved,
                   const SageGradients& grads);

}  // namespace tw
