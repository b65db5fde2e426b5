#include "common/matmul.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <new>

#include "common/thread_blocks.h"
#include "common/thread_pool.h"

namespace tw {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

enum class Path { tiled, swapped, dots, row_by_matrix, matrix_by_column, small_m, small_mn, small_k, small_n };

// How a product is computed; decided from the whole problem, so that splitting it changes no result.
struct Plan {
  Path path = Path::tiled;
  int variant = 0;   // dots: 1 where the larger operand comes from memory; rows: see RowBy; swapped: see Swapped
  int64_t tail = 0;  // tiled: the last columns, which would leave most lanes of a vector idle, go another way
};

// Below this many multiply-adds, waking a second thread costs more than it saves.
constexpr int64_t kWorthThreads = 1 << 20;
// Of B, packed at once for all threads; and multiply-adds that are worth a task of their own, so that threads that fall
// behind get fewer of them.
constexpr int64_t kSharedFloats = 16 << 20, kWorthTask = 8 << 20, kTasksPerThread = 4;
// What the last thread to finish keeps the others waiting, in tasks; and what reading (and packing) a column of B or a
// row of A from afar takes, in rows or columns to multiply it by.
constexpr double kWaiting = 0.1, kReading = 8.0;
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
// The default tile's blocks (docs/tiles.md says why).
constexpr int64_t kShallowest = 256, kShallow = 384, kDeep = 512, kMostBlockRows = 192, kFewestBlockRows = 48;
constexpr int64_t kShortK = 12, kMostlyStoring = 32, kShortBlockFloats = 16384;
// A row-major B is packed from so many rows on: where a row of a strip is a line or two, and where it is more; fewer or
// more rows where the caches of the machine say so (`packing_rows`). With fewer rows than kMany, a B whose rows lie a
// page apart is read in shallow blocks: their pages stay within reach of the first translation buffer.
constexpr int64_t kPackColliding = 4, kPackNarrow = 64, kPackWide = 193, kPackRowsWide = 256, kMany = 96,
                  kShallowFew = 128;
constexpr int64_t kLine = 64, kPage = 4096, kShallowestAcross = 96;
constexpr int64_t kNarrowStrip = 128, kFastL1 = 48 << 10, kManyColumnsOfA = 512, kManyStrips = 12;

// How the transposed product is computed: in tiles; row by row, or with its sums over k split, where there are too few
// accumulators to keep the multipliers busy; in whole rows where they are few and wide; or all its rows at once, which
// are then written transposed.
enum Swapped { kTiles, kRowByRow, kWholeRows, kInterleaved, kFewResults };

// How one row goes through a matrix: in strips of columns; whole rows after each other, where they are wide; with its
// sums over k split, where they are narrow.
enum RowBy { kStrips, kStreamed, kSplitSums };

RowBy row_by(int64_t columns, int64_t k) {
  if (columns >= kWideRow) return kStreamed;
  const bool fits = columns <= std::min<int64_t>(kFewest, active_gemm().lanes);
  return fits && k >= kLongSum ? kSplitSums : kStrips;
}

Swapped swapped_by(const Gemm& g) {
  if (g.n <= kFewest && g.m <= active_gemm().lanes && g.k >= kLongSum) return kFewResults;
  if (g.n * ceil_div(g.m, active_gemm().lanes) <= 4) return kRowByRow;
  if (g.n <= kFewest && g.c_row == g.n) return kInterleaved;
  return g.n <= kFewStreamed && g.m >= kWideStream ? kWholeRows : kTiles;
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

// The same product as C' = B' A', without its result and epilogue.
Gemm transposed(const Gemm& g) {
  Gemm t;
  t.m = g.n;
  t.n = g.m;
  t.k = g.k;
  t.a = g.b;
  t.a_row = g.b_col;
  t.a_col = g.b_row;
  t.b = g.a;
  t.b_row = g.a_col;
  t.b_col = g.a_row;
  t.c_row = g.m;
  return t;
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

Plan choose_plan(const Gemm& g) {
  const int64_t long_side = std::max(g.m, g.n), short_side = std::min(g.m, g.n);
  const int64_t long_bytes = long_side * g.k * 4;
  const CacheSizes& caches = cache_sizes();
  const bool from_memory = g.stream_b || long_bytes > (g.k <= kShortRow ? caches.l2 : kSharesOfL3 * caches.l3_share);
  if (g.m == 1 && g.b_col == 1) return {Path::row_by_matrix, row_by(g.n, g.k)};
  if (g.n == 1 && g.a_row == 1 && g.c_row == 1) return {Path::matrix_by_column, row_by(g.m, g.k)};
  if (short_side == 1 && (g.m == 1 ? g.b_row : g.a_col) == 1) return {Path::dots, from_memory};
  if (small_n(g)) return {Path::small_n};
  if (g.k <= kShortestSum && g.n > (g.a_row == 1 ? kFewest : kFewQuads)) return {Path::small_k};
  if (better_as_dots(g)) return {Path::dots, 0};
  if (small_mn(g)) return {Path::small_mn};
  if (g.m <= kFewStreamed && g.b_col == 1) {
    const bool streamed = g.n >= kWideStream && g.k * g.n * 4 > caches.l3_share;
    return {streamed ? Path::row_by_matrix : Path::small_m, kStreamed};
  }
  if (better_streamed(g)) return {Path::row_by_matrix, kStreamed};
  if (better_swapped(g)) return {Path::swapped, swapped_by(g)};
  Plan plan;
  plan.tail = separate_tail(g);
  return plan;
}

// A part of C: what one task computes.
Gemm part_of(const Gemm& g, int64_t row, int64_t rows, int64_t col, int64_t cols) {
  Gemm p = g;
  p.m = rows;
  p.n = cols;
  p.a += row * g.a_row;
  p.b += col * g.b_col;
  p.c += row * g.c_row + col;
  if (p.epilogue.bias) p.epilogue.bias += col;
  if (p.epilogue.residual) p.epilogue.residual += row * g.epilogue.residual_row + col;
  return p;
}

Gemm item_of(const Gemm& g, const Batch& batch, int64_t index) {
  Gemm p = g;
  p.c += index * g.m * g.n;
  for (int d = batch.dims - 1; d >= 0; --d) {
    const int64_t at = index % batch.shape[d];
    index /= batch.shape[d];
    p.a += at * batch.a_stride[d];
    p.b += at * batch.b_stride[d];
    if (p.epilogue.residual) p.epilogue.residual += at * batch.residual_stride[d];
  }
  return p;
}

float* workspace(int64_t floats) { return thread_scratch<float>(Scratch::product, floats); }

void copy_strided(const float* from, int64_t stride, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = from[i * stride];
}

// Inner products need both operands along k; the smaller one is copied where it is not.
void run_dots(const Gemm& g, bool variant) {
  Gemm d = g;
  if (g.a_col != 1) {  // m = 1
    float* a = workspace(g.k);
    copy_strided(g.a, g.a_col, g.k, a);
    d.a = a;
    d.a_col = 1;
  }
  if (g.b_row != 1) {                                          // n is small
    const int64_t apart = round_up(g.k, active_gemm().lanes);  // whole vectors, so that none straddles two cache lines
    float* b = workspace(apart * g.n);
    if (g.b_col == 1) {
      active_gemm().transpose(g.b, g.k, g.n, g.b_row, b, apart);
    } else {
      for (int64_t j = 0; j < g.n; ++j) copy_strided(g.b + j * g.b_col, g.b_row, g.k, b + j * apart);
    }
    d.b = b;
    d.b_row = 1;
    d.b_col = apart;
  }
  active_gemm().dots(d, variant);
}

void run_swapped(const Gemm& g, int by, const GemmTile& tile) {
  const GemmKernels& kernels = active_gemm();
  Gemm t = transposed(g);
  if (by == kInterleaved) {
    t.c = g.c;
    kernels.small_m(t, true);
    if (g.epilogue.any()) kernels.finish(g.epilogue, g.c, g.c_row, 0, 0, g.m, g.n);
    return;
  }
  const int64_t result = round_up(g.m * g.n, 16);
  t.c = workspace(result + (by != kTiles ? 0 : kernels.workspace(t.m, t.n, t.k, tile)));
  if (by == kWholeRows) {
    kernels.row_by_matrix(t, true);
  } else if (by == kFewResults) {
    kernels.small_mn(t);
  } else if (by == kRowByRow) {  // too few rows and columns to keep the multipliers busy: split the sums over k instead
    for (int64_t i = 0; i < t.m; ++i) kernels.row_by_matrix(part_of(t, i, 1, 0, t.n), false);
  } else {
    kernels.tiled(t, tile, {}, t.c + result);
  }
  kernels.transpose(t.c, g.n, g.m, g.m, g.c, g.c_row);
  if (g.epilogue.any()) kernels.finish(g.epilogue, g.c, g.c_row, 0, 0, g.m, g.n);
}

void run_row_by_matrix(const Gemm& g, int by) {
  by == kSplitSums ? active_gemm().small_mn(g) : active_gemm().row_by_matrix(g, by == kStreamed);
}

// m x k times k x 1 with A's columns contiguous: the transposed product is a row by a matrix.
void run_matrix_by_column(const Gemm& g, int by) {
  Gemm t = g;
  t.m = 1;
  t.n = g.m;
  t.a = g.b;
  t.a_col = g.b_row;
  t.b = g.a;
  t.b_row = g.a_col;
  t.b_col = 1;
  t.epilogue = Epilogue();
  run_row_by_matrix(t, by);
  if (g.epilogue.any()) active_gemm().finish(g.epilogue, g.c, g.c_row, 0, 0, g.m, 1);
}

void run_empty_sum(const Gemm& g) {
  for (int64_t i = 0; i < g.m; ++i) std::memset(g.c + i * g.c_row, 0, static_cast<std::size_t>(g.n) * sizeof(float));
  if (g.epilogue.any()) active_gemm().finish(g.epilogue, g.c, g.c_row, 0, 0, g.m, g.n);
}

// How the parts of a tiled product are computed: alike, whatever the number of parts.
struct Cut {
  GemmTile tile;
  GemmTile tail_tile;  // of the last columns, transposed
  PackedB b;           // where all parts share it
};

void run_tiled(const Gemm& g, const GemmTile& tile, const PackedB& b) {
  const GemmKernels& kernels = active_gemm();
  GemmTile own = tile;
  own.pack_b = tile.pack_b && b.at == nullptr;
  kernels.tiled(g, tile, b, workspace(kernels.workspace(g.m, g.n, g.k, own)));
}

void run_tiled_and_tail(const Gemm& g, const Cut& cut, int64_t tail) {
  if (tail == 0 || g.n % active_gemm().lanes != tail)
    return run_tiled(g, cut.tile, cut.b);  // no part with the last columns
  if (g.n > tail) run_tiled(part_of(g, 0, g.m, 0, g.n - tail), cut.tile, cut.b);
  const Gemm last = part_of(g, 0, g.m, g.n - tail, tail);
  g.a_col == 1 ? run_dots(last, false) : run_swapped(last, kTiles, cut.tail_tile);
}

// Sums of a few terms: B's rows must be contiguous, and transposing a B of a few rows costs little.
void run_small_k(const Gemm& g) {
  if (g.b_col == 1) return active_gemm().small_k(g);
  Gemm t = g;
  float* b = workspace(g.k * g.n);
  if (g.b_row == 1) {
    active_gemm().transpose(g.b, g.n, g.k, g.b_col, b, g.n);
  } else {
    for (int64_t p = 0; p < g.k; ++p) copy_strided(g.b + p * g.b_row, g.b_col, g.n, b + p * g.n);
  }
  t.b = b;
  t.b_row = g.n;
  t.b_col = 1;
  active_gemm().small_k(t);
}

// Up to four columns, written side by side for the kernel.
void run_small_n(const Gemm& g) {
  float* b = workspace(4 * g.k);
  for (int64_t p = 0; p < g.k; ++p) {
    for (int64_t j = 0; j < 4; ++j) b[4 * p + j] = j < g.n ? g.b[p * g.b_row + j * g.b_col] : 0.0f;
  }
  Gemm t = g;
  t.b = b;
  active_gemm().small_n(t);
}

void run_part(const Gemm& g, const Plan& plan, const Cut& cut) {
  switch (plan.path) {
    case Path::tiled:
      return run_tiled_and_tail(g, cut, plan.tail);
    case Path::swapped:
      return run_swapped(g, plan.variant, cut.tile);
    case Path::dots:
      return run_dots(g, plan.variant);
    case Path::row_by_matrix:
      return run_row_by_matrix(g, plan.variant);
    case Path::matrix_by_column:
      return run_matrix_by_column(g, plan.variant);
    case Path::small_m:
      return active_gemm().small_m(g, false);
    case Path::small_mn:
      return active_gemm().small_mn(g);
    case Path::small_k:
      return run_small_k(g);
    case Path::small_n:
      return run_small_n(g);
  }
}

int64_t multiply_adds(const Gemm& g) { return g.m * g.n * g.k; }

struct Grid {
  int64_t rows, cols;          // tasks
  int64_t row_step, col_step;  // extent of a task
};

Grid grid_of(const Gemm& g, Path path, const GemmTile& tile, int threads) {
  int64_t tm = 1, tn = 1, row_grain = 1, col_grain = 1;
  if (path == Path::tiled) {
    tm = tile.threads_m;
    tn = tile.threads_n;
    row_grain = tile.mr;
    col_grain = tile.nr;
  } else if (threads > 1) {
    (g.m >= g.n ? tm : tn) = threads;
    row_grain = path == Path::dots ? 4 : 128;
    col_grain = path == Path::dots ? 4 : 128;
  }
  Grid grid;
  grid.row_step = std::max<int64_t>(round_up(ceil_div(g.m, tm), row_grain), 1);
  grid.col_step = std::max<int64_t>(round_up(ceil_div(g.n, tn), col_grain), 1);
  grid.rows = ceil_div(g.m, grid.row_step);
  grid.cols = ceil_div(g.n, grid.col_step);
  return grid;
}

struct Job {
  const Gemm* g;
  const Batch* batch;
  Plan plan;
  Cut cut;
  Grid grid;
  int64_t items_per_task;
  float* packed = nullptr;  // B, where the tasks share it
  int64_t strips_per_task = 1;
  std::atomic<bool> failed{false};
};

void run_task(Job& job, int64_t task) {
  const int64_t parts = job.grid.rows * job.grid.cols;
  const int64_t first = task * job.items_per_task;
  const int64_t last = std::min(first + job.items_per_task, job.batch->count * parts);
  for (int64_t i = first; i < last; ++i) {
    const Gemm item = item_of(*job.g, *job.batch, i / parts);
    const int64_t part = i % parts;
    const int64_t row = part / job.grid.cols * job.grid.row_step, col = part % job.grid.cols * job.grid.col_step;
    Cut cut = job.cut;
    cut.b.first = col;
    run_part(
        part_of(item, row, std::min(job.grid.row_step, item.m - row), col, std::min(job.grid.col_step, item.n - col)),
        job.plan, cut);
  }
}

// The last columns that go another way (`run_tiled_and_tail`) stay out: with them the last strip would be wider than is
// read.
void pack_task(Job& job, int64_t task) {
  const int64_t step = job.strips_per_task * job.cut.tile.nr, col = task * step;
  const int64_t tail = job.g->n % active_gemm().lanes == job.plan.tail ? job.plan.tail : 0;
  active_gemm().pack_b(*job.g, job.cut.tile, col, std::min(step, job.g->n - tail - col), job.packed);
}

template <void (*Task)(Job&, int64_t)>
void guarded(void* context, int task) {
  Job& job = *static_cast<Job*>(context);
  try {
    Task(job, task);
  } catch (const std::bad_alloc&) {
    job.failed = true;
  }
}

void run_grid(Job& job, bool worth, int threads) {
  const int64_t units = job.batch->count * job.grid.rows * job.grid.cols;
  job.items_per_task = worth ? std::max<int64_t>(units / (8 * threads), 1) : units;
  run_tasks(static_cast<int>(ceil_div(units, job.items_per_task)), guarded<run_task>, &job);
}

// Where several rows of tasks read the same columns, all threads first pack B, once, then all multiply.
bool shares_b(const Job& job, int threads) {
  const bool several = threads > 1 && job.grid.rows > 1 && multiply_adds(*job.g) >= threads * kWorthThreads;
  return several && job.plan.path == Path::tiled && job.cut.tile.pack_b && job.batch->count == 1;
}

bool run_shared(const Gemm& g, Job& job, int threads) {
  const int nr = job.cut.tile.nr;
  const int64_t fit = std::max<int64_t>(kSharedFloats / g.k / nr * nr, nr), blocks = ceil_div(g.n, fit);
  const int64_t width = round_up(ceil_div(g.n, blocks), nr);
  try {
    job.packed = thread_scratch<float>(Scratch::packed_product, width * g.k + 64);
  } catch (const std::bad_alloc&) {
    return false;
  }
  for (int64_t col = 0; col < g.n; col += width) {
    const Gemm part = part_of(g, 0, g.m, col, std::min(width, g.n - col));
    const int64_t strips = ceil_div(part.n, nr);
    job.g = &part;
    job.strips_per_task = ceil_div(strips, 4 * threads);
    run_tasks(static_cast<int>(ceil_div(strips, job.strips_per_task)), guarded<pack_task>, &job);
    job.cut.b = {job.packed, strips * nr, 0};
    job.grid = grid_of(part, Path::tiled, job.cut.tile, threads);
    run_grid(job, true, threads);
  }
  return !job.failed;
}

// What the loops themselves cannot run.
const char* shape_problem(const GemmTile& t, const Gemm& g) {
  const GemmKernels& kernels = active_gemm();
  if (t.nr < kernels.lanes || t.nr % kernels.lanes != 0 || t.nr / kernels.lanes > 4) {
    return "nr must be one to four vectors of this instruction set";
  }
  if (t.mr < 1 || t.mr > kernels.max_rows[t.nr / kernels.lanes]) {
    return "the register tile mr x nr does not fit the register file";
  }
  if (t.mc < t.mr) return "mc must be at least mr";
  if (t.nc < t.nr) return "nc must be at least nr";
  if (t.kc < 1) return "kc must be positive";
  if (t.mc > (1 << 24) || t.nc > (1 << 24) || t.kc > (1 << 24)) return "mc, nc and kc must be at most 2**24";
  if (t.threads_m < 1 || t.threads_n < 1 || t.threads_m > 1024 || t.threads_n > 1024) {
    return "threads_m and threads_n must be between 1 and 1024";
  }
  if (!t.pack_b && g.b_col != 1 && g.n > 1) return "B must be packed where its columns are not contiguous";
  return nullptr;
}

// Rows of the default register tile. One vector wide, only a tall tile keeps the multipliers busy, unless its rows of A
// lie whole pages apart and evict each other. A short k leaves little to do between two stores of the tile: a small one
// lets the next begin while this one is written.
int default_rows(const Gemm& g, int vectors) {
  if (vectors == 4) return g.k < kShortK && g.m > 6 ? 4 : 6;
  if (vectors == 3 && g.k < kShortK) return 6;
  if (vectors == 1 && g.a_row * 4 % 2048 != 0) return 14;
  return 8;
}

// Every panel of rows reads a B that is not packed once more: nine rows by three vectors need fewer panels than six by
// four. That counts where one panel is enough, and where two multipliers wait for L2 (a core with an L1 of 48 KB).
bool better_taller(const Gemm& g, int64_t across) {
  const bool again = g.b_col == 1 && g.m > 6 && g.m < kMany && (across >= kManyStrips || across % 3 == 0);
  return again && (g.m <= 9 || cache_sizes().l1 >= kFastL1);
}

void default_registers(const Gemm& g, GemmTile& t) {
  const GemmKernels& kernels = active_gemm();
  const int widest = kernels.max_rows[4] >= 4 ? 4 : 2;  // sixteen registers hold 6 x 2 vectors, thirty-two 6 x 4
  const int64_t across = ceil_div(g.n, kernels.lanes);
  // A short k is mostly storing: strips of equal width rather than a narrow last one.
  const int64_t strips = g.k < kShortK ? ceil_div(across, widest) : 1;
  int vectors = static_cast<int>(std::min<int64_t>(ceil_div(across, strips), widest));
  t.mr = std::min(kernels.max_rows[vectors], default_rows(g, vectors));
  if (vectors == 4 && better_taller(g, across)) {
    vectors = 3;
    t.mr = kernels.max_rows[3];
  }
  t.nr = vectors * kernels.lanes;
}

// Packing reads and writes B once, and then every panel of rows reads it in order: from how many rows on that is
// quicker. Rows of B whole pages apart share one set of L1 and evict each other even while they are fetched ahead. A
// core with an L1 of 48 KB has two 512-bit multipliers waiting for it.
int64_t packing_rows(const Gemm& g, const GemmTile& t) {
  const int64_t l1 = cache_sizes().l1;
  if (t.nr * 4 > kNarrowStrip) return l1 >= kFastL1 ? kMany : kPackWide;
  return g.b_row * 4 % kPage == 0 ? kPackColliding : kPackNarrow;
}

// A B that stays in a quarter of L2 is read as well as it lies.
bool worth_packing_b(const Gemm& g, const GemmTile& t) {
  return g.k * g.n * 4 > cache_sizes().l2 / 4 && g.m >= packing_rows(g, t);
}

// Packed, a panel of A is one run of memory: worth it where A is transposed or its rows lie whole pages apart and share
// a set of L1 with each other and the strip, and where there are rows enough to be read by many strips. Copying out a
// few rows that collide takes longer than reading them; a wide strip leaves more time to fetch them.
bool worth_packing_a(const Gemm& g, const GemmTile& t) {
  const int64_t rows = t.nr * 4 > kNarrowStrip ? kPackRowsWide : kMany;
  return g.n >= kManyColumnsOfA && g.m >= rows && (g.a_col != 1 || g.a_row * 4 % kPage == 0);
}

// Read across its rows, a panel of A takes a line or two of L1 for every step along k, and the next panel wants the
// rest of those lines: as many steps as L1 holds beside the strip. A core of one 512-bit multiplier and an L1 of 32 KB
// does not notice. Rows: `transposed` of benchmarks.gemm, as AVX2 on both machines and as AVX-512 on the Xeon.
int64_t depth_across_rows(const GemmTile& t) {
  const int64_t l1 = cache_sizes().l1, step = t.nr * 4 + 2 * kLine;
  return active_gemm().lanes == 8 || l1 >= kFastL1 ? std::max(l1 * 3 / 4 / step, kShallowestAcross) : 0;
}

// A strip of B fills three quarters of L1 where that gives blocks deep enough (each reads and writes the result again),
// else an eighth of L2, from where whole lines arrive in time. A k half as long again is not cut.
int64_t default_depth(const Gemm& g, const GemmTile& t) {
  const CacheSizes& caches = cache_sizes();
  const int64_t across = g.a_col != 1 && !t.pack_a ? depth_across_rows(t) : 0;
  if (across > 0) return g.k <= across * 3 / 2 ? std::max<int64_t>(g.k, 1) : across;
  const int64_t step = t.nr * 4;
  const int64_t depth =
      caches.l1 * 3 / 4 / step >= kShallow ? kShallow : std::clamp(caches.l2 / 8 / step, kShallowest, kDeep);
  const bool one_strip = g.n <= t.nr && g.k * step <= caches.l2 / 4;
  const bool page_a_row = !t.pack_b && g.m < kMany && g.b_row * 4 > kPage / 2;
  if (page_a_row && !one_strip) return std::min(g.k, kShallowFew);
  return one_strip || g.k <= depth * 3 / 2 ? std::max<int64_t>(g.k, 1) : depth;
}

// A block of A is a quarter of L2, beside the strips of B that pass through it; twice that where it is then whole.
void default_row_block(const Gemm& g, GemmTile& t) {
  const int64_t fit = cache_sizes().l2 / 4 / (t.kc * 4), most = std::clamp(fit, kFewestBlockRows, kMostBlockRows);
  t.mc = round_up(g.m <= std::min(2 * most, kMostBlockRows) ? g.m : most / t.mr * t.mr, t.mr);
  if (g.k < kMostlyStoring && g.m * g.n * 4 > cache_sizes().l2) {  // mostly the result to write, in order
    if (t.nr == 4 * active_gemm().lanes && g.m > 6) t.mr = std::min(t.mr, 4);
    t.mc = std::max<int64_t>(4 * t.mr, round_up(kShortBlockFloats / g.n, t.mr));
  }
}

// The grid whose threads have least to do, and that reads least twice: every row of tasks reads B, every column of
// tasks A. Several tasks a thread where each is still worth one.
void default_grid(const Gemm& g, int threads, GemmTile& t) {
  const int64_t most = std::clamp<int64_t>(multiply_adds(g) / threads / kWorthTask, 1, kTasksPerThread);
  double best = 0.0;
  for (int each = 1; each <= most; ++each) {
    for (int tm = 1; tm <= threads * each; ++tm) {
      if (threads * each % tm != 0) continue;
      const int tn = threads * each / tm;
      const double rows = static_cast<double>(round_up(ceil_div(g.m, tm), t.mr));
      const double cols = static_cast<double>(round_up(ceil_div(g.n, tn), tn > 1 ? t.nr : active_gemm().lanes));
      const double area = rows * cols,
                   cost = each * (area + kReading * (rows + cols)) + kWaiting * area;  // see `grid_of`
      if (best == 0.0 || cost < best) {
        best = cost;
        t.threads_m = tm;
        t.threads_n = tn;
      }
    }
  }
}

}  // namespace

const char* matmul_path(const Gemm& g) {
  switch (choose_plan(g).path) {
    case Path::tiled:
      return "tiled";
    case Path::swapped:
      return "transposed tiles";
    case Path::small_m:
      return "few rows";
    case Path::small_mn:
      return "few results";
    case Path::small_k:
      return "short sums";
    case Path::small_n:
      return "few columns";
    case Path::row_by_matrix:
    case Path::matrix_by_column:
      return "scaled rows";
    default:
      return "inner products";
  }
}

bool tile_problem(const GemmTile& t, const Gemm& g, char* reason, std::size_t size) {
  const char* problem = shape_problem(t, g);
  if (problem != nullptr) {
    std::snprintf(reason, size, "%s", problem);
    return true;
  }
  const CacheSizes& caches = cache_sizes();
  const int64_t mc = std::min(t.mc, g.m), nc = std::min(t.nc, g.n), kc = std::min(t.kc, g.k);
  const int64_t a_bytes = t.pack_a ? mc * kc * 4 : 0, strip_bytes = kc * t.nr * 4;
  const int64_t b_bytes = t.pack_b && mc < g.m ? kc * nc * 4 : 0;
  if (a_bytes + strip_bytes > caches.l2) {
    std::snprintf(reason, size, "a block of A and a strip of B take %lld KB, more than the L2 cache's %lld KB",
                  static_cast<long long>((a_bytes + strip_bytes) >> 10), static_cast<long long>(caches.l2 >> 10));
    return true;
  }
  if (b_bytes > caches.l3) {
    std::snprintf(reason, size, "the packed block of B takes %lld KB, more than the L3 cache's %lld KB",
                  static_cast<long long>(b_bytes >> 10), static_cast<long long>(caches.l3 >> 10));
    return true;
  }
  return false;
}

GemmTile default_tile(const Gemm& g, int threads) {
  const CacheSizes& caches = cache_sizes();
  GemmTile t;
  default_registers(g, t);
  t.pack_b = g.b_col != 1 || worth_packing_b(g, t);
  t.pack_a = worth_packing_a(g, t);
  t.kc = default_depth(g, t);
  default_row_block(g, t);
  t.nc = std::clamp<int64_t>(caches.l3_share / (t.kc * 4), 8 * t.nr, 4096) / t.nr * t.nr;
  if (threads > 1 && multiply_adds(g) >= kWorthThreads) default_grid(g, threads, t);
  return t;
}

bool matmul(const Gemm& g, const Batch& batch, const GemmTile* tile) {
  if (g.m == 0 || g.n == 0 || batch.count == 0) return true;
  if (g.k == 0) {
    for (int64_t i = 0; i < batch.count; ++i) run_empty_sum(item_of(g, batch, i));
    return true;
  }
  const int threads = num_threads();
  const bool spread_items = batch.count >= 2 * threads;
  Job job;
  job.g = &g;
  job.batch = &batch;
  if (tile) {
    job.plan.tail = separate_tail(g);
    job.cut.tile = *tile;
  } else {
    job.plan = choose_plan(g);
    if (job.plan.path == Path::tiled) job.cut.tile = default_tile(g, spread_items ? 1 : threads);
    if (job.plan.path == Path::swapped && job.plan.variant == kTiles) job.cut.tile = default_tile(transposed(g), 1);
  }
  if (job.plan.tail > 0 && g.a_col != 1) {
    job.cut.tail_tile = default_tile(transposed(part_of(g, 0, g.m, g.n - job.plan.tail, job.plan.tail)), 1);
  }
  const bool worth = multiply_adds(g) * batch.count >= kWorthThreads;
  job.grid = grid_of(g, job.plan.path, job.cut.tile, worth && !spread_items ? threads : 1);
  if (shares_b(job, threads)) return run_shared(g, job, threads);
  run_grid(job, worth, threads);
  return !job.failed;
}

}  // namespace tw
