// Memory planning: gives buffers offsets in one block of memory so that buffers alive at the same time do not overlap.
#pragma once

#include <cstdint>
#include <vector>

namespace tw {

// A buffer is alive from the node that writes it first to the node that reads it last, both included.
struct Lifetime {
  std::size_t first = 0, last = 0;
  int64_t bytes = 0;
  int64_t offset = 0;  // set by allocate_buffers
};

// Gives every buffer an offset, the largest first, each at the lowest one that is free during its lifetime ("greedy by
// size", Pisarchyk and Lee 2020). Returns the bytes of memory that all of them need.
int64_t allocate_buffers(std::vector<Lifetime>& buffers);

}  // namespace tw
