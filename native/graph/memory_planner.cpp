#include "graph/memory_planner.h"

#include <algorithm>

namespace tw {

// Assigns offsets by "greedy by size" (Pisarchyk and Lee 2020): the largest buffer first, each in the lowest free gap.
int64_t allocate_buffers(std::vector<Lifetime>& buffers) {
  std::vector<Lifetime*> order;
  for (Lifetime& buffer : buffers) order.push_back(&buffer);
  std::stable_sort(order.begin(), order.end(),
                   [](const Lifetime* a, const Lifetime* b) { return a->bytes > b->bytes; });
  std::vector<const Lifetime*> by_offset;  // those that have an offset, in ascending order of it
  int64_t total = 0;
  for (Lifetime* buffer : order) {
    // The first gap that is large enough, between the buffers that are alive at the same time.
    int64_t offset = 0;
    for (const Lifetime* other : by_offset) {
      if (other->first > buffer->last || buffer->first > other->last) continue;
      if (other->offset >= offset + buffer->bytes) break;
      offset = std::max(offset, other->offset + other->bytes);
    }
    buffer->offset = offset;
    total = std::max(total, offset + buffer->bytes);
    const auto after = std::upper_bound(by_offset.begin(), by_offset.end(), buffer,
                                        [](const auto* a, const auto* b) { return a->offset < b->offset; });
    by_offset.insert(after, buffer);
  }
  return total;
}

}  // namespace tw
