// Plans of integer layers, and layers in groups, seen from Python: what they mean is in common/int8_plan.h and
// common/int8_grouped_layer.h, whose std::invalid_argument becomes Python's ValueError.
#include <nanobind/stl/shared_ptr.h>

#include <limits>

#include "bindings/arguments.h"
#include "bindings/int8_arrays.h"
#include "common/int8_plan.h"

namespace tw {
namespace {

// --- layers in groups ---

GroupedGeometry geometry_of(PyArrayObject* weights, int groups, IntPair stride, Four padding, IntPair dilation) {
  GroupedGeometry g;
  g.columns = PyArray_DIM(weights, 0);
  g.group_channels = PyArray_DIM(weights, 3);
  g.groups = groups;
  std::tie(g.top, g.left, g.bottom, g.right) = padding;
  g.taps = {PyArray_DIM(weights, 1), PyArray_DIM(weights, 2), std::get<0>(stride),
            std::get<1>(stride),     std::get<0>(dilation),   std::get<1>(dilation)};
  return g;
}

// weights (columns, kh, kw, channels of a group) int8; offset int32 and scale float32 (columns,); padding top, left,
// bottom, right
void make_grouped(Int8GroupedLayer* self, nb::handle weights, nb::handle offset, nb::handle scale, int groups,
                  IntPair stride, Four padding, IntPair dilation) {
  PyArrayObject* w = checked(weights, NPY_INT8, 4, "weights");
  if (PyArray_SIZE(w) > std::numeric_limits<int>::max()) throw nb::value_error("the weights have too many elements");
  const GroupedGeometry g = geometry_of(w, groups, stride, padding, dilation);
  if (offset.is_none() || scale.is_none()) throw nb::type_error("a layer in groups needs its offset and scale");
  const int columns = static_cast<int>(g.columns);
  new (self) Int8GroupedLayer(g, data<const int8_t>(weights), per_column<int32_t>(offset, NPY_INT32, columns, "offset"),
                              per_column<float>(scale, NPY_FLOAT32, columns, "scale"));
}

nb::object grouped_conv(const Int8GroupedLayer& layer, nb::handle x, int border, nb::handle residual,
                        int residual_border, int out_border) {
  const Int8Image in = image_of(x, border, "x");
  if (in.pixel != round_up(layer.geometry().channels(), kInt8Group))
    throw nb::value_error("x has another number of channels than the weights");
  Int8Image out = layer.conv_shape(in), skip;
  if (!residual.is_none()) {
    skip = image_of(residual, residual_border, "residual");
    if (skip.images != out.images || skip.height != out.height || skip.width != out.width || skip.pixel != out.pixel) {
      throw nb::value_error("the residual has another shape than the result");
    }
  }
  out.border = out_border;
  nb::object result = new_image(out, layer.finish().zero);
  if (layer.geometry().columns < out.pixel) fill_all(result, layer.finish().zero);
  GilRelease release(true);
  layer.conv(in, data<const uint8_t>(x), skip, residual.is_none() ? nullptr : data<const uint8_t>(residual), out,
             data<uint8_t>(result));
  return result;
}

nb::object grouped_weights(const Int8GroupedLayer& layer) {
  const GroupedGeometry& g = layer.geometry();
  const npy_intp shape[4] = {g.columns, g.taps.kernel_h, g.taps.kernel_w, g.group_channels};
  nb::object out = new_object(4, shape, NPY_INT8);
  layer.unpack(data<int8_t>(out));
  return out;
}

// --- layers on numbers of 16 bits ---

// weights (columns, kh, kw, channels of a group) int16; offset int32, scale and bias float32 (columns,); bias may be
// None
void make_wide(Int16Layer* self, nb::handle weights, nb::handle offset, nb::handle scale, nb::handle bias, int groups,
               IntPair stride, Four padding, IntPair dilation) {
  PyArrayObject* w = checked(weights, NPY_INT16, 4, "weights");
  if (PyArray_SIZE(w) > std::numeric_limits<int>::max()) throw nb::value_error("the weights have too many elements");
  if (offset.is_none() || scale.is_none()) throw nb::type_error("a layer needs its offset and scale");
  const GroupedGeometry g = geometry_of(w, groups, stride, padding, dilation);
  const int columns = static_cast<int>(g.columns);
  new (self) Int16Layer(g, data<const int16_t>(weights), per_column<int32_t>(offset, NPY_INT32, columns, "offset"),
                        per_column<float>(scale, NPY_FLOAT32, columns, "scale"),
                        per_column<float>(bias, NPY_FLOAT32, columns, "bias"));
}

nb::object wide_weights(const Int16Layer& layer) {
  const GroupedGeometry& g = layer.geometry();
  const npy_intp shape[4] = {g.columns, g.taps.kernel_h, g.taps.kernel_w, g.group_channels};
  nb::object out = new_object(4, shape, NPY_INT16);
  layer.unpack(data<int16_t>(out));
  return out;
}

// A finish to bytes, or one to 16 bits.
MixedEnd end_of(nb::handle given) {
  MixedEnd end;
  ShortFinish shorts;
  end.wide = nb::try_cast(given, shorts);
  if (end.wide) {
    end.numbers = wide_finish_of(shorts);
  } else {
    end.bytes = finish_of(nb::cast<Finish>(given));  // its table is the tuple's: kept by the operation
  }
  return end;
}

// --- rows of pixels, one operation at a time ---

struct Rows {
  BytePixels pixels;
  int64_t count, channels;
};

// (pixels, channels) bytes
Rows rows_of(nb::handle x, float scale, int zero) {
  PyArrayObject* array = checked(x, NPY_UINT8, 2, "x");
  check_zero(zero);
  return {{data<const uint8_t>(x), PyArray_DIM(array, 1), scale, zero}, PyArray_DIM(array, 0), PyArray_DIM(array, 1)};
}

nb::object like_rows(const Rows& rows) {
  const npy_intp shape[2] = {rows.count, rows.channels};
  return new_object(2, shape, NPY_UINT8);
}

Rows second_of(nb::handle x, float scale, int zero, const Rows& first) {
  Rows rows = rows_of(x, scale, zero);
  if (rows.channels != first.channels || (rows.count != first.count && rows.count != 1)) {
    throw nb::value_error("these two do not have one shape");
  }
  if (rows.count == 1) rows.pixels.step = 0;
  return rows;
}

nb::object add_bytes(nb::handle a, nb::handle b, float a_scale, int a_zero, float b_scale, int b_zero, Finish finish) {
  const Rows first = rows_of(a, a_scale, a_zero), second = second_of(b, b_scale, b_zero, first);
  nb::object out = like_rows(first);
  active_int8_between().add(first.pixels, second.pixels, first.count, first.channels, finish_of(finish),
                            {data<uint8_t>(out), first.channels});
  return out;
}

nb::object mul_bytes(nb::handle a, nb::handle b, float scale, int a_zero, int b_zero, Finish finish) {
  const Rows first = rows_of(a, scale, a_zero), second = second_of(b, 0.0f, b_zero, first);
  nb::object out = like_rows(first);
  active_int8_between().mul(first.pixels, second.pixels, first.count, first.channels, finish_of(finish),
                            {data<uint8_t>(out), first.channels});
  return out;
}

nb::object affine_bytes(nb::handle x, int zero, nb::handle scale, nb::handle shift, Finish finish) {
  const Rows rows = rows_of(x, 0.0f, zero);
  const int channels = static_cast<int>(rows.channels);
  if (scale.is_none() || shift.is_none()) throw nb::type_error("a scale and a shift a channel");
  const float* by = per_column<float>(scale, NPY_FLOAT32, channels, "scale");
  const float* plus = per_column<float>(shift, NPY_FLOAT32, channels, "shift");
  nb::object out = like_rows(rows);
  active_int8_between().affine(rows.pixels, by, plus, rows.count, rows.channels, finish_of(finish),
                               {data<uint8_t>(out), rows.channels});
  return out;
}

nb::object take_bytes(nb::handle x, std::vector<int> channels) {
  const Rows rows = rows_of(x, 0.0f, 0);
  for (int c : channels) {
    if (c < 0 || c >= rows.channels) throw nb::value_error("there is no such channel");
  }
  const npy_intp shape[2] = {rows.count, static_cast<npy_intp>(channels.size())};
  nb::object out = new_object(2, shape, NPY_UINT8);
  active_int8_ops().take(rows.pixels.data, rows.pixels.step, channels.data(), shape[1], rows.count, data<uint8_t>(out),
                         shape[1]);
  return out;
}

// --- plans ---

int plan_input(Int8Plan& plan, bool bytes, bool rows, int channels, int border, int zero, bool wide) {
  check_zero(wide ? 0 : zero);
  if (channels < 0 || border < 0 || (rows && border != 0)) throw nb::value_error("bad channels or border");
  PlanShape shape;
  shape.bytes = bytes;
  shape.rows = rows;
  shape.channels = channels;
  shape.border = border;
  shape.zero = wide ? 0 : zero;
  shape.size = wide ? 2 : 1;
  return plan.add_input(shape);
}

int type_of(const PlanShape& shape) { return !shape.bytes ? NPY_FLOAT32 : shape.wide() ? NPY_INT16 : NPY_UINT8; }

// The shape of one image of an input, and how many there are.
std::pair<PlanShape, int64_t> input_shape(PlanShape shape, nb::handle x) {
  PyArrayObject* array = checked(x, type_of(shape), shape.rows ? 2 : 4, "x");
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
    const npy_intp dims[2] = {images, shape.bytes ? shape.numbers(images).pixel : shape.channels};
    return new_object(2, dims, type_of(shape));
  }
  if (shape.wide()) return new_wide_image(shape.numbers(images));
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

void bind_plan(nb::module_& m) {
  nb::class_<Int8Plan>(m, "Int8Plan")
      .def(nb::init<>())
      .def("input", plan_input, nb::arg("bytes"), nb::arg("rows"), nb::arg("channels"), nb::arg("border") = 0,
           nb::arg("zero") = 0, nb::arg("wide") = false)
      .def("quantize", [](Int8Plan& p, int x, float scale, int zero,
                          int border) { return p.add(quantize_op(scale, zero, border), {x}); })
      .def("dequantize", [](Int8Plan& p, int x, float scale) { return p.add(dequantize_op(scale), {x}); })
      .def("conv", [](Int8Plan& p, std::shared_ptr<Int8Layer> layer, std::vector<int> inputs,
                      int border) { return p.add(conv_op(std::move(layer), inputs.size() == 2, border), inputs); })
      .def("grouped_conv",
           [](Int8Plan& p, std::shared_ptr<Int8GroupedLayer> layer, std::vector<int> inputs, int border) {
             return p.add(grouped_conv_op(std::move(layer), inputs.size() == 2, border), inputs);
           })
      .def("linear", [](Int8Plan& p, std::shared_ptr<Int8Layer> layer, int x, bool to_float,
                        bool relu) { return p.add(linear_op(std::move(layer), to_float, relu), {x}); })
      .def("max_pool",
           [](Int8Plan& p, int x, IntPair kernel, IntPair stride, Four padding, int border) {
             return p.add(max_pool_op(window_of(kernel, stride, padding, true), border), {x});
           })
      .def("avg_pool",
           [](Int8Plan& p, int x, IntPair kernel, IntPair stride, Four padding, bool count_padding, int border) {
             return p.add(avg_pool_op(window_of(kernel, stride, padding, count_padding), border), {x});
           })
      .def("global_pool",
           [](Int8Plan& p, int x, float scale, float out_scale, int out_zero, bool rows, int border) {
             return p.add(global_pool_op(scale, out_scale, out_zero, rows, border), {x});
           })
      .def(
          "flatten", [](Int8Plan& p, int x, bool channels_first) { return p.add(flatten_op(channels_first), {x}); },
          nb::arg("x"), nb::arg("channels_first") = false)
      .def("add", [](Int8Plan& p, int a, int b, float a_scale, float b_scale, Finish finish,
                     int border) { return p.add(add_op(a_scale, b_scale, finish_of(finish), border), {a, b}); })
      .def("mul", [](Int8Plan& p, int a, int b, float scale, Finish finish,
                     int border) { return p.add(mul_op(scale, finish_of(finish), border), {a, b}); })
      .def("affine", [](Int8Plan& p, int x, std::vector<float> scale, std::vector<float> shift, Finish finish,
                        int border) { return p.add(affine_op(scale, shift, finish_of(finish), border), {x}); })
      .def("same", [](Int8Plan& p, int x, bool rows, int border) { return p.add(same_op(rows, border), {x}); })
      .def("concat", [](Int8Plan& p, std::vector<int> parts, int border) { return p.add(concat_op(border), parts); })
      .def("slice", [](Int8Plan& p, int x, int first, int count,
                       int border) { return p.add(slice_op(first, count, border), {x}); })
      .def("take", [](Int8Plan& p, int x, std::vector<int> channels,
                      int border) { return p.add(take_op(channels, border), {x}); })
      .def("upsample", [](Int8Plan& p, int x, IntPair by,
                          int border) { return p.add(upsample_op(std::get<0>(by), std::get<1>(by), border), {x}); })
      .def("spread", [](Int8Plan& p, int x, IntPair by,
                        int border) { return p.add(spread_op(std::get<0>(by), std::get<1>(by), border), {x}); })
      .def("wide_quantize", [](Int8Plan& p, int x, float scale, int most,
                               int border) { return p.add(wide_quantize_op(scale, most, border), {x}); })
      .def("wide_dequantize", [](Int8Plan& p, int x, float scale) { return p.add(wide_dequantize_op(scale), {x}); })
      .def("wide_layer",
           [](Int8Plan& p, std::shared_ptr<Int16Layer> layer, std::vector<int> inputs, bool relu, int border) {
             return p.add(wide_layer_op(std::move(layer), inputs.size() == 2, relu, border), inputs);
           })
      .def("wide_pool",
           [](Int8Plan& p, int x, IntPair kernel, IntPair stride, Four padding, bool count_padding, bool mean,
              int border) {
             return p.add(wide_pool_op(window_of(kernel, stride, padding, count_padding), mean, border), {x});
           })
      .def("wide_global_pool",
           [](Int8Plan& p, int x, float scale, float out_scale, int out_zero, int most, bool rows, int border) {
             return p.add(wide_global_pool_op(scale, out_scale, out_zero, most, rows, border), {x});
           })
      .def("wide_add", [](Int8Plan& p, int a, int b, float a_scale, float b_scale, nb::handle finish,
                          int border) { return p.add(wide_add_op(a_scale, b_scale, end_of(finish), border), {a, b}); })
      .def("wide_mul", [](Int8Plan& p, int a, int b, float scale, float fraction, nb::handle finish,
                          int border) { return p.add(wide_mul_op(scale, fraction, end_of(finish), border), {a, b}); })
      .def("wide_affine", [](Int8Plan& p, int x, std::vector<float> scale, std::vector<float> shift, nb::handle finish,
                             int border) { return p.add(wide_affine_op(scale, shift, end_of(finish), border), {x}); })
      .def("output", &Int8Plan::add_output)
      .def("run", run_plan, nb::arg("arrays"), nb::arg("table").none() = nb::none())
      .def("products", plan_products, nb::arg("arrays"));
}

}  // namespace

void bind_int8_plan(nb::module_& m) {
  nb::class_<Int8GroupedLayer>(m, "Int8GroupedLayer")
      .def("__init__", make_grouped, nb::arg("weights"), nb::arg("offset"), nb::arg("scale"), nb::arg("groups"),
           nb::arg("stride"), nb::arg("padding"), nb::arg("dilation"))
      .def("set_finish", [](Int8GroupedLayer& layer, Finish finish) { layer.set_finish(finish_of(finish)); })
      .def("set_residual", &Int8GroupedLayer::set_residual)
      .def("conv", grouped_conv, nb::arg("x"), nb::arg("border"), nb::arg("residual").none(),
           nb::arg("residual_border"), nb::arg("out_border"))
      .def("weights", grouped_weights)
      .def_prop_ro("nbytes", &Int8GroupedLayer::nbytes);
  nb::class_<Int16Layer>(m, "Int16Layer")
      .def("__init__", make_wide, nb::arg("weights"), nb::arg("offset"), nb::arg("scale"), nb::arg("bias").none(),
           nb::arg("groups"), nb::arg("stride"), nb::arg("padding"), nb::arg("dilation"))
      .def("set_finish", [](Int16Layer& layer, Finish finish) { layer.set_finish(finish_of(finish)); })
      .def("set_wide_finish",
           [](Int16Layer& layer, const ShortFinish& finish) { layer.set_wide_finish(wide_finish_of(finish)); })
      .def("set_bytes_read", &Int16Layer::set_bytes_read)
      .def("set_residual", &Int16Layer::set_residual, nb::arg("scale"), nb::arg("zero"), nb::arg("wide"))
      .def("weights", wide_weights)
      .def_prop_ro("nbytes", &Int16Layer::nbytes);
  m.def("int8_add", add_bytes, nb::arg("a"), nb::arg("b"), nb::arg("a_scale"), nb::arg("a_zero"), nb::arg("b_scale"),
        nb::arg("b_zero"), nb::arg("finish"));
  m.def("int8_mul", mul_bytes, nb::arg("a"), nb::arg("b"), nb::arg("scale"), nb::arg("a_zero"), nb::arg("b_zero"),
        nb::arg("finish"));
  m.def("int8_affine", affine_bytes, nb::arg("x"), nb::arg("zero"), nb::arg("scale"), nb::arg("shift"),
        nb::arg("finish"));
  m.def("int8_take", take_bytes, nb::arg("x"), nb::arg("channels"));
  bind_plan(m);
}

}  // namespace tw
