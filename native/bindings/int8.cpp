// Integer layers and plans of them, seen from Python. Arrays are checked here; what they mean is in common/int8_layer.h
// and common/int8_plan.h, whose std::invalid_argument becomes Python's ValueError.
#include <nanobind/stl/shared_ptr.h>

#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <tuple>

#include "bindings/arguments.h"
#include "bindings/bindings.h"
#include "bindings/numpy_api.h"
#include "bindings/tile_table.h"
#include "common/int8_plan.h"
#include "common/thread_pool.h"

namespace tw {
namespace {

PyArrayObject* checked(nb::handle object, int type, int ndim, const char* what) {
  PyObject* raw = object.ptr();
  if (!PyArray_Check(raw)) throw nb::type_error((std::string(what) + " must be a NumPy array").c_str());
  auto* array = reinterpret_cast<PyArrayObject*>(raw);
  if (PyArray_TYPE(array) != type || PyArray_NDIM(array) != ndim || !PyArray_ISCARRAY_RO(array)) {
    throw nb::type_error((std::string(what) + " must be C-contiguous with " + std::to_string(ndim) +
                          " dimensions and the documented dtype").c_str());
  }
  return array;
}

nb::object new_object(int ndim, const npy_intp* shape, int type) {
  PyArrayObject* array = new_array(ndim, shape, type);
  if (array == nullptr) throw nb::python_error();
  return nb::steal(reinterpret_cast<PyObject*>(array));
}

template <class T>
T* data(nb::handle array) {
  return static_cast<T*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr())));
}

using IntPair = std::tuple<int, int>;

// An image buffer of the integer layers: (images, height + 2 border, width + 2 border, channels rounded up to 4).
Int8Image image_of(nb::handle x, int border, const char* what) {
  PyArrayObject* array = checked(x, NPY_UINT8, 4, what);
  const Int8Image image{PyArray_DIM(array, 0), PyArray_DIM(array, 1) - 2 * border, PyArray_DIM(array, 2) - 2 * border,
                        PyArray_DIM(array, 3), border};
  if (border < 0 || image.height < 0 || image.width < 0) throw nb::value_error("the border is wider than the image");
  return image;
}

nb::object new_image(const Int8Image& image, int zero) {
  if (image.border < 0) throw nb::value_error("a border cannot be negative");
  const npy_intp shape[4] = {image.images, image.full_height(), image.full_width(), image.pixel};
  nb::object out = new_object(4, shape, NPY_UINT8);
  fill_border(image, zero, data<uint8_t>(out));
  return out;
}

// --- one layer ---

template <class T>
const T* per_column(nb::handle values, int type, int columns, const char* what) {
  if (values.is_none()) return nullptr;
  if (PyArray_DIM(checked(values, type, 1, what), 0) != columns) {
    throw nb::value_error((std::string(what) + " needs one number per column").c_str());
  }
  return data<const T>(values);
}

// weights (columns, kh, kw, channels) int8; offset int32 (columns,); scale and bias float32 (columns,) or None
void make_layer(Int8Layer* self, nb::handle weights, nb::handle offset, nb::handle scale, nb::handle bias, IntPair stride,
                IntPair padding) {
  PyArrayObject* w = checked(weights, NPY_INT8, 4, "weights");
  if (PyArray_SIZE(w) > std::numeric_limits<int>::max()) throw nb::value_error("the weights have too many elements");
  ConvGeometry g;
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

nb::object layer_conv(const Int8Layer& layer, nb::handle x, int border, nb::handle residual, int residual_border,
                      int out_border) {
  const Int8Image in = image_of(x, border, "x");
  Int8Image out = layer.conv_shape(in), skip;
  if (!residual.is_none()) {
    skip = image_of(residual, residual_border, "residual");
    if (skip.images != out.images || skip.height != out.height || skip.width != out.width || skip.pixel != out.pixel) {
      throw nb::value_error("the residual has another shape than the result");
    }
  }
  out.border = out_border;
  nb::object result = new_image(out, layer.zero());
  GilRelease release(true);
  layer.conv(in, data<const uint8_t>(x), skip, residual.is_none() ? nullptr : data<const uint8_t>(residual), out,
             data<uint8_t>(result));
  return result;
}

int64_t tile_field(nb::handle tile, const char* name) {
  nb::object value = nb::getattr(tile, name, nb::none());
  int64_t number = 0;
  if (!nb::try_cast(value, number) || std::abs(number) > std::numeric_limits<int>::max()) {
    throw nb::value_error((std::string("an integer product's tile must be an Int8Tile with a whole number ") + name).c_str());
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

// What was kept for a product, null for the default: to be copied, as the table may change once Python's lock is let go.
const Int8Tile* kept_tile(const TileTable* table, int64_t rows, int64_t columns, int64_t k, int threads) {
  if (table == nullptr || table->int8_products == nullptr) return nullptr;
  const auto* entry = table->int8_products->find({{rows, columns, k, tile_setting(threads)}});
  return entry == nullptr ? nullptr : &entry->tile;
}

// x (rows, channels rounded up to 4) uint8; kind 0: int32, 1: float32, 2: uint8. A `tile` that is given comes before what
// was kept in the `table`.
nb::object layer_linear(const Int8Layer& layer, nb::handle x, int kind, nb::handle row_scale, bool relu, nb::handle tile,
                        nb::handle table) {
  PyArrayObject* in = checked(x, NPY_UINT8, 2, "x");
  const int64_t rows = PyArray_DIM(in, 0), width = PyArray_DIM(in, 1);
  if (kind < 0 || kind > 2 || rows > std::numeric_limits<int>::max()) throw nb::value_error("x does not fit the weights");
  const auto form = static_cast<Int8Out>(kind);
  layer.check_linear(width, form);
  const float* scales = nullptr;
  if (!row_scale.is_none()) {
    if (PyArray_DIM(checked(row_scale, NPY_FLOAT32, 1, "row_scale"), 0) != rows) {
      throw nb::value_error("row_scale needs one number per row");
    }
    scales = data<const float>(row_scale);
  }
  Int8Tile chosen;  // of no rows: the default
  const ConvGeometry& g = layer.geometry();
  if (!tile.is_none()) {
    chosen = read_tile(tile);
    if (const char* problem = int8_tile_problem(chosen, width)) {
      throw nb::value_error((std::string("this tile cannot be used: ") + problem).c_str());
    }
  } else if (const Int8Tile* kept = kept_tile(tile_table_in(table.ptr()), rows, g.columns, g.channels, num_threads())) {
    chosen = *kept;
  }
  const int64_t columns = form == Int8Out::uint8 ? layer.out_pixel() : g.columns;
  const npy_intp shape[2] = {rows, columns};
  nb::object out = new_object(2, shape, kind == 0 ? NPY_INT32 : kind == 1 ? NPY_FLOAT32 : NPY_UINT8);
  GilRelease release(rows * columns * width > 10000);
  layer.linear(data<const uint8_t>(x), rows, form, scales, relu, data<void>(out), chosen.mr == 0 ? nullptr : &chosen);
  return out;
}

nb::object layer_weights(const Int8Layer& layer) {
  const ConvGeometry& g = layer.geometry();
  const npy_intp shape[4] = {g.columns, g.kernel_h, g.kernel_w, g.channels};
  nb::object out = new_object(4, shape, NPY_INT8);
  layer.unpack(data<int8_t>(out));
  return out;
}

// --- what stands between layers ---

void check_zero(int zero) {
  if (zero < 0 || zero > 255) throw nb::value_error("a zero point lies between 0 and 255");
}

nb::object quantize_images(nb::handle x, float scale, int zero, int border) {
  PyArrayObject* in = checked(x, NPY_FLOAT32, 4, "x");
  check_zero(zero);
  const int64_t channels = PyArray_DIM(in, 1);
  const Int8Image image{PyArray_DIM(in, 0), PyArray_DIM(in, 2), PyArray_DIM(in, 3), round_up(channels, kInt8Group), border};
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

PoolWindow window_of(IntPair kernel, IntPair stride, IntPair padding) {
  return {std::get<0>(kernel), std::get<1>(kernel), std::get<0>(stride),
          std::get<1>(stride), std::get<0>(padding), std::get<1>(padding)};
}

template <bool kMean>
nb::object pool(nb::handle x, int border, IntPair kernel, IntPair stride, IntPair padding, int out_border, int zero) {
  const Int8Image in = image_of(x, border, "x");
  check_zero(zero);
  const PoolWindow w = window_of(kernel, stride, padding);
  Int8Image out = pooled_shape(in, w);
  out.border = out_border;
  nb::object result = new_image(out, zero);
  GilRelease release(true);
  parallel_for(static_cast<int>(in.images), [&](int i) {
    const uint8_t* from = data<const uint8_t>(x) + i * in.image_step() + in.inside();
    uint8_t* to = data<uint8_t>(result) + i * out.image_step() + out.inside();
    kMean ? active_int8_ops().avg_pool(from, in.plane(), w, zero, to, out.plane())
          : active_int8_ops().max_pool(from, in.plane(), w, to, out.plane());
  });
  return result;
}

nb::object global_pool(nb::handle x, int border, int channels, float scale, int zero, float out_scale, int out_zero) {
  const Int8Image in = image_of(x, border, "x");
  check_zero(zero);
  check_zero(out_zero);
  if (channels < 0 || channels > in.pixel || in.height * in.width == 0) throw nb::value_error("x has no pixels to average");
  const npy_intp shape[2] = {in.images, in.pixel};
  nb::object out = new_object(2, shape, NPY_UINT8);
  GilRelease release(true);
  for (int64_t i = 0; i < in.images; ++i) {
    active_int8_ops().global_pool(data<const uint8_t>(x) + i * in.image_step() + in.inside(), in.plane(), channels, scale,
                                  zero, 1.0f / out_scale, out_zero, data<uint8_t>(out) + i * in.pixel);
  }
  return out;
}

// --- plans ---

int plan_input(Int8Plan& plan, bool bytes, bool rows, int channels, int border, int zero) {
  check_zero(zero);
  if (channels < 0 || border < 0 || (rows && border != 0)) throw nb::value_error("bad channels or border");
  PlanShape shape;
  shape.bytes = bytes;
  shape.rows = rows;
  shape.channels = channels;
  shape.border = border;
  shape.zero = zero;
  return plan.add_input(shape);
}

// The shape of one image of an input, and how many there are.
std::pair<PlanShape, int64_t> input_shape(PlanShape shape, nb::handle x) {
  PyArrayObject* array = checked(x, shape.bytes ? NPY_UINT8 : NPY_FLOAT32, shape.rows ? 2 : 4, "x");
  const int64_t channels = PyArray_DIM(array, shape.rows ? 1 : shape.bytes ? 3 : 1);
  if (channels != (shape.bytes ? round_up(shape.channels, kInt8Group) : shape.channels)) {
    throw nb::value_error("x has another number of channels than the model");
  }
  if (!shape.rows) {
    const int first = shape.bytes ? 1 : 2;
    shape.height = PyArray_DIM(array, first) - 2 * shape.border;
    shape.width = PyArray_DIM(array, first + 1) - 2 * shape.border;
    if (shape.height < 0 || shape.width < 0) throw nb::value_error("the border is wider than the image");
  }
  return {shape, PyArray_DIM(array, 0)};
}

nb::object new_output(const PlanShape& shape, int64_t images) {
  if (shape.rows) {
    const npy_intp dims[2] = {images, shape.bytes ? shape.image(images).pixel : shape.channels};
    return new_object(2, dims, shape.bytes ? NPY_UINT8 : NPY_FLOAT32);
  }
  if (shape.bytes) return new_image(shape.image(images), shape.zero);
  const npy_intp dims[4] = {images, shape.channels, shape.height, shape.width};
  return new_object(4, dims, NPY_FLOAT32);
}

struct PlanCall {
  std::shared_ptr<Int8Plan::Schedule> schedule;
  std::vector<const void*> in;
  int64_t images = -1;
};

PlanCall read_call(const Int8Plan& plan, nb::list arrays) {
  if (arrays.size() != plan.inputs().size()) throw nb::value_error("a plan needs all of its inputs");
  std::vector<PlanShape> shapes;
  PlanCall call;
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    const auto [shape, count] = input_shape(plan.inputs()[i], arrays[i]);
    if (call.images >= 0 && count != call.images) throw nb::value_error("the inputs hold different numbers of images");
    call.images = count;
    shapes.push_back(shape);
    call.in.push_back(data<const void>(arrays[i]));
  }
  call.schedule = plan.schedule(shapes);
  return call;
}

// What was kept for the products of a call, by slot; empty where that is nothing.
std::vector<Int8Tile> kept_tiles(const Int8Plan& plan, const PlanCall& call, const TileTable* table) {
  std::vector<Int8Tile> tiles;
  if (table == nullptr || table->int8_products == nullptr) return tiles;
  for (const PlanProduct& p : plan.products(*call.schedule, call.images)) {
    const Int8Tile* tile = kept_tile(table, p.rows, p.columns, p.k, p.threads);
    if (tile == nullptr) continue;
    tiles.resize(plan.slots());
    tiles[p.slot] = *tile;
  }
  return tiles;
}

nb::list run_plan(const Int8Plan& plan, nb::list arrays, nb::handle table) {
  const PlanCall call = read_call(plan, arrays);
  nb::list results;
  std::vector<void*> out;
  for (std::size_t i = 0; i < plan.outputs(); ++i) {
    nb::object array = new_output(Int8Plan::output_shape(*call.schedule, i), call.images);
    out.push_back(data<void>(array));
    results.append(array);
  }
  const std::vector<Int8Tile> tiles = kept_tiles(plan, call, tile_table_in(table.ptr()));
  GilRelease release(true);
  plan.run(*call.schedule, call.images, call.in, out, tiles);
  return results;
}

// The plain products that `run` makes of these arrays: [(value, m, n, k, threads), ...].
nb::list plan_products(const Int8Plan& plan, nb::list arrays) {
  const PlanCall call = read_call(plan, arrays);
  nb::list out;
  for (const PlanProduct& p : plan.products(*call.schedule, call.images)) {
    out.append(nb::make_tuple(plan.inputs().size() + p.step, p.rows, p.columns, p.k, p.threads));
  }
  return out;
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

// The tallest register tile of each width there is: [(mr, nr), ...].
nb::list register_tiles() {
  nb::list out;
  for (int panels = 1; panels <= kInt8MaxPanels; ++panels) {
    const int most = active_int8().max_rows[panels];
    if (most > 0) out.append(nb::make_tuple(most, panels * kInt8Panel));
  }
  return out;
}

void bind_plan(nb::module_& m) {
  nb::class_<Int8Plan>(m, "Int8Plan")
      .def(nb::init<>())
      .def("input", plan_input, nb::arg("bytes"), nb::arg("rows"), nb::arg("channels"), nb::arg("border") = 0,
           nb::arg("zero") = 0)
      .def("quantize", [](Int8Plan& p, int x, float scale, int zero, int border) {
        return p.add(quantize_op(scale, zero, border), {x});
      })
      .def("dequantize", [](Int8Plan& p, int x, float scale) { return p.add(dequantize_op(scale), {x}); })
      .def("conv", [](Int8Plan& p, std::shared_ptr<Int8Layer> layer, std::vector<int> inputs, int border) {
        if (inputs.empty() || inputs.size() > 2) throw nb::value_error("a convolution reads one value and a residual");
        return p.add(conv_op(std::move(layer), inputs.size() == 2, border), inputs);
      })
      .def("linear", [](Int8Plan& p, std::shared_ptr<Int8Layer> layer, int x, bool to_float, bool relu) {
        return p.add(linear_op(std::move(layer), to_float, relu), {x});
      })
      .def("max_pool", [](Int8Plan& p, int x, IntPair kernel, IntPair stride, IntPair padding, int border) {
        return p.add(max_pool_op(window_of(kernel, stride, padding), border), {x});
      })
      .def("avg_pool", [](Int8Plan& p, int x, IntPair kernel, IntPair stride, IntPair padding, int border) {
        return p.add(avg_pool_op(window_of(kernel, stride, padding), border), {x});
      })
      .def("global_pool", [](Int8Plan& p, int x, float scale, float out_scale, int out_zero) {
        return p.add(global_pool_op(scale, out_scale, out_zero), {x});
      })
      .def("flatten", [](Int8Plan& p, int x) { return p.add(flatten_op(), {x}); })
      .def("output", &Int8Plan::add_output)
      .def("run", run_plan, nb::arg("arrays"), nb::arg("table").none() = nb::none())
      .def("products", plan_products, nb::arg("arrays"));
}

}  // namespace

PyObject* table_keep_int8(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject*) {
  int64_t size[3], threads;
  if (count != 3) return refuse("ConfigurationError", "keep_int8 takes a shape, threads and a tile");
  if (!read_sizes(args[0], 3, "the shape of a product", size) || !read_size(args[1], 1, "threads", &threads)) return nullptr;
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
  m.def("int8_quantize_images", quantize_images, nb::arg("x"), nb::arg("scale"), nb::arg("zero"), nb::arg("border"));
  m.def("int8_quantize", quantize_flat, nb::arg("x"), nb::arg("scale"), nb::arg("zero"));
  m.def("int8_quantize_rows", quantize_rows, nb::arg("x"));
  m.def("int8_max_pool", pool<false>, nb::arg("x"), nb::arg("border"), nb::arg("kernel"), nb::arg("stride"),
        nb::arg("padding"), nb::arg("out_border"), nb::arg("zero"));
  m.def("int8_avg_pool", pool<true>, nb::arg("x"), nb::arg("border"), nb::arg("kernel"), nb::arg("stride"),
        nb::arg("padding"), nb::arg("out_border"), nb::arg("zero"));
  m.def("int8_global_pool", global_pool, nb::arg("x"), nb::arg("border"), nb::arg("channels"), nb::arg("scale"),
        nb::arg("zero"), nb::arg("out_scale"), nb::arg("out_zero"));
  nb::class_<Int8Layer>(m, "Int8Layer")
      .def("__init__", make_layer, nb::arg("weights"), nb::arg("offset"), nb::arg("scale").none(), nb::arg("bias").none(),
           nb::arg("stride"), nb::arg("padding"))
      .def("set_output", &Int8Layer::set_output)
      .def("set_residual", &Int8Layer::set_residual)
      .def("conv", layer_conv, nb::arg("x"), nb::arg("border"), nb::arg("residual").none(), nb::arg("residual_border"),
           nb::arg("out_border"))
      .def("linear", layer_linear, nb::arg("x"), nb::arg("kind"), nb::arg("row_scale").none(), nb::arg("relu"),
           nb::arg("tile").none() = nb::none(), nb::arg("table").none() = nb::none())
      .def("weights", layer_weights)
      .def_prop_ro("nbytes", &Int8Layer::nbytes);
  m.def("int8_tile_problem", problem_of_tile, nb::arg("tile").none(), nb::arg("k"));
  m.def("int8_default_tile", default_tile_of, nb::arg("m"), nb::arg("n"), nb::arg("k"));
  m.def("int8_register_tiles", register_tiles);
  bind_plan(m);
}

}  // namespace tw
