// The cost of a tile: an analytic model of the blocked loops whose coefficients were fitted to measurements.
#pragma once

#include "kernels/gemm.h"

namespace tw {

// The tile with the lowest predicted time for the tiled path. The depth of its blocks, which decides the bits of the
// result, is chosen for one thread, so that the number of threads changes no bit.
void cheapest_tile(const Gemm& g, int threads, GemmTile* tile);

// The grid over which threads share C: the split whose threads have least to do and that reads least twice.
void choose_grid(const Gemm& g, int threads, GemmTile* tile);

}  // namespace tw
