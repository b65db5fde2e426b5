// Alias analysis: finds values that need no buffer because their bytes are already stored in another value's buffer.
//
// A slice of channels and a reshape are stored in their source's buffer. The inputs of a concatenation are computed
// directly into their channels of its result. A view is the bytes of its source. The values that share a buffer are an
// alias set, whose root is the value that owns the buffer.
#pragma once

#include <cstdint>
#include <vector>

#include "graph/graph.h"

namespace tw {

struct AliasSets {
  std::vector<int> parent;       // per value: the value in whose buffer it is stored, or -1 for a root
  std::vector<int64_t> channel;  // per value: its first channel inside its parent
  std::vector<bool> is_alias;    // per node: its result exists already, so it does not run

  int root(int value) const {
    while (parent[value] >= 0) value = parent[value];
    return value;
  }
  // The first channel of a value inside its root.
  int64_t first_channel(int value) const {
    int64_t first = 0;
    for (; parent[value] >= 0; value = parent[value]) first += channel[value];
    return first;
  }
};

// Finds the alias sets and sets the pitch and padding of all values that share a buffer. `external[v]`: value v is an
// input or output of the graph, stored in the caller's memory.
AliasSets analyze_aliases(const std::vector<Graph::Node>& nodes, const std::vector<bool>& external,
                          std::vector<TensorDesc>& descs);

}  // namespace tw
