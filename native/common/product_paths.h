// Configurations of a product: the path (which kernels compute it), its tile, and how the last columns are computed.
// Every path can be run by name on every product for which it is feasible; common/product_choice.h chooses one.
#pragma once

#include <cstdint>

#include "kernels/gemm.h"

namespace tw {

enum class ProductPath : uint8_t {
  tiled,                   // blocks of A and B, packed or not
  transposed_tiles,        // C' = B' A' in tiles, then the result is transposed
  transposed_interleaved,  // all rows of C' at once, written transposed
  transposed_split_sums,   // C' with its sums over k split over the lanes
  dot_products,            // inner products; both operands along k
  dot_products_streamed,   // inner products with prefetches, for an operand in memory
  row_strips,              // rows of A times strips of columns of B
  row_streamed,            // whole rows of B after each other
  column_strips,           // one column: the transposed product is a row times a matrix
  column_streamed,         // one column by whole rows of A'
  column_split_sums,       // one column with its sums over k split
  small_m,                 // two or three rows
  split_sums,              // few results, whose sums over k are split over several accumulators
  small_k,                 // sums of a few terms
  small_n,                 // up to four columns
};
constexpr int kProductPaths = 15;  // definition: values of ProductPath

struct ProductConfig {
  ProductPath path = ProductPath::tiled;
  int64_t last_columns = 0;  // tiled: last columns that are computed separately, because they leave most lanes idle
  GemmTile tile;             // of the tiled paths
};

const char* path_name(ProductPath path);
// False if no path has this name.
bool path_from_name(const char* name, ProductPath* path);
// True if the kernels of a path can compute this product.
bool path_feasible(ProductPath path, const Gemm& g);

// The extent of a task along the longer side of C: such that every thread has one, and a part has the same bits as the
// whole. The tiled path has its own grid.
int64_t task_extent(const Gemm& g, ProductPath path, int threads);

// Returns the product as C' = B' A', without its result and epilogue.
Gemm transposed(const Gemm& g);
// Returns the part of a product that computes this block of C.
Gemm part_of(const Gemm& g, int64_t row, int64_t rows, int64_t col, int64_t cols);
// Returns the tile of the last columns of a product, which are computed transposed.
GemmTile last_columns_tile(const Gemm& last);
// Computes a part of a product as `config` says; `b` is B if it was packed for all parts.
void run_part(const Gemm& g, const ProductConfig& config, const PackedB& b);

}  // namespace tw
