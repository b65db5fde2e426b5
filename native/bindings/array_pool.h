// Memory of large result arrays, used again. A network makes and drops the same few arrays at every step; given back to
// the system each time, their pages are faulted in and cleared anew, which costs more than a cheap layer computes. Blocks
// of 256 KiB and more are kept here when NumPy frees them, up to a bound, and handed out for results of like size.
// numpy_api.h's new_array() allocates from it.
#pragma once

#include <cstdint>

namespace tw {

int64_t array_pool_bytes();

// From which size on results come from the pool; gives what held before. Measurements set it to 1: a block of the pool
// starts on a page, and where a result lies is then no matter of chance.
int64_t set_least_pooled(int64_t bytes);
void clear_array_pool();

}  // namespace tw
