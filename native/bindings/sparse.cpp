// Python bindings of sparse weights: packed from a dense array, applied to float32 activations.
#include "bindings/sparse_weights.h"

#include "common/sparse_int8.h"

namespace tw {
namespace {

// Sparse int8 weights with a scale per row.
class SparseInt8Weights {
 public:
  SparseInt8Weights(nb::handle dense, nb::handle scale, nb::handle bias)
      : matrix_(packed(dense)), scale_(copy_of_rows(scale, matrix_.rows(), "scale")) {
    if (!bias.is_none()) bias_ = copy_of_rows(bias, matrix_.rows(), "bias");
  }

  // int8 (M, columns) to int32 (M, rows)
  nb::object sums(nb::handle x) const {
    const auto in = view_of<int8_t>(x, 2, "x");
    if (in.dim(1) != matrix_.columns()) refuse("DtypeError", "x must have one column per column of the weights");
    const auto out = new_array<int32_t>({in.dim(0), matrix_.rows()});
    without_gil(true, [&] { matrix_.sums(in.data, in.dim(0), out.data); });
    return out.object;
  }

  // float32 (..., columns) to float32 (..., rows); None if the kernels do not support x.
  nb::object multiply(nb::handle x, bool relu) const {
    return rows_times(matrix_, x, [&](const float* in, int64_t batch, float* out) {
      matrix_.linear(in, batch, scale_.data(), bias_.data(), relu, out);
    });
  }

  const PackedSparseInt8& matrix() const { return matrix_; }
  int64_t nbytes() const { return matrix_.nbytes() + 4 * static_cast<int64_t>(scale_.size() + bias_.size()); }

 private:
  static PackedSparseInt8 packed(nb::handle dense) {
    const auto array = view_of<int8_t>(dense, 2, "the weights");
    check(array.dim(1) <= kInt8MostColumns, "the matrix has too many columns: sums would not fit 32 bits");
    return PackedSparseInt8(array.data, array.dim(0), array.dim(1));
  }

  PackedSparseInt8 matrix_;
  Buffer<float> scale_, bias_;
};

template <class T, class Weights>
void bind_matrix(nb::class_<Weights>& weights) {
  weights.def("multiply", &Weights::multiply, nb::arg("x"), nb::arg("relu"))
      .def("to_dense", [](const Weights& w) { return dense_of<T>(w.matrix()); })
      .def_prop_ro("nbytes", &Weights::nbytes)
      .def_prop_ro("nonzeros", [](const Weights& w) { return w.matrix().nonzeros(); });
}

}  // namespace

void bind_sparse(nb::module_& m) {
  m.def("prefer_sparse", prefer_sparse);
  nb::class_<SparseWeights> floats(m, "SparseWeights");
  floats.def(nb::init<nb::handle, nb::handle>(), nb::arg("dense"), nb::arg("bias").none() = nb::none())
      .def("convolve", &SparseWeights::convolve);
  bind_matrix<float>(floats);
  nb::class_<SparseInt8Weights> bytes(m, "SparseInt8Weights");
  bytes.def(nb::init<nb::handle, nb::handle, nb::handle>(), nb::arg("dense"), nb::arg("scale"), nb::arg("bias").none())
      .def("sums", &SparseInt8Weights::sums, nb::arg("x"));
  bind_matrix<int8_t>(bytes);
}

}  // namespace tw
