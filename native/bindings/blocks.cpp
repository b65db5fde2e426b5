// Python bindings of weights in quantized blocks: made from the bytes of a GGUF file, from four-bit codes or from
// floats, and multiplied by rows of floats.
#include <limits>

#include "bindings/arrays.h"
#include "common/block_matrix.h"

namespace tw {
namespace {

int64_t blocks_of(int64_t inputs) { return (inputs + kBlock - 1) / kBlock; }

void check_size(int64_t outputs, int64_t inputs) {
  const int64_t most = std::numeric_limits<int32_t>::max();
  check(outputs >= 0 && inputs >= 1 && inputs <= most && outputs <= most,
        "the weights have too many elements, or none");
}

// Returns the format, after checking that `bytes` has the size that this shape needs.
const BlockFormat& checked_format(int code, const ArrayView<uint8_t>& bytes, int64_t outputs, int64_t inputs) {
  const BlockFormat* format = block_format(code);
  check(format != nullptr, "this format of blocks is not supported");
  check_size(outputs, inputs);
  check(inputs % format->values == 0 && bytes.size() == outputs * (inputs / format->values) * format->bytes,
        "the bytes are not as many as blocks of this shape need");
  check(format->packing >= 0 || reinterpret_cast<uintptr_t>(bytes.data) % format->bytes == 0,
        "the numbers are not aligned");
  return *format;
}

void make_matrix(BlockMatrix* self, int code, nb::handle bytes, int64_t outputs, int64_t inputs, WeightArena* arena) {
  const auto raw = view_of<uint8_t>(bytes, 1, "bytes");
  checked_format(code, raw, outputs, inputs);
  without_gil(true, [&] { new (self) BlockMatrix(code, raw.data, outputs, inputs, arena); });
}

// Builds a matrix from four-bit codes, one per byte, and the float16 scales of their blocks.
BlockMatrix* matrix_of_codes(nb::handle codes, nb::handle scales, nb::handle minimums, nb::handle column_scale,
                             WeightArena* arena) {
  const auto c = view_of<uint8_t>(codes, 2, "codes");
  const auto s = view_of<uint16_t>(scales, 2, "scales");
  const bool has_minimums = !minimums.is_none();
  const auto m = has_minimums ? view_of<uint16_t>(minimums, 2, "minimums") : ArrayView<uint16_t>{};
  const auto f = view_of<float>(column_scale, 1, "column_scale");
  const int64_t outputs = c.dim(0), inputs = c.dim(1);
  if (outputs > 0) check_size(outputs, inputs > 0 ? inputs : 1);
  check(s.dim(0) == outputs && s.dim(1) == blocks_of(inputs) && f.dim(0) == outputs &&
            (!has_minimums || PyArray_SAMESHAPE(s.array, m.array)),
        "scales and minimums need one number per block of 32, column_scale one per output");
  return new BlockMatrix(outputs, inputs, c.data, s.data, m.data, f.data, arena);
}

BlockMatrix* matrix_of_floats(nb::handle weight, WeightArena* arena) {
  const auto w = view_of<float>(weight, 2, "weight");
  check_size(w.dim(0), w.dim(1));
  BlockMatrix* matrix = nullptr;
  without_gil(true, [&] { matrix = new BlockMatrix(w.data, w.dim(0), w.dim(1), arena); });
  return matrix;
}

nb::object linear(const BlockMatrix& weights, nb::handle x) {
  const auto rows = view_of<float>(x, 2, "x");
  check(rows.dim(1) == weights.inputs(), "x has another width than the weights");
  const NewArray<float> y = new_array({rows.dim(0), weights.outputs()});
  bool enough_memory;
  without_gil(true, [&] {
    BlockScratch scratch;
    enough_memory = weights.apply(rows.data, rows.dim(0), y.data, weights.outputs(), scratch);
  });
  if (!enough_memory) throw std::bad_alloc();
  return y.object;
}

nb::tuple unpack(const BlockMatrix& weights) {
  const bool has_minimums = weights.code() == kQ4_1;
  check(has_minimums || weights.code() == kQ4_0, "only four-bit weights have codes to unpack");
  const int64_t outputs = weights.outputs(), blocks = blocks_of(weights.inputs());
  const auto codes = new_array<uint8_t>({outputs, weights.inputs()});
  const auto scales = new_array<uint16_t>({outputs, blocks}),
             minimums = has_minimums ? new_array<uint16_t>({outputs, blocks}) : NewArray<uint16_t>{nb::none(), nullptr};
  const NewArray<float> row_scales = new_array({outputs});
  weights.unpack(codes.data, scales.data, minimums.data, row_scales.data);
  return nb::make_tuple(codes.object, scales.object, minimums.object, row_scales.object);
}

// Returns the rows of a matrix or an embedding at the given indices as float32 (n, columns).
template <class Matrix>
nb::object rows_at(const Matrix& matrix, nb::handle indices, int64_t rows, int64_t columns) {
  const auto ids = view_of<int64_t>(indices, 1, "indices");
  const NewArray<float> out = new_array({ids.dim(0), columns});
  for (int64_t i = 0; i < ids.dim(0); ++i) {
    if (ids.data[i] < 0 || ids.data[i] >= rows) throw nb::index_error("an index is outside the rows");
    matrix.row(ids.data[i], out.data + i * columns);
  }
  return out.object;
}

void make_rows(BlockRows* self, int code, nb::handle bytes, int64_t rows, int64_t columns) {
  const auto raw = view_of<uint8_t>(bytes, 1, "bytes");
  new (self) BlockRows{checked_format(code, raw, rows, columns), raw.data, rows, columns};
}

// Quantizes x (n, k) float32 to int8 (n, blocks * 32), with scales and sums of the int8 values (n, blocks).
nb::tuple quantize_blocks(nb::handle x) {
  const auto rows = view_of<float>(x, 2, "x");
  const int64_t n = rows.dim(0), k = rows.dim(1), blocks = (k + 2 * kBlock - 1) / (2 * kBlock) * 2;
  const auto values = new_array<int8_t>({n, blocks * kBlock});
  const NewArray<float> scale = new_array({n, blocks});
  const auto sum = new_array<int32_t>({n, blocks});
  Buffer<float> total(blocks);
  for (int64_t r = 0; r < n; ++r) {
    active_block_dot().quantize(rows.data + r * k, k, blocks, 1, 1, values.data + r * blocks * kBlock,
                                scale.data + r * blocks, sum.data + r * blocks, total.data());
  }
  return nb::make_tuple(values.object, scale.object, sum.object);
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
