// Working memory of kernels: the part of thread_blocks.h without templates.
#pragma once

#include <cstdint>

namespace tw {

// Returns at least `floats` floats, aligned to a cache line, with undefined contents, valid until this thread asks
// again; null if memory is exhausted.
float* thread_scratch(int64_t floats);

// Frees this thread's block if it is larger than what a thread keeps between calls.
void trim_thread_scratch();

}  // namespace tw
