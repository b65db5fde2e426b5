// The cost of a product's configurations: an analytic model whose coefficients were fitted to measurements
// (common/product_terms.h).
#pragma once

#include "common/product_paths.h"

namespace tw {

// The configuration with the lowest predicted time. What decides the bits of the result does not depend on the number
// of threads: the depth of its blocks is chosen for one thread, its path for one thread and for as many as the machine
// has cores (the least product of both times).
void cheapest_config(const Gemm& g, int threads, ProductConfig* config);

// The same for a path or a tile that the caller chose.
void config_of_path(const Gemm& g, ProductPath path, int threads, ProductConfig* config);
void config_of_tile(const Gemm& g, const GemmTile& tile, ProductConfig* config);

// Columns past the last whole vector, if they can be computed separately, else 0.
int64_t last_columns_of(const Gemm& g);

// The tile of the tiled path with the lowest predicted time.
void cheapest_tile(const Gemm& g, int threads, GemmTile* tile);

// The grid over which threads share C: the split whose threads have least to do and that reads least twice.
void choose_grid(const Gemm& g, int threads, GemmTile* tile);

// True if a second thread saves more than waking it costs.
bool worth_threads(int64_t multiply_adds);

// Adds what the busiest thread does to `counts`, which has a place for each of the kCostTerms terms.
void count_terms(const Gemm& g, const ProductConfig& config, int threads, double* counts);

}  // namespace tw
