// A pool for the memory of large result arrays. A network allocates and frees the same few arrays at every step; if
// they are returned to the system each time, their pages are faulted in and cleared again, which costs more than a
// cheap layer computes. Blocks of 256 KiB and more are kept here when NumPy frees them, up to a bound, and reused for
// results of similar size. arrays.h's allocate_array() allocates from it.
#pragma once

#include <cstdint>

namespace tw {

int64_t array_pool_bytes();

// Sets the size from which on results come from the pool, and returns the old one. Measurements set it to 1: blocks of
// the pool start on a page, so the alignment of a result does not depend on chance.
int64_t set_least_pooled(int64_t bytes);

// Returns memory to the system: the pool's blocks, this thread's memory for weights packed for one call, and what the C
// library holds free.
void give_back_memory();

}  // namespace tw
