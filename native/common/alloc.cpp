#include "common/alloc.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace tw {
namespace {

constexpr std::size_t kAlignment = 64;  // hardware: bytes of a cache line
// A block of this size gets large pages: read front to back, small pages cost up to half the bandwidth, because the
// hardware prefetcher stops at the end of each.
constexpr std::size_t kLargePage = std::size_t{1} << 21;  // hardware: bytes of a large page on x86-64 and arm64
constexpr std::size_t kLargeBlock = 2 * kLargePage;
std::atomic<int64_t> in_use{0}, peak{0};

std::size_t rounded(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

void count(int64_t delta) {
  const int64_t now = in_use.fetch_add(delta, std::memory_order_relaxed) + delta;
  int64_t current_peak = peak.load(std::memory_order_relaxed);
  while (now > current_peak && !peak.compare_exchange_weak(current_peak, now, std::memory_order_relaxed)) {
  }
}

// Allocates aligned memory; large blocks are aligned to, and advised to use, pages of 2 MiB. Returns null on failure.
void* aligned(std::size_t bytes) {
  if (bytes < kLargeBlock) return std::aligned_alloc(kAlignment, bytes);
  void* block = nullptr;  // aligned_alloc would need a size in whole large pages
  if (posix_memalign(&block, kLargePage, bytes) != 0) return nullptr;
#if defined(MADV_HUGEPAGE)
  madvise(block, bytes / kLargePage * kLargePage, MADV_HUGEPAGE);  // may be refused
#endif
  return block;
}

// madvise's MADV_COLLAPSE (Linux 6.1) by number, because the headers may be older than the kernel. Older kernels answer
// EINVAL.
[[maybe_unused]] constexpr int kCollapse = 25;

}  // namespace

bool settle_on_large_pages(const void* begin, std::size_t bytes) noexcept {
#if defined(MADV_HUGEPAGE)
  const auto address = reinterpret_cast<uintptr_t>(begin);
  const uintptr_t first = (address + kLargePage - 1) / kLargePage * kLargePage,
                  last = (address + bytes) / kLargePage * kLargePage;
  if (first >= last) return false;
  return madvise(reinterpret_cast<void*>(first), last - first, kCollapse) == 0;
#else
  (void)begin, (void)bytes;
  return false;
#endif
}

void* counted_alloc(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  if (bytes > SIZE_MAX - kAlignment) throw std::bad_alloc();
  void* block = aligned(rounded(bytes));
  if (block == nullptr) throw std::bad_alloc();
  count(static_cast<int64_t>(rounded(bytes)));
  return block;
}

void counted_free(void* block, std::size_t bytes) noexcept {
  if (block == nullptr) return;
  std::free(block);
  count(-static_cast<int64_t>(rounded(bytes)));
}

int64_t memory_in_use() { return in_use.load(std::memory_order_relaxed); }
int64_t memory_peak() { return peak.load(std::memory_order_relaxed); }
void reset_memory_peak() { peak.store(memory_in_use(), std::memory_order_relaxed); }

}  // namespace tw
