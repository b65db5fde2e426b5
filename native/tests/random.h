// Random operands for the tests of the cost models' kernels.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

using Floats = std::vector<float>;

inline Floats random_floats(int64_t n, unsigned seed, float scale) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Floats x(static_cast<size_t>(n));
  for (float& v : x) v = scale * normal(generator);
  return x;
}
