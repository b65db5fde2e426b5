// Integer layers and what stands between them, seen from Python. Arrays are checked here; what they mean is in
// common/int8_layer.h, whose std::invalid_argument becomes Python's ValueError.
#include <nanobind/stl/shared_ptr.h>

#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <tuple>

#include "bindings/arguments.h"
#include "bindings/bindings.h"
#include "bindings/int8_arrays.h"
#include "bindings/numpy_api.h"
#include "bindings/tile_table.h"
#include "common/int8_layer.h"
#include "common/thread_pool.h"

namespace tw {
namespace {

// --- one layer ---

// weights (columns, kh, kw, channels) int8; offset int32 (columns,); scale and bias float32 (columns,) or None
void make_layer(Int8Layer* self, nb::handle weights, nb::handle offset, nb::handle scale, nb::handle bias,
                IntPair stride, IntPair padding) {
  PyArrayObject* w = checked(weights, NPY_INT8, 4, "weights");
  if (PyArray_SIZE(w) > std::numeric_limits<int>::max()) throw nb::value_error("the weights have too many elements");
  Int8Geometry g;
  g.columns = static_cast<int>(PyArray_DIM(w, 0));
  g.kernel_h = static_cast<int>(PyArray_DIM(w, 1));
  g.kernel_w = static_cast<int>(PyArray_DIM(w, 2));
  g.channels = static_cast<int>(PyArray_DIM(w, 3));
  std::tie(g.stride_h, g.stride_w) = stride;
  std::tie(g.pad_h, g.pad_w) = padding;
  if (offset.is_none()) throw nb::type_error("a layer needs its offset");
  new (self) Int8Layer(g, static_cast<const int8_t*>(PyArray_DATA(w)),
                       per_column<int32_t>(offset, NPY_INT32, g.columns, "offset"),
                       per_column<float>(scale, NPY_FLOAT32, g.columns, "scale"),
                       per_column<float>(bias, NPY_FLOAT32, g.columns, "bias"));
}

nb::object layer_conv(const Int8Layer& layer, nb::handle x, int x_padding, nb::handle residual, int residual_padding,
                      int out_padding) {
  if (layer.gives_int16()) throw nb::value_error("only a plan runs a layer that gives 16 bits");
  const Int8Image in = image_of(x, x_padding, "x");
  Int8Image out = layer.conv_shape(in), skip;
  if (!residual.is_none()) {
    skip = image_of(residual, residual_padding, "residual");
    if (skip.images != out.images || skip.height != out.height || skip.width != out.width || skip.pixel != out.pixel) {
      throw nb::value_error("the residual has another shape than the result");
    }
  }
  out.padding = out_padding;
  nb::object result = new_image(out, layer.zero());
  if (layer.geometry().columns < out.pixel) fill_all(result, layer.zero());
  GilRelease release(true);
  layer.conv(in, data<const uint8_t>(x), skip, residual.is_none() ? nullptr : data<const uint8_t>(residual), out,
             data<uint8_t>(result));
  return result;
}

int64_t tile_field(nb::handle tile, const char* name) {
  nb::object value = nb::getattr(tile, name, nb::none());
  int64_t number = 0;
  if (!nb::try_cast(value, number) || std::abs(number) > std::numeric_limits<int>::max()) {
    throw nb::value_error(
        (std::string("an integer product's tile must be an Int8Tile with a whole number ") + name).c_str());
  }
  return number;
}

Int8Tile read_tile(nb::handle tile) {
  Int8Tile t;
  t.mr = static_cast<int>(tile_field(tile, "mr"));
  t.nr = static_cast<int>(tile_field(tile, "nr"));
  t.mc = tile_field(tile, "mc");
  t.nc = tile_field(tile, "nc");
  t.kc = tile_field(tile, "kc");
  t.threads_m = static_cast<int>(tile_field(tile, "threads_m"));
  t.threads_n = static_cast<int>(tile_field(tile, "threads_n"));
  return t;
}

// Multiplies x (rows, channels rounded up to 4) uint8; kind 0: int32, 1: float32, 2: uint8 results. An explicit `tile`
// takes precedence over the tile in `table`.
nb::object layer_linear(const Int8Layer& layer, nb::handle x, int kind, nb::handle row_scale, bool relu,
                        nb::handle tile, nb::handle table) {
  PyArrayObject* in = checked(x, NPY_UINT8, 2, "x");
  const int64_t rows = PyArray_DIM(in, 0), width = PyArray_DIM(in, 1);
  if (kind < 0 || kind > 2 || rows > std::numeric_limits<int>::max())
    throw nb::value_error("x does not fit the weights");
  const auto form = static_cast<Int8Out>(kind);
  layer.check_linear(width, form);
  const float* scales = nullptr;
  if (!row_scale.is_none()) {
    if (PyArray_DIM(checked(row_scale, NPY_FLOAT32, 1, "row_scale"), 0) != rows) {
      throw nb::value_error("row_scale needs one number per row");
    }
    scales = data<const float>(row_scale);
  }
  Int8Tile tile_choice;  // of no rows: the default
  const Int8Geometry& g = layer.geometry();
  if (!tile.is_none()) {
    tile_choice = read_tile(tile);
    if (const char* problem = int8_tile_problem(tile_choice, width)) {
      throw nb::value_error((std::string("this tile cannot be used: ") + problem).c_str());
    }
  } else if (const Int8Tile* tuned =
                 tuned_tile(tile_table_in(table.ptr()), rows, g.columns, g.channels, num_threads())) {
    tile_choice = *tuned;
  }
  const int64_t columns = form == Int8Out::uint8 ? layer.out_pixel() : g.columns;
  const npy_intp shape[2] = {rows, columns};
  nb::object out = new_object(2, shape, kind == 0 ? NPY_INT32 : kind == 1 ? NPY_FLOAT32 : NPY_UINT8);
  if (form == Int8Out::uint8 && g.columns < columns) fill_all(out, layer.zero());
  GilRelease release(rows * columns * width > 10000);
  layer.linear(data<const uint8_t>(x), rows, form, scales, relu, data<void>(out),
               tile_choice.mr == 0 ? nullptr : &tile_choice);
  return out;
}

nb::object layer_weights(const Int8Layer& layer) {
  const Int8Geometry& g = layer.geometry();
  const npy_intp shape[4] = {g.columns, g.kernel_h, g.kernel_w, g.channels};
  nb::object out = new_object(4, shape, NPY_INT8);
  layer.unpack(data<int8_t>(out));
  return out;
}

// --- what stands between layers ---

nb::object quantize_images(nb::handle x, float scale, int zero, int x_padding) {
  PyArrayObject* in = checked(x, NPY_FLOAT32, 4, "x");
  check_zero(zero);
  const int64_t channels = PyArray_DIM(in, 1);
  const Int8Image image{PyArray_DIM(in, 0), PyArray_DIM(in, 2), PyArray_DIM(in, 3), round_up(channels, kInt8Group),
                        x_padding};
  nb::object out = new_image(image, zero);
  GilRelease release(true);
  const int64_t floats = channels * image.height * image.width;
  parallel_for(static_cast<int>(image.images), [&](int i) {
    active_int8_ops().quantize_image(data<const float>(x) + i * floats, channels, 1.0f / scale, zero, image.plane(),
                                     data<uint8_t>(out) + i * image.image_step() + image.inside());
  });
  return out;
}

// x (rows, n) float32 to (rows, n rounded up to 4) bytes by one scale.
nb::object quantize_flat(nb::handle x, float scale, int zero) {
  PyArrayObject* in = checked(x, NPY_FLOAT32, 2, "x");
  check_zero(zero);
  const int64_t rows = PyArray_DIM(in, 0), n = PyArray_DIM(in, 1), padded = round_up(n, kInt8Group);
  const npy_intp shape[2] = {rows, padded};
  nb::object out = new_object(2, shape, NPY_UINT8);
  GilRelease release(rows * n > 10000);
  for (int64_t r = 0; r < rows; ++r) {
    active_int8_ops().quantize(data<const float>(x) + r * n, n, 1.0f / scale, zero, data<uint8_t>(out) + r * padded);
    std::memset(data<uint8_t>(out) + r * padded + n, zero, padded - n);
  }
  return out;
}

// x (rows, n) float32 to bytes with 128 added, each row by its own scale: (bytes, scales).
std::tuple<nb::object, nb::object> quantize_rows(nb::handle x) {
  PyArrayObject* in = checked(x, NPY_FLOAT32, 2, "x");
  const int64_t rows = PyArray_DIM(in, 0), n = PyArray_DIM(in, 1), padded = round_up(n, kInt8Group);
  const npy_intp shape[2] = {rows, padded};
  nb::object bytes = new_object(2, shape, NPY_UINT8), scales = new_object(1, shape, NPY_FLOAT32);
  GilRelease release(rows * n > 10000);
  for (int64_t r = 0; r < rows; ++r) {
    data<float>(scales)[r] =
        active_int8_ops().quantize_row(data<const float>(x) + r * n, n, padded, data<uint8_t>(bytes) + r * padded);
  }
  return {bytes, scales};
}

// --- tiles of a product ---

nb::object problem_of_tile(nb::handle tile, int64_t k) {
  const char* problem = int8_tile_problem(read_tile(tile), k);
  return problem == nullptr ? nb::none() : nb::object(nb::str(problem));
}

// (mr, nr, mc, nc, kc, threads_m, threads_n)
nb::tuple default_tile_of(int64_t m, int64_t n, int64_t k) {
  const Int8Tile t = default_int8_tile(m, n, k);
  return nb::make_tuple(t.mr, t.nr, t.mc, t.nc, t.kc, t.threads_m, t.threads_n);
}

// Lists the tallest register tile of each width: [(mr, nr), ...].
nb::list register_tiles() {
  nb::list out;
  for (int panels = 1; panels <= kInt8MaxPanels; ++panels) {
    const int most = active_int8().max_rows[panels];
    if (most > 0) out.append(nb::make_tuple(most, panels * kInt8Panel));
  }
  return out;
}

// --- AMX and AVX-VNNI ---

const char* const kAmxNames[] = {"off", "hardware", "emulated"};

std::string amx_name() { return kAmxNames[static_cast<int>(active_amx())]; }

void choose_amx(const std::string& name) {
  for (int i = 0; i < 3; ++i) {
    if (name != kAmxNames[i]) continue;
    if (static_cast<Amx>(i) == Amx::hardware && !has_amx()) throw nb::value_error("this CPU or system has no AMX");
    return set_amx(static_cast<Amx>(i));
  }
  throw nb::value_error("AMX is off, hardware or emulated");
}

void choose_avx_vnni(bool use) {
  if (use && !has_avx_vnni()) throw nb::value_error("this CPU has no AVX-VNNI");
  use_avx_vnni(use);
}

}  // namespace

PyObject* table_keep_int8(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject*) {
  int64_t size[3], threads;
  if (count != 3) return refuse("ConfigurationError", "keep_int8 takes a shape, threads and a tile");
  if (!read_sizes(args[0], 3, "the shape of a product", size) || !read_size(args[1], 1, "threads", &threads))
    return nullptr;
  Int8Tile tile;
  try {
    tile = read_tile(args[2]);
  } catch (const std::exception& error) {
    return refuse("ConfigurationError", "%s", error.what());
  }
  if (const char* problem = int8_tile_problem(tile, size[2])) {
    return refuse("ConfigurationError", "this tile cannot be used: %s", problem);
  }
  Int8Table*& table = reinterpret_cast<TileTable*>(self)->int8_products;
  if (table == nullptr) table = new (std::nothrow) Int8Table();
  if (table == nullptr) return PyErr_NoMemory();
  auto* entry = table->find_or_make({{size[0], size[1], size[2], tile_setting(static_cast<int>(threads))}});
  if (entry == nullptr) Py_RETURN_NONE;  // its places are taken by others that were kept: the default stays
  entry->state = Int8Table::State::use_tile;
  entry->tile = tile;
  entry->pinned = true;
  Py_RETURN_NONE;
}

void bind_int8(nb::module_& m) {
  m.def("amx", amx_name);
  m.def("set_amx", choose_amx);
  m.def("avx_vnni", uses_avx_vnni);
  m.def("set_avx_vnni", choose_avx_vnni);
  m.def("int8_quantize_images", quantize_images, nb::arg("x"), nb::arg("scale"), nb::arg("zero"), nb::arg("x_padding"));
  m.def("int8_quantize", quantize_flat, nb::arg("x"), nb::arg("scale"), nb::arg("zero"));
  m.def("int8_quantize_rows", quantize_rows, nb::arg("x"));
  nb::class_<Int8Layer>(m, "Int8Layer")
      .def("__init__", make_layer, nb::arg("weights"), nb::arg("offset"), nb::arg("scale").none(),
           nb::arg("bias").none(), nb::arg("stride"), nb::arg("padding"))
      .def("set_output", &Int8Layer::set_output)
      .def("set_uint8_stage",
           [](Int8Layer& layer, const Uint8StageTuple& stage) { layer.set_uint8_stage(uint8_stage_of(stage)); })
      .def("set_int16_stage",
           [](Int8Layer& layer, const Int16StageTuple& stage) { layer.set_int16_stage(int16_stage_of(stage)); })
      .def("set_residual", &Int8Layer::set_residual, nb::arg("scale"), nb::arg("zero"), nb::arg("wide") = false)
      .def("conv", layer_conv, nb::arg("x"), nb::arg("x_padding"), nb::arg("residual").none(),
           nb::arg("residual_padding"), nb::arg("out_padding"))
      .def("linear", layer_linear, nb::arg("x"), nb::arg("kind"), nb::arg("row_scale").none(), nb::arg("relu"),
           nb::arg("tile").none() = nb::none(), nb::arg("table").none() = nb::none())
      .def("weights", layer_weights)
      .def_prop_ro("nbytes", &Int8Layer::nbytes);
  m.def("int8_tile_problem", problem_of_tile, nb::arg("tile").none(), nb::arg("k"));
  m.def("int8_default_tile", default_tile_of, nb::arg("m"), nb::arg("n"), nb::arg("k"));
  m.def("int8_register_tiles", register_tiles);
}

}  // namespace tw
