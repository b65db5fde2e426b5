// Scratch memory that threads keep from call to call, so that a call allocates nothing once the blocks have grown large
// enough. Which thread gets the largest of some shared tasks is random: in shared tasks a block therefore grows to the
// most that any thread has asked for, and the pool gives its workers as much when a job ends (`catch_up`). Kernels use
// scratch.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/alloc.h"

namespace tw {

// What a block is for: a thread may use blocks of different uses at once.
enum class Scratch { kernel, product, packed_product, call_weights, attention, int8, int8_sums, sage };
constexpr int kScratchUses = 8;  // definition: values of Scratch

class ScratchBlocks {
 public:
  void* get(Scratch use, std::size_t bytes);
  void trim(Scratch use);    // frees a block that is larger than what is kept between calls
  void forget(Scratch use);  // frees a block of any size
  void catch_up();           // grows every block to what any thread needed in shared tasks; not while one is in use

 private:
  Buffer<char> of_[kScratchUses];
  unsigned last_raise_ = 0;  // number of raises at the last `catch_up`
};

// Returns this thread's blocks. A worker of a pool uses blocks that the pool owns (`use_blocks`).
ScratchBlocks& thread_blocks();
void use_blocks(ScratchBlocks* blocks);
void forget_raises();  // for a new pool: ignores what threads needed until now

// Returns uninitialized memory, aligned to a cache line; valid until this thread requests it for the same use again.
template <class T>
T* thread_scratch(Scratch use, int64_t count) {
  return static_cast<T*>(thread_blocks().get(use, static_cast<std::size_t>(count) * sizeof(T)));
}

}  // namespace tw
