// Fused tile groups: consecutive operators that run depth-first, a few rows at a time, because what is between them is
// larger than the cache. Only line buffers of the intermediate values exist. The numbers are those of one operator
// after the other.
#pragma once

#include <cstdint>
#include <vector>

#include "graph/op.h"

namespace tw {

// Nodes [first, last], each of which alone reads the result of the one before it.
struct TileGroup {
  std::size_t first = 0, last = 0;
  int64_t rows = 1;   // of the result that are computed at a time
  int64_t bytes = 0;  // of the line buffers
};

// One operator of a group for one batch element. `second` is a whole second input; its desc is null without one.
struct TiledOp {
  const Op* op;
  const TensorDesc* in;
  Operand second;
  const TensorDesc* out;
};

// The most rows at a time whose line buffers fit into `budget_bytes`. The data of `second` is not used.
TileGroup choose_tile_rows(const std::vector<TiledOp>& ops, int64_t budget_bytes);

// Computes the rows [first, last) of one batch element's result. `in` and `out` are whole images; `line_buffers` has
// `group.bytes`. `times_ns` is null, or has an entry per operator, to which the time of its rows is added.
void run_tile_group(const TileGroup& group, const std::vector<TiledOp>& ops, char* in, char* out, int64_t first,
                    int64_t last, char* line_buffers, int64_t* times_ns);

}  // namespace tw
