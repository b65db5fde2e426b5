// The cost of a product's configurations: an analytic model whose coefficients were fitted to measurements
// (common/product_terms.h).
#pragma once

#include "common/product_paths.h"

namespace tw {

// Sets the configuration with the lowest predicted time. Whatever decides the bits of the result does not depend on the
// number of threads: the depth of blocks is chosen for one thread, the path for one thread and for as many as the
// machine has cores (by the smallest product of both times).
void cheapest_config(const Gemm& g, int threads, ProductConfig* config);

// Completes a configuration whose path or tile the caller chose.
void config_of_path(const Gemm& g, ProductPath path, int threads, ProductConfig* config);
void config_of_tile(const Gemm& g, const GemmTile& tile, ProductConfig* config);

// The columns past the last whole vector if they can be computed separately, else 0.
int64_t last_columns_of(const Gemm& g);

// Sets the tile of the tiled path with the lowest predicted time.
void cheapest_tile(const Gemm& g, int threads, GemmTile* tile);

// Sets the grid over which threads share C: the split with the least work per thread and the least data read twice.
void choose_grid(const Gemm& g, int threads, GemmTile* tile);

// Returns whether a second thread saves more than waking it costs.
bool worth_threads(int64_t multiply_adds);

// Returns the predicted time of a configuration, in arbitrary units.
double predicted_time(const Gemm& g, const ProductConfig& config, int threads);

// Adds the operations of the busiest thread to `counts`, which has an entry for each of the kCostTerms terms.
void count_terms(const Gemm& g, const ProductConfig& config, int threads, double* counts);

}  // namespace tw
