// The features of the CPU's cost model seen from Python: tables are checked before they are read.
#include "common/cpu_features.h"

#include "bindings/tables.h"

namespace tw {
namespace {

using Configs = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::object features(const Configs& configs, const Longs& columns, const Doubles& product, const Doubles& machine,
                    const FloatArray& centre, const FloatArray& scale, float bound) {
  const int64_t count = static_cast<int64_t>(configs.shape(0)), width = static_cast<int64_t>(configs.shape(1));
  need(columns.ndim() == 1 && columns.shape(0) == kCpuColumns && product.shape(0) == kCpuProduct &&
           machine.shape(0) == kCpuMachine,
       "nine columns, twelve numbers of the product and fourteen of the machine");
  need(centre.ndim() == 1 && centre.shape(0) == kCpuFeatures && scale.ndim() == 1 && scale.shape(0) == kCpuFeatures,
       "a centre and a scale a feature");
  need(width >= 24, "configurations begin with TpuGraphs' bounds");
  for (int i = 0; i < kCpuColumns; ++i)
    need(columns.data()[i] >= -1 && columns.data()[i] < width, "a column that is not there");
  const Made out = made({kCpuFeatures, count});
  cpu_features({configs.data(), count, configs.stride(0), configs.stride(1), columns.data(), product.data(),
                machine.data(), centre.data(), scale.data(), bound},
               out.data);
  return out.object;
}

}  // namespace

void bind_cpu_features(nb::module_& m) {
  m.def("cpu_features", features, nb::arg("configs").noconvert(), nb::arg("columns").noconvert(),
        nb::arg("product").noconvert(), nb::arg("machine").noconvert(), nb::arg("centre").noconvert(),
        nb::arg("scale").noconvert(), nb::arg("bound"));
}

}  // namespace tw
