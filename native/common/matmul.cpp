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

constexpr int64_t kSharedFloats = 16 << 20;  // chosen: floats of B that are packed at once for all threads (64 MiB)

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
int64_t multiply_adds(const Gemm& g) { return g.m * g.n * g.k; }

// Returns product number `index` of a batch.
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

// Computes a product with k = 0: zeros, then the epilogue.
void run_empty_sum(const Gemm& g) {
  for (int64_t i = 0; i < g.m; ++i) std::memset(g.c + i * g.c_row, 0, static_cast<std::size_t>(g.n) * sizeof(float));
  if (g.epilogue.any()) active_gemm().apply_epilogue(g.epilogue, g.c, g.c_row, 0, 0, g.m, g.n);
}

// The grid of tasks over C.
struct Grid {
  int64_t rows, cols;          // number of tasks
  int64_t row_step, col_step;  // rows and columns of a task
};

// Splits C into tasks: by the tile's thread grid, or along the longer side.
Grid grid_of(const Gemm& g, ProductPath path, const GemmTile& tile, int threads) {
  Grid grid;
  if (path == ProductPath::tiled) {
    grid.row_step = round_up(ceil_div(g.m, tile.threads_m), tile.mr);
    grid.col_step = round_up(ceil_div(g.n, tile.threads_n), tile.nr);
  } else {
    const int64_t extent = task_extent(g, path, threads);
    grid.row_step = g.m >= g.n ? extent : g.m;
    grid.col_step = g.m >= g.n ? g.n : extent;
  }
  grid.rows = ceil_div(g.m, grid.row_step);
  grid.cols = ceil_div(g.n, grid.col_step);
  return grid;
}

struct Job {
  const Gemm* g;
  const Batch* batch;
  ProductConfig config;
  PackedB b;  // if the tasks share it
  Grid grid;
  int64_t items_per_task;
  float* packed = nullptr;  // memory of that B
  int64_t strips_per_task = 1;
  std::atomic<bool> failed{false};
};

// Computes the blocks of C of one task.
void run_task(Job& job, int64_t task) {
  const int64_t blocks = job.grid.rows * job.grid.cols;
  const int64_t first = task * job.items_per_task;
  const int64_t last = std::min(first + job.items_per_task, job.batch->count * blocks);
  for (int64_t i = first; i < last; ++i) {
    const Gemm item = item_of(*job.g, *job.batch, i / blocks);
    const int64_t block = i % blocks;
    const int64_t row = block / job.grid.cols * job.grid.row_step, col = block % job.grid.cols * job.grid.col_step;
    PackedB b = job.b;
    b.first = col;
    run_part(
        part_of(item, row, std::min(job.grid.row_step, item.m - row), col, std::min(job.grid.col_step, item.n - col)),
        job.config, b);
  }
}

// Packs one task's columns of B, without the last columns that are computed separately
// (`run_tiled_and_last_columns`): with them the last strip would be wider than the kernel reads.
void pack_task(Job& job, int64_t task) {
  const int64_t step = job.strips_per_task * job.config.tile.nr, col = task * step;
  const int64_t last_columns = job.g->n % active_gemm().lanes == job.config.last_columns ? job.config.last_columns : 0;
  active_gemm().pack_b(*job.g, job.config.tile, col, std::min(step, job.g->n - last_columns - col), job.packed);
}

// Runs a task; exceptions must not leave a thread of the pool.
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

// Returns whether several rows of tasks read the same columns of B, so that threads pack B once before multiplying.
bool shares_b(const Job& job, int threads) {
  const bool several = threads > 1 && job.grid.rows > 1 && worth_threads(multiply_adds(*job.g) / threads);
  return several && job.config.path == ProductPath::tiled && job.config.tile.pack_b && job.batch->count == 1;
}

// Packs B in parallel, then multiplies, one block of columns of at most kSharedFloats after the other.
bool run_shared(const Gemm& g, Job& job, int threads) {
  const int nr = job.config.tile.nr;
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
    job.b = {job.packed, strips * nr, 0};
    job.grid = grid_of(part, ProductPath::tiled, job.config.tile, threads);
    run_grid(job, true, threads);
  }
  return !job.failed;
}

// Runs a product as one task on this thread.
bool run_whole(const Gemm& g, const ProductConfig& config) {
  try {
    run_part(g, config, {});
  } catch (const std::bad_alloc&) {
    return false;
  }
  return true;
}

// Returns why the loops cannot run this tile, or null.
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
  if (t.threads_m < 1 || t.threads_n < 1 || t.threads_m > kMaxThreads || t.threads_n > kMaxThreads) {
    return "threads_m and threads_n must be between 1 and 1024";
  }
  if (!t.pack_b && g.b_col != 1 && g.n > 1) return "B must be packed where its columns are not contiguous";
  return nullptr;
}

}  // namespace

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

// Computes a batch of products: threads share the items of a large batch, or else the blocks of each product.
bool matmul(const Gemm& g, const Batch& batch, const ProductConfig* config) {
  if (g.m == 0 || g.n == 0 || batch.count == 0) return true;
  if (g.k == 0) {
    for (int64_t i = 0; i < batch.count; ++i) run_empty_sum(item_of(g, batch, i));
    return true;
  }
  const int threads = num_threads();
  const bool split_items = batch.count >= 2 * threads;
  const bool worth = worth_threads(multiply_adds(g) * batch.count);
  if (config == nullptr) config = &choose_config(g, split_items ? 1 : threads);
  if (batch.count == 1 && (threads == 1 || !worth)) return run_whole(g, *config);
  Job job;
  job.g = &g;
  job.batch = &batch;
  job.config = *config;
  job.grid = grid_of(g, job.config.path, job.config.tile, worth && !split_items ? threads : 1);
  if (shares_b(job, threads)) return run_shared(g, job, threads);
  run_grid(job, worth, threads);
  return !job.failed;
}

}  // namespace tw
