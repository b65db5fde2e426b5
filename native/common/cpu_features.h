// The features of a list of configurations that the CPU's cost model reads, as costmodel/features/cpu.py says them one
// by one; here a configuration at a time, for choosing a tile in passing.
#pragma once

#include <cstdint>

namespace tw {

constexpr int kCpuFeatures = 85, kCpuColumns = 9, kCpuProduct = 12, kCpuMachine = 14;

struct CpuFeatureInputs {
  const float* config;      // (count, width)
  int64_t count, row, col;  // strides in floats
  const int64_t* columns;   // kCpuColumns: where a configuration says what it is; -1: nowhere
  const double* product;    // kCpuProduct: the fields of Python's Product
  const double*
      machine;  // kCpuMachine: lanes, registers, three caches, flops; log2 of four sizes and of the rates there
  const float *centre, *scale;  // kCpuFeatures: what a feature is centred on and multiplied by
  float bound;                  // how far it may then be from zero
};

// out (kCpuFeatures, count)
void cpu_features(const CpuFeatureInputs& in, float* out);

}  // namespace tw
