// Attention over a cache: several queries at once get the floats each would get alone, for every kind of cache, on
// arrays with no element to spare.
#include <cstdint>
#include <vector>

#include "kernels/kv_attention.h"
#include "tests/random.h"
#include "tests/tests.h"

namespace {

int64_t element_size(tw::CacheKind kind) {
  return kind == tw::CacheKind::float32 ? 4 : kind == tw::CacheKind::float16 ? 2 : 1;
}

struct Cache {
  std::vector<char> data;
  Floats scales;
  tw::CachedRows rows() const { return {data.data(), scales.data()}; }
};

Cache filled(tw::CacheKind kind, int64_t length, int64_t width, unsigned seed) {
  Cache cache{std::vector<char>(length * width * element_size(kind)), Floats(length)};
  const Floats x = random_floats(length * width, seed, 1.0f);
  for (int64_t t = 0; t < length; ++t) {
    tw::active_kv_attention().store(kind, x.data() + t * width, width, cache.data.data(), cache.scales.data(), t);
  }
  return cache;
}

void check(tw::CacheKind kind, int64_t length, int64_t width, bool slides) {
  constexpr int64_t R = tw::kAttendRows;
  const int64_t q_row = width + 3, out_row = width + 1, longest = length + R - 1;
  const Cache keys = filled(kind, longest, width, 5), values = filled(kind, longest, width, 6);
  const Floats q = random_floats((R - 1) * q_row + width, 7, 2.0f);
  Floats together((R - 1) * out_row + width), alone(together.size()), scores(R * (length + R)), one(longest);
  const auto& kernels = tw::active_kv_attention();
  kernels.attend_rows(kind, q.data(), q_row, keys.rows(), values.rows(), length, width, {0.25f, 3.0f, slides},
                      scores.data(), together.data(), out_row);
  for (int64_t r = 0; r < R; ++r) {
    const int64_t skipped = slides ? r : 0, bytes = skipped * width * element_size(kind);
    const tw::CachedRows window_keys = {keys.data.data() + bytes, keys.scales.data() + skipped};
    const tw::CachedRows mixed = {values.data.data() + bytes, values.scales.data() + skipped};
    kernels.attend(kind, q.data() + r * q_row, window_keys, mixed, length + r - skipped, width, {0.25f, 3.0f},
                   one.data(), alone.data() + r * out_row);
  }
  TW_CHECK(together == alone);
}

}  // namespace

TW_TEST(queries_over_a_cache_get_together_what_they_get_alone) {
  for (tw::CacheKind kind : {tw::CacheKind::float32, tw::CacheKind::float16, tw::CacheKind::int8}) {
    for (int64_t length : {1, 2, 7, 16, 61}) {
      for (int64_t width : {1, 3, 8, 16, 40, 64, 97}) {
        for (bool slides : {false, true}) check(kind, length, width, slides);
      }
    }
  }
}
