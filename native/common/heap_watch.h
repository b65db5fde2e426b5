// Counts what a process takes from the heap while a function is profiled, whoever asks for it: NumPy, our kernels,
// BLAS.
//
// While the watch is on, the calls of every loaded library to malloc, free, mmap and their kin are led through counting
// versions, by rewriting the libraries' tables of imported functions (their GOT). Two sums are kept, each with its
// peak:
//   system:    blocks taken from malloc by the size asked for, and mappings; Python's small objects appear as the
//   arenas
//              they live in.
//   requested: the same blocks, but Python's objects one by one (the bindings report them with note_requested), and not
//              the arenas.
// Only blocks taken after the start are counted, and their release; libraries loaded after the start are not seen.
// Linux with glibc only; elsewhere `start` returns false.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tw {
namespace heap_watch {

struct Counts {
  int64_t system_now, system_peak, requested_now, requested_peak, blocks;
};

// False where this system cannot be watched, or a watch is on already. With `large_only` nothing but `allocated` is
// kept: no block is looked up, which costs next to nothing and still sees every array that matters.
constexpr std::size_t kLarge = 16 << 10;
bool start(bool large_only = false);
void stop();
bool active();
bool counting_blocks();  // a watch is on, and not only for large blocks
void note_reused(
    std::size_t bytes);  // a block handed out again by a pool of ours: allocated, though nobody asked malloc
Counts counts();
int64_t allocated();  // bytes taken in blocks of kLarge and more since the start, given back or not
void reset_peaks();

// Calls `alarm` once, from inside the allocating call, when the requested bytes first reach `level`. 0 switches it off.
void set_alarm(int64_t level, void (*alarm)());

// For allocators built on top of malloc (Python's): their blocks are counted by their own size, and what they take from
// malloc or mmap inside `Inner` counts for the system sum only.
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
