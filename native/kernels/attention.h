// Fused attention, forward and backward, for one head at a time (FlashAttention, Dao et al. 2022): scores exist only as
// one small block of queries by keys, so memory grows with the length of the sequence and not with its square. Queries,
// keys and values are read in place: rows of `dim` floats at any distance, as a fused projection stores them.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

enum class MaskKind { none, additive, boolean };

struct StridedRows {
  const float* data;
  int64_t stride;  // floats from one row to the next
};

struct RowsOut {
  float* data;
  int64_t stride;
};

// One head of one example. `causal`: query t sees the keys up to keys - queries + t, only the last `window` of them if
// that is not 0. Scores become cap * tanh(score / cap) if `cap` is not 0. The backward pass supports neither window nor
// cap.
struct AttentionHead {
  int64_t queries, keys, dim, value_dim;
  StridedRows q, k, v;
  float scale;
  bool causal;
  MaskKind mask_kind;
  const void* mask;               // float (added to the scores) or bool (true: may attend)
  int64_t mask_row, mask_column;  // in elements; 0 where it is broadcast
  int64_t window = 0;
  float cap = 0.0f;
};

struct AttentionKernels {
  // The floats of workspace that one call of `forward` or `backward` needs.
  int64_t (*forward_workspace)(int64_t dim, int64_t value_dim);
  int64_t (*backward_workspace)(int64_t queries, int64_t dim, int64_t value_dim);
  int64_t queries_per_block;
  // Computes queries [first, last), at most queries_per_block of them. logsumexp (one per query) is for `backward`; it
  // may be null.
  void (*forward)(const AttentionHead& head, int64_t first, int64_t last, RowsOut out, float* logsumexp,
                  float* workspace);
  // Computes the gradients gq, gk and gv of a head from gout, the gradient of out. They need not be cleared.
  void (*backward)(const AttentionHead& head, StridedRows gout, StridedRows out, const float* logsumexp, RowsOut gq,
                   RowsOut gk, RowsOut gv, float* workspace);
};

TW_TABLE(AttentionKernels, attention)

}  // namespace tw
