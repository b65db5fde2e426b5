// Helpers of the cost models' bindings: argument checks that raise ValueError, and new NumPy arrays for results.
#pragma once

#include <initializer_list>

#include "bindings/bindings.h"
#include "bindings/numpy_api.h"

namespace tw {

using Longs = nb::ndarray<const int64_t, nb::c_contig, nb::device::cpu>;

inline void check(bool valid, const char* message) {
  if (!valid) throw nb::value_error(message);
}

struct NewArray {
  nb::object object;
  float* data;
};

inline NewArray new_array(std::initializer_list<npy_intp> shape) {
  PyArrayObject* array = new_float_array(static_cast<int>(shape.size()), shape.begin());
  if (array == nullptr) throw nb::python_error();
  return {nb::steal(reinterpret_cast<PyObject*>(array)), floats(array)};
}

}  // namespace tw
