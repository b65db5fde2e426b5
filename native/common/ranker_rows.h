// TileRanker's row network, forward and backward: the layers that every configuration of a kernel passes through.
//
// A row is one (configuration, ensemble member) pair. Everything that depends on the kernel alone (its encoding, FiLM's
// scale and shift, the attention query) is already folded into the weights (costmodel/models/numpy/ranker.py), so that
// the rows of one kernel are
//
//   h0 = relu(configs first_weight + first_bias)
//   h1 = h0 + softmax(h0 keys^T + key_bias) values      (attention over the kernel's nodes)
//   h <- h + relu(h block_weight + block_bias)          (for each residual block)
//   scores = h out_weight
//
// One task computes one kernel: its rows stay in the L2 cache from layer to layer. No sum crosses kernels, so results
// do not depend on the number of threads.
#pragma once

#include <cstdint>
#include <vector>

namespace tw {

struct RankerRows {
  int64_t kernels = 0;
  int64_t slots = 0;                        // configurations of each kernel
  int64_t members = 0;                      // networks of the ensemble
  int64_t columns = 0;                      // inputs of a configuration
  int64_t width = 0;                        // hidden units of a member
  const float* configs = nullptr;           // (kernels, slots, columns), strided:
  int64_t config_stride = 0;                // floats from one configuration to the next
  int64_t kernel_stride = 0;                // floats from one kernel's first configuration to the next kernel's
  const float* first_weight = nullptr;      // (columns, members * width)
  const float* first_bias = nullptr;        // (kernels, width)
  const int64_t* first_node = nullptr;      // (kernels + 1); every kernel has at least one node
  const float* keys = nullptr;              // (nodes, width)
  const float* key_bias = nullptr;          // (nodes)
  const float* values = nullptr;            // (nodes, width)
  std::vector<const float*> block_weights;  // (kernels, width, width) each
  std::vector<const float*> block_biases;   // (kernels, width) each
  const float* out_weight = nullptr;        // (members * width, members)

  int64_t rows_per_kernel() const { return slots * members; }
};

// Gradients, shaped like the fields of RankerRows with the same name unless a comment says otherwise.
struct RankerRowsGradients {
  float* hidden = nullptr;  // (kernels, slots, members * width): gradient of the first layer before its ReLU
  float* first_bias = nullptr;
  float* keys = nullptr;
  float* key_bias = nullptr;
  float* values = nullptr;
  std::vector<float*> block_weights, block_biases;
  float* out_weight = nullptr;  // (kernels, members * width, members): the caller sums over kernels
};

// Number of floats of the `saved` buffer.
int64_t ranker_rows_saved_size(const RankerRows& rows);

// Computes scores (kernels, slots, members) and fills `saved` with the activations that the backward pass reads.
void ranker_rows_forward(const RankerRows& rows, float* scores, float* saved);

void ranker_rows_backward(const RankerRows& rows, const float* grad_scores, const float* saved,
                          const RankerRowsGradients& grads);

}  // namespace tw
