// Python binding of the CPU cost model's features. Every table is checked before it is read.
#include "common/cpu_features.h"

#include "bindings/arrays.h"

namespace tw {
namespace {

using Configs = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::object features(const Configs& configs, const Longs& columns, const Doubles& product, const Doubles& machine,
                    const FloatArray& centre, const FloatArray& scale, float bound) {
  const int64_t count = static_cast<int64_t>(configs.shape(0)), width = static_cast<int64_t>(configs.shape(1));
  check(columns.ndim() == 1 && columns.shape(0) == kCpuColumns && product.shape(0) == kCpuProduct &&
            machine.shape(0) == kCpuMachine,
        "columns, product and machine must have 9, 12 and 14 numbers");
  check(centre.ndim() == 1 && centre.shape(0) == kCpuFeatures && scale.ndim() == 1 && scale.shape(0) == kCpuFeatures,
        "centre and scale must have one number per feature");
  check(width >= 24, "configurations must begin with the 24 bounds of TpuGraphs");
  for (int i = 0; i < kCpuColumns; ++i)
    check(columns.data()[i] >= -1 && columns.data()[i] < width,
          "columns must be -1 or the index of a configuration column");
  const NewArray<float> out = new_array({kCpuFeatures, count});
  cpu_features({configs.data(), count, configs.stride(0), configs.stride(1), columns.data(), product.data(),
                machine.data(), centre.data(), scale.data(), bound},
               out.data);
  return out.object;
}

}  // namespace

void bind_cpu_features(nb::module_& m) {
  m.def("cpu_features", features, array_arg("configs"), array_arg("columns"), array_arg("product"),
        array_arg("machine"), array_arg("centre"), array_arg("scale"), nb::arg("bound"));
}

}  // namespace tw
