// Python bindings of the sparse float32 weights of one layer, which the decoder reads too.
#pragma once

#include <algorithm>

#include "common/sparse_matrix.h"

#include "bindings/arrays.h"

namespace tw {

// Maps x (..., columns) to (..., rows) with `product(in, batch, out)`; None if the kernels do not support x.
template <class Matrix, class Product>
nb::object rows_times(const Matrix& matrix, nb::handle x, Product product) {
  PyArrayObject* in = as_float_array(x);
  const int ndim = in == nullptr ? 0 : PyArray_NDIM(in);
  if (ndim < 1 || PyArray_DIM(in, ndim - 1) != matrix.columns()) return nb::none();
  npy_intp shape[NPY_MAXDIMS];
  std::copy(PyArray_DIMS(in), PyArray_DIMS(in) + ndim, shape);
  const int64_t batch = PyArray_MultiplyList(shape, ndim - 1);
  shape[ndim - 1] = matrix.rows();
  const NewArray<float> out = new_array(ndim, shape);
  without_gil(matrix.nonzeros() * batch > kMinWorkForGilRelease,
              [&] { product(data<const float>(x), batch, out.data); });
  return out.object;
}

// A copy of one number for each row of the weights.
inline Buffer<float> copy_of_rows(nb::handle numbers, int64_t rows, const char* name) {
  const auto array = view_of<float>(numbers, 1, name);
  if (array.dim(0) != rows) refuse("DtypeError", "%s must be a float32 vector with one number per row", name);
  Buffer<float> copy(static_cast<std::size_t>(rows));
  std::copy(array.data, array.data + rows, copy.data());
  return copy;
}

template <class T, class Matrix>
nb::object dense_of(const Matrix& matrix) {
  const auto out = new_array<T>({matrix.rows(), matrix.columns()});
  matrix.to_dense(out.data);
  return out.object;
}

// The weights and bias of one layer. The product takes only the activations, so that a call costs little.
class SparseWeights {
 public:
  SparseWeights(nb::handle dense, nb::handle bias) : matrix_(packed(dense)) {
    if (!bias.is_none()) bias_ = copy_of_rows(bias, matrix_.rows(), "bias");
  }

  // x (..., columns) to (..., rows); None if the kernels do not support x, so that the caller converts it.
  nb::object multiply(nb::handle x, bool relu) const {
    return rows_times(matrix_, x, [&](const float* in, int64_t batch, float* out) {
      matrix_.times_rows(in, matrix_.columns(), batch, {bias_.data(), relu}, out, matrix_.rows());
    });
  }

  // x (N, C, H, W) to (N, H', W', rows), for weights (rows, C * filter height * filter width). None if x is not a
  // C-contiguous float32 array of four dimensions.
  nb::object convolve(nb::handle x, int kernel_height, int kernel_width, int stride_y, int stride_x, int pad_y,
                      int pad_x, bool relu) const {
    PyArrayObject* in = as_float_array(x);
    if (in == nullptr || PyArray_NDIM(in) != 4) return nb::none();
    const int64_t n = PyArray_DIM(in, 0), c = PyArray_DIM(in, 1), h = PyArray_DIM(in, 2), w = PyArray_DIM(in, 3);
    const int64_t rest_h = h + 2 * int64_t{pad_y} - kernel_height, rest_w = w + 2 * int64_t{pad_x} - kernel_width;
    check(kernel_height >= 1 && kernel_width >= 1 && stride_y >= 1 && stride_x >= 1 && pad_y >= 0 && pad_x >= 0 &&
              rest_h >= 0 && rest_w >= 0 && c * kernel_height * kernel_width == matrix_.columns(),
          "the filter does not fit the images");
    ConvShape s{n, c, h, w, matrix_.rows(), kernel_height, kernel_width, stride_y, stride_x, pad_y, pad_x, 1, 0, 0};
    s.oh = rest_h / stride_y + 1, s.ow = rest_w / stride_x + 1;
    const ConvEpilogue e{bias_.data(), nullptr, relu ? ConvActivation::relu : ConvActivation::none};
    const NewArray<float> out = new_array({n, s.oh, s.ow, s.o});
    if (PyArray_SIZE(as_array(out.object)) > 0)
      without_gil(true, [&] { matrix_.convolve(s, data<const float>(x), e, {0, s.o, 0}, out.data); });
    return out.object;
  }

  const PackedSparse& matrix() const { return matrix_; }
  int64_t nbytes() const { return matrix_.nbytes(); }

 private:
  static PackedSparse packed(nb::handle dense) {
    PyArrayObject* array = as_float_array(dense);
    if (array == nullptr || PyArray_NDIM(array) != 2)
      refuse("DtypeError", "weights must be a C-contiguous float32 matrix");
    const int64_t rows = PyArray_DIM(array, 0), columns = PyArray_DIM(array, 1);
    check(columns <= (int64_t{1} << 31) && rows <= (int64_t{1} << 31), "the matrix is too large");
    return PackedSparse(data<float>(dense), rows, columns);
  }

  PackedSparse matrix_;
  Buffer<float> bias_;
};

}  // namespace tw
