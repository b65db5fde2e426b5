// Python bindings of grouped int8 layers and int16 layers. The meaning of the arguments is documented in
// common/int8_grouped_layer.h and common/int16_layer.h, whose std::invalid_argument becomes Python's ValueError.
#include <nanobind/stl/shared_ptr.h>

#include <limits>

#include "bindings/arguments.h"
#include "bindings/int8_arrays.h"
#include "common/int16_layer.h"
#include "common/int8_grouped_layer.h"

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

nb::object grouped_conv(const Int8GroupedLayer& layer, nb::handle x, int x_padding, nb::handle residual,
                        int residual_padding, int out_padding) {
  const Int8Image in = image_of(x, x_padding, "x");
  if (in.pixel != round_up(layer.geometry().channels(), kInt8Group))
    throw nb::value_error("x has another number of channels than the weights");
  Int8Image out = layer.conv_shape(in), skip;
  if (!residual.is_none()) {
    skip = image_of(residual, residual_padding, "residual");
    if (skip.images != out.images || skip.height != out.height || skip.width != out.width || skip.pixel != out.pixel) {
      throw nb::value_error("the residual has another shape than the result");
    }
  }
  out.padding = out_padding;
  nb::object result = new_image(out, layer.uint8_stage().zero);
  if (layer.geometry().columns < out.pixel) fill_all(result, layer.uint8_stage().zero);
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
void make_int16_layer(Int16Layer* self, nb::handle weights, nb::handle offset, nb::handle scale, nb::handle bias,
                      int groups, IntPair stride, Four padding, IntPair dilation) {
  PyArrayObject* w = checked(weights, NPY_INT16, 4, "weights");
  if (PyArray_SIZE(w) > std::numeric_limits<int>::max()) throw nb::value_error("the weights have too many elements");
  if (offset.is_none() || scale.is_none()) throw nb::type_error("a layer needs its offset and scale");
  const GroupedGeometry g = geometry_of(w, groups, stride, padding, dilation);
  const int columns = static_cast<int>(g.columns);
  new (self) Int16Layer(g, data<const int16_t>(weights), per_column<int32_t>(offset, NPY_INT32, columns, "offset"),
                        per_column<float>(scale, NPY_FLOAT32, columns, "scale"),
                        per_column<float>(bias, NPY_FLOAT32, columns, "bias"));
}

nb::object int16_weights(const Int16Layer& layer) {
  const GroupedGeometry& g = layer.geometry();
  const npy_intp shape[4] = {g.columns, g.taps.kernel_h, g.taps.kernel_w, g.group_channels};
  nb::object out = new_object(4, shape, NPY_INT16);
  layer.unpack(data<int16_t>(out));
  return out;
}

}  // namespace

void bind_int8_layers(nb::module_& m) {
  nb::class_<Int8GroupedLayer>(m, "Int8GroupedLayer")
      .def("__init__", make_grouped, nb::arg("weights"), nb::arg("offset"), nb::arg("scale"), nb::arg("groups"),
           nb::arg("stride"), nb::arg("padding"), nb::arg("dilation"))
      .def("set_uint8_stage",
           [](Int8GroupedLayer& layer, const Uint8StageTuple& stage) { layer.set_uint8_stage(uint8_stage_of(stage)); })
      .def("set_residual", &Int8GroupedLayer::set_residual)
      .def("conv", grouped_conv, nb::arg("x"), nb::arg("x_padding"), nb::arg("residual").none(),
           nb::arg("residual_padding"), nb::arg("out_padding"))
      .def("weights", grouped_weights)
      .def_prop_ro("nbytes", &Int8GroupedLayer::nbytes);
  nb::class_<Int16Layer>(m, "Int16Layer")
      .def("__init__", make_int16_layer, nb::arg("weights"), nb::arg("offset"), nb::arg("scale"),
           nb::arg("bias").none(), nb::arg("groups"), nb::arg("stride"), nb::arg("padding"), nb::arg("dilation"))
      .def("set_uint8_stage",
           [](Int16Layer& layer, const Uint8StageTuple& stage) { layer.set_uint8_stage(uint8_stage_of(stage)); })
      .def("set_int16_stage",
           [](Int16Layer& layer, const Int16StageTuple& stage) { layer.set_int16_stage(int16_stage_of(stage)); })
      .def("set_bytes_read", &Int16Layer::set_bytes_read)
      .def("set_residual", &Int16Layer::set_residual, nb::arg("scale"), nb::arg("zero"), nb::arg("wide"))
      .def("weights", int16_weights)
      .def_prop_ro("nbytes", &Int16Layer::nbytes);
}

}  // namespace tw
