// Working memory of kernels. Each thread keeps one block and hands it out again, so that a call allocates nothing once
// the block has grown to what its kernels need; a block larger than the keep limit is given back after the call.
#pragma once

#include <cstdint>

namespace tw {

// At least `floats` floats, aligned to a cache line, contents undefined; valid until this thread asks again. Null when
// the machine is out of memory.
float* thread_scratch(int64_t floats);

// Gives back this thread's block if it is larger than what is kept between calls.
void trim_thread_scratch();

}  // namespace tw
