// What the bindings of the cost models' kernels share: a table that is not as said is refused, results are new arrays.
#pragma once

#include <initializer_list>

#include "bindings/bindings.h"
#include "bindings/numpy_api.h"

namespace tw {

using Longs = nb::ndarray<const int64_t, nb::c_contig, nb::device::cpu>;

inline void need(bool right, const char* what) {
  if (!right) throw nb::value_error(what);
}

struct Made {
  nb::object object;
  float* data;
};

inline Made made(std::initializer_list<npy_intp> shape) {
  PyArrayObject* array = new_float_array(static_cast<int>(shape.size()), shape.begin());
  if (array == nullptr) throw nb::python_error();
  return {nb::steal(reinterpret_cast<PyObject*>(array)), floats(array)};
}

}  // namespace tw
