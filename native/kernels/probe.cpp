// The accumulators are twelve named variables, not an array: the compiler keeps an array whose elements are passed to
// TW_KEEP on the stack, and the probe would measure store-to-load forwarding (41 GFLOP/s where the vector units do
// 110).
#include "kernels/probe.h"

#include "common/simd.h"

namespace tw {
namespace TW_ISA {
namespace {

// Twelve independent chains cover the latency (4 cycles) times the throughput (2 a cycle) of any current core, and with
// the two constants still fit the sixteen registers of SSE2 and AVX2.
constexpr int kChains = 12;  // definition: entries of TW_EACH_CHAIN
#define TW_EACH_CHAIN(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)

double multiply_adds(int64_t rounds, float* sink) {
  vf a = splat(0.999f), b = splat(0.001f);
#define TW_DECLARE(i) vf acc##i = splat(static_cast<float>(i));
#define TW_STEP(i)         \
  acc##i = acc##i * a + b; \
  TW_KEEP(acc##i);
#define TW_ADD(i) total += acc##i;
  TW_EACH_CHAIN(TW_DECLARE)
  for (int64_t r = 0; r < rounds; ++r) {
    TW_EACH_CHAIN(TW_STEP)
  }
  vf total = {};
  TW_EACH_CHAIN(TW_ADD)
#undef TW_DECLARE
#undef TW_STEP
#undef TW_ADD
  *sink = sum_lanes(total);
  return 2.0 * kLanes * kChains * static_cast<double>(rounds);
}

float read(const float* x, int64_t n) {
  constexpr int64_t step = 8 * kLanes;
  vf s0 = {}, s1 = {}, s2 = {}, s3 = {}, s4 = {}, s5 = {}, s6 = {}, s7 = {};
  int64_t i = 0;
  for (; i + step <= n; i += step) {
    const float* p = x + i;
    s0 += load(p);
    s1 += load(p + kLanes);
    s2 += load(p + 2 * kLanes);
    s3 += load(p + 3 * kLanes);
    s4 += load(p + 4 * kLanes);
    s5 += load(p + 5 * kLanes);
    s6 += load(p + 6 * kLanes);
    s7 += load(p + 7 * kLanes);
  }
  float total = sum_lanes(((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7)));
  for (; i < n; ++i) total += x[i];
  return total;
}

void copy(float* to, const float* from, int64_t n) {
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    vf a = load(from + i), b = load(from + i + kLanes), c = load(from + i + 2 * kLanes),
       d = load(from + i + 3 * kLanes);
    TW_KEEP(a);  // or the compiler would turn the loop into a call of memcpy, which bypasses the cache for large blocks
    store(to + i, a);
    store(to + i + kLanes, b);
    store(to + i + 2 * kLanes, c);
    store(to + i + 3 * kLanes, d);
  }
  for (; i < n; ++i) to[i] = from[i];
}

}  // namespace

const ProbeKernels probe = {multiply_adds, read, copy};

}  // namespace TW_ISA
}  // namespace tw
