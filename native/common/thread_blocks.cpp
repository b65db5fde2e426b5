#include "common/thread_blocks.h"

#include <atomic>
#include <cstring>
#include <new>

#include "common/scratch.h"
#include "common/thread_pool.h"
#include "kernels/int8.h"

namespace tw {
namespace {

// A block larger than this is freed when less is asked for; products and attention size theirs by the caches.
constexpr std::size_t kKept[kScratchUses] = {
    std::size_t{16} << 20, SIZE_MAX, SIZE_MAX, std::size_t{16} << 20, SIZE_MAX, std::size_t{32} << 20, SIZE_MAX,
    std::size_t{16} << 20};
std::atomic<std::size_t> most[kScratchUses];  // the most that a thread asked for in a shared task
std::atomic<unsigned> raises{0};

thread_local ScratchBlocks own;
thread_local ScratchBlocks* current_blocks = nullptr;

// Raises the most that was asked for to `bytes`, and returns it.
std::size_t raised(int use, std::size_t bytes) {
  std::size_t before = most[use].load(std::memory_order_relaxed);
  while (bytes > before) {
    if (!most[use].compare_exchange_weak(before, bytes, std::memory_order_relaxed)) continue;
    raises.fetch_add(1, std::memory_order_release);
    return bytes;
  }
  return before;
}

template <class T>
T* scratch_or_null(Scratch use, int64_t count) {
  try {
    return thread_scratch<T>(use, count);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

}  // namespace

void* ScratchBlocks::get(Scratch use, std::size_t bytes) {
  const int i = static_cast<int>(use);
  if (bytes <= kKept[i]) {
    trim(use);
    if (in_shared_task()) bytes = raised(i, bytes);
  }
  return of_[i].grow(bytes);
}

void ScratchBlocks::trim(Scratch use) {
  if (of_[static_cast<int>(use)].size() > kKept[static_cast<int>(use)]) forget(use);
}

void ScratchBlocks::forget(Scratch use) { of_[static_cast<int>(use)] = Buffer<char>(); }

void ScratchBlocks::catch_up() {
  const unsigned now = raises.load(std::memory_order_acquire);
  if (now == last_raise_) return;
  last_raise_ = now;
  for (int i = 0; i < kScratchUses; ++i) {
    const std::size_t bytes = most[i].load(std::memory_order_relaxed);
    if (bytes <= of_[i].size()) continue;
    std::memset(of_[i].grow(bytes), 0, bytes);  // touched, so that the system provides its pages now
  }
}

ScratchBlocks& thread_blocks() { return current_blocks != nullptr ? *current_blocks : own; }

void use_blocks(ScratchBlocks* blocks) { current_blocks = blocks; }

void forget_raises() {
  for (std::atomic<std::size_t>& bytes : most) bytes.store(0, std::memory_order_relaxed);
}

float* thread_scratch(int64_t floats) { return scratch_or_null<float>(Scratch::kernel, floats); }

void trim_thread_scratch() { thread_blocks().trim(Scratch::kernel); }

int32_t* int8_scratch(int64_t numbers) { return scratch_or_null<int32_t>(Scratch::int8, numbers); }

}  // namespace tw
