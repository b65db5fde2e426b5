// Working memory of kernels: the part of thread_blocks.h without templates.
#pragma once

#include <cstdint>

namespace tw {

// At least `floats` floats, aligned to a cache line, contents undefined; valid until this thread asks again. Null when
// the machine is out of memory.
float* thread_scratch(int64_t floats);

// Gives back this thread's block if it is larger than what is kept between calls.
void trim_thread_scratch();

}  // namespace tw
