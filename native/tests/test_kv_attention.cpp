// Attention over a KV cache: several queries at once give the same results as each alone, for every data type of the
// cache, with and without a window. Arrays have exactly the needed size.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/attention.h"
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

void check(tw::CacheKind kind, int64_t queries, int64_t length, int64_t width, int64_t window) {
  const int64_t q_row = width + 3, out_row = width + 1;
  const Cache keys = filled(kind, length, width, 5), values = filled(kind, length, width, 6);
  const Floats q = random_floats((queries - 1) * q_row + width, 7, 2.0f);
  Floats together((queries - 1) * out_row + width), alone(width), scores(length);
  Floats float_keys(length * width), float_values(length * width);
  const auto& kernels = tw::active_kv_attention();
  kernels.read(kind, keys.rows(), length, width, float_keys.data());
  kernels.read(kind, values.rows(), length, width, float_values.data());
  tw::AttentionHead head = {};
  head.queries = queries, head.keys = length, head.dim = head.value_dim = width;
  head.q = {q.data(), q_row}, head.k = {float_keys.data(), width}, head.v = {float_values.data(), width};
  head.scale = 0.25f, head.cap = 3.0f, head.causal = true, head.window = window;
  const auto& flash = tw::active_attention();
  Floats workspace(flash.forward_workspace(width, width));
  for (int64_t first = 0; first < queries; first += flash.queries_per_block) {
    flash.forward(head, first, std::min(queries, first + flash.queries_per_block), {together.data(), out_row}, nullptr,
                  workspace.data());
  }
  for (int64_t r = 0; r < queries; ++r) {
    const int64_t visible = length - queries + r + 1, skipped = window > 0 ? std::max<int64_t>(0, visible - window) : 0;
    const int64_t bytes = skipped * width * element_size(kind);
    const tw::CachedRows window_keys = {keys.data.data() + bytes, keys.scales.data() + skipped};
    const tw::CachedRows window_values = {values.data.data() + bytes, values.scales.data() + skipped};
    kernels.attend(kind, q.data() + r * q_row, window_keys, window_values, visible - skipped, width, {0.25f, 3.0f},
                   scores.data(), alone.data());
    for (int64_t d = 0; d < width; ++d) TW_CHECK(std::fabs(together[r * out_row + d] - alone[d]) < 1e-5f);
  }
}

}  // namespace

TW_TEST(queries_over_a_cache_get_together_what_they_get_alone) {
  for (tw::CacheKind kind : {tw::CacheKind::float32, tw::CacheKind::float16, tw::CacheKind::int8}) {
    for (int64_t length : {1, 7, 61, 300}) {
      for (int64_t width : {1, 8, 40, 97}) {
        for (int64_t window : {0, 1, 20}) {
          for (int64_t queries : {1, 5, 70}) check(kind, std::min(queries, length), length, width, window);
        }
      }
    }
  }
}
