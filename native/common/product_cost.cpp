#include "common/product_cost.h"

#include <algorithm>

#include "common/machine.h"
#include "common/product_terms.h"
#include "common/thread_pool.h"

namespace tw {
namespace {

constexpr double kLine = 64;  // hardware: bytes of a cache line

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// The properties of a product and a machine that the cost of every tile depends on.
struct Problem {
  int64_t m, n, k;
  int64_t l1, l2;
  double lanes;
  int threads;
  bool transposed_a, transposed_b;
  int64_t b_row_bytes, a_col_bytes;
  bool a_same_set;
};

// The cycles of one step along k of a micro-tile: two multiply-adds or two loads per cycle, or the latency of one.
double step_cycles(int64_t rows, int64_t vectors) {
  constexpr double kLatency = 5;  // chosen: a multiply-add takes 4 cycles, and one is added for its load
  const double r = static_cast<double>(rows), v = static_cast<double>(vectors);
  return vectors == 0 ? 0 : std::max({r * v / 2, (r + v) / 2, kLatency});
}

// Returns whether a micro-tile has too few accumulators to hide the latency of a multiply-add.
bool waits(int64_t rows, int64_t vectors) { return vectors > 0 && rows * vectors < 9; }

// Bytes of a cache that rows of `width` bytes can occupy if each starts `apart` bytes after the previous one. The
// offset within a page decides the set of a line in L1, and 64 groups of sets in L2, so rows that are a multiple of a
// large power of two apart share sets.
int64_t reachable(int64_t cache, int64_t apart, int64_t width) {
  const int64_t page = 4096, line = static_cast<int64_t>(kLine);
  const int64_t step = std::min(page, apart & -apart), starts = step > line ? page / step : page / line;
  return apart == 0 ? cache : cache / page * std::min(page, starts * std::max(width, line));
}

// Adds the counts of a tiled product to `sink`.
template <class Sink>
void count_tile(const Problem& p, const GemmTile& t, Sink& sink) {
  const int64_t lanes = static_cast<int64_t>(p.lanes), vectors = t.nr / lanes;
  // A task's part of C, and the tasks of the busiest thread.
  const int64_t rows = std::min(std::max<int64_t>(round_up(ceil_div(p.m, t.threads_m), t.mr), 1), p.m);
  const int64_t cols = std::min(std::max<int64_t>(round_up(ceil_div(p.n, t.threads_n), t.nr), 1), p.n);
  const int64_t task_rows = ceil_div(p.m, rows), tasks = task_rows * ceil_div(p.n, cols);
  const double each = static_cast<double>(ceil_div(tasks, p.threads));
  const int64_t depths = ceil_div(p.k, t.kc), depth = ceil_div(p.k, depths);
  const int64_t row_blocks = ceil_div(rows, t.mc), block_rows = ceil_div(rows, row_blocks);
  const int64_t whole = cols / t.nr, rest = ceil_div(cols - whole * t.nr, lanes), strips = whole + (rest > 0);
  const int64_t panels = ceil_div(rows, t.mr), last = rows - (panels - 1) * t.mr;
  const double k = static_cast<double>(p.k), each_k = each * k;
  const double steps = static_cast<double>(panels * strips) * each_k;
  const double b_vectors = each_k * static_cast<double>(cols) / p.lanes;
  const double stored = each * static_cast<double>(rows * strips * depths);
  const double full = static_cast<double>(whole);

  sink.add(Term::tile_multiply,
           each_k * (static_cast<double>(panels - 1) * (full * step_cycles(t.mr, vectors) + step_cycles(t.mr, rest)) +
                     full * step_cycles(last, vectors) + step_cycles(last, rest)));
  sink.add(Term::tile_load, each_k / 2 * static_cast<double>(panels * ceil_div(cols, lanes) + strips * rows));
  sink.add(Term::tile_latency,
           each_k * static_cast<double>((panels - 1) * (whole * waits(t.mr, vectors) + waits(t.mr, rest)) +
                                        whole * waits(last, vectors) + waits(last, rest)));
  sink.add(Term::micro_tile, each * static_cast<double>(panels * strips * depths));
  sink.add(Term::result_row, stored);
  sink.add(Term::result_again, each * static_cast<double>((depths - 1) * rows * cols) / p.lanes);
  if (block_rows * cols * 8 > p.l2) sink.add(Term::result_far, stored);
  const int64_t strip_l1 = t.pack_b ? p.l1 : reachable(p.l1, p.b_row_bytes, t.nr * 4);
  const int64_t strip_l2 = t.pack_b ? p.l2 : reachable(p.l2, p.b_row_bytes, t.nr * 4);
  if (depth * t.nr * 16 > 3 * strip_l1) sink.add(Term::b_from_l2, static_cast<double>(panels) * b_vectors);
  if (depth * t.nr * 8 >= strip_l2) {
    sink.add(Term::b_from_l3, static_cast<double>(panels) * b_vectors);
  } else if (depth * cols * 8 > p.l2) {
    sink.add(Term::b_from_l3, static_cast<double>(row_blocks) * b_vectors);
  }
  if (t.pack_b) {
    const bool shared = p.threads > 1 && task_rows > 1;
    const double share = static_cast<double>(std::min<int64_t>(p.threads, ceil_div(p.n, t.nr)));
    const double vectors = shared ? k * static_cast<double>(p.n) / p.lanes / share : b_vectors;
    if (p.transposed_b) {  // in square blocks, the last of each depth padded
      const double blocks = vectors / static_cast<double>(depth);
      sink.add(Term::pack_b_transposed, blocks * static_cast<double>(round_up(depth, lanes)));
      if (depth % lanes != 0) sink.add(Term::pack_b_part, blocks);
    } else {
      sink.add(Term::pack_b, vectors);
    }
    if (shared) sink.add(Term::share_b, 1);
  } else {
    if (p.b_row_bytes > 2048) sink.add(Term::b_page, steps);
    if (p.b_row_bytes % 2048 == 0) sink.add(p.b_row_bytes % 4096 == 0 ? Term::b_same_set : Term::b_two_sets, steps);
  }
  const double a_vectors = static_cast<double>(rows * strips) * each_k / p.lanes;
  if (block_rows * depth * 8 > p.l2) sink.add(Term::a_from_l3, a_vectors);
  if (t.pack_a) {  // once for every block of columns
    const double vectors = static_cast<double>(panels * ceil_div(t.mr, lanes) * ceil_div(cols, t.nc)) * each_k;
    sink.add(p.transposed_a ? Term::pack_a_transposed : Term::pack_a, vectors);
  } else if (p.transposed_a) {
    // Every step reads a line or two of a column. The next panel finds them in L1 if all lines of this one fit.
    const int64_t panel_bytes = depth * 2 * static_cast<int64_t>(kLine);
    const bool fits = panel_bytes <= reachable(p.l1, p.a_col_bytes, t.mr * 4);
    const double share = std::min(1.0, static_cast<double>(p.a_col_bytes) / kLine), floats = kLine / 4;
    const double apart = static_cast<double>(panels) * (1 + (static_cast<double>(t.mr) - 1) / floats);
    const double lines = fits ? static_cast<double>(rows) / floats : apart;
    sink.add(Term::a_lines, static_cast<double>(strips) * each_k * share * lines);
    if (panel_bytes > reachable(p.l2, p.a_col_bytes, t.mr * 4)) {
      sink.add(Term::a_from_l3, static_cast<double>(strips) * each_k * share * lines);
    }
    sink.add(Term::a_across, steps * std::min(1.0, static_cast<double>(p.a_col_bytes) / 4096));
  } else if (p.a_same_set) {
    sink.add(Term::a_same_set, a_vectors);
  }
  if (tasks > 1) sink.add(Term::task, each);
}

double cost_of(const Problem& p, const GemmTile& t) {
  CostSum sum;
  count_tile(p, t, sum);
  return sum.total;
}

// The search space: tiles with fewer accumulators cannot hide the latency of their loads, deeper blocks leave no room
// for B in any cache, and shallower ones only help an unpacked transposed A.
constexpr int kMinAccumulators = 12;                   // chosen
constexpr int64_t kDeepest = 1536, kShallowest = 256;  // chosen; values of k

struct Search {
  const Gemm* g;
  Problem problem;
  GemmTile best, grid;
  double least = 0;

  // Completes a tile by its columns and grid, and keeps it if its cost is the lowest so far.
  void consider(GemmTile t) {
    t.nc = std::clamp<int64_t>(cache_sizes().l3_share / (t.kc * 4), 8 * t.nr, 4096) / t.nr * t.nr;
    if (problem.threads > 1) {
      // The grid depends on the register tile alone; neighbours in the search share it.
      if (t.mr != grid.mr || t.nr != grid.nr) {
        grid = t;
        choose_grid(*g, problem.threads, &grid);
      }
      t.threads_m = grid.threads_m;
      t.threads_n = grid.threads_n;
    }
    const double cost = cost_of(problem, t);
    if (least == 0 || cost < least) {
      least = cost;
      best = t;
    }
  }

  // Blocks of rows: all rows, or a quarter or half of L2.
  void each_row_block(GemmTile t, bool only_half) {
    const int64_t half = std::max<int64_t>(problem.l2 / 2 / (t.kc * 4) / t.mr * t.mr, t.mr);
    t.mc = round_up(problem.m, t.mr);
    if (t.mc <= half || !(only_half || t.pack_a)) consider(t);
    if (half >= problem.m) return;
    t.mc = half;
    consider(t);
    if (only_half) return;
    t.mc = std::max<int64_t>(half / 2 / t.mr * t.mr, t.mr);
    consider(t);
  }

  // A is packed only if several strips of columns read it, and only with B: the kernels that read a packed A fetch no
  // rows of B ahead.
  void each_packing(GemmTile t) {
    const bool large_b = problem.k * problem.n * 4 > problem.l1, shallow = t.kc < std::min(kShallowest, problem.k);
    if (shallow && !problem.transposed_a) return;
    t.pack_a = false;
    for (int pack_b = problem.transposed_b ? 1 : 0; pack_b <= (problem.transposed_b || large_b); ++pack_b) {
      t.pack_b = pack_b != 0;
      each_row_block(t, true);
    }
    if (problem.n <= t.nr || problem.m == 1 || shallow) return;
    t.pack_a = t.pack_b = true;
    each_row_block(t, true);
  }

  // True if tiles of this width have enough accumulators and their strip of B fits L2. One vector is always considered.
  bool has_room(int v, int64_t depth) const {
    const GemmKernels& kernels = active_gemm();
    return kernels.max_rows[v] * v >= kMinAccumulators && depth * v * kernels.lanes * 4 <= problem.l2;
  }

  // Register tiles of every width, with as many rows as share m evenly; packed or not.
  void each_width(int64_t depth) {
    const GemmKernels& kernels = active_gemm();
    GemmTile t;
    t.kc = depth;
    for (int v = 1; v <= 4 && (v == 1 || (v - 1) * kernels.lanes < problem.n); ++v) {
      if (v > 1 && !has_room(v, depth)) continue;
      t.nr = v * kernels.lanes;
      t.mr = static_cast<int>(ceil_div(problem.m, ceil_div(problem.m, kernels.max_rows[v])));
      each_packing(t);
    }
  }

  // The best so far with other row blocks and with the tallest register tiles of every width.
  void refine() {
    const GemmKernels& kernels = active_gemm();
    GemmTile t = best;
    each_row_block(t, false);
    for (int v = 1; v <= 4 && (v == 1 || (v - 1) * kernels.lanes < problem.n); ++v) {
      if (v > 1 && !has_room(v, best.kc)) continue;
      t.nr = v * kernels.lanes;
      t.mr = kernels.max_rows[v];
      each_row_block(t, false);
    }
  }
};

// Reads the properties of a product that the costs depend on.
Problem describe(const Gemm& g, int threads) {
  Problem p;
  p.m = g.m;
  p.n = g.n;
  p.k = g.k;
  p.l1 = cache_sizes().l1;
  p.l2 = cache_sizes().l2;
  p.lanes = active_gemm().lanes;
  p.threads = threads;
  p.transposed_a = g.a_col != 1 && g.m > 1;
  p.transposed_b = g.b_col != 1;
  p.b_row_bytes = g.b_row * 4;
  p.a_col_bytes = g.a_col * 4;
  p.a_same_set = !p.transposed_a && g.a_row * 4 % 4096 == 0 && g.m > 1;
  return p;
}

}  // namespace

void choose_grid(const Gemm& g, int threads, GemmTile* t) {
  // The costs, in the time of one multiply-add: kWaiting tasks for waiting for the last thread to finish; kReading rows
  // or columns of multiply-adds for reading a column of B or a row of A. A task has at least kMinWorkPerTask
  // multiply-adds.
  constexpr double kWaiting = 0.1, kReading = 8.0;                   // chosen
  constexpr int64_t kMinWorkPerTask = 8 << 20, kTasksPerThread = 4;  // chosen
  const int64_t most = std::clamp<int64_t>(g.m * g.n * g.k / threads / kMinWorkPerTask, 1, kTasksPerThread);
  double best = 0.0;
  for (int each = 1; each <= most; ++each) {
    for (int tm = 1; tm <= threads * each; ++tm) {
      if (threads * each % tm != 0) continue;
      const int tn = threads * each / tm;
      const double rows = static_cast<double>(round_up(ceil_div(g.m, tm), t->mr));
      const double cols = static_cast<double>(round_up(ceil_div(g.n, tn), tn > 1 ? t->nr : active_gemm().lanes));
      const double area = rows * cols, cost = each * (area + kReading * (rows + cols)) + kWaiting * area;
      if (best == 0.0 || cost < best) {
        best = cost;
        t->threads_m = tm;
        t->threads_n = tn;
      }
    }
  }
}

void cheapest_tile(const Gemm& g, int threads, GemmTile* tile) {
  Search search;
  search.g = &g;
  search.problem = describe(g, 1);
  constexpr int64_t kDepths[] = {768, 512, 384, 256, 160, 96};
  if (g.k <= kDeepest) search.each_width(std::max<int64_t>(g.k, 1));
  for (int64_t depth : kDepths) {
    if (depth * 5 / 4 <= g.k) search.each_width(depth);
  }
  if (threads > 1) {
    const int64_t depth = search.best.kc;
    search.problem.threads = threads;
    search.least = 0;
    search.each_width(depth);
  }
  search.refine();
  *tile = search.best;
}

namespace {

// The counts of the paths. Each function describes the kernel of the same name in kernels/gemv.h, gemm_small_m.h or
// gemm_small_k.h.

int64_t vectors_of(int64_t n) { return ceil_div(n, active_gemm().lanes); }
// Returns the accumulators that the kernels for a few rows keep in registers.
int64_t accumulators() { return 2 * active_gemm().max_rows[2] - 2; }
double as_double(int64_t x) { return static_cast<double>(x); }

// Counts the reads of an operand from the cache that holds it: `l2` is the term for L2; those for L3 and memory follow
// it.
template <class Sink>
void count_reads(Term l2, int64_t floats, double vectors, bool from_memory, Sink& sink) {
  const CacheSizes& caches = cache_sizes();
  const int64_t bytes = floats * 4;
  if (bytes <= caches.l1 && !from_memory) return;
  const int level = from_memory || bytes > caches.l3_share ? 2 : bytes > caches.l2 ? 1 : 0;
  sink.add(static_cast<Term>(static_cast<int>(l2) + level), vectors);
}

// Counts the transposition of a matrix: whole blocks of vectors, except if it has a few rows or columns.
template <class Sink>
void count_transposition(int64_t rows, int64_t cols, Sink& sink) {
  const int64_t lanes = active_gemm().lanes;
  sink.add(Term::transpose_call, 1);
  if ((rows >= 2 && rows <= 4 && cols >= lanes) || cols <= lanes / 2) {
    sink.add(Term::transpose_narrow, as_double(rows * cols));
  } else {
    sink.add(Term::transpose_block, as_double(vectors_of(rows) * vectors_of(cols) * lanes));
  }
}

// Counts the copy of an operand of `rows` x `cols`: transposed if its rows are contiguous, else element by element.
template <class Sink>
void count_copy(int64_t rows, int64_t cols, bool by_rows, Sink& sink) {
  if (by_rows) return count_transposition(rows, cols, sink);
  sink.add(Term::copy_strided, as_double(rows * cols));
}

// Counts the work of the dot_products paths: one dot product per element of C, several at a time.
template <class Sink>
void count_dot_products(const Gemm& g, bool streamed, Sink& sink) {
  const int64_t lanes = active_gemm().lanes, outer = std::max(g.m, g.n), inner = std::min(g.m, g.n);
  sink.add(Term::dot_call, 1);
  if (g.a_col != 1) sink.add(Term::copy_strided, as_double(g.m * g.k));
  if (g.b_row != 1) count_copy(g.k, g.n, g.b_col == 1, sink);
  if (inner == 1 && g.k <= std::max<int64_t>(lanes / 2, 8)) {
    if (g.k == 2) return sink.add(Term::dot_short, 2 * as_double(vectors_of(outer)));
    if (g.k > 3 && g.k <= lanes / 2) return sink.add(Term::dot_short, as_double(outer));
    return sink.add(Term::dot_scalar, as_double(outer * g.k));
  }
  const int64_t most_inner = accumulators() > 16 ? 6 : 3, inner_tiles = ceil_div(inner, most_inner);
  const int64_t columns = ceil_div(inner, inner_tiles);
  const int64_t outer_tiles = ceil_div(outer, columns == 1 ? 8 : accumulators() / columns);
  const int64_t rows = ceil_div(outer, outer_tiles), steps = vectors_of(g.k), tiles = inner_tiles * outer_tiles;
  const double cycles = std::max({as_double(rows * columns) / 2, as_double(rows + columns) / 2, 4.0});
  sink.add(Term::dot_multiply, as_double(steps * tiles) * cycles);
  sink.add(Term::dot_tile, as_double(tiles));
  sink.add(Term::dot_sum, as_double(g.m * g.n));
  const double long_vectors = as_double(outer * steps);
  if (streamed) {
    sink.add(Term::dot_fetch, long_vectors);
    if (outer * g.k * 4 > cache_sizes().l2 || g.stream_b) sink.add(Term::dot_fetch_far, long_vectors);
  } else {
    count_reads(Term::dot_l2, outer * g.k, long_vectors, g.stream_b, sink);
  }
  // Every tile of the short side passes over a block of the long side in L2; every block reads the short side again.
  if (outer * g.k * 4 > cache_sizes().l1) sink.add(Term::dot_again_l2, long_vectors * as_double(inner_tiles - 1));
  if (inner * g.k * 4 > cache_sizes().l2) {
    sink.add(Term::dot_again_l3, as_double(inner * steps) * as_double(outer_tiles) / 16);
  }
}

// Counts the terms of the time of the path row_strips (a strip of columns stays in registers).
template <class Sink>
void count_strips(const Gemm& g, Sink& sink) {
  const int64_t strips = ceil_div(vectors_of(g.n), 8), steps = g.m * g.k * strips;
  const double vectors = as_double(g.m * g.k * vectors_of(g.n));
  sink.add(Term::strip_call, 1);
  sink.add(Term::strip_vector, vectors);
  sink.add(Term::strip_step, as_double(steps));
  sink.add(Term::strip_start, as_double(g.m * strips));
  count_reads(Term::strip_l2, g.k * g.n, vectors, g.stream_b, sink);
  if (g.b_row > 512 && g.k * g.n * 4 > cache_sizes().l1) sink.add(Term::strip_page, as_double(steps));
}

// Counts the terms of the time of the path small_m (a few rows of A, B is read once).
template <class Sink>
void count_small_m(const Gemm& g, bool interleaved, Sink& sink) {
  const int64_t vectors = vectors_of(g.n), strips = ceil_div(vectors, std::max<int64_t>(accumulators() / g.m, 1));
  const double width = as_double(vectors) / as_double(strips), rows = as_double(g.m), steps = as_double(g.k * strips);
  sink.add(Term::small_m_call, 1);
  sink.add(Term::small_m_multiply, steps * std::max({rows * width / 2, (rows + 2 * width) / 2, 4.0}));
  sink.add(interleaved ? Term::small_m_interleave : Term::small_m_start,
           rows * as_double(interleaved ? vectors : strips));
  count_reads(Term::small_m_l2, g.k * g.n, as_double(g.k * vectors), g.stream_b, sink);
  if (g.b_row > 512 && g.k * g.n * 4 > cache_sizes().l1) sink.add(Term::small_m_page, steps);
  if (g.b_row * 4 % 4096 == 0) sink.add(Term::small_m_set, steps);
}

// Counts the terms of the time of the path row_streamed (rows of B are scaled and added in memory order).
template <class Sink>
void count_streamed(const Gemm& g, Sink& sink) {
  const int64_t at_once = g.m == 3 ? 4 : 8, groups = g.m <= 3 ? 1 : ceil_div(g.m, accumulators() > 16 ? 6 : 4);
  const int64_t vectors = vectors_of(g.n), blocks = ceil_div(g.k, at_once);
  sink.add(Term::stream_call, 1);
  sink.add(Term::stream_multiply, as_double(g.k * vectors * std::max(g.m, groups)) / 2);
  sink.add(Term::stream_result, as_double(g.m * vectors * blocks));
  sink.add(Term::stream_start, as_double(blocks * groups));
  count_reads(Term::stream_l2, g.k * g.n, as_double(g.k * vectors), g.stream_b, sink);
}

// Counts the terms of the time of the path split_sums (several accumulators share a sum).
template <class Sink>
void count_split(const Gemm& g, Sink& sink) {
  const double split = g.m == 1 ? 8 : g.m <= 3 ? 4 : g.m < 8 ? 2 : 1;
  sink.add(Term::split_call, 1);
  sink.add(Term::split_multiply, as_double(g.k) * std::max(as_double(g.m + 1) / 2, 4 / split));
  if (g.k * g.b_row * 4 > cache_sizes().l1) {
    sink.add(g.k * g.b_row * 4 > cache_sizes().l2 ? Term::split_l3 : Term::split_l2, as_double(g.k));
  }
}

// Counts the work of a product with a small k (kernels/gemm_small_k.h).
template <class Sink>
void count_short(const Gemm& g, Sink& sink) {
  const int64_t vectors = vectors_of(g.n), most = std::clamp<int64_t>((accumulators() > 16 ? 24 : 12) / g.k, 1, 4);
  const int64_t strips = ceil_div(vectors, most), block = std::max<int64_t>(kSmallestL1 / 4 / g.n, 8);
  sink.add(Term::short_call, 1);
  sink.add(Term::short_multiply, as_double(g.m * vectors * g.k) / 2);
  sink.add(Term::short_store, as_double(g.m * vectors));
  sink.add(Term::short_row, as_double(g.m * strips * g.k));
  sink.add(Term::short_start, as_double(strips * ceil_div(g.m, block) * g.k));
  if (g.m * g.n * 4 > cache_sizes().l2) sink.add(Term::short_far, as_double(g.m * vectors));
  if (g.b_col != 1) count_copy(g.n, g.k, g.b_row == 1, sink);
}

template <class Sink>
void count_narrow(const Gemm& g, Sink& sink) {
  const int64_t rows = std::max<int64_t>(active_gemm().lanes / 4, 1), groups = g.m / rows + g.m % rows;
  sink.add(Term::narrow_call, 1);
  sink.add(Term::narrow_step, as_double(groups * g.k));
  sink.add(Term::narrow_group, as_double(groups));
  sink.add(Term::narrow_copy, as_double(g.k));
}

// Counts the costs of a tiled product outside its loops: packing, threads, last columns.
template <class Sink>
void count_around_tiles(const Gemm& g, int64_t last_columns, int threads, Sink& sink) {
  sink.add(Term::tile_call, 1);
  const int64_t floats = g.m * g.k + g.k * g.n + g.m * g.n;
  count_reads(Term::tile_l2, floats, as_double(floats) / active_gemm().lanes / threads, g.stream_b, sink);
  if (last_columns == 0) return;
  const Gemm last = part_of(g, 0, ceil_div(g.m, threads), g.n - last_columns, last_columns);
  if (g.a_col == 1) return count_dot_products(last, false, sink);
  sink.add(Term::tile_call, 1);
  count_tile(describe(transposed(last), 1), last_columns_tile(last), sink);
  count_transposition(last.n, last.m, sink);
}

// Counts the operations of a configuration on the busiest thread.
template <class Sink>
void count_config(const Gemm& whole, const ProductConfig& config, int threads, Sink& sink) {
  Gemm g = whole;
  if (config.path != ProductPath::tiled && threads > 1) {  // one thread's part
    int64_t& side = g.m >= g.n ? g.m : g.n;
    const int64_t extent = task_extent(g, config.path, threads);
    if (extent < side) {
      side = extent;
      sink.add(Term::task, 1);
    }
  }
  const Gemm t = transposed(g);
  switch (config.path) {
    case ProductPath::tiled:
      count_tile(describe(part_of(g, 0, g.m, 0, g.n - config.last_columns), threads), config.tile, sink);
      return count_around_tiles(g, config.last_columns, threads, sink);
    case ProductPath::transposed_tiles:
      count_tile(describe(t, 1), config.tile, sink);
      count_around_tiles(t, 0, 1, sink);
      if (g.b_col == 1 && g.b_row > 512) {
        const int64_t micro_tiles = ceil_div(t.m, config.tile.mr) * ceil_div(t.n, config.tile.nr);
        sink.add(g.b_row % 512 == 0 ? Term::transposed_set : Term::transposed_page, as_double(micro_tiles * g.k));
      }
      return count_transposition(g.n, g.m, sink);
    case ProductPath::transposed_interleaved:
      return count_small_m(t, true, sink);
    case ProductPath::transposed_split_sums:
      count_split(t, sink);
      return count_transposition(g.n, g.m, sink);
    case ProductPath::dot_products:
    case ProductPath::dot_products_streamed:
      return count_dot_products(g, config.path == ProductPath::dot_products_streamed, sink);
    case ProductPath::row_strips:
      return count_strips(g, sink);
    case ProductPath::row_streamed:
      return count_streamed(g, sink);
    case ProductPath::column_strips:
      return count_strips(t, sink);
    case ProductPath::column_streamed:
      return count_streamed(t, sink);
    case ProductPath::column_split_sums:
      return count_split(t, sink);
    case ProductPath::small_m:
      return count_small_m(g, false, sink);
    case ProductPath::split_sums:
      return count_split(g, sink);
    case ProductPath::small_k:
      return count_short(g, sink);
    case ProductPath::small_n:
      return count_narrow(g, sink);
  }
}

double cost_of(const Gemm& g, const ProductConfig& config, int threads) {
  CostSum sum;
  count_config(g, config, threads, sum);
  return sum.total;
}

// Decides whether the last columns of a tiled product are computed separately, whatever the number of threads.
void choose_last_columns(const Gemm& g, ProductConfig* config) {
  config->last_columns = last_columns_of(g);
  if (config->last_columns == 0) return;
  ProductConfig together;
  together.tile = config->tile;
  together.tile.threads_m = together.tile.threads_n = 1;
  ProductConfig apart = together;
  apart.last_columns = config->last_columns;
  if (cost_of(g, apart, 1) >= cost_of(g, together, 1)) config->last_columns = 0;
}

// Returns a lower bound on the time of a tiled product: every lane of two multipliers is busy.
double tiled_lower_bound(const Gemm& g) {
  const double cycles = as_double(g.m * g.k * vectors_of(g.n)) / 2;
  return kCost[static_cast<int>(Term::tile_call)] + kCost[static_cast<int>(Term::tile_multiply)] * cycles;
}

}  // namespace

int64_t last_columns_of(const Gemm& g) {
  const int64_t last_columns = g.n % active_gemm().lanes;
  return g.n > last_columns && (g.a_col == 1 || g.a_row == 1) ? last_columns : 0;
}

bool worth_threads(int64_t multiply_adds) { return multiply_adds >= kWakeMultiplyAdds; }

void config_of_tile(const Gemm& g, const GemmTile& tile, ProductConfig* config) {
  config->path = ProductPath::tiled;
  config->tile = tile;
  choose_last_columns(g, config);
}

void config_of_path(const Gemm& g, ProductPath path, int threads, ProductConfig* config) {
  config->path = path;
  if (path == ProductPath::transposed_tiles) cheapest_tile(transposed(g), 1, &config->tile);
  if (path != ProductPath::tiled) return;
  cheapest_tile(g, 1, &config->tile);
  choose_last_columns(g, config);
  if (!worth_threads(g.m * g.n * g.k)) threads = 1;
  if (config->last_columns > 0 || threads > 1) {
    cheapest_tile(part_of(g, 0, g.m, 0, g.n - config->last_columns), threads, &config->tile);
  }
}

void cheapest_config(const Gemm& g, int threads, ProductConfig* config) {
  // A path that is fast on one thread may leave most of many threads idle, so the path is chosen for both.
  const int many = worth_threads(g.m * g.n * g.k) ? machine().cores : 1;
  ProductConfig candidate;
  double least = 0;
  const auto consider = [&](double one_thread) {
    const double cost = one_thread * (many > 1 ? cost_of(g, candidate, many) : one_thread);
    if (least != 0 && cost >= least) return;
    least = cost;
    *config = candidate;
  };
  // Paths without a tile first: their predictions take some nanoseconds and often rule out the search for a tile.
  for (int i = 0; i < kProductPaths; ++i) {
    candidate.path = static_cast<ProductPath>(i);
    const bool tiles = candidate.path == ProductPath::tiled || candidate.path == ProductPath::transposed_tiles;
    if (!tiles && path_feasible(candidate.path, g)) consider(cost_of(g, candidate, 1));
  }
  for (ProductPath path : {ProductPath::tiled, ProductPath::transposed_tiles}) {
    const double bound = tiled_lower_bound(path == ProductPath::tiled ? g : transposed(g));
    if (least != 0 && bound * bound / many >= least) continue;
    config_of_path(g, path, 1, &candidate);
    const double one_thread = cost_of(g, candidate, 1);
    if (path == ProductPath::tiled && many > 1) {
      cheapest_tile(part_of(g, 0, g.m, 0, g.n - candidate.last_columns), many, &candidate.tile);
    }
    consider(one_thread);
  }
  if (config->path == ProductPath::tiled && threads != many) {
    cheapest_tile(part_of(g, 0, g.m, 0, g.n - config->last_columns), threads, &config->tile);
  }
}

double predicted_time(const Gemm& g, const ProductConfig& config, int threads) { return cost_of(g, config, threads); }

void count_terms(const Gemm& g, const ProductConfig& config, int threads, double* counts) {
  CostCounts sink{counts};
  count_config(g, config, threads, sink);
}

}  // namespace tw
