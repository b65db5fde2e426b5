// Four-bit weights, seen from Python: made of codes and scales, unpacked to them, multiplied by rows of floats.
#include <nanobind/stl/shared_ptr.h>

#include <limits>
#include <string>

#include "bindings/bindings.h"
#include "bindings/numpy_api.h"
#include "common/int4_layer.h"

namespace tw {
namespace {

PyArrayObject* checked(nb::handle object, int type, int ndim, const char* what) {
  PyObject* raw = object.ptr();
  auto* array = reinterpret_cast<PyArrayObject*>(raw);
  if (!PyArray_Check(raw) || PyArray_TYPE(array) != type || PyArray_NDIM(array) != ndim ||
      !PyArray_ISCARRAY_RO(array)) {
    throw nb::type_error(
        (std::string(what) + " must be a C-contiguous array of the documented dtype and dimensions").c_str());
  }
  return array;
}

template <class T>
T* data(PyArrayObject* array) {
  return static_cast<T*>(PyArray_DATA(array));
}

nb::object new_object(int ndim, const npy_intp* shape, int type) {
  PyArrayObject* array = new_array(ndim, shape, type);
  if (array == nullptr) throw nb::python_error();
  return nb::steal(reinterpret_cast<PyObject*>(array));
}

template <class T>
T* data_of(const nb::object& array) {
  return data<T>(reinterpret_cast<PyArrayObject*>(array.ptr()));
}

int64_t blocks_of(int64_t inputs) { return (inputs + kInt4Block - 1) / kInt4Block; }

void make(Int4Weights* self, nb::handle codes, nb::handle scales, nb::handle minimums, nb::handle column_scale) {
  PyArrayObject* c = checked(codes, NPY_UINT8, 2, "codes");
  PyArrayObject* s = checked(scales, NPY_FLOAT16, 2, "scales");
  PyArrayObject* m = minimums.is_none() ? nullptr : checked(minimums, NPY_FLOAT16, 2, "minimums");
  PyArrayObject* f = checked(column_scale, NPY_FLOAT32, 1, "column_scale");
  const int64_t outputs = PyArray_DIM(c, 0), inputs = PyArray_DIM(c, 1);
  if (inputs > std::numeric_limits<int32_t>::max() || outputs > std::numeric_limits<int32_t>::max()) {
    throw nb::value_error("the weights have too many elements");
  }
  if (PyArray_DIM(s, 0) != outputs || PyArray_DIM(s, 1) != blocks_of(inputs) ||
      (m != nullptr && !PyArray_SAMESHAPE(s, m)) || PyArray_DIM(f, 0) != outputs) {
    throw nb::value_error("scales and minimums need one number per block of 32, column_scale one per output");
  }
  new (self) Int4Weights(outputs, inputs, data<uint8_t>(c), data<uint16_t>(s),
                         m == nullptr ? nullptr : data<uint16_t>(m), data<float>(f));
}

nb::object linear(const Int4Weights& weights, nb::handle x) {
  PyArrayObject* rows = checked(x, NPY_FLOAT32, 2, "x");
  if (PyArray_DIM(rows, 1) != weights.inputs()) throw nb::value_error("x has another width than the weights");
  const npy_intp shape[2] = {PyArray_DIM(rows, 0), weights.outputs()};
  nb::object y = new_object(2, shape, NPY_FLOAT32);
  const Int4Place place = weights.place();
  GilRelease release(true);
  Int4Scratch scratch;
  weights.apply(place, data<float>(rows), shape[0], data_of<float>(y), shape[1], scratch);
  return y;
}

nb::tuple unpack(const Int4Weights& weights) {
  const npy_intp codes_shape[2] = {weights.outputs(), weights.inputs()};
  const npy_intp blocks_shape[2] = {weights.outputs(), blocks_of(weights.inputs())};
  nb::object codes = new_object(2, codes_shape, NPY_UINT8), scales = new_object(2, blocks_shape, NPY_FLOAT16);
  nb::object factors = new_object(1, codes_shape, NPY_FLOAT32), minimums = nb::none();
  if (weights.minimum()) minimums = new_object(2, blocks_shape, NPY_FLOAT16);
  weights.unpack(data_of<uint8_t>(codes), data_of<uint16_t>(scales),
                 weights.minimum() ? data_of<uint16_t>(minimums) : nullptr, data_of<float>(factors));
  return nb::make_tuple(codes, scales, minimums, factors);
}

// x (n, k) float32 to bytes (n, blocks * 32), scales and sums (n, blocks) of the bytes.
nb::tuple quantize_blocks(nb::handle x) {
  PyArrayObject* rows = checked(x, NPY_FLOAT32, 2, "x");
  const int64_t k = PyArray_DIM(rows, 1), blocks = int4_blocks(k);
  const npy_intp values_shape[2] = {PyArray_DIM(rows, 0), blocks * kInt4Block}, shape[2] = {values_shape[0], blocks};
  nb::object values = new_object(2, values_shape, NPY_INT8), scale = new_object(2, shape, NPY_FLOAT32);
  nb::object sum = new_object(2, shape, NPY_INT32);
  for (int64_t r = 0; r < shape[0]; ++r) {
    active_int4().quantize(data<float>(rows) + r * k, k, blocks, data_of<int8_t>(values) + r * values_shape[1],
                           data_of<float>(scale) + r * blocks, data_of<int32_t>(sum) + r * blocks);
  }
  int32_t* offsets = data_of<int32_t>(sum);
  for (int64_t i = 0; i < shape[0] * blocks; ++i) offsets[i] /= -8;
  return nb::make_tuple(values, scale, sum);
}

}  // namespace

void bind_int4(nb::module_& m) {
  nb::class_<Int4Weights>(m, "Int4Weights")
      .def("__init__", &make, nb::arg("codes"), nb::arg("scales"), nb::arg("minimums").none(), nb::arg("column_scale"))
      .def("linear", &linear, nb::arg("x"))
      .def("unpack", &unpack)
      .def_prop_ro("nbytes", [](const Int4Weights& w) { return w.bytes() + 4 * w.outputs(); });
  m.def("int4_quantize_rows", &quantize_blocks, nb::arg("x"));
}

}  // namespace tw
