// Python bindings of the probes. Each runs on all threads of the pool, over equal shares, `rounds` times without
// returning to Python, so that the memory or the vector units are timed and not the call.
#include "kernels/probe.h"

#include "bindings/bindings.h"
#include "common/thread_pool.h"

namespace tw {
namespace {

void check_rounds(int64_t rounds) {
  if (rounds < 1) throw nb::value_error("rounds must be positive");
}

// The part of n floats that one thread works on, in whole cache lines so that threads never share one.
struct Share {
  int64_t begin, count;
};
Share share_of(int64_t n, int share, int shares) {
  const int64_t lines = (n + 15) / 16;
  const int64_t begin = lines * share / shares * 16, end = lines * (share + 1) / shares * 16;
  return {begin < n ? begin : n, (end < n ? end : n) - (begin < n ? begin : n)};
}

// Runs the multiply-adds on every thread; returns the floating-point operations of all. The caller takes the time.
double multiply_adds(int64_t rounds) {
  check_rounds(rounds);
  nb::gil_scoped_release release;
  float sinks[kMaxThreads];
  double per_thread[kMaxThreads];
  const int threads = num_threads();
  parallel_for(threads, [&](int t) { per_thread[t] = active_probe().multiply_adds(rounds, &sinks[t]); });
  double total = 0.0;
  for (int t = 0; t < threads; ++t) total += per_thread[t];
  return total;
}

// Reads an array `rounds` times, each thread its share of it. The sum is returned only so that the reads happen.
float read(const FloatArray& x, int64_t rounds) {
  check_rounds(rounds);
  nb::gil_scoped_release release;
  float sums[kMaxThreads];
  const int threads = num_threads();
  parallel_for(threads, [&](int t) {
    const Share s = share_of(static_cast<int64_t>(x.size()), t, threads);
    for (int64_t r = 0; r < rounds; ++r) sums[t] = active_probe().read(x.data() + s.begin, s.count);
  });
  float total = 0.0f;
  for (int t = 0; t < threads; ++t) total += sums[t];
  return total;
}

void copy(const FloatOut& to, const FloatArray& from, int64_t rounds) {
  check_rounds(rounds);
  if (to.size() != from.size()) throw nb::value_error("probe_copy needs two arrays of one size");
  nb::gil_scoped_release release;
  const int threads = num_threads();
  parallel_for(threads, [&](int t) {
    const Share s = share_of(static_cast<int64_t>(from.size()), t, threads);
    for (int64_t r = 0; r < rounds; ++r) active_probe().copy(to.data() + s.begin, from.data() + s.begin, s.count);
  });
}

}  // namespace

void bind_probe(nb::module_& m) {
  m.def("probe_multiply_adds", multiply_adds, nb::arg("rounds"));
  m.def("probe_read", read, nb::arg("x").noconvert(), nb::arg("rounds") = 1);
  m.def("probe_copy", copy, nb::arg("to").noconvert(), nb::arg("source").noconvert(), nb::arg("rounds") = 1);
}

}  // namespace tw
