#include "common/product_choice.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

#include "common/product_cost.h"

namespace tw {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
int64_t multiply_adds(const Gemm& g) { return g.m * g.n * g.k; }

// Below this many multiply-adds, waking a second thread costs more than it saves.
constexpr int64_t kWorthThreads = 1 << 20;
// Inner products pay off from this length on; with a B that is first transposed, up to this many columns.
constexpr int64_t kFewCopied = 24, kShortDot = 8;
// ... and with no more rows (or columns) than so many vectors.
constexpr int64_t kDotVectors = 3;
// Adding up the lanes of an inner product takes as long as this many vectors of k.
constexpr double kAddingUp = 2.5;
// Transposing a result takes as long as this many terms of k.
constexpr double kTransposing = 12;
constexpr int64_t kFewColumns = 12, kWideRow = 128;
// Up to this many rows of A are kept in registers for a strip of columns; a B this wide and larger than a core's share
// of L3 is read row by row rather than strip by strip. What exceeds so many shares is in no cache, whatever L3 is
// reported.
constexpr int64_t kFewStreamed = 3, kGroupStreamed = 4, kWideStream = 512, kSharesOfL3 = 4;
// Sums at least this long are split where there are few of them; columns that are computed in vectors of four.
constexpr int64_t kLongSum = 64, kFewQuads = 4;
// Rows this short, of a matrix that exceeds L2, are fetched ahead: the hardware only follows longer ones.
constexpr int64_t kShortRow = 256;
// Columns past the last whole vector: up to this many are worth a path of their own, in matrices this narrow.
constexpr int64_t kFewTail = 4, kManyColumns = 200, kLongTail = 24;
constexpr int64_t kFastL1 = 48 << 10;  // bytes; a core with such an L1 reads strips in time

// Whether a row times a matrix is computed in strips of columns, in whole rows if they are wide, or with its sums over
// k split if they are narrow.
ProductPath row_path(int64_t columns, int64_t k, bool column) {
  if (columns >= kWideRow) return column ? ProductPath::column_streamed : ProductPath::row_streamed;
  const bool fits = columns <= std::min<int64_t>(kFewest, active_gemm().lanes);
  if (fits && k >= kLongSum) return column ? ProductPath::column_split_sums : ProductPath::split_sums;
  return column ? ProductPath::column_strips : ProductPath::row_strips;
}

ProductPath transposed_path(const Gemm& g) {
  if (g.n <= kFewest && g.m <= active_gemm().lanes && g.k >= kLongSum) return ProductPath::transposed_split_sums;
  if (g.n * ceil_div(g.m, active_gemm().lanes) <= 4) return ProductPath::transposed_rows;
  if (g.n <= kFewest && g.c_row == g.n) return ProductPath::transposed_interleaved;
  return g.n <= kFewStreamed && g.m >= kWideStream ? ProductPath::transposed_streamed : ProductPath::transposed_tiles;
}

// The last columns of a product that go another way than the tiled loops: 0, or those past the last whole vector.
int64_t separate_tail(const Gemm& g) {
  const int64_t tail = g.n % active_gemm().lanes;
  const bool worth = g.n > tail && g.n < kManyColumns && g.k >= kLongTail && g.m >= (tail <= 2 ? 8 : 32);
  return worth && tail <= kFewTail && (g.a_col == 1 || g.a_row == 1) ? tail : 0;
}

// How much of the multipliers' time the tiled loops use: lanes past the last column idle, and packing a transposed B
// costs as much as half a vector's worth of rows.
double tiled_use(const Gemm& g) {
  const double lanes = active_gemm().lanes, whole = static_cast<double>(g.n / active_gemm().lanes);
  const double rest = static_cast<double>(g.n) - whole * lanes;
  double idle = rest == 0 ? 0 : rest <= lanes / 2 && whole > 0 ? 0.75 * lanes - rest : lanes - rest;
  if (whole == 0 && lanes >= 16 && rest <= lanes / 2) idle = 0.6 * lanes - rest;  // in vectors of half the width
  if (separate_tail(g) > 0) idle = rest * kAddingUp * lanes / static_cast<double>(g.k);
  const double packing = g.b_col == 1 ? 0 : lanes / 2;
  const double m = static_cast<double>(g.m), n = static_cast<double>(g.n);
  return n / (n + idle) * m / (m + packing);
}

// C' = B' A' has row-major operands where A and B are transposed views, and full vectors where C has few columns. Worth
// the transposition of the result when that is small beside the work.
bool better_swapped(const Gemm& g) {
  if (g.a_row != 1 || g.m <= 1) return false;
  if (g.n <= kFewColumns && g.m > g.n) return true;
  if (g.b_row != 1 || g.b_col == 1 || g.k < 32) return false;
  if (g.m < 2 * active_gemm().lanes && g.n > g.m) {  // idle lanes against packing
    const double k = static_cast<double>(g.k);
    return tiled_use(transposed(g)) * k / (k + kTransposing) > tiled_use(g);
  }
  return g.k >= 2 * g.m || g.m <= 64;
}

// Both operands along k: every lane is busy, but the lanes of each result must be added up in the end. A row-major B is
// transposed first. The shorter operand must stay in L2, and comes from there again and again: with more of it, packing
// wins.
bool better_as_dots(const Gemm& g) {
  const bool copied = g.b_row != 1;
  if (g.a_col != 1 || g.k < kShortDot || (copied && g.n > std::min(kFewCopied, g.m))) return false;
  const int64_t short_side = std::min(g.m, g.n);
  if (short_side * g.k * 4 > cache_sizes().l2 / 2 || short_side > kDotVectors * active_gemm().lanes) return false;
  const double lanes = active_gemm().lanes, m = static_cast<double>(g.m), k = static_cast<double>(g.k);
  const double copying = !copied ? 0 : 2 * g.n <= active_gemm().lanes ? lanes / 2 : lanes;
  const double steps = static_cast<double>(round_up(g.k, active_gemm().lanes));
  const double use = k / (steps + kAddingUp * lanes) * m / (m + copying);
  return use > tiled_use(g);
}

// So few results that their sums over k are split, to keep the multipliers busy.
bool small_mn(const Gemm& g) { return g.b_col == 1 && g.m <= kFewest && g.n <= active_gemm().lanes && g.k >= kLongSum; }

// Two to four columns of a row-major A, with sums too short for inner products.
bool small_n(const Gemm& g) {
  constexpr int64_t kTerms[kFewQuads + 1] = {0, 0, 16, 32, 44};
  const bool fits = g.n >= 2 && g.n <= kFewQuads && g.a_col == 1 && g.c_row == g.n && g.m >= 2 * active_gemm().lanes;
  return fits && g.k <= kTerms[g.n];
}

// A handful of rows and a B from afar: whole rows of it, each page from front to back, rather than strips. Each block
// of B's rows reads and writes the result once more, so that more rows are worth it only with a larger B, and none
// where strips arrive in time (a core with an L1 of 48 KB).
bool better_streamed(const Gemm& g) {
  const CacheSizes& caches = cache_sizes();
  const bool few = g.m > kFewStreamed && g.m <= kFewest && g.b_col == 1 && g.n >= kWideStream && caches.l1 < kFastL1;
  return few && g.k * g.n * 4 > caches.l3_share * g.m / kGroupStreamed;
}

ProductPath choose_path(const Gemm& g) {
  const int64_t long_side = std::max(g.m, g.n), short_side = std::min(g.m, g.n);
  const int64_t long_bytes = long_side * g.k * 4;
  const CacheSizes& caches = cache_sizes();
  const bool from_memory = g.stream_b || long_bytes > (g.k <= kShortRow ? caches.l2 : kSharesOfL3 * caches.l3_share);
  if (g.m == 1 && g.b_col == 1) return row_path(g.n, g.k, false);
  if (g.n == 1 && g.a_row == 1 && g.c_row == 1) return row_path(g.m, g.k, true);
  if (short_side == 1 && (g.m == 1 ? g.b_row : g.a_col) == 1) {
    return from_memory ? ProductPath::dots_streamed : ProductPath::dots;
  }
  if (small_n(g)) return ProductPath::small_n;
  if (g.k <= kShortestSum && g.n > (g.a_row == 1 ? kFewest : kFewQuads)) return ProductPath::small_k;
  if (better_as_dots(g)) return ProductPath::dots;
  if (small_mn(g)) return ProductPath::split_sums;
  if (g.m <= kFewStreamed && g.b_col == 1) {
    const bool streamed = g.n >= kWideStream && g.k * g.n * 4 > caches.l3_share;
    return streamed ? ProductPath::row_streamed : ProductPath::small_m;
  }
  if (better_streamed(g)) return ProductPath::row_streamed;
  return better_swapped(g) ? transposed_path(g) : ProductPath::tiled;
}

// Decisions for the shapes that this thread met last: a direct-mapped table, looked up in some ten nanoseconds.
struct TileCache {
  static constexpr int kEntries = 256;
  struct Entry {
    int64_t key[9] = {};
    GemmTile tile;
  };
  Entry entries[kEntries];
};

void fill_default_tile(const Gemm& g, int threads, GemmTile& t) {
  thread_local std::unique_ptr<TileCache> cache;
  const int used = threads > 1 && multiply_adds(g) >= kWorthThreads ? threads : 1;
  const CacheSizes& caches = cache_sizes();
  const int64_t key[9] = {g.m,
                          g.n,
                          g.k,
                          g.a_row,
                          g.a_col,
                          g.b_row,
                          g.b_col,
                          used | static_cast<int64_t>(active_isa()) << 16 | caches.l1 << 24,
                          caches.l2 ^ caches.l3_share << 20};
  uint64_t hash = 0;
  for (int64_t word : key) hash = (hash ^ static_cast<uint64_t>(word)) * 0xd6e8feb86659fd93u;
  if (!cache) cache = std::make_unique<TileCache>();
  TileCache::Entry& entry = cache->entries[hash >> 56];
  if (std::memcmp(entry.key, key, sizeof key) != 0) {
    Gemm tiled = g;
    tiled.n -= separate_tail(g);
    cheapest_tile(tiled, used, &entry.tile);
    std::memcpy(entry.key, key, sizeof key);
  }
  t = entry.tile;
}

// How the last columns of a tiled product are computed.
void config_tail(const Gemm& g, ProductConfig* config) {
  config->path = ProductPath::tiled;
  config->tail = separate_tail(g);
  if (config->tail > 0 && g.a_col != 1) {
    fill_default_tile(transposed(part_of(g, 0, g.m, g.n - config->tail, config->tail)), 1, config->tail_tile);
  }
}

std::atomic<bool> invariant{false};

// Two orders of summation over k serve every number of rows. With rows of B contiguous: one term after the other, in
// blocks of a depth that depends on k alone; the tiled loops, `small_k`, `small_m` and `row_streamed` do that. With
// columns of B contiguous: inner products, whose partial sums are spread over the lanes in one way; packing B for one
// row would take 2.6 times as long. Inner products of a few terms have special cases for a single row: they count as
// the first kind.
void choose_invariant(const Gemm& g, int threads, ProductConfig* config) {
  constexpr int64_t kDepth = 512;  // insensitive between 384 and 768 (256 x 2048 x 2048 on Zen 5: 1 %)
  if (g.b_col != 1 && g.b_row == 1 && g.k > std::max<int64_t>(kShortestSum, active_gemm().lanes)) {
    config->path = ProductPath::dots;
    return;
  }
  config->path = ProductPath::tiled;
  if (g.k <= kShortestSum) {
    config->path = ProductPath::small_k;
  } else if (g.b_col == 1 && g.m == 1 && g.n >= kWideRow) {
    config->path = ProductPath::row_streamed;
  } else if (g.b_col == 1 && g.m > 1 && g.m <= kMostSmallRows) {
    config->path = ProductPath::small_m;
  }
  if (config->path == ProductPath::tiled) fill_default_tile(g, threads, config->tile);
  const int64_t blocks = g.k <= kDepth * 3 / 2 ? 1 : ceil_div(g.k, kDepth);
  config->tile.kc = ceil_div(g.k, blocks);
}

}  // namespace

bool batch_invariant() { return invariant.load(std::memory_order_relaxed); }
void set_batch_invariant(bool on) { invariant.store(on, std::memory_order_relaxed); }

bool worth_threads(int64_t count) { return count >= kWorthThreads; }

GemmTile default_tile(const Gemm& g, int threads) {
  GemmTile tile;
  fill_default_tile(g, threads, tile);
  return tile;
}

void config_of_tile(const Gemm& g, const GemmTile& tile, ProductConfig* config) {
  config->tile = tile;
  config_tail(g, config);
}

void config_of_path(const Gemm& g, ProductPath path, int threads, ProductConfig* config) {
  config->path = path;
  if (path == ProductPath::tiled) {
    fill_default_tile(g, threads, config->tile);
    config_tail(g, config);
  } else if (path == ProductPath::transposed_tiles) {
    fill_default_tile(transposed(g), 1, config->tile);
  }
}

void choose_config(const Gemm& g, int threads, ProductConfig* config) {
  if (batch_invariant()) return choose_invariant(g, threads, config);
  config_of_path(g, choose_path(g), threads, config);
}

}  // namespace tw
