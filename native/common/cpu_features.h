// Features of the CPU cost model, one configuration at a time, for tile choices at run time. They are the same as in
// costmodel/features/cpu.py, which documents them.
#pragma once

#include <cstdint>

namespace tw {

constexpr int kCpuFeatures = 85, kCpuColumns = 9, kCpuProduct = 12, kCpuMachine = 14;

struct CpuFeatureInputs {
  const float* config;      // (count, width)
  int64_t count, row, col;  // strides in floats
  const int64_t* columns;   // kCpuColumns: indices of the configuration's own columns; -1: absent
  const double* product;    // kCpuProduct: the fields of Python's MatrixProduct
  const double*
      machine;  // kCpuMachine: lanes, registers, three caches, flops; log2 of four sizes and of the bandwidths there
  const float *centre, *scale;  // kCpuFeatures: mean and inverse deviation of a feature
  float bound;                  // scaled features are clipped to [-bound, bound]
};

// Computes out (kCpuFeatures, count).
void cpu_features(const CpuFeatureInputs& in, float* out);

}  // namespace tw
