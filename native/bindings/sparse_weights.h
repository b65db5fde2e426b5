// Sparse float32 weights of one layer, seen from Python; the decoder reads them too.
#pragma once

#include <algorithm>

#include "common/sparse_matrix.h"

#include "bindings/bindings.h"
#include "bindings/numpy_api.h"

namespace tw {

constexpr int64_t kMinWorkForGilRelease = 100000;  // multiply-adds

// Maps x (..., columns) to (..., rows) with `product(in, batch, out)`; None if the kernels do not support x.
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
  GilRelease release(matrix.nonzeros() * batch > kMinWorkForGilRelease);
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

  const PackedSparse& matrix() const { return matrix_; }
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

}  // namespace tw
