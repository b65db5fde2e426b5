#include "common/product_choice.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

namespace tw {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

std::atomic<bool> invariant{false};

// Chooses a configuration whose order of summation over k does not depend on the number of rows. There are two orders.
// If rows of B are contiguous: one term after the other, in blocks whose depth depends on k alone; the tiled loops,
// `small_k`, `small_m` and `row_streamed` do that. If columns of B are contiguous: inner products, whose partial sums
// are spread over the lanes in one way; packing B for one row would take 2.6 times as long. Inner products of a few
// terms have special cases for a single row, so they use the first order.
void choose_invariant(const Gemm& g, int threads, ProductConfig* config) {
  constexpr int64_t kDepth = 512;  // chosen: insensitive between 384 and 768 (256 x 2048 x 2048 on Zen 5: 1 %)
  if (g.b_col != 1 && g.b_row == 1 && g.k > std::max<int64_t>(kShortestSum, active_gemm().lanes)) {
    config->path = ProductPath::dot_products;
    return;
  }
  config->path = ProductPath::tiled;
  cheapest_tile(g, threads, &config->tile);
  ProductConfig few_rows = *config;
  few_rows.path = g.m == 1 ? ProductPath::row_streamed : ProductPath::small_m;
  if (g.k <= kShortestSum) {
    config->path = ProductPath::small_k;
  } else if (path_feasible(few_rows.path, g) &&
             predicted_time(g, few_rows, threads) < predicted_time(g, *config, threads)) {
    config->path = few_rows.path;
  }
  const int64_t blocks = g.k <= kDepth * 3 / 2 ? 1 : ceil_div(g.k, kDepth);
  config->tile.kc = ceil_div(g.k, blocks);
}

// The configurations of the shapes that this thread met last: a direct-mapped table, looked up in some ten nanoseconds.
struct ConfigCache {
  static constexpr int kEntries = 256;  // definition: indices of eight bits of the hash
  struct Entry {
    int64_t key[9] = {};
    ProductConfig config;
  };
  Entry entries[kEntries];
};

}  // namespace

bool batch_invariant() { return invariant.load(std::memory_order_relaxed); }
void set_batch_invariant(bool on) { invariant.store(on, std::memory_order_relaxed); }

// Returns the fastest configuration by the cost model, from a cache of this thread's last choices.
const ProductConfig& choose_config(const Gemm& g, int threads) {
  thread_local std::unique_ptr<ConfigCache> cache;
  const int used = threads > 1 && worth_threads(g.m * g.n * g.k) ? threads : 1;
  const CacheSizes& caches = cache_sizes();
  const int64_t flags = (g.c_row == g.n) | (g.c_row == 1) << 1 | g.stream_b << 2 | batch_invariant() << 3;
  const int64_t key[9] = {g.m,
                          g.n,
                          g.k,
                          g.a_row,
                          g.a_col,
                          g.b_row,
                          g.b_col,
                          used | static_cast<int64_t>(active_isa()) << 16 | flags << 20 | caches.l1 << 24,
                          caches.l2 ^ caches.l3_share << 20 ^ static_cast<int64_t>(machine().cores) << 48};
  uint64_t hash = 0;
  for (int64_t word : key) hash = (hash ^ static_cast<uint64_t>(word)) * 0xd6e8feb86659fd93u;
  if (!cache) cache = std::make_unique<ConfigCache>();
  ConfigCache::Entry& entry = cache->entries[hash >> 56];
  if (std::memcmp(entry.key, key, sizeof key) != 0) {
    entry.config = ProductConfig();
    batch_invariant() ? choose_invariant(g, used, &entry.config) : cheapest_config(g, used, &entry.config);
    std::memcpy(entry.key, key, sizeof key);
  }
  return entry.config;
}

}  // namespace tw
