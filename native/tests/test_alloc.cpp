#include "common/alloc.h"

#include <cstdint>

#include "tests/tests.h"

TW_TEST(buffers_are_aligned_and_counted_until_freed) {
  const int64_t before = tw::memory_in_use();
  tw::reset_memory_peak();
  {
    tw::Buffer<float> a(1000), b(3);
    TW_CHECK(reinterpret_cast<uintptr_t>(a.data()) % 64 == 0 && reinterpret_cast<uintptr_t>(b.data()) % 64 == 0);
    TW_CHECK(tw::memory_in_use() - before == 4032 + 64);
    tw::Buffer<float> moved(std::move(a));
    TW_CHECK(a.data() == nullptr && moved.size() == 1000);
    TW_CHECK(tw::memory_in_use() - before == 4032 + 64);
  }
  TW_CHECK(tw::memory_in_use() == before);
  TW_CHECK(tw::memory_peak() - before == 4032 + 64);
}

TW_TEST(a_kept_workspace_grows_only_when_it_must) {
  const int64_t before = tw::memory_in_use();
  tw::Buffer<int32_t> kept;
  const int32_t* first = kept.grow(64);
  TW_CHECK(kept.grow(10) == first && kept.size() == 64);
  kept.grow(128);
  TW_CHECK(kept.size() == 128 && tw::memory_in_use() - before == 512);
}
