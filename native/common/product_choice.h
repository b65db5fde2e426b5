// The choice of a product's configuration from its shape, its strides and the machine.
#pragma once

#include "common/machine.h"
#include "common/product_cost.h"

namespace tw {

// Returns the configuration to use if none is given. It depends on the whole problem and not on how it is split. The
// reference is valid until this thread asks again: copying would take as long as a tiny product.
const ProductConfig& choose_config(const Gemm& g, int threads);

// Batch-invariant mode, for the whole process, off at first: a row of a result has the same bits for every number of
// rows, because the order of summation depends on B alone.
bool batch_invariant();
void set_batch_invariant(bool on);

}  // namespace tw
