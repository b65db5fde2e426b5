// Sparse weights, seen from Python: packed from a dense float32 array, applied to float32 activations.
#include "bindings/sparse_weights.h"

#include <algorithm>
#include <string>

#include "common/sparse_int8.h"

namespace tw {
namespace {

PyArrayObject* as_int8_matrix(nb::handle object, int64_t columns) {
  if (!PyArray_Check(object.ptr())) return nullptr;
  PyArrayObject* array = reinterpret_cast<PyArrayObject*>(object.ptr());
  const bool fits = PyArray_TYPE(array) == NPY_INT8 && PyArray_ISCARRAY_RO(array) && PyArray_NDIM(array) == 2;
  return fits && (columns < 0 || PyArray_DIM(array, 1) == columns) ? array : nullptr;
}

const int8_t* bytes_of(PyArrayObject* array) { return static_cast<const int8_t*>(PyArray_DATA(array)); }

// Sparse int8 weights with a scale per row.
class SparseInt8Weights {
 public:
  SparseInt8Weights(nb::handle dense, nb::handle scale, nb::handle bias) : matrix_(packed(dense)) {
    scale_ = vector(scale, "scale");
    if (!bias.is_none()) bias_ = vector(bias, "bias");
  }

  // int8 (M, columns) to int32 (M, rows)
  nb::object sums(nb::handle x) const {
    PyArrayObject* in = as_int8_matrix(x, matrix_.columns());
    if (in == nullptr)
      throw nb::type_error("x must be a C-contiguous int8 matrix with one column per column of the weights");
    const npy_intp shape[2] = {PyArray_DIM(in, 0), matrix_.rows()};
    PyArrayObject* out = new_array(2, shape, NPY_INT32);
    if (out == nullptr) throw nb::python_error();
    nb::object result = nb::steal(reinterpret_cast<PyObject*>(out));
    GilRelease release(true);
    matrix_.sums(bytes_of(in), shape[0], static_cast<int32_t*>(PyArray_DATA(out)));
    return result;
  }

  // float32 (..., columns) to float32 (..., rows). None where x is not what the kernels take.
  nb::object multiply(nb::handle x, bool relu) const {
    return rows_times(matrix_, x, [&](const float* in, int64_t batch, float* out) {
      matrix_.linear(in, batch, scale_.data(), bias_.data(), relu, out);
    });
  }

  nb::object to_dense() const {
    const npy_intp shape[2] = {matrix_.rows(), matrix_.columns()};
    PyObject* out = PyArray_SimpleNew(2, const_cast<npy_intp*>(shape), NPY_INT8);
    if (out == nullptr) throw nb::python_error();
    matrix_.to_dense(static_cast<int8_t*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(out))));
    return nb::steal(out);
  }

  int64_t nbytes() const { return matrix_.nbytes() + 4 * static_cast<int64_t>(scale_.size() + bias_.size()); }
  int64_t nonzeros() const { return matrix_.nonzeros(); }

 private:
  static PackedSparseInt8 packed(nb::handle dense) {
    PyArrayObject* array = as_int8_matrix(dense, -1);
    if (array == nullptr) throw nb::type_error("weights must be a C-contiguous int8 matrix");
    if (PyArray_DIM(array, 1) > kInt8MostColumns)
      throw nb::value_error("the matrix has too many columns: sums would not fit 32 bits");
    return PackedSparseInt8(bytes_of(array), PyArray_DIM(array, 0), PyArray_DIM(array, 1));
  }

  Buffer<float> vector(nb::handle object, const char* name) const {
    PyArrayObject* array = as_float_array(object.ptr());
    if (array == nullptr || PyArray_NDIM(array) != 1 || PyArray_DIM(array, 0) != matrix_.rows()) {
      throw nb::type_error((std::string(name) + " must be a float32 vector with one number per row").c_str());
    }
    Buffer<float> copy(static_cast<std::size_t>(matrix_.rows()));
    std::copy(floats(array), floats(array) + matrix_.rows(), copy.data());
    return copy;
  }

  PackedSparseInt8 matrix_;
  Buffer<float> scale_, bias_;
};

}  // namespace

void bind_sparse(nb::module_& m) {
  nb::class_<SparseWeights>(m, "SparseWeights")
      .def(nb::init<nb::handle, nb::handle>(), nb::arg("dense"), nb::arg("bias").none() = nb::none())
      .def("multiply", &SparseWeights::multiply, nb::arg("x"), nb::arg("relu"))
      .def("convolve", &SparseWeights::convolve)
      .def("to_dense", &SparseWeights::to_dense)
      .def_prop_ro("nbytes", &SparseWeights::nbytes)
      .def_prop_ro("nonzeros", &SparseWeights::nonzeros);
  nb::class_<SparseInt8Weights>(m, "SparseInt8Weights")
      .def(nb::init<nb::handle, nb::handle, nb::handle>(), nb::arg("dense"), nb::arg("scale"), nb::arg("bias").none())
      .def("sums", &SparseInt8Weights::sums, nb::arg("x"))
      .def("multiply", &SparseInt8Weights::multiply, nb::arg("x"), nb::arg("relu"))
      .def("to_dense", &SparseInt8Weights::to_dense)
      .def_prop_ro("nbytes", &SparseInt8Weights::nbytes)
      .def_prop_ro("nonzeros", &SparseInt8Weights::nonzeros);
}

}  // namespace tw
