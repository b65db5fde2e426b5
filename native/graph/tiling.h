// Fused tile groups: consecutive operators computed depth-first, a few rows at a time, because the values between them
// do not fit the cache. Only line buffers (sliding windows of rows) of the intermediate values are stored. The result
// is bit for bit the one that the operators compute one after the other.
#pragma once

#include <cstdint>
#include <vector>

#include "graph/op.h"

namespace tw {

// Nodes [first, last]. Each is the only reader of the result of the node before it.
struct TileGroup {
  std::size_t first = 0, last = 0;
  int64_t rows = 1;   // rows of the last result computed at a time
  int64_t bytes = 0;  // bytes of all line buffers
};

// One operator of a group, for one batch element. `second` is its whole second input; `desc` is null if it has none.
struct TiledOp {
  const Op* op;
  const TensorDesc* in;
  Operand second;
  const TensorDesc* out;
};

// Returns the group with as many rows at a time as line buffers of `budget_bytes` allow. Ignores the data of `second`.
TileGroup choose_tile_rows(const std::vector<TiledOp>& ops, int64_t budget_bytes);

// Computes rows [first, last) of the result of one batch element. `in` and `out` point to whole images; `line_buffers`
// has room for `group.bytes`. `times_ns` is null or has one entry per operator, to which the time of its rows is added.
void run_tile_group(const TileGroup& group, const std::vector<TiledOp>& ops, char* in, char* out, int64_t first,
                    int64_t last, char* line_buffers, int64_t* times_ns);

}  // namespace tw
