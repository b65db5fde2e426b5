// Convolutions of a plan that follow each other, run a band of rows at a time: what lies between them, which is larger
// than the cache, is made where it is read, and only a few rows of it have memory. The numbers are those of one step
// after the other.
#pragma once

#include <cstdint>
#include <vector>

#include "common/int8_plan.h"

namespace tw {

// Some steps, each of which reads what the one before it gives, and nobody else.
struct Chain {
  std::size_t first = 0, last = 0;  // steps
  int64_t rows = 1;                 // of the result that are made at a time
  int64_t bytes = 0;                // of memory for the bands between
};

// A step of a chain as it is run.
struct BandStep {
  const Int8Op* op;
  const PlanShape* in;
  const PlanShape* skip;  // of a second input, which lies whole; null: none
  const char* skipped;
  const PlanShape* out;
};

// How a chain of such steps (their `skipped` is not looked at) is cut: as many rows as keep the bands in `most` bytes.
Chain cut_chain(const std::vector<BandStep>& steps, int64_t most);

// One image through a chain, its result's rows [first, last). `in` and `out` are whole images; `bands` is of
// `chain.bytes`.
void run_bands(const Chain& chain, const std::vector<BandStep>& steps, const char* in, char* out, int64_t first,
               int64_t last, char* bands);

}  // namespace tw
