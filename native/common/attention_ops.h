// Attention over a batch of heads: splits the work into tasks (forward: a block of queries of one head; backward: a
// whole head) and gives each thread its workspace. Results do not depend on the number of threads.
#pragma once

#include <cstdint>

#include "kernels/attention.h"

namespace tw {

// Distances in floats (elements, for the mask) between examples and between heads.
struct HeadStrides {
  int64_t batch, head;
};

// `first` is head 0 of example 0; the other heads follow at these distances.
struct AttentionBatch {
  int64_t batch, heads;
  AttentionHead first;
  HeadStrides q, k, v, mask;
};

struct BatchRows {
  StridedRows rows;
  HeadStrides strides;
};

struct BatchRowsOut {
  RowsOut rows;
  HeadStrides strides;
};

// logsumexp is (batch, heads, queries) in C order; null in the forward pass if no gradient needs it.
void attention_forward(const AttentionBatch& problem, BatchRowsOut out, float* logsumexp);
void attention_backward(const AttentionBatch& problem, BatchRows gout, BatchRows out, const float* logsumexp,
                        BatchRowsOut gq, BatchRowsOut gk, BatchRowsOut gv);

}  // namespace tw
