// Sparse weights, seen from Python: packed from a dense float32 array, applied to float32 activations.
#include "common/sparse_matrix.h"

#include <algorithm>
#include <string>

#include "common/sparse_int8.h"

#include "bindings/bindings.h"
#include "bindings/numpy_api.h"

namespace tw {
namespace {

constexpr int64_t kWorthReleasing = 100000;  // multiply-adds

// x (..., columns) to (..., rows) by `product(in, batch, out)`. None where x is not what the kernels take.
template <class Matrix, class Product>
nb::object rows_times(const Matrix& matrix, nb::handle x, Product product) {
  PyArrayObject* in = as_float_array(x.ptr());
  if (in == nullptr) return nb::none();
  const int ndim = PyArray_NDIM(in);
  if (ndim < 1 || PyArray_DIM(in, ndim - 1) != matrix.columns()) return nb::none();
  npy_intp shape[NPY_MAXDIMS];
  int64_t batch = 1;
  for (int i = 0; i + 1 < ndim; ++i) batch *= shape[i] = PyArray_DIM(in, i);
  shape[ndim - 1] = matrix.rows();
  PyArrayObject* out = new_float_array(ndim, shape);
  if (out == nullptr) throw nb::python_error();
  nb::object result = nb::steal(reinterpret_cast<PyObject*>(out));
  GilRelease release(matrix.nonzeros() * batch > kWorthReleasing);
  product(floats(in), batch, floats(out));
  return result;
}

// The weights of one layer; the product is called with nothing but the activations, so that a call costs little.
class SparseWeights {
 public:
  SparseWeights(nb::handle dense, nb::handle bias) : matrix_(packed(dense)) {
    if (bias.is_none()) return;
    PyArrayObject* b = as_float_array(bias.ptr());
    if (b == nullptr || PyArray_NDIM(b) != 1 || PyArray_DIM(b, 0) != matrix_.rows()) {
      throw nb::type_error("bias must be a C-contiguous float32 vector with one number per row of the weights");
    }
    bias_ = Buffer<float>(static_cast<std::size_t>(matrix_.rows()));
    std::copy(floats(b), floats(b) + matrix_.rows(), bias_.data());
  }

  // x (..., columns) to (..., rows). None where x is not what the kernels take, so that the caller converts it.
  nb::object multiply(nb::handle x, bool relu) const {
    return rows_times(matrix_, x, [&](const float* in, int64_t batch, float* out) {
      matrix_.times_rows(in, batch, out, epilogue(relu));
    });
  }

  // x (N, C, H, W) to (N, rows, H', W'), the weights being (rows, C * kernel height * kernel width). None where x is
  // not a C-contiguous float32 array of four dimensions; the caller has checked that the filter fits.
  nb::object convolve(nb::handle x, int kernel_height, int kernel_width, int stride_y, int stride_x, int pad_y,
                      int pad_x, bool relu) const {
    PyArrayObject* in = as_float_array(x.ptr());
    if (in == nullptr || PyArray_NDIM(in) != 4) return nb::none();
    SparseConvShape s;
    s.images = PyArray_DIM(in, 0);
    s.channels = PyArray_DIM(in, 1);
    s.height = PyArray_DIM(in, 2);
    s.width = PyArray_DIM(in, 3);
    s.kernel_height = kernel_height;
    s.kernel_width = kernel_width;
    s.stride_y = stride_y;
    s.stride_x = stride_x;
    s.pad_y = pad_y;
    s.pad_x = pad_x;
    if (kernel_height < 1 || kernel_width < 1 || stride_y < 1 || stride_x < 1 || pad_y < 0 || pad_x < 0 ||
        s.height + 2 * s.pad_y < kernel_height || s.width + 2 * s.pad_x < kernel_width ||
        s.channels * kernel_height * kernel_width != matrix_.columns()) {
      throw nb::value_error("the filter does not fit the images");
    }
    const npy_intp shape[4] = {s.images, matrix_.rows(), s.out_height(), s.out_width()};
    PyArrayObject* out = new_float_array(4, shape);
    if (out == nullptr) throw nb::python_error();
    nb::object result = nb::steal(reinterpret_cast<PyObject*>(out));
    if (PyArray_SIZE(out) == 0) return result;
    GilRelease release(true);
    matrix_.convolve(s, floats(in), floats(out), epilogue(relu));
    return result;
  }

  nb::object to_dense() const {
    const npy_intp shape[2] = {matrix_.rows(), matrix_.columns()};
    PyArrayObject* out = new_float_array(2, shape);
    if (out == nullptr) throw nb::python_error();
    matrix_.to_dense(floats(out));
    return nb::steal(reinterpret_cast<PyObject*>(out));
  }

  int64_t nbytes() const { return matrix_.nbytes(); }
  int64_t nonzeros() const { return matrix_.nonzeros(); }

 private:
  static PackedSparse packed(nb::handle dense) {
    PyArrayObject* array = as_float_array(dense.ptr());
    if (array == nullptr || PyArray_NDIM(array) != 2)
      throw nb::type_error("weights must be a C-contiguous float32 matrix");
    const int64_t rows = PyArray_DIM(array, 0), columns = PyArray_DIM(array, 1);
    if (columns > (int64_t{1} << 31) || rows > (int64_t{1} << 31)) throw nb::value_error("the matrix is too large");
    return PackedSparse(floats(array), rows, columns);
  }

  SparseEpilogue epilogue(bool relu) const {
    SparseEpilogue e;
    e.bias = bias_.data();
    e.relu = relu;
    return e;
  }

  PackedSparse matrix_;
  Buffer<float> bias_;
};

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
    if (PyArray_DIM(array, 1) > kInt8MostColumns) throw nb::value_error("sums of so many products do not fit 32 bits");
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
