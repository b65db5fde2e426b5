// Counts what a process allocates while a function is profiled, whoever asks for it: NumPy, our kernels, BLAS.
//
// While the watch is on, the calls of every loaded library to malloc, free, mmap and similar functions are redirected
// to counting versions, by rewriting the libraries' tables of imported functions (the GOT). Two sums are counted, each
// with its peak:
//   system: blocks from malloc by the size requested, and mappings. Python's small objects appear as the arenas that
//   contain them.
//   requested: the same blocks, but Python's objects one by one (the bindings report them with note_requested) instead
//   of the arenas.
// Only blocks allocated after the start are counted, and their release; libraries loaded after the start are not seen.
// Linux with glibc only; elsewhere `start` returns false.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tw {
namespace heap_watch {

struct Counts {
  int64_t system_now, system_peak, requested_now, requested_peak, blocks;
};

// Starts a watch. Returns false if this system cannot be watched, or a watch is on already. With `large_only` only
// `allocated` is counted: no block is looked up, which costs next to nothing and still sees every array that matters.
constexpr std::size_t kLarge = 16 << 10;  // chosen: bytes of a large block
bool start(bool large_only = false);
void stop();
bool active();
bool counting_blocks();  // a watch is on, and not only for large blocks
// Counts a block that one of our pools hands out again as allocated, although malloc is not called.
void note_reused(std::size_t bytes);
Counts counts();
int64_t allocated();  // bytes of all blocks of kLarge or more since the start, freed or not
void reset_peaks();

// Calls `alarm` once, from inside the allocating call, when the requested bytes first reach `level`; 0 disables it.
void set_alarm(int64_t level, void (*alarm)());

// For allocators on top of malloc (Python's): their blocks are counted by their own size, and what they allocate by
// malloc or mmap while an `Inner` exists counts for the system sum only.
void note_requested(void* block, std::size_t bytes);
void forget_requested(void* block);
class Inner {
 public:
  Inner();
  ~Inner();
  bool outermost() const;
};

}  // namespace heap_watch
}  // namespace tw
