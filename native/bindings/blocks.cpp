// Weights in quantized blocks, seen from Python: made of the bytes of a GGUF file, of four-bit codes or of floats, and
// multiplied by rows of floats.
#include <limits>
#include <string>

#include "bindings/bindings.h"
#include "bindings/numpy_api.h"
#include "common/block_matrix.h"

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

int64_t blocks_of(int64_t inputs) { return (inputs + kBlock - 1) / kBlock; }

void check_size(int64_t outputs, int64_t inputs) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (outputs < 0 || inputs < 1 || inputs > kMost || outputs > kMost) {
    throw nb::value_error("the weights have too many elements, or none");
  }
}

// The format of `bytes`, after checking that they are as many as the shape needs.
const BlockFormat& checked_format(int code, PyArrayObject* bytes, int64_t outputs, int64_t inputs) {
  const BlockFormat* format = block_format(code);
  if (format == nullptr) throw nb::value_error("this format of blocks is not supported");
  check_size(outputs, inputs);
  if (inputs % format->values != 0 || PyArray_SIZE(bytes) != outputs * (inputs / format->values) * format->bytes) {
    throw nb::value_error("the bytes are not as many as blocks of this shape need");
  }
  const auto address = reinterpret_cast<uintptr_t>(data<uint8_t>(bytes));
  if (format->packing < 0 && address % format->bytes != 0) throw nb::value_error("the numbers are not aligned");
  return *format;
}

void make_matrix(BlockMatrix* self, int code, nb::handle bytes, int64_t outputs, int64_t inputs, WeightArena* arena) {
  PyArrayObject* raw = checked(bytes, NPY_UINT8, 1, "bytes");
  checked_format(code, raw, outputs, inputs);
  GilRelease release(true);
  new (self) BlockMatrix(code, data<uint8_t>(raw), outputs, inputs, arena);
}

BlockMatrix* matrix_of_codes(nb::handle codes, nb::handle scales, nb::handle minimums, nb::handle column_scale,
                             WeightArena* arena) {
  PyArrayObject* c = checked(codes, NPY_UINT8, 2, "codes");
  PyArrayObject* s = checked(scales, NPY_FLOAT16, 2, "scales");
  PyArrayObject* m = minimums.is_none() ? nullptr : checked(minimums, NPY_FLOAT16, 2, "minimums");
  PyArrayObject* f = checked(column_scale, NPY_FLOAT32, 1, "column_scale");
  const int64_t outputs = PyArray_DIM(c, 0), inputs = PyArray_DIM(c, 1);
  if (outputs > 0) check_size(outputs, inputs > 0 ? inputs : 1);
  if (PyArray_DIM(s, 0) != outputs || PyArray_DIM(s, 1) != blocks_of(inputs) ||
      (m != nullptr && !PyArray_SAMESHAPE(s, m)) || PyArray_DIM(f, 0) != outputs) {
    throw nb::value_error("scales and minimums need one number per block of 32, column_scale one per output");
  }
  return new BlockMatrix(outputs, inputs, data<uint8_t>(c), data<uint16_t>(s),
                         m == nullptr ? nullptr : data<uint16_t>(m), data<float>(f), arena);
}

BlockMatrix* matrix_of_floats(nb::handle weight, WeightArena* arena) {
  PyArrayObject* w = checked(weight, NPY_FLOAT32, 2, "weight");
  check_size(PyArray_DIM(w, 0), PyArray_DIM(w, 1));
  GilRelease release(true);
  return new BlockMatrix(data<float>(w), PyArray_DIM(w, 0), PyArray_DIM(w, 1), arena);
}

nb::object linear(const BlockMatrix& weights, nb::handle x) {
  PyArrayObject* rows = checked(x, NPY_FLOAT32, 2, "x");
  if (PyArray_DIM(rows, 1) != weights.inputs()) throw nb::value_error("x has another width than the weights");
  const npy_intp shape[2] = {PyArray_DIM(rows, 0), weights.outputs()};
  nb::object y = new_object(2, shape, NPY_FLOAT32);
  bool ok;
  {
    GilRelease release(true);
    BlockScratch scratch;
    ok = weights.apply(data<float>(rows), shape[0], data_of<float>(y), shape[1], scratch);
  }
  if (!ok) throw std::bad_alloc();
  return y;
}

nb::tuple unpack(const BlockMatrix& weights) {
  const bool minimum = weights.code() == kQ4_1;
  if (!minimum && weights.code() != kQ4_0) throw nb::value_error("only four-bit weights have codes to unpack");
  const npy_intp codes_shape[2] = {weights.outputs(), weights.inputs()};
  const npy_intp blocks_shape[2] = {weights.outputs(), blocks_of(weights.inputs())};
  nb::object codes = new_object(2, codes_shape, NPY_UINT8), scales = new_object(2, blocks_shape, NPY_FLOAT16);
  nb::object row_scales = new_object(1, codes_shape, NPY_FLOAT32), minimums = nb::none();
  if (minimum) minimums = new_object(2, blocks_shape, NPY_FLOAT16);
  weights.unpack(data_of<uint8_t>(codes), data_of<uint16_t>(scales), minimum ? data_of<uint16_t>(minimums) : nullptr,
                 data_of<float>(row_scales));
  return nb::make_tuple(codes, scales, minimums, row_scales);
}

// The rows of a matrix or an embedding at the given indices as float32 (n, columns).
template <class Matrix>
nb::object rows_at(const Matrix& matrix, nb::handle indices, int64_t rows, int64_t columns) {
  PyArrayObject* ids = checked(indices, NPY_INT64, 1, "indices");
  const npy_intp shape[2] = {PyArray_DIM(ids, 0), columns};
  nb::object out = new_object(2, shape, NPY_FLOAT32);
  for (int64_t i = 0; i < shape[0]; ++i) {
    const int64_t row = data<int64_t>(ids)[i];
    if (row < 0 || row >= rows) throw nb::index_error("an index is outside the rows");
    matrix.row(row, data_of<float>(out) + i * columns);
  }
  return out;
}

void make_rows(BlockRows* self, int code, nb::handle bytes, int64_t rows, int64_t columns) {
  PyArrayObject* raw = checked(bytes, NPY_UINT8, 1, "bytes");
  new (self) BlockRows{checked_format(code, raw, rows, columns), data<uint8_t>(raw), rows, columns};
}

// x (n, k) float32 to int8 (n, blocks * 32), scales and sums (n, blocks) of the int8 values.
nb::tuple quantize_blocks(nb::handle x) {
  PyArrayObject* rows = checked(x, NPY_FLOAT32, 2, "x");
  const int64_t k = PyArray_DIM(rows, 1), blocks = (k + 2 * kBlock - 1) / (2 * kBlock) * 2;
  const npy_intp values_shape[2] = {PyArray_DIM(rows, 0), blocks * kBlock}, shape[2] = {values_shape[0], blocks};
  nb::object values = new_object(2, values_shape, NPY_INT8), scale = new_object(2, shape, NPY_FLOAT32);
  nb::object sum = new_object(2, shape, NPY_INT32);
  Buffer<float> total(blocks);
  for (int64_t r = 0; r < shape[0]; ++r) {
    active_block_dot().quantize(data<float>(rows) + r * k, k, blocks, 1, 1,
                                data_of<int8_t>(values) + r * values_shape[1], data_of<float>(scale) + r * blocks,
                                data_of<int32_t>(sum) + r * blocks, total.data());
  }
  return nb::make_tuple(values, scale, sum);
}

int64_t packed_bytes(int code, int64_t outputs, int64_t inputs) {
  const BlockFormat* format = block_format(code);
  check_size(outputs, inputs);
  return format == nullptr ? 0 : BlockMatrix::packed_bytes(*format, outputs, inputs);
}

}  // namespace

void bind_blocks(nb::module_& m) {
  nb::class_<WeightArena>(m, "WeightArena").def(nb::init<int64_t>(), nb::arg("bytes"));
  nb::class_<BlockMatrix>(m, "BlockMatrix")
      .def("__init__", &make_matrix, nb::keep_alive<1, 3>(), nb::arg("code"), nb::arg("bytes"), nb::arg("outputs"),
           nb::arg("inputs"), nb::arg("arena").none() = nb::none())
      .def_static("from_codes", &matrix_of_codes, nb::arg("codes"), nb::arg("scales"), nb::arg("minimums").none(),
                  nb::arg("column_scale"), nb::arg("arena").none() = nb::none())
      .def_static("from_floats", &matrix_of_floats, nb::arg("weight"), nb::arg("arena").none() = nb::none())
      .def("linear", &linear, nb::arg("x"))
      .def("unpack", &unpack)
      .def(
          "rows", [](const BlockMatrix& w, nb::handle ids) { return rows_at(w, ids, w.outputs(), w.inputs()); },
          nb::arg("indices"))
      .def_prop_ro("shape", [](const BlockMatrix& w) { return nb::make_tuple(w.outputs(), w.inputs()); })
      .def_prop_ro("nbytes", [](const BlockMatrix& w) { return w.bytes() + 4 * w.outputs(); });
  nb::class_<BlockRows>(m, "BlockRows")
      .def("__init__", &make_rows, nb::keep_alive<1, 3>(), nb::arg("code"), nb::arg("bytes"), nb::arg("rows"),
           nb::arg("columns"))
      .def(
          "rows", [](const BlockRows& b, nb::handle ids) { return rows_at(b, ids, b.rows, b.columns); },
          nb::arg("indices"))
      .def_prop_ro("shape", [](const BlockRows& b) { return nb::make_tuple(b.rows, b.columns); })
      .def_prop_ro("nbytes", &BlockRows::bytes);
  m.def("quantize_row_blocks", &quantize_blocks, nb::arg("x"));
  m.def("packed_block_bytes", &packed_bytes, nb::arg("code"), nb::arg("outputs"), nb::arg("inputs"));
}

}  // namespace tw
