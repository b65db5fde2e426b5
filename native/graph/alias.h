// Alias analysis: which values of a graph share one buffer because an operator only names bytes that are there already.
//
// A slice of channels and a reshape are stored in their source's buffer, the inputs of a concatenation are computed in
// their channels of its buffer, and a view has its source's bytes. The values of one buffer are an alias set; its root
// is the value that owns the buffer.
#pragma once

#include <cstdint>
#include <vector>

#include "graph/graph.h"

namespace tw {

struct AliasSets {
  std::vector<int> parent;       // per value: the value in whose buffer it is stored, or -1
  std::vector<int64_t> channel;  // per value: its first channel there
  std::vector<bool> is_alias;    // per node: its result is stored already, so it does not run

  int root(int value) const {
    while (parent[value] >= 0) value = parent[value];
    return value;
  }
  int64_t first_channel(int value) const {
    int64_t first = 0;
    for (; parent[value] >= 0; value = parent[value]) first += channel[value];
    return first;
  }
};

// `external[v]`: the value is an input or output of the graph, stored in memory of the caller. Sets the pitch and
// padding of all values that share a buffer.
AliasSets analyze_aliases(const std::vector<Graph::Node>& nodes, const std::vector<bool>& external,
                          std::vector<TensorDesc>& descs);

}  // namespace tw
