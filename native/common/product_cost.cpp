#include "common/product_cost.h"

#include <algorithm>

#include "common/machine.h"

namespace tw {
namespace {

constexpr double kLine = 64;  // bytes of a cache line

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Predicted time = sum of coefficient x count. Counts are vectors, steps along k, or micro-tiles of the busiest thread;
// the scale is arbitrary. Fitted to 40,000 timings of 1,660 products on a Zen 5 and an Emerald Rapids core as AVX-512
// and AVX2, and on 16 threads of the latter.
struct Coefficients {
  double multiply;      // cycles of a micro-tile's step: multipliers, loads or the latency of a multiply-add
  double load;          // half a load of A or B
  double latency;       // steps of a micro-tile with fewer accumulators than keep two multipliers busy
  double micro_tile;    // starting and ending a micro-tile
  double result_row;    // rows of micro-tiles that are stored, once per block of k
  double result_again;  // vectors of C that a further block of k reads and adds to
  double result_far;    // rows of micro-tiles stored to a block of C that exceeds half of L2
  double b_from_l2;     // vectors of B read for a strip that exceeds three quarters of L1
  double b_from_l3;     // vectors of B read again for every block of rows, if a block of k exceeds half of L2
  double pack_b, pack_b_transposed;      // vectors of B packed
  double share_b;                        // a second round of tasks, in which all threads pack B
  double page, same_set, same_two_sets;  // steps along an unpacked B whose rows are on different pages; whose rows fall
                                         // into one, two sets of L1
  double a_across, a_same_set;  // steps along an unpacked transposed A; vectors of an unpacked A in one set of L1
  double task;                  // a task of the busiest thread
  double a_from_l3;             // vectors of A read again for every strip, if a block of rows exceeds half of L2
};

constexpr Coefficients kCost = {
    0.2395, 0.06782, 0.008771, 0.1996, 1.614,  0.3388, 0.2822, 0.05547, 0.07652, 0.9025,
    2.477,  9183,    0.1299,   0.5142, 0.1422, 0.1054, 0.1638, 3189,    0.1189,
};

// What of a product and a machine all its tiles share.
struct Problem {
  int64_t m, n, k;
  int64_t l1, l2;
  double lanes;
  int threads;
  bool transposed_a, transposed_b;
  int64_t b_row_bytes, a_col_bytes;
  bool a_same_set;
};

// Cycles of one step along k of a micro-tile: two multiply-adds or two loads a cycle, or the latency of one.
double step_cycles(int64_t rows, int64_t vectors) {
  constexpr double kLatency = 5;
  const double r = static_cast<double>(rows), v = static_cast<double>(vectors);
  return vectors == 0 ? 0 : std::max({r * v / 2, (r + v) / 2, kLatency});
}

bool waits(int64_t rows, int64_t vectors) { return vectors > 0 && rows * vectors < 9; }

double cost_of(const Problem& p, const GemmTile& t) {
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
  const double k = static_cast<double>(p.k), steps = static_cast<double>(panels * strips) * k;
  const double b_vectors = k * static_cast<double>(cols) / p.lanes;
  const double stored = static_cast<double>(rows * strips * depths);
  const Coefficients& c = kCost;

  const double full = static_cast<double>(whole);
  double cost = c.multiply * k *
                (static_cast<double>(panels - 1) * (full * step_cycles(t.mr, vectors) + step_cycles(t.mr, rest)) +
                 full * step_cycles(last, vectors) + step_cycles(last, rest));
  cost += c.load * k / 2 * static_cast<double>(panels * ceil_div(cols, lanes) + strips * rows);
  cost += c.latency * k *
          static_cast<double>((panels - 1) * (whole * waits(t.mr, vectors) + waits(t.mr, rest)) +
                              whole * waits(last, vectors) + waits(last, rest));
  cost += c.micro_tile * static_cast<double>(panels * strips * depths) + c.result_row * stored;
  cost += c.result_again * static_cast<double>((depths - 1) * rows * cols) / p.lanes;
  if (block_rows * cols * 8 > p.l2) cost += c.result_far * stored;
  if (depth * t.nr * 16 > 3 * p.l1) cost += c.b_from_l2 * static_cast<double>(panels) * b_vectors;
  if (depth * cols * 8 > p.l2) cost += c.b_from_l3 * static_cast<double>(row_blocks) * b_vectors;
  const bool shared = p.threads > 1 && task_rows > 1 && t.pack_b;
  double packing = 0;
  if (t.pack_b) {
    const double share = static_cast<double>(std::min<int64_t>(p.threads, ceil_div(p.n, t.nr)));
    packing = (p.transposed_b ? c.pack_b_transposed : c.pack_b) *
              (shared ? k * static_cast<double>(p.n) / p.lanes / share : each * b_vectors);
    if (shared) packing += c.share_b;
  } else {
    if (p.b_row_bytes > 2048) cost += c.page * steps;
    if (p.b_row_bytes % 2048 == 0) cost += (p.b_row_bytes % 4096 == 0 ? c.same_set : c.same_two_sets) * steps;
  }
  const double a_vectors = static_cast<double>(rows) * k / p.lanes;
  if (block_rows * depth * 8 > p.l2) cost += c.a_from_l3 * a_vectors * static_cast<double>(strips);
  if (p.transposed_a) {
    cost += c.a_across * steps * std::min(1.0, static_cast<double>(p.a_col_bytes) / kLine);
  } else if (p.a_same_set) {
    cost += c.a_same_set * a_vectors * static_cast<double>(strips);
  }
  return each * cost + packing + (tasks > 1 ? each * c.task : 0);
}

// The space: tiles with fewer accumulators cannot hide the latency of their loads, blocks deeper than this leave no
// room for B in any cache, and shallower ones only help an unpacked transposed A.
constexpr int kFewestAccumulators = 12;
constexpr int64_t kDeepest = 1024, kShallowest = 256;

struct Search {
  const Gemm* g;
  Problem problem;
  GemmTile best, grid;
  double least = 0;

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
    if (t.mc <= half || !only_half) consider(t);
    if (half >= problem.m) return;
    t.mc = half;
    consider(t);
    if (only_half) return;
    t.mc = std::max<int64_t>(half / 2 / t.mr * t.mr, t.mr);
    consider(t);
  }

  // A is never packed: in the measurements the best tile that packs A takes 1 to 20 % longer than the best that does
  // not, on both machines and in every layout.
  void each_packing(GemmTile t) {
    const bool large_b = problem.k * problem.n * 4 > problem.l1;
    t.pack_a = false;
    if (t.kc < std::min<int64_t>(kShallowest, problem.k) && !problem.transposed_a) return;
    for (int pack_b = problem.transposed_b ? 1 : 0; pack_b <= (problem.transposed_b || large_b); ++pack_b) {
      t.pack_b = pack_b != 0;
      each_row_block(t, true);
    }
  }

  // True if tiles of this width have enough accumulators and their strip of B fits L2. One vector is always considered.
  bool has_room(int v, int64_t depth) const {
    const GemmKernels& kernels = active_gemm();
    return kernels.max_rows[v] * v >= kFewestAccumulators && depth * v * kernels.lanes * 4 <= problem.l2;
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
  // What the last thread to finish keeps the others waiting, in tasks; and what reading a column of B or a row of A
  // from afar takes, in rows or columns to multiply it by. Multiply-adds that are worth a task of their own.
  constexpr double kWaiting = 0.1, kReading = 8.0;
  constexpr int64_t kWorthTask = 8 << 20, kTasksPerThread = 4;
  const int64_t most = std::clamp<int64_t>(g.m * g.n * g.k / threads / kWorthTask, 1, kTasksPerThread);
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
  constexpr int64_t kDepths[] = {768, 512, 384, 160, 96};
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

}  // namespace tw
