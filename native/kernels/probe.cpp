#include "kernels/probe.h"

#include "common/simd.h"

namespace tw {
namespace TW_ISA {
namespace {

// Twelve independent chains cover the latency (4 cycles) times the throughput (2 a cycle) of any current core.
constexpr int kChains = 12;

double multiply_adds(int64_t rounds, float* sink) {
  vf acc[kChains];
  for (int i = 0; i < kChains; ++i) acc[i] = splat(static_cast<float>(i));
  const vf a = splat(0.999f), b = splat(0.001f);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) {
      acc[i] = acc[i] * a + b;
      TW_KEEP(acc[i]);
    }
  }
  vf total = acc[0];
  for (int i = 1; i < kChains; ++i) total += acc[i];
  *sink = sum_lanes(total);
  return 2.0 * kLanes * kChains * static_cast<double>(rounds);
}

float read(const float* x, int64_t n) {
  constexpr int kStreams = 8;
  vf acc[kStreams] = {};
  int64_t i = 0;
  for (; i + kStreams * kLanes <= n; i += kStreams * kLanes) {
    for (int s = 0; s < kStreams; ++s) acc[s] += load(x + i + s * kLanes);
  }
  float total = 0.0f;
  for (int s = 0; s < kStreams; ++s) total += sum_lanes(acc[s]);
  for (; i < n; ++i) total += x[i];
  return total;
}

}  // namespace

const ProbeKernels probe = {multiply_adds, read};

}  // namespace TW_ISA
}  // namespace tw
