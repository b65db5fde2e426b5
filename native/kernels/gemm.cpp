// The blocked multiplication around the micro-kernel, after Goto and van de Geijn (2008): a block of A (mc x kc) stays
// in L2, a strip of B (kc x nr) passes through L1, and C is read and written once per kc. Strips of B are packed just
// before their first use, inside the first block of rows, so that packing warms the cache for the multiplication. If
// there is only one block of rows, a buffer for a few strips is enough. If several tasks read the same columns, B
// arrives packed (PackedB).
#include "kernels/gemm.h"

#include "common/machine.h"

#include "kernels/gemm_epilogue.h"
#include "kernels/gemm_micro.h"
#include "kernels/gemm_pack.h"
#include "kernels/gemm_small_k.h"
#include "kernels/gemm_small_m.h"
#include "kernels/gemv.h"

namespace tw {
namespace TW_ISA {
namespace {

constexpr MicroTable kPackedA[2] = {TW_MICRO_TABLE(false, true), TW_MICRO_TABLE(true, true)};
constexpr MicroTable kStridedA[2] = {TW_MICRO_TABLE(false, false), TW_MICRO_TABLE(true, false)};

TW_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
TW_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
TW_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Returns the size of about equal blocks that cover `extent`: multiples of `grain`, none larger than `most`.
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

// Returns the sizes of equal blocks of rows, columns and depth, none larger than those of the tile.
Blocks block_sizes(int64_t m, int64_t n, int64_t k, const GemmTile& t) {
  Blocks b;
  b.mc = balanced(m, t.mc, t.mr);
  b.nc = balanced(n, t.nc, t.nr);
  b.kc = balanced(k, t.kc, 1);
  b.panels = ceil_div(b.mc, t.mr);
  return b;
}

int64_t packed_a_floats(const Blocks& b, const GemmTile& t) { return t.pack_a ? round_up(b.mc * b.kc + 64, 64) : 0; }

// Strips of a row-major B are packed several at a time, together this wide: a row is then read in runs that the
// hardware prefetcher follows, with one page lookup for all of them.
constexpr int64_t kPackedRun = 128;  // chosen; floats
int64_t strips_at_once(int nr) { return kPackedRun <= nr ? 1 : kPackedRun / nr; }

// The floats of workspace: a packed block of A, then packed strips of B.
int64_t workspace(int64_t m, int64_t n, int64_t k, const GemmTile& t) {
  const Blocks b = block_sizes(m, n, k, t);
  const int64_t columns = b.mc >= m ? smaller(strips_at_once(t.nr) * t.nr, round_up(b.nc, t.nr)) : round_up(b.nc, t.nr);
  return packed_a_floats(b, t) + (t.pack_b ? round_up(columns * b.kc + 64, 64) : 0);
}

// The innermost unit of work: one block of rows times one strip of columns, for one block of k.
struct StripJob {
  const Gemm* g;
  int64_t row, rows;  // first row and number of rows
  int64_t col;
  int vectors, lanes;   // width of this strip
  int64_t step, steps;  // first step of k and number of steps
  const float* a;       // packed block of A, or null
  const float* b;       // strip of B
  int64_t b_row;
  bool b_packed;
  int mr;
  const float* next_b;  // the strip that is read next, for prefetching
};

// Multiplies the rows of a block, in panels of about equal height, by one strip, and applies the epilogue after the
// last block of k. While the first panels are computed, the next strip is prefetched.
void multiply_strip(const StripJob& job) {
  const Gemm& g = *job.g;
  const int special = wants_special(job.lanes, job.b_packed);
  const MicroKernel* kernels = job.a ? kPackedA[special].at[job.vectors - 1] : kStridedA[special].at[job.vectors - 1];
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
  args.fetch_ahead = job.row == 0 && !job.b_packed && g.n * job.steps * 4 > kSmallestL1 ? rows_ahead(g.b_row) : 0;
  int64_t row = 0;
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t rows = base + (panel < extra);
    args.a = job.a ? job.a + row * job.steps : g.a + (job.row + row) * g.a_row + job.step * g.a_col;
    args.c = g.c + (job.row + row) * g.c_row + job.col;
    kernels[rows - 1](args);
    if (last && g.epilogue.any()) apply_epilogue(g.epilogue, args.c, g.c_row, job.row + row, job.col, rows, cols);
    args.fetch_ahead = 0;
    args.prefetch = panel + 1 < job.vectors ? args.prefetch + job.steps * kPrefetchStep : job.b;
    row += rows;
  }
}

// Packs a block of A. Panels are split as in multiply_strip.
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

// Packs `strips` neighbouring strips of NV vectors of a row-major B, row by row.
template <int NV>
void copy_strips(const float* from, int64_t row, int64_t steps, int64_t strips, float* to) {
  const int64_t ahead = rows_ahead(row) * row;
  for (int64_t p = 0; p < steps; ++p, from += row, to += NV * kLanes) {
    for (int64_t s = 0; s < strips; ++s) {
      const float* const at = from + s * NV * kLanes;
      float* const out = to + s * NV * kLanes * steps;
      fetch_row<NV>(at + ahead);
#pragma GCC unroll 4
      for (int j = 0; j < NV; ++j) store(out + j * kLanes, load(at + j * kLanes));
    }
  }
}

using CopyStrips = void (*)(const float*, int64_t, int64_t, int64_t, float*);
constexpr CopyStrips kCopyStrips[kMaxVectors] = {copy_strips<1>, copy_strips<2>, copy_strips<3>, copy_strips<4>};

// Packs `width` columns of B starting at `col`, for one block of k: strip after strip, the last one padded to whole
// vectors.
void pack_strips(const Gemm& g, int64_t step, int64_t steps, int64_t col, int64_t width, int nr, float* to) {
  int64_t j = 0;
  if (g.b_col == 1) {
    const int64_t strips = width / nr;
    kCopyStrips[nr / kLanes - 1](g.b + step * g.b_row + col, g.b_row, steps, strips, to);
    j = strips * nr;
  }
  for (; j < width; j += nr) {
    const int64_t count = smaller(nr, width - j);
    pack({g.b + step * g.b_row + (col + j) * g.b_col, g.b_row, g.b_col, steps, count, round_up(count, kLanes)},
         to + j * steps);
  }
}

// Packs columns of B for several tasks, in the layout of PackedB.
void pack_b(const Gemm& g, const GemmTile& t, int64_t col, int64_t cols, float* to) {
  const int64_t kc = block_sizes(g.m, g.n, g.k, t).kc, columns = round_up(g.n, t.nr), run = strips_at_once(t.nr) * t.nr;
  for (int64_t step = 0; step < g.k; step += kc) {
    const int64_t steps = smaller(kc, g.k - step);
    for (int64_t j = 0; j < cols; j += run) {
      pack_strips(g, step, steps, col + j, smaller(run, cols - j), t.nr, to + step * columns + (col + j) * steps);
    }
  }
}

// Provides the strips of one block of columns: packed by another task, packed here at first use, or read in place.
struct StripSource {
  const Gemm* g;
  const GemmTile* tile;
  int64_t jc, columns;  // the block of columns
  float* own;           // buffer for strips packed here, or null
  bool one_run;         // `own` holds one run of strips, packed again for every run
  PackedB shared;

  // Sets the job's strip, j columns into the block. During the first block of rows, packs the run that starts there.
  void find(StripJob& job, int64_t j) const {
    const int nr = tile->nr;
    job.b_row = job.vectors * kLanes;
    if (shared.at) {
      job.b = shared.at + job.step * shared.columns + (shared.first + jc + j) * job.steps;
      job.next_b = job.b + nr * job.steps;
      return;
    }
    if (!own) {
      job.b = job.next_b = g->b + job.step * g->b_row + job.col * g->b_col;
      job.b_row = g->b_row;
      return;
    }
    const int64_t run = g->b_col == 1 ? strips_at_once(nr) * nr : nr, within = j % run;
    float* const at = own + (one_run ? within : j) * job.steps;
    if (job.row == 0 && within == 0) pack_strips(*g, job.step, job.steps, job.col, smaller(run, columns - j), nr, at);
    job.b = at;
    job.next_b = job.row == 0 && within + nr >= run ? at : at + nr * job.steps;
  }
};

// Multiplies the current block of A by all strips of the block of columns.
void multiply_strips(StripJob& job, const StripSource& source, int nr) {
  for (int64_t j = 0; j < source.columns; j += nr) {
    const int64_t width = smaller(nr, source.columns - j);
    job.col = source.jc + j;
    job.vectors = static_cast<int>(ceil_div(width, kLanes));
    job.lanes = static_cast<int>(width - (job.vectors - 1) * kLanes);
    source.find(job, j);
    multiply_strip(job);
  }
}

// The three outer loops: over blocks of columns, of k and of rows.
void tiled(const Gemm& g, const GemmTile& t, const PackedB& b, float* workspace) {
  const Blocks blocks = block_sizes(g.m, g.n, g.k, t);
  float* const packed_a = t.pack_a ? workspace : nullptr;
  StripSource source = {&g, &t, 0, 0, nullptr, blocks.mc >= g.m, b};
  if (t.pack_b && !b.at) source.own = workspace + packed_a_floats(blocks, t);
  StripJob job;
  job.g = &g;
  job.a = packed_a;
  job.b_packed = t.pack_b;
  job.mr = t.mr;
  for (source.jc = 0; source.jc < g.n; source.jc += blocks.nc) {
    source.columns = smaller(blocks.nc, g.n - source.jc);
    for (job.step = 0; job.step < g.k; job.step += blocks.kc) {
      job.steps = smaller(blocks.kc, g.k - job.step);
      for (job.row = 0; job.row < g.m; job.row += blocks.mc) {
        job.rows = smaller(blocks.mc, g.m - job.row);
        if (packed_a) pack_a_block(g, job.row, job.rows, job.step, job.steps, t.mr, packed_a);
        multiply_strips(job, source, t.nr);
      }
    }
  }
}

void inner_products(const Gemm& g, bool from_memory, float* copy, int64_t copy_floats) {
  dot_products_tiled(g, from_memory, copy, copy_floats);
  if (g.epilogue.any()) apply_epilogue(g.epilogue, g.c, g.c_row, 0, 0, g.m, g.n);
}

void row_by_matrix(const Gemm& g, bool streamed) {
  streamed ? row_streamed(g) : row_by_strips(g);
  if (g.epilogue.any()) apply_epilogue(g.epilogue, g.c, g.c_row, 0, 0, g.m, g.n);
}

void small_m(const Gemm& g, bool interleaved) {
  small_m_product(g, interleaved);
  if (g.epilogue.any() && !interleaved) apply_epilogue(g.epilogue, g.c, g.c_row, 0, 0, g.m, g.n);
}

void small_mn(const Gemm& g) {
  small_mn_product(g);
  if (g.epilogue.any()) apply_epilogue(g.epilogue, g.c, g.c_row, 0, 0, g.m, g.n);
}

void small_k(const Gemm& g) {
  small_k_product(g);
  if (g.epilogue.any()) apply_epilogue(g.epilogue, g.c, g.c_row, 0, 0, g.m, g.n);
}

void small_n(const Gemm& g) {
  small_n_product(g);
  if (g.epilogue.any()) apply_epilogue(g.epilogue, g.c, g.c_row, 0, 0, g.m, g.n);
}

using TransposeRows = void (*)(const float*, int64_t, int64_t, float*);
constexpr TransposeRows kTransposeRows[] = {transpose_rows<2>, transpose_rows<3>, transpose_rows<4>};

// Transposes a matrix, by the special cases of few rows or few columns or by the packing of strips.
void transpose_into(const float* from, int64_t rows, int64_t cols, int64_t from_row, float* to, int64_t to_row) {
  if (rows >= 2 && rows <= 4 && to_row == rows && cols >= kLanes) {
    return kTransposeRows[rows - 2](from, cols, from_row, to);
  }
  if (cols <= kLanes / 2) return transpose_narrow(from, rows, cols, from_row, to, to_row);
  pack({from, 1, from_row, cols, rows, rows, false, to_row}, to);
}

}  // namespace

const GemmKernels gemm = {kLanes,  kMaxRows, workspace, tiled,   pack_b,         inner_products, row_by_matrix,
                          small_m, small_mn, small_k,   small_n, transpose_into, apply_epilogue};

}  // namespace TW_ISA
}  // namespace tw
