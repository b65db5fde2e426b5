// Python bindings of integer layers and quantization. Arrays are checked here; common/integer_layer.h documents them,
// and its std::invalid_argument becomes Python's ValueError.
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <tuple>

#include "bindings/int8_arrays.h"
#include "common/int16_layer.h"
#include "common/int8_layer.h"
#include "common/thread_pool.h"

namespace tw {
namespace {

// Reads a Python Int8Tile: an object with these attributes.
Int8Tile read_tile(PyObject* tile) {
  static PyObject* const names[] = {
      PyUnicode_InternFromString("mr"),        PyUnicode_InternFromString("nr"),
      PyUnicode_InternFromString("mc"),        PyUnicode_InternFromString("nc"),
      PyUnicode_InternFromString("kc"),        PyUnicode_InternFromString("threads_m"),
      PyUnicode_InternFromString("threads_n"),
  };
  int64_t v[7];
  for (int i = 0; i < 7; ++i) {
    v[i] = tile_attribute(tile, names[i], "an Int8Tile");
    if (std::abs(v[i]) > std::numeric_limits<int>::max())
      refuse("ConfigurationError", "a tile must be an Int8Tile with a whole number %U below 2**31", names[i]);
  }
  const auto number = [&](int i) { return static_cast<int>(v[i]); };
  return {number(0), number(1), v[2], v[3], v[4], number(5), number(6)};
}

Int8Tile read_tile(PyObject* object, int64_t k) {
  const Int8Tile tile = read_tile(object);
  if (const char* problem = int8_tile_problem(tile, k))
    refuse("ConfigurationError", "this tile cannot be used: %s", problem);
  return tile;
}

// --- layers ---

// Returns one number per row or column; null for None.
template <class T>
const T* per_row(nb::handle values, int64_t count, const char* sentence) {
  if (values.is_none()) return nullptr;
  const auto array = view_of<T>(values, 1, "the numbers of a layer");
  check(array.dim(0) == count, sentence);
  return array.data;
}

// The arrays of a layer: weights (columns, kh, kw, channels of a group); offset int32 (columns,), scale and bias
// float32 (columns,) or None; padding top, left, bottom, right.
template <class T>
struct LayerArrays {
  IntegerGeometry geometry;
  const T* weights;
  const int32_t* offset;
  const float *scale, *bias;

  LayerArrays(nb::handle w, nb::handle offset, nb::handle scale, nb::handle bias, int groups, IntPair stride,
              Four padding, IntPair dilation) {
    const auto array = view_of<T>(w, 4, "weights");
    check(array.size() <= std::numeric_limits<int>::max(), "the weights have too many elements");
    if (offset.is_none()) refuse("DtypeError", "a layer needs an offset");
    geometry.columns = array.dim(0);
    geometry.group_channels = array.dim(3);
    geometry.groups = groups;
    std::tie(geometry.top, geometry.left, geometry.bottom, geometry.right) = padding;
    geometry.taps = {array.dim(1),        array.dim(2),          std::get<0>(stride),
                     std::get<1>(stride), std::get<0>(dilation), std::get<1>(dilation)};
    constexpr const char* kSentence = "offset, scale and bias need one number per column";
    weights = array.data;
    this->offset = per_row<int32_t>(offset, geometry.columns, kSentence);
    this->scale = per_row<float>(scale, geometry.columns, kSentence);
    this->bias = per_row<float>(bias, geometry.columns, kSentence);
  }
};

void make_layer(Int8Layer* self, nb::handle weights, nb::handle offset, nb::handle scale, nb::handle bias,
                IntPair stride, IntPair padding) {
  const auto [h, w] = padding;
  const LayerArrays<int8_t> a(weights, offset, scale, bias, 1, stride, {h, w, h, w}, {1, 1});
  new (self) Int8Layer(a.geometry, a.weights, a.offset, a.scale, a.bias);
}

void make_grouped(Int8GroupedLayer* self, nb::handle weights, nb::handle offset, nb::handle scale, int groups,
                  IntPair stride, Four padding, IntPair dilation) {
  const LayerArrays<int8_t> a(weights, offset, scale, nb::none(), groups, stride, padding, dilation);
  if (a.scale == nullptr) refuse("DtypeError", "a grouped layer needs a scale");
  new (self) Int8GroupedLayer(a.geometry, a.weights, a.offset, a.scale);
}

void make_int16_layer(Int16Layer* self, nb::handle weights, nb::handle offset, nb::handle scale, nb::handle bias,
                      int groups, IntPair stride, Four padding, IntPair dilation) {
  const LayerArrays<int16_t> a(weights, offset, scale, bias, groups, stride, padding, dilation);
  if (a.scale == nullptr) refuse("DtypeError", "an int16 layer needs a scale");
  new (self) Int16Layer(a.geometry, a.weights, a.offset, a.scale, a.bias);
}

// Convolution by an Int8Layer or an Int8GroupedLayer.
template <class Layer>
nb::object layer_conv(const Layer& layer, nb::handle x, int x_padding, nb::handle residual, int residual_padding,
                      int out_padding) {
  check(!layer.gives_int16(), "a layer with an int16 result runs in a graph only");
  const Int8Image in = image_of(x, x_padding, "x");
  check(in.pixel == round_up(layer.geometry().channels(), kInt8Group) || layer.geometry().taps.kernel_w == 1,
        "x has another number of channels than the weights");
  Int8Image out = layer.conv_shape(in), skip;
  const uint8_t* skip_data = nullptr;
  if (!residual.is_none()) {
    skip = image_of(residual, residual_padding, "residual");
    skip_data = data<const uint8_t>(residual);
    check(skip.images == out.images && skip.height == out.height && skip.width == out.width && skip.pixel == out.pixel,
          "the residual has another shape than the result");
  }
  out.padding = out_padding;
  const nb::object result = new_image(out, layer.zero());
  uint8_t* const y = data<uint8_t>(result);
  if (layer.geometry().columns < out.pixel) std::memset(y, layer.zero(), out.images * out.image_step());
  without_gil(true, [&] { layer.conv(in, data<const uint8_t>(x), skip, skip_data, out, y); });
  return result;
}

template <class T, class Layer>
nb::object layer_weights(const Layer& layer) {
  const IntegerGeometry& g = layer.geometry();
  const auto out = new_array<T>({g.columns, g.taps.kernel_h, g.taps.kernel_w, g.group_channels});
  layer.unpack(out.data);
  return out.object;
}

// Multiplies x (rows, channels rounded up to 4) uint8; kind 0: int32, 1: float32, 2: uint8 results. A `tile` takes
// precedence over the one in `table`.
nb::object layer_linear(const Int8Layer& layer, nb::handle x, int kind, nb::handle row_scale, bool relu,
                        nb::handle tile, const TileTable* table) {
  const auto in = view_of<uint8_t>(x, 2, "x");
  const int64_t rows = in.dim(0), width = in.dim(1);
  check(kind >= 0 && kind <= 2 && rows <= std::numeric_limits<int>::max(), "x does not fit the weights");
  const auto form = static_cast<Int8Out>(kind);
  layer.check_linear(width, form);
  const float* scales = per_row<float>(row_scale, rows, "row_scale needs one number per row");
  Int8Tile tile_choice;  // 0 rows: the default
  const IntegerGeometry& g = layer.geometry();
  if (!tile.is_none()) {
    tile_choice = read_tile(tile.ptr(), width);
  } else if (const Int8Tile* tuned = tuned_tile(table, rows, g.columns, g.channels(), num_threads())) {
    tile_choice = *tuned;
  }
  const int64_t columns = form == Int8Out::uint8 ? layer.out_pixel() : g.columns;
  const npy_intp shape[2] = {rows, columns};
  const int types[] = {NPY_INT32, NPY_FLOAT32, NPY_UINT8};
  const nb::object out = allocate_array(2, shape, types[kind]);
  if (form == Int8Out::uint8 && g.columns < columns) std::memset(data<void>(out), layer.zero(), rows * columns);
  without_gil(rows * columns * width > kMinWorkForGilRelease, [&] {
    layer.linear(in.data, rows, form, scales, relu, data<void>(out), tile_choice.mr == 0 ? nullptr : &tile_choice);
  });
  return out;
}

// --- quantization ---

// Quantizes float images (N, C, H, W) to padded channels-last uint8 images.
nb::object quantize_images(nb::handle x, float scale, int zero, int x_padding) {
  const auto in = view_of<float>(x, 4, "x");
  check_zero(zero);
  const int64_t channels = in.dim(1);
  const Int8Image image{in.dim(0), in.dim(2), in.dim(3), round_up(channels, kInt8Group), x_padding};
  const nb::object out = new_image(image, zero);
  const int64_t floats = channels * image.height * image.width;
  without_gil(true, [&] {
    parallel_for(static_cast<int>(image.images), [&](int i) {
      active_int8_ops().quantize_image(in.data + i * floats, channels, 1.0f / scale, zero, image.plane(),
                                       data<uint8_t>(out) + i * image.image_step() + image.inside());
    });
  });
  return out;
}

// Quantizes x (rows, n) float32 to uint8 (rows, n rounded up to 4) by one scale.
nb::object quantize_flat(nb::handle x, float scale, int zero) {
  const auto in = view_of<float>(x, 2, "x");
  check_zero(zero);
  const int64_t rows = in.dim(0), n = in.dim(1), padded = round_up(n, kInt8Group);
  const auto out = new_array<uint8_t>({rows, padded});
  without_gil(rows * n > kMinWorkForGilRelease, [&] {
    for (int64_t r = 0; r < rows; ++r) {
      uint8_t* const to = out.data + r * padded;
      active_int8_ops().quantize(in.data + r * n, n, 1.0f / scale, zero, to);
      std::memset(to + n, zero, padded - n);
    }
  });
  return out.object;
}

// Quantizes x (rows, n) float32 to uint8 with zero point 128, each row by its own scale: (bytes, scales).
std::tuple<nb::object, nb::object> quantize_rows(nb::handle x) {
  const auto in = view_of<float>(x, 2, "x");
  const int64_t rows = in.dim(0), n = in.dim(1), padded = round_up(n, kInt8Group);
  const auto bytes = new_array<uint8_t>({rows, padded});
  const NewArray<float> scales = new_array({rows});
  without_gil(rows * n > kMinWorkForGilRelease, [&] {
    for (int64_t r = 0; r < rows; ++r)
      scales.data[r] = active_int8_ops().quantize_row(in.data + r * n, n, padded, bytes.data + r * padded);
  });
  return {bytes.object, scales.object};
}

// --- tiles of a product ---

nb::object problem_of_tile(nb::handle tile, int64_t k) {
  const char* problem = int8_tile_problem(read_tile(tile.ptr()), k);
  return problem == nullptr ? nb::none() : nb::object(nb::str(problem));
}

// Returns the default tile: (mr, nr, mc, nc, kc, threads_m, threads_n).
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

template <class T, class Layer>
void bind_layer(nb::class_<Layer>& layer) {
  layer
      .def("set_uint8_stage",
           [](Layer& self, const Uint8StageTuple& stage) { self.set_uint8_stage(uint8_stage_of(stage)); })
      .def("set_residual", &Layer::set_residual, nb::arg("scale"), nb::arg("zero"), nb::arg("wide") = false)
      .def("weights", layer_weights<T, Layer>)
      .def_prop_ro("nbytes", &Layer::nbytes);
}

template <class Layer>
void bind_int16_stage(nb::class_<Layer>& layer) {
  layer.def("set_int16_stage",
            [](Layer& self, const Int16StageTuple& stage) { self.set_int16_stage(int16_stage_of(stage)); });
}

template <class Layer>
void bind_conv(nb::class_<Layer>& layer) {
  layer.def("conv", layer_conv<Layer>, nb::arg("x"), nb::arg("x_padding"), nb::arg("residual").none(),
            nb::arg("residual_padding"), nb::arg("out_padding"));
}

}  // namespace

nb::object table_keep_int8(const Call& call) {
  static const Parameters parameters("keep_int8", {"shape", "threads", "tile"}, 3);
  const auto v = parameters.read(call);
  int64_t size[3];
  read_sizes(v[0], 3, 0, "the shape of a product", size);
  const int threads = static_cast<int>(read_size(v[1], 1, "threads"));
  const Int8Tile tile = read_tile(v[2], size[2]);
  auto& table = table_of(call.self).int8_products;
  if (table == nullptr) table = std::make_unique<Int8Table>();
  keep(*table, {{size[0], size[1], size[2], tile_setting(threads)}}, true, tile);
  return nb::none();
}

void bind_int8(nb::module_& m) {
  m.def("amx", amx_name);
  m.def("set_amx", choose_amx);
  m.def("avx_vnni", uses_avx_vnni);
  m.def("set_avx_vnni", choose_avx_vnni);
  m.def("int8_quantize_images", quantize_images, nb::arg("x"), nb::arg("scale"), nb::arg("zero"), nb::arg("x_padding"));
  m.def("int8_quantize", quantize_flat, nb::arg("x"), nb::arg("scale"), nb::arg("zero"));
  m.def("int8_quantize_rows", quantize_rows, nb::arg("x"));
  nb::class_<Int8Layer> layer(m, "Int8Layer");
  layer
      .def("__init__", make_layer, nb::arg("weights"), nb::arg("offset"), nb::arg("scale").none(),
           nb::arg("bias").none(), nb::arg("stride"), nb::arg("padding"))
      .def("set_output", [](Int8Layer& self, int zero, int low,
                            int high) { self.set_uint8_stage({zero, low, high, {}, Approximation::none, {}, {}}); })
      .def("linear", layer_linear, nb::arg("x"), nb::arg("kind"), nb::arg("row_scale").none(), nb::arg("relu"),
           nb::arg("tile").none() = nb::none(), nb::arg("table").none() = nb::none());
  bind_conv(layer);
  bind_int16_stage(layer);
  bind_layer<int8_t>(layer);
  nb::class_<Int8GroupedLayer> grouped(m, "Int8GroupedLayer");
  grouped.def("__init__", make_grouped, nb::arg("weights"), nb::arg("offset"), nb::arg("scale"), nb::arg("groups"),
              nb::arg("stride"), nb::arg("padding"), nb::arg("dilation"));
  bind_conv(grouped);
  bind_layer<int8_t>(grouped);
  nb::class_<Int16Layer> int16(m, "Int16Layer");
  int16
      .def("__init__", make_int16_layer, nb::arg("weights"), nb::arg("offset"), nb::arg("scale"),
           nb::arg("bias").none(), nb::arg("groups"), nb::arg("stride"), nb::arg("padding"), nb::arg("dilation"))
      .def("set_bytes_read", &Int16Layer::set_bytes_read);
  bind_int16_stage(int16);
  bind_layer<int16_t>(int16);
  m.def("int8_tile_problem", problem_of_tile, nb::arg("tile").none(), nb::arg("k"));
  m.def("int8_default_tile", default_tile_of, nb::arg("m"), nb::arg("n"), nb::arg("k"));
  m.def("int8_register_tiles", register_tiles);
}

}  // namespace tw
