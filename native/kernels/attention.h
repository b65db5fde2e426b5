// Fused attention, forward and backward, for one head at a time: the scores exist only as one small block of queries by
// keys, so that memory grows with the sequence and not with its square. Queries, keys and values are read where they
// lie: rows of `dim` floats any distance apart, as a packed projection has them.
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

// One head of one example. `causal` lets query t see the keys up to keys - queries + t, the last `window` of them if
// that is not 0. Scores are cap * tanh(score / cap) if `cap` is not 0. The backward pass knows neither of the two.
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
  // Floats of workspace that one call below needs.
  int64_t (*forward_workspace)(int64_t dim, int64_t value_dim);
  int64_t (*backward_workspace)(int64_t queries, int64_t dim, int64_t value_dim);
  int64_t queries_per_block;
  // Queries first ... last - 1, at most one block of them; logsumexp may be null.
  void (*forward)(const AttentionHead& head, int64_t first, int64_t last, RowsOut out, float* logsumexp,
                  float* workspace);
  // All of a head's gradients; gq, gk and gv need not be cleared.
  void (*backward)(const AttentionHead& head, StridedRows gout, StridedRows out, const float* logsumexp, RowsOut gq,
                   RowsOut gk, RowsOut gv, float* workspace);
};

TW_TABLE(AttentionKernels, attention)

}  // namespace tw
