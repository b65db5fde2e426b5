// The choice of a product's configuration from its shape, its strides and the machine.
#pragma once

#include "common/machine.h"
#include "common/product_cost.h"

namespace tw {

// The configuration that is used when none is given. It depends on the whole problem and not on how it is split, and
// stays valid until this thread asks again: copying it would take as long as a tiny product.
const ProductConfig& choose_config(const Gemm& g, int threads);

// Batch-invariant mode: a row of a result has the same bits for every number of rows, because the path's order of
// summation depends on B alone. Off at first; for the whole process.
bool batch_invariant();
void set_batch_invariant(bool on);

}  // namespace tw
