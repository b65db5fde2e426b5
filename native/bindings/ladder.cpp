// The ladder's lower rungs, seen from Python: two C-contiguous float32 matrices in, a new one out.
#include "common/ladder.h"

#include "bindings/bindings.h"
#include "bindings/numpy_api.h"

namespace tw {
namespace {

template <class Run>
nb::object product(nb::handle a, nb::handle b, Run&& run) {
  PyArrayObject* left = as_float_array(a.ptr());
  PyArrayObject* right = as_float_array(b.ptr());
  if (left == nullptr || right == nullptr || PyArray_NDIM(left) != 2 || PyArray_NDIM(right) != 2 ||
      PyArray_DIM(left, 1) != PyArray_DIM(right, 0)) {
    throw nb::value_error("the ladder takes two C-contiguous float32 matrices that fit together");
  }
  const npy_intp shape[2] = {PyArray_DIM(left, 0), PyArray_DIM(right, 1)};
  PyArrayObject* out = new_float_array(2, shape);
  if (out == nullptr) throw nb::python_error();
  nb::object result = nb::steal(reinterpret_cast<PyObject*>(out));
  GilRelease release(true);
  run(floats(left), floats(right), floats(out), shape[0], shape[1], PyArray_DIM(left, 1));
  return result;
}

nb::object blocked(nb::handle a, nb::handle b, int64_t block_m, int64_t block_n, int64_t block_k) {
  if (block_m < 1 || block_n < 1 || block_k < 1) throw nb::value_error("a block has at least one row and column");
  return product(a, b, [&](const float* x, const float* y, float* z, int64_t m, int64_t n, int64_t k) {
    ladder_blocked(x, y, z, m, n, k, block_m, block_n, block_k);
  });
}

}  // namespace

void bind_ladder(nb::module_& m) {
  m.def("ladder_naive", [](nb::handle a, nb::handle b) { return product(a, b, ladder_naive); });
  m.def("ladder_reordered", [](nb::handle a, nb::handle b) { return product(a, b, ladder_reordered); });
  m.def("ladder_blocked", blocked, nb::arg("a"), nb::arg("b"), nb::arg("block_m"), nb::arg("block_n"),
        nb::arg("block_k"));
  m.def("ladder_packed", [](nb::handle a, nb::handle b) { return product(a, b, ladder_packed); });
}

}  // namespace tw
