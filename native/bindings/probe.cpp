#include "kernels/probe.h"

#include "bindings/bindings.h"
#include "common/thread_pool.h"

namespace tw {
namespace {

double multiply_adds(int64_t rounds) {
  if (rounds < 1) throw nb::value_error("rounds must be positive");
  nb::gil_scoped_release release;
  float sinks[1024];
  const int threads = num_threads();
  double per_thread[1024];
  parallel_for(threads, [&](int t) { per_thread[t] = active_probe().multiply_adds(rounds, &sinks[t]); });
  double total = 0.0;
  for (int t = 0; t < threads; ++t) total += per_thread[t];
  return total;
}

float read(const FloatArray& x) {
  nb::gil_scoped_release release;
  return active_probe().read(x.data(), static_cast<int64_t>(x.size()));
}

}  // namespace

void bind_probe(nb::module_& m) {
  m.def("probe_multiply_adds", multiply_adds, nb::arg("rounds"));
  m.def("probe_read", read, nb::arg("x").noconvert());
}

}  // namespace tw
