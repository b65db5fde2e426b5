// The blocked multiplication around the micro-kernel, after Goto: a block of A (mc x kc) stays in L2, a strip of B
// (kc x nr) passes through L1, C is touched once per kc. B's strips are packed just before their first use, inside the
// first block of rows, so that packing warms the cache for the multiplication; with a single block of rows one strip's
// worth of buffer is enough.
#include "kernels/gemm.h"

#include "kernels/gemm_epilogue.h"
#include "kernels/gemm_few.h"
#include "kernels/gemm_micro.h"
#include "kernels/gemm_pack.h"
#include "kernels/gemm_short.h"
#include "kernels/gemm_skinny.h"

namespace tw {
namespace TW_ISA {
namespace {

constexpr MicroTable kPackedA[2] = {TW_MICRO_TABLE(false, true), TW_MICRO_TABLE(true, true)};
constexpr MicroTable kStridedA[2] = {TW_MICRO_TABLE(false, false), TW_MICRO_TABLE(true, false)};

TW_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
TW_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
TW_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// The size of equal blocks, multiples of `grain`, none larger than `most`, that cover `extent`.
int64_t balanced(int64_t extent, int64_t most, int64_t grain) {
  if (extent <= most) return extent;
  const int64_t cap = most < grain ? grain : most / grain * grain;
  const int64_t each = round_up(ceil_div(extent, ceil_div(extent, cap)), grain);
  return each < cap ? each : cap;
}

struct Blocks {
  int64_t mc, nc, kc;
  int64_t panels;  // row panels in the largest block of rows
};

Blocks cut(int64_t m, int64_t n, int64_t k, const GemmTile& t) {
  Blocks b;
  b.mc = balanced(m, t.mc, t.mr);
  b.nc = balanced(n, t.nc, t.nr);
  b.kc = balanced(k, t.kc, 1);
  b.panels = ceil_div(b.mc, t.mr);
  return b;
}

int64_t packed_a_floats(const Blocks& b, const GemmTile& t) { return t.pack_a ? round_up(b.mc * b.kc + 64, 64) : 0; }

int64_t workspace(int64_t m, int64_t n, int64_t k, const GemmTile& t) {
  const Blocks b = cut(m, n, k, t);
  const int64_t columns = b.mc >= m ? t.nr : round_up(b.nc, t.nr);
  return packed_a_floats(b, t) + (t.pack_b ? round_up(columns * b.kc + 64, 64) : 0);
}

// One block of rows times one strip of columns, for one block of k.
struct StripJob {
  const Gemm* g;
  int64_t row, rows;  // the block of rows
  int64_t col;
  int vectors, lanes;  // of this strip
  int64_t step, steps;  // the block of k
  const float* a;      // packed block, or null
  const float* b;      // the strip
  int64_t b_row;
  bool b_packed;
  int mr;
  const float* next_b;
};

void multiply_strip(const StripJob& job) {
  const Gemm& g = *job.g;
  const int special = wants_special(job.lanes, job.b_packed);
  const MicroKernel* kernels =
      job.a ? kPackedA[special].at[job.vectors - 1] : kStridedA[special].at[job.vectors - 1];
  const int64_t panels = ceil_div(job.rows, job.mr);
  const int64_t base = job.rows / panels, extra = job.rows % panels;
  const bool last = job.step + job.steps == g.k;
  const int64_t cols = (job.vectors - 1) * kLanes + job.lanes;

  MicroArgs args;
  args.k = job.steps;
  args.a_row = g.a_row;
  args.a_col = g.a_col;
  args.b = job.b;
  args.b_row = job.b_row;
  args.c_row = g.c_row;
  args.last_lanes = job.lanes;
  args.accumulate = job.step > 0;
  args.prefetch = job.next_b;
  int64_t row = 0;
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t rows = base + (panel < extra);
    args.a = job.a ? job.a + row * job.steps : g.a + (job.row + row) * g.a_row + job.step * g.a_col;
    args.c = g.c + (job.row + row) * g.c_row + job.col;
    kernels[rows - 1](args);
    if (last && g.epilogue.any()) finish(g.epilogue, args.c, g.c_row, job.row + row, job.col, rows, cols);
    args.prefetch = panel + 1 < job.vectors ? args.prefetch + job.steps * kPrefetchStep : job.b;
    row += rows;
  }
}

// Panels of rows must be cut as multiply_strip cuts them for the tile's own width.
void pack_a_block(const Gemm& g, int64_t row, int64_t rows, int64_t step, int64_t steps, int mr, float* to) {
  const int64_t panels = ceil_div(rows, mr);
  const int64_t base = rows / panels, extra = rows % panels;
  int64_t done = 0;
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t count = base + (panel < extra);
    pack({g.a + (row + done) * g.a_row + step * g.a_col, g.a_col, g.a_row, steps, count, count}, to + done * steps);
    done += count;
  }
}

void tiled(const Gemm& g, const GemmTile& t, float* workspace) {
  const Blocks blocks = cut(g.m, g.n, g.k, t);
  float* const packed_a = t.pack_a ? workspace : nullptr;
  float* const packed_b = workspace + packed_a_floats(blocks, t);
  const bool one_row_block = blocks.mc >= g.m;
  StripJob job;
  job.g = &g;
  job.a = packed_a;
  job.b_packed = t.pack_b;
  job.mr = t.mr;
  for (int64_t jc = 0; jc < g.n; jc += blocks.nc) {
    const int64_t columns = smaller(blocks.nc, g.n - jc);
    for (job.step = 0; job.step < g.k; job.step += blocks.kc) {
      job.steps = smaller(blocks.kc, g.k - job.step);
      for (job.row = 0; job.row < g.m; job.row += blocks.mc) {
        job.rows = smaller(blocks.mc, g.m - job.row);
        if (packed_a) pack_a_block(g, job.row, job.rows, job.step, job.steps, t.mr, packed_a);
        for (int64_t j = 0; j < columns; j += t.nr) {
          const int64_t width = smaller(t.nr, columns - j);
          job.col = jc + j;
          job.vectors = static_cast<int>(ceil_div(width, kLanes));
          job.lanes = static_cast<int>(width - (job.vectors - 1) * kLanes);
          const float* source = g.b + job.step * g.b_row + job.col * g.b_col;
          if (t.pack_b) {
            float* to = packed_b + (one_row_block ? 0 : j * job.steps);
            if (job.row == 0) {
              pack({source, g.b_row, g.b_col, job.steps, width, job.vectors * kLanes}, to);
            }
            job.b = to;
            job.b_row = job.vectors * kLanes;
            job.next_b = one_row_block || job.row == 0 ? to : to + t.nr * job.steps;
          } else {
            job.b = source;
            job.b_row = g.b_row;
            job.next_b = source;
          }
          multiply_strip(job);
        }
      }
    }
  }
}

void dots(const Gemm& g, bool from_memory) {
  dots_tiled(g, from_memory);
  if (g.epilogue.any()) finish(g.epilogue, g.c, g.c_row, 0, 0, g.m, g.n);
}

void row_by_matrix(const Gemm& g, bool wide) {
  wide ? row_streamed(g) : row_by_strips(g);
  if (g.epilogue.any()) finish(g.epilogue, g.c, g.c_row, 0, 0, g.m, g.n);
}

void few_rows(const Gemm& g, bool interleaved) {
  few_rows_product(g, interleaved);
  if (g.epilogue.any() && !interleaved) finish(g.epilogue, g.c, g.c_row, 0, 0, g.m, g.n);
}

void few_by_few(const Gemm& g) {
  few_results_product(g);
  if (g.epilogue.any()) finish(g.epilogue, g.c, g.c_row, 0, 0, g.m, g.n);
}

void short_sums(const Gemm& g) {
  short_sums_product(g);
  if (g.epilogue.any()) finish(g.epilogue, g.c, g.c_row, 0, 0, g.m, g.n);
}

void narrow(const Gemm& g) {
  narrow_product(g);
  if (g.epilogue.any()) finish(g.epilogue, g.c, g.c_row, 0, 0, g.m, g.n);
}

using TransposeFew = void (*)(const float*, int64_t, int64_t, float*);
constexpr TransposeFew kTransposeFew[] = {transpose_few<2>, transpose_few<3>, transpose_few<4>};

void transpose_into(const float* from, int64_t rows, int64_t cols, int64_t from_row, float* to, int64_t to_row) {
  if (rows >= 2 && rows <= 4 && to_row == rows && cols >= kLanes) {
    return kTransposeFew[rows - 2](from, cols, from_row, to);
  }
  if (cols <= kLanes / 2) return transpose_narrow(from, rows, cols, from_row, to, to_row);
  pack({from, 1, from_row, cols, rows, rows, false, to_row}, to);
}

}  // namespace

const GemmKernels gemm = {kLanes, kMaxRows, workspace, tiled, dots, row_by_matrix, few_rows,
                          few_by_few, short_sums, narrow, transpose_into, finish};

}  // namespace TW_ISA
}  // namespace tw
