// Memory of large result arrays, used again. A network makes and drops the same few arrays at every step; given back to
// the system each time, their pages are faulted in and cleared anew, which costs more than a cheap layer computes.
// Blocks of 256 KiB and more are kept here when NumPy frees them, up to a bound, and handed out for results of like
// size. arrays.h's allocate_array() allocates from it.
#pragma once

#include <cstdint>

namespace tw {

int64_t array_pool_bytes();

// From which size on results come from the pool; gives what held before. Measurements set it to 1: a block of the pool
// starts on a page, and where a result lies is then no matter of chance.
int64_t set_least_pooled(int64_t bytes);

// To the system: the pool's blocks, the weights that this thread packed for one call, and what the C library holds
// free.
void give_back_memory();

}  // namespace tw
