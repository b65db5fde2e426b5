// EarlyJoinSAGE (the baseline published with TpuGraphs, Phothilimthana et al. 2023), forward and backward. Every node
// of a graph is joined with every configuration ("slot") of that graph, passes through GraphSAGE layers x <-
// l2_normalize(leaky_relu([S x, x] W + b)), where S sums over neighbours, and the result is summed over nodes.
//
// Before its activation the first layer is linear in node and configuration, so the caller passes its two products:
// `nodes` (N, 2H) and `configs` (K, C, 2H). The left half of each enters the sum over neighbours, the right half the
// node's own term.
//
// One task computes one graph with a few of its slots, so that its rows stay in the L2 cache from layer to layer. The
// split into tasks and the order of every sum depend on the graphs alone, so results do not depend on the number of
// threads.
#pragma once

#include <cstdint>
#include <vector>

namespace tw {

struct SageBatch {
  int64_t graphs = 0, slots = 0, width = 0;
  const int64_t* first_node = nullptr;  // (graphs + 1)
  const int64_t* first_edge = nullptr;  // (nodes + 1): index of each node's first neighbour
  const int32_t* neighbours = nullptr;  // indices within the graph; the relation is symmetric
  const float* nodes = nullptr;         // (nodes, 2 width)
  const float* configs = nullptr;       // (graphs, slots, 2 width)
  const float* bias = nullptr;          // (width) of the first layer
};

// Layers after the first: (2 width, width) and (width) each.
struct SageLayers {
  std::vector<const float*> kernels, biases;
};

struct SageGradients {
  float* nodes = nullptr;  // shaped like the fields of SageBatch
  float* configs = nullptr;
  float* bias = nullptr;
  std::vector<float*> kernels, biases;
};

// Number of floats of the `saved` buffer.
int64_t sage_saved_size(const SageBatch& batch, int layers);

// Computes pooled (graphs, slots, width). If `saved` is not null, it receives the activations for the backward pass.
void sage_forward(const SageBatch& batch, const SageLayers& layers, float* pooled, float* saved);

// Computes all gradients from that of the pooled graphs; overwrites `saved`.
void sage_backward(const SageBatch& batch, const SageLayers& layers, const float* grad_pooled, float* saved,
                   const SageGradients& grads);

}  // namespace tw
