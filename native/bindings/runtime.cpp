// Python bindings of the instruction set, the number of threads and the machine.
#include "bindings/bindings.h"
#include "common/isa.h"
#include "common/machine.h"
#include "common/product_choice.h"
#include "common/thread_pool.h"

namespace tw {
namespace {

void set_isa(const std::string& name) {
  Isa isa;
  if (!parse_isa(name.c_str(), &isa)) {
    throw nb::value_error(("instruction set '" + name + "' is not one of portable, avx2, avx512").c_str());
  }
  if (!isa_built(isa)) {
    throw nb::value_error(
        ("'" + name + "' was not compiled here; `make kernels` compiles every instruction set").c_str());
  }
  if (!isa_supported(isa)) throw nb::value_error(("this CPU does not support '" + name + "'").c_str());
  set_active_isa(isa);
}

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (Isa isa : {Isa::portable, Isa::avx2, Isa::avx512}) {
    if (isa_supported(isa)) names.push_back(isa_name(isa));
  }
  return names;
}

void set_threads(int n) {
  if (n < 1 || n > kMaxThreads) throw nb::value_error("the number of threads must be between 1 and 1024");
  nb::gil_scoped_release release;
  set_num_threads(n);
}

std::tuple<int64_t, int64_t, int64_t> caches() {
  const CacheSizes& sizes = cache_sizes();
  return {sizes.l1, sizes.l2, sizes.l3};
}

}  // namespace

void bind_runtime(nb::module_& m) {
  m.def("isa", [] { return std::string(isa_name(active_isa())); });
  m.def("set_isa", set_isa);
  m.def("supported_isas", supported_isas);
  m.def("num_threads", num_threads);
  m.def("set_num_threads", set_threads);
  m.def("batch_invariant", batch_invariant);
  m.def("set_batch_invariant", set_batch_invariant);
  machine();  // read now: a caller may later restrict the process to fewer cores for a while
  m.def("cache_sizes", caches);
  m.def("l3_share", [] { return cache_sizes().l3_share; });
  m.def("cores", [] { return machine().cores; });
  m.def("real_cores", [] { return machine().real_cores; });
  m.def("pretend_machine", pretend_machine, nb::arg("l1"), nb::arg("l2"), nb::arg("l3"), nb::arg("cores"));
}

}  // namespace tw
