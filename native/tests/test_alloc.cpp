// Buffers: alignment, accounting of memory in use, growth, and large pages.
#include "common/alloc.h"

#include <cstdint>

#include "tests/tests.h"

TW_TEST(buffers_are_aligned_and_counted_until_freed) {
  const int64_t before = tw::memory_in_use();
  tw::reset_memory_peak();
  {
    // 4000 and 12 bytes, rounded up to cache lines of 64.
    tw::Buffer<float> a(1000), b(3);
    TW_CHECK(reinterpret_cast<uintptr_t>(a.data()) % 64 == 0 && reinterpret_cast<uintptr_t>(b.data()) % 64 == 0);
    TW_CHECK(tw::memory_in_use() - before == 4032 + 64);
    tw::Buffer<float> new_owner(std::move(a));
    TW_CHECK(a.data() == nullptr && new_owner.size() == 1000);
    TW_CHECK(tw::memory_in_use() - before == 4032 + 64);
  }
  TW_CHECK(tw::memory_in_use() == before);
  TW_CHECK(tw::memory_peak() - before == 4032 + 64);
}

TW_TEST(a_workspace_grows_only_when_it_must) {
  const int64_t before = tw::memory_in_use();
  tw::Buffer<int32_t> workspace;
  const int32_t* first = workspace.grow(64);
  TW_CHECK(workspace.grow(10) == first && workspace.size() == 64);
  workspace.grow(128);
  TW_CHECK(workspace.size() == 128 && tw::memory_in_use() - before == 512);
}

TW_TEST(settling_on_large_pages_keeps_what_is_there) {
  tw::Buffer<char> block(9000000);
  for (std::size_t i = 0; i < block.size(); ++i) block[i] = static_cast<char>(i % 251);
  tw::settle_on_large_pages(block.data() + 12345, block.size() - 12345);  // granted or not
  bool is_unchanged = true;
  for (std::size_t i = 0; i < block.size(); ++i) is_unchanged = is_unchanged && block[i] == static_cast<char>(i % 251);
  TW_CHECK(is_unchanged);
  TW_CHECK(!tw::settle_on_large_pages(block.data() + 1, 100));
}

TW_TEST(a_large_block_starts_on_a_large_page_and_is_counted_like_any_other) {
  const int64_t before = tw::memory_in_use();
  {
    tw::Buffer<char> block(5000001);
    TW_CHECK(reinterpret_cast<uintptr_t>(block.data()) % (1 << 21) == 0);
    TW_CHECK(tw::memory_in_use() - before == 5000064);
    block[0] = block[5000000] = 1;
  }
  TW_CHECK(tw::memory_in_use() == before);
}
