#include "common/product_paths.h"

#include <algorithm>
#include <cstring>

#include "common/machine.h"
#include "common/thread_blocks.h"

namespace tw {
namespace {

int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

constexpr const char* kPathNames[kProductPaths] = {"tiled",
                                                   "transposed_tiles",
                                                   "transposed_interleaved",
                                                   "transposed_split_sums",
                                                   "dots",
                                                   "dots_streamed",
                                                   "row_strips",
                                                   "row_streamed",
                                                   "column_strips",
                                                   "column_streamed",
                                                   "column_split_sums",
                                                   "small_m",
                                                   "split_sums",
                                                   "small_k",
                                                   "small_n"};

float* workspace(int64_t floats) { return thread_scratch<float>(Scratch::product, floats); }

void copy_strided(const float* from, int64_t stride, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = from[i * stride];
}

// Runs a product as inner products; an operand that is not contiguous along k is copied first.
void run_dot_products(const Gemm& g, bool streamed) {
  Gemm d = g;
  const int64_t apart = round_up(g.k, active_gemm().lanes);  // whole vectors, so that none straddles two cache lines
  const int64_t a_floats = g.a_col != 1 ? apart * g.m : 0, b_floats = g.b_row != 1 ? apart * g.n : 0;
  const int64_t block_floats = cache_sizes().l2 / 2 / 4;
  float* const copies = workspace(a_floats + b_floats + (std::min(g.m, g.n) < kMinCopyRows ? 0 : block_floats));
  if (g.a_col != 1) {
    for (int64_t i = 0; i < g.m; ++i) copy_strided(g.a + i * g.a_row, g.a_col, g.k, copies + i * apart);
    d.a = copies;
    d.a_row = apart;
    d.a_col = 1;
  }
  if (g.b_row != 1) {  // n is small
    float* b = copies + a_floats;
    if (g.b_col == 1) {
      active_gemm().transpose(g.b, g.k, g.n, g.b_row, b, apart);
    } else {
      for (int64_t j = 0; j < g.n; ++j) copy_strided(g.b + j * g.b_col, g.b_row, g.k, b + j * apart);
    }
    d.b = b;
    d.b_row = 1;
    d.b_col = apart;
  }
  active_gemm().dot_products(d, streamed, copies + a_floats + b_floats, block_floats);
}

// Computes C' = B' A' by tiles or the kernels for few rows, and transposes the result.
void run_transposed(const Gemm& g, ProductPath path, const GemmTile& tile) {
  const GemmKernels& kernels = active_gemm();
  Gemm t = transposed(g);
  if (path == ProductPath::transposed_interleaved) {
    t.c = g.c;
    kernels.small_m(t, true);
    if (g.epilogue.any()) kernels.apply_epilogue(g.epilogue, g.c, g.c_row, 0, 0, g.m, g.n);
    return;
  }
  const int64_t result = round_up(g.m * g.n, 16);
  const bool tiles = path == ProductPath::transposed_tiles;
  t.c = workspace(result + (tiles ? kernels.workspace(t.m, t.n, t.k, tile) : 0));
  tiles ? kernels.tiled(t, tile, {}, t.c + result) : kernels.small_mn(t);
  kernels.transpose(t.c, g.n, g.m, g.m, g.c, g.c_row);
  if (g.epilogue.any()) kernels.apply_epilogue(g.epilogue, g.c, g.c_row, 0, 0, g.m, g.n);
}

// Computes m x k times k x 1 with contiguous columns of A: the transposed product is a row times a matrix.
void run_column(const Gemm& g, ProductPath path) {
  Gemm t = g;
  t.m = 1;
  t.n = g.m;
  t.a = g.b;
  t.a_col = g.b_row;
  t.b = g.a;
  t.b_row = g.a_col;
  t.b_col = 1;
  t.epilogue = Epilogue();
  if (path == ProductPath::column_split_sums) {
    active_gemm().small_mn(t);
  } else {
    active_gemm().row_by_matrix(t, path == ProductPath::column_streamed);
  }
  if (g.epilogue.any()) active_gemm().apply_epilogue(g.epilogue, g.c, g.c_row, 0, 0, g.m, 1);
}

void run_tiled(const Gemm& g, const GemmTile& tile, const PackedB& b) {
  const GemmKernels& kernels = active_gemm();
  GemmTile own = tile;
  own.pack_b = tile.pack_b && b.at == nullptr;
  kernels.tiled(g, tile, b, workspace(kernels.workspace(g.m, g.n, g.k, own)));
}

// Computes whole vectors of columns by tiles and the last columns separately, if the configuration says so.
void run_tiled_and_last_columns(const Gemm& g, const ProductConfig& config, const PackedB& b) {
  const int64_t last_columns = config.last_columns;
  if (last_columns == 0 || g.n % active_gemm().lanes != last_columns)
    return run_tiled(g, config.tile, b);  // without the last columns
  if (g.n > last_columns) run_tiled(part_of(g, 0, g.m, 0, g.n - last_columns), config.tile, b);
  const Gemm last = part_of(g, 0, g.m, g.n - last_columns, last_columns);
  g.a_col == 1 ? run_dot_products(last, false)
               : run_transposed(last, ProductPath::transposed_tiles, last_columns_tile(last));
}

// Computes a few rows. If the sums over k are cut into blocks of `depth` terms, each block is summed from zero and then
// added, as in the tiled loops.
void run_small_m(const Gemm& g, ProductPath path, int64_t depth) {
  const GemmKernels& kernels = active_gemm();
  const auto run = [&](const Gemm& part) {
    path == ProductPath::small_m ? kernels.small_m(part, false)
                                 : kernels.row_by_matrix(part, path == ProductPath::row_streamed);
  };
  if (depth == 0 || depth >= g.k) return run(g);
  Gemm block = g;
  block.epilogue = Epilogue();
  block.k = depth;
  run(block);
  block.c = workspace(g.m * g.n);
  block.c_row = g.n;
  Epilogue sum;
  sum.residual = block.c;
  sum.residual_row = g.n;
  for (int64_t step = depth; step < g.k; step += depth) {
    block.k = std::min(depth, g.k - step);
    block.a = g.a + step * g.a_col;
    block.b = g.b + step * g.b_row;
    run(block);
    kernels.apply_epilogue(sum, g.c, g.c_row, 0, 0, g.m, g.n);
  }
  if (g.epilogue.any()) kernels.apply_epilogue(g.epilogue, g.c, g.c_row, 0, 0, g.m, g.n);
}

// Runs a product with small k. B's rows must be contiguous; otherwise B is transposed, which costs little.
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

// Runs a product of up to four columns, which are interleaved for the kernel first.
void run_small_n(const Gemm& g) {
  float* b = workspace(4 * g.k);
  for (int64_t p = 0; p < g.k; ++p) {
    for (int64_t j = 0; j < 4; ++j) b[4 * p + j] = j < g.n ? g.b[p * g.b_row + j * g.b_col] : 0.0f;
  }
  Gemm t = g;
  t.b = b;
  active_gemm().small_n(t);
}

}  // namespace

const char* path_name(ProductPath path) { return kPathNames[static_cast<int>(path)]; }

bool path_from_name(const char* name, ProductPath* path) {
  for (int i = 0; i < kProductPaths; ++i) {
    if (std::strcmp(name, kPathNames[i]) == 0) {
      *path = static_cast<ProductPath>(i);
      return true;
    }
  }
  return false;
}

bool path_feasible(ProductPath path, const Gemm& g) {
  const int64_t lanes = active_gemm().lanes;
  const bool rows_of_b = g.b_col == 1, column = g.n == 1 && g.a_row == 1 && g.c_row == 1;
  switch (path) {
    case ProductPath::tiled:
    case ProductPath::transposed_tiles:
      return true;
    case ProductPath::transposed_interleaved:
      return g.a_row == 1 && g.m > 1 && g.n > 1 && g.n <= kMaxSmallM && g.c_row == g.n;
    case ProductPath::transposed_split_sums:
      return g.a_row == 1 && g.m > 1 && g.n <= kMaxSmallM && g.m <= lanes;
    case ProductPath::dot_products:
      return g.a_col == 1 || g.m == 1;
    case ProductPath::dot_products_streamed:
      return (g.a_col == 1 && g.n == 1) || g.m == 1;
    case ProductPath::row_strips:
      return rows_of_b && g.m == 1;
    case ProductPath::row_streamed:
      return rows_of_b && g.m <= kMaxSmallM;
    case ProductPath::column_strips:
    case ProductPath::column_streamed:
      return column;
    case ProductPath::column_split_sums:
      return column && g.m <= lanes;
    case ProductPath::small_m:
      return rows_of_b && g.m > 1 && g.m <= kMostSmallRows;
    case ProductPath::split_sums:
      return rows_of_b && g.m <= kMaxSmallM && g.n <= lanes;
    case ProductPath::small_k:
      return g.k <= kShortestSum;
    case ProductPath::small_n:
      return g.n > 1 && g.n <= kMostSmallColumns && g.a_col == 1 && g.c_row == g.n;
  }
  return false;
}

int64_t task_extent(const Gemm& g, ProductPath path, int threads) {
  const bool dot_products = path == ProductPath::dot_products || path == ProductPath::dot_products_streamed;
  // Strips of a row have up to 128 columns, and the order of their sums depends on their width.
  const int64_t grain = dot_products ? 4 : path == ProductPath::transposed_tiles ? active_gemm().lanes : 128;
  const int64_t side = std::max(g.m, g.n);
  return threads > 1 ? round_up((side + threads - 1) / threads, grain) : side;
}

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

GemmTile last_columns_tile(const Gemm& last) {
  const GemmKernels& kernels = active_gemm();
  int vectors = 4;
  while (vectors > 1 && kernels.max_rows[vectors] < last.n) --vectors;
  GemmTile tile;
  tile.mr = static_cast<int>(std::min<int64_t>(last.n, kernels.max_rows[vectors]));
  tile.nr = vectors * kernels.lanes;
  tile.mc = tile.mr;
  tile.nc = round_up(last.m, tile.nr);
  tile.kc = std::min<int64_t>(last.k, cache_sizes().l1 / 2 / (4 * tile.nr));
  tile.pack_a = tile.pack_b = false;
  return tile;
}

void run_part(const Gemm& g, const ProductConfig& config, const PackedB& b) {
  const GemmKernels& kernels = active_gemm();
  switch (config.path) {
    case ProductPath::tiled:
      return run_tiled_and_last_columns(g, config, b);
    case ProductPath::transposed_tiles:
    case ProductPath::transposed_interleaved:
    case ProductPath::transposed_split_sums:
      return run_transposed(g, config.path, config.tile);
    case ProductPath::dot_products:
    case ProductPath::dot_products_streamed:
      return run_dot_products(g, config.path == ProductPath::dot_products_streamed);
    case ProductPath::row_strips:
    case ProductPath::row_streamed:
    case ProductPath::small_m:
      return run_small_m(g, config.path, config.tile.kc);
    case ProductPath::column_strips:
    case ProductPath::column_streamed:
    case ProductPath::column_split_sums:
      return run_column(g, config.path);
    case ProductPath::split_sums:
      return kernels.small_mn(g);
    case ProductPath::small_k:
      return run_small_k(g);
    case ProductPath::small_n:
      return run_small_n(g);
  }
}

}  // namespace tw
