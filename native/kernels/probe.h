// Probes of the machine's peak: multiply-adds per second of the vector units, and the bandwidth of reading and copying
// memory. They are the roofline of every report.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

struct ProbeKernels {
  // Runs `rounds` rounds of independent multiply-adds in registers; returns how many floating-point operations it did.
  double (*multiply_adds)(int64_t rounds, float* sink);
  // Reads n floats once, in order; returns their sum, so that the reads happen.
  float (*read)(const float* x, int64_t n);
  // Copies n floats with ordinary stores, as a kernel writing its result does (no cache bypass).
  void (*copy)(float* to, const float* from, int64_t n);
};

TW_TABLE(ProbeKernels, probe)

}  // namespace tw
