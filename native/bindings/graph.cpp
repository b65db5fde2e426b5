// Python bindings of graphs and of the float layers in them. Arrays are checked here; the operators are documented in
// ops/ops.h, whose std::invalid_argument becomes Python's ValueError.
#include "graph/graph.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>

#include "bindings/int8_arrays.h"
#include "common/convolution.h"
#include "graph/schedule.h"
#include "ops/ops.h"

namespace tw {
namespace {

// --- arguments ---

template <std::size_t N>
int index_of(const char* const (&names)[N], const std::string& name, const char* what) {
  for (std::size_t i = 0; i < N; ++i) {
    if (name == names[i]) return static_cast<int>(i);
  }
  refuse("ConfigurationError", "a graph has no %s %s", what, name.c_str());
}

ConvActivation activation_of(const std::string& name) {
  const std::string leaky = "leaky_relu ";  // followed by its slope
  if (name.compare(0, leaky.size(), leaky) == 0)
    return {ConvActivation::leaky_relu, std::stof(name.substr(leaky.size()))};
  constexpr const char* kNames[] = {"",           "relu",    "gelu",         "relu6",    "silu",
                                    "hard_swish", "sigmoid", "hard_sigmoid", "gelu_tanh"};
  return static_cast<ConvActivation::Kind>(index_of(kNames, name, "activation"));
}

BinaryKind binary_of(const std::string& name) {
  constexpr const char* kNames[] = {"add", "sub", "mul"};
  return static_cast<BinaryKind>(index_of(kNames, name, "operator"));
}

ConvAlgorithm algorithm_of(const std::string& name) {
  return static_cast<ConvAlgorithm>(index_of(kAlgorithmNames, name, "algorithm"));
}

DType dtype_of(const std::string& name) {
  constexpr const char* kNames[] = {"float32", "uint8", "int16"};
  return static_cast<DType>(index_of(kNames, name, "values of type"));
}

int numpy_type(const TensorDesc& desc) {
  return !desc.is_integer() ? NPY_FLOAT32 : desc.is_int16() ? NPY_INT16 : NPY_UINT8;
}

// Converts a tuple to an output stage; the form of the tuple tells uint8 from int16.
OutputStage stage_of(nb::handle tuple) {
  OutputStage stage;
  Int16StageTuple int16;
  stage.is_int16 = nb::try_cast(tuple, int16);
  if (stage.is_int16) {
    stage.int16 = int16_stage_of(int16);
  } else {
    stage.uint8 = uint8_stage_of(nb::cast<Uint8StageTuple>(tuple));  // the operator copies the tuple's table
  }
  return stage;
}

const float* bias_of(const std::optional<FloatArray>& bias, int64_t count) {
  if (!bias) return nullptr;
  check(has_shape(*bias, {count}), "the bias has a number for every output");
  return bias->data();
}

// --- float layers ---

// Returns the shape of the weights, or `meta` for a meta layer: graphs of it are planned but never run.
std::vector<int64_t> shape_of(const std::optional<FloatArray>& weights, const std::vector<int64_t>& meta) {
  if (!weights) return meta;
  std::vector<int64_t> shape;
  for (std::size_t i = 0; i < weights->ndim(); ++i) shape.push_back(static_cast<int64_t>(weights->shape(i)));
  return shape;
}

// Constructor of the Python class for a float convolution; without weights, `meta` has their shape.
void make_conv(FloatConvLayer* self, std::optional<FloatArray> weights, std::optional<FloatArray> bias,
               std::vector<int64_t> stride, std::vector<int64_t> padding, std::vector<int64_t> dilation, int64_t groups,
               const std::string& activation, const std::vector<int64_t>& meta) {
  const std::vector<int64_t> shape = shape_of(weights, meta);
  if (shape.size() != 4 || stride.size() != 2 || padding.size() != 4 || dilation.size() != 2) {
    refuse("ShapeError", "a convolution has weights of four dimensions, two strides, four paddings, two dilations");
  }
  const ConvGeometry geometry{
      {stride[0], stride[1]}, {padding[0], padding[1], padding[2], padding[3]}, {dilation[0], dilation[1]}, groups};
  new (self) FloatConvLayer(weights ? weights->data() : nullptr, shape.data(), bias_of(bias, shape[0]), geometry,
                            activation_of(activation));
}

void make_linear(FloatLinearLayer* self, std::optional<FloatArray> weights, std::optional<FloatArray> bias,
                 const std::string& activation, const std::vector<int64_t>& meta) {
  const std::vector<int64_t> shape = shape_of(weights, meta);
  if (shape.size() != 2) refuse("ShapeError", "a linear layer has weights of two dimensions");
  new (self) FloatLinearLayer(weights ? weights->data() : nullptr, shape[0], shape[1], bias_of(bias, shape[0]),
                              activation_of(activation));
}

void restore(FloatConvLayer& layer, const FloatArray& weights) {
  if (static_cast<int64_t>(weights.size()) != layer.count())
    refuse("ShapeError", "this layer has another number of weights");
  layer.restore(weights.data());
}

// Returns a number that changes when the weights do.
uint64_t fingerprint(const FloatArray& weights) {
  return active_int8_ops().fingerprint(weights.data(), static_cast<int64_t>(weights.size()));
}

// --- building ---

// Adds a float input (n, c, h, w) of the graph, in planes or channels-last, and returns its number.
int add_input(Graph& g, int64_t n, int64_t c, int64_t h, int64_t w, bool last) {
  if (n < 0 || c < 1 || h < 1 || w < 1) refuse("ShapeError", "an input has channels and pixels");
  TensorDesc desc;
  desc.n = n, desc.channels = c, desc.height = h, desc.width = w;
  if (last) {
    desc.layout = Layout::channels_last;
    desc.pitch = 4 * c;
  }
  return g.add_input(desc);
}

// Adds an input for any batch, height and width: planes of floats, or integers with channels last.
int add_dynamic_input(Graph& g, const std::string& dtype, bool rows, int channels, int padding, int zero_point) {
  check_zero(zero_point);
  if (channels < 0 || padding < 0 || (rows && padding != 0))
    refuse("ShapeError", "an input has channels, padding that is not negative, and as rows no padding");
  TensorDesc desc;
  desc.sized = false;
  desc.dtype = dtype_of(dtype);
  desc.layout = desc.is_integer() ? Layout::channels_last : Layout::planes;
  desc.rows = rows;
  desc.channels = channels;
  desc.padding = padding;
  desc.zero_point = zero_point;
  return g.add_input(desc);
}

int add_quantize(Graph& g, int x, float scale, int zero_point, int padding, int int16_limit) {
  return g.add(
      int16_limit > 0 ? quantize_int16_op(scale, int16_limit, padding) : quantize_op(scale, zero_point, padding), {x});
}

// Adds a float convolution with optional residual (-1: none); images with few channels are read as planes.
int add_float_conv(Graph& g, std::shared_ptr<FloatConvLayer> layer, int x, int residual, const std::string& algorithm) {
  const TensorDesc from = g.desc(x);
  const ConvShape shape = layer->shape(from.n, from.channels, from.height, from.width);
  if (from.channels > kMaxPlanarChannels || layer->groups() > 1 || from.layout == Layout::channels_last)
    x = g.channels_last(x);
  std::vector<int> inputs{x};
  if (residual >= 0) inputs.push_back(g.channels_last(residual));
  return g.add(conv_op(std::move(layer), shape, algorithm_of(algorithm)), inputs);
}

int add_dynamic_linear(Graph& g, std::shared_ptr<Int8Layer> layer, int x, int residual, const std::string& activation) {
  std::vector<int> inputs{g.quantized_rows(x)};
  if (residual >= 0) inputs.push_back(g.channels_last(residual));
  return g.add(dynamic_linear_op(std::move(layer), activation_of(activation)), inputs);
}

int add_pool(Graph& g, int x, IntPair kernel, IntPair stride, Four padding, bool mean, bool count_padding,
             int out_padding) {
  const PoolWindow window = window_of(kernel, stride, padding, count_padding);
  return g.add(pool_op(window, mean, out_padding), {g.channels_last(x)});
}

int add_binary(Graph& g, const std::string& kind, int a, int b, const std::string& activation) {
  a = g.channels_last(a), b = g.channels_last(b);
  const TensorDesc &first = g.desc(a), &second = g.desc(b);
  const bool gate_first = first.height * first.width < second.height * second.width;  // one pixel, broadcast
  if (gate_first && binary_of(kind) != BinaryKind::sub) std::swap(a, b);
  return g.add(binary_op(binary_of(kind), activation_of(activation)), {a, b});
}

int add_concat(Graph& g, std::vector<int> inputs, int padding) {
  if (inputs.empty()) refuse("ShapeError", "there is nothing to concatenate");
  for (int& input : inputs) input = g.channels_last(input);
  return g.add(concat_op(padding), inputs);
}

// Adds attention over `heads` heads; `first` and `step` locate each head's queries, keys and values in their pixels.
int add_attention(Graph& g, const std::vector<int>& qkv, int64_t heads, const std::vector<int64_t>& first,
                  const std::vector<int64_t>& step, int64_t dim, int64_t value_dim, float scale, bool causal) {
  if (qkv.size() < 3 || qkv.size() > 4 || first.size() != 3 || step.size() != 3)
    refuse("ShapeError", "attention reads queries, keys, values and optionally a mask");
  std::vector<int> inputs = qkv;
  for (int i = 0; i < 3; ++i) inputs[i] = g.channels_last(qkv[i]);
  return g.add(
      attention_op({heads, {first[0], first[1], first[2]}, {step[0], step[1], step[2]}, dim, value_dim, scale, causal}),
      inputs);
}

// --- running ---

struct GraphCall {
  std::shared_ptr<Graph::Schedule> schedule;
  std::vector<const void*> in;
  int64_t batch = -1;
};

// Completes the description of an input by its array, and returns the number of batch elements.
int64_t read_input(TensorDesc& desc, nb::handle x) {
  if (desc.sized) {
    PyArrayObject* array = as_float_array(x);
    if (array == nullptr) refuse("DtypeError", "an input is a C-contiguous float32 array");
    check(PyArray_SIZE(array) == desc.elements(), "this graph is for inputs of another size");
    return 1;
  }
  PyArrayObject* array = checked(x, numpy_type(desc), desc.rows ? 2 : 4, "x");
  const int64_t channels = PyArray_DIM(array, desc.rows ? 1 : desc.is_integer() ? 3 : 1);
  check(channels == (desc.is_integer() ? round_up(desc.channels, kInt8Group) : desc.channels),
        "x has another number of channels than the model");
  if (!desc.rows) {
    const int first = desc.is_integer() ? 1 : 2;
    desc.height = PyArray_DIM(array, first) - 2 * desc.padding;
    desc.width = PyArray_DIM(array, first + 1) - 2 * desc.padding;
    check(desc.height >= 0 && desc.width >= 0, "the padding is wider than the image");
  }
  desc.sized = true;
  return PyArray_DIM(array, 0);
}

// Reads the inputs of a run, checks that they hold equally many images, and finds or makes the schedule of their
// shapes.
GraphCall read_call(Graph& graph, nb::list arrays) {
  if (arrays.size() != graph.inputs().size()) refuse("ShapeError", "this graph has another number of inputs");
  std::vector<TensorDesc> descs;
  GraphCall call;
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    descs.push_back(graph.input_desc(i));
    const int64_t batch = read_input(descs.back(), arrays[i]);
    if (call.batch >= 0 && batch != call.batch) refuse("ShapeError", "the inputs hold different numbers of images");
    call.batch = batch;
    call.in.push_back(data<const void>(arrays[i]));
  }
  call.schedule = graph.schedule(descs);
  return call;
}

// Allocates the NumPy array of an output: rows, integer images with padding, or planes.
nb::object new_output(const TensorDesc& desc, int64_t batch) {
  const int64_t images = batch * desc.n;
  if (desc.rows) {
    const npy_intp dims[2] = {images, desc.is_integer() ? desc.numbers(1).pixel : desc.channels};
    return allocate_array(2, dims, numpy_type(desc));
  }
  if (desc.is_int16()) return new_image<int16_t>(desc.numbers(batch), 0);
  if (desc.is_integer()) return new_image(desc.image(batch), desc.zero_point);
  return new_array({images, desc.channels, desc.height, desc.width}).object;  // the caller reshapes dense pixels
}

// Returns the tuned tiles of a call's products by slot; empty if there are none.
std::vector<Int8Tile> tuned_tiles(const Graph& graph, const GraphCall& call, const TileTable* table) {
  std::vector<Int8Tile> tiles;
  if (table == nullptr || table->int8_products == nullptr) return tiles;
  for (const GraphProduct& p : graph.products(*call.schedule, call.batch)) {
    const Int8Tile* tile = tuned_tile(table, p.m, p.n, p.k, p.threads);
    if (tile == nullptr) continue;
    tiles.resize(graph.slots());
    tiles[p.slot] = *tile;
  }
  return tiles;
}

using Times = nb::ndarray<int64_t, nb::c_contig, nb::device::cpu>;

// Runs the graph on new outputs. `table`: tuned tiles of INT8 products; `times`: one int64 per value, in ns, added to.
nb::list run_graph(Graph& graph, nb::list arrays, const TileTable* table, std::optional<Times> times) {
  const GraphCall call = read_call(graph, arrays);
  if (times && times->size() != graph.values()) refuse("ShapeError", "there is one time for every value");
  nb::list results;
  std::vector<void*> out;
  for (std::size_t i = 0; i < graph.outputs().size(); ++i) {
    nb::object array = new_output(call.schedule->descs[graph.outputs()[i]], call.batch);
    out.push_back(data<void>(array));
    results.append(array);
  }
  const std::vector<Int8Tile> tiles = tuned_tiles(graph, call, table);
  without_gil(true,
              [&] { graph.run(*call.schedule, call.batch, call.in, out, tiles, times ? times->data() : nullptr); });
  return results;
}

// Lists the matrix products that `run` computes for these arrays: [(value, m, n, k, threads), ...].
nb::list graph_products(Graph& graph, nb::list arrays) {
  const GraphCall call = read_call(graph, arrays);
  nb::list out;
  for (const GraphProduct& p : graph.products(*call.schedule, call.batch))
    out.append(nb::make_tuple(p.value, p.m, p.n, p.k, p.threads));
  return out;
}

// --- strided operators ---

// A loop in Python: (sizes; operands, the last of which is the result; shape (n, c, h, w) of the result). An operand is
// (first pixel, first channel, [(pixels, channels) per axis]).
using OperandTuple = std::tuple<int64_t, int64_t, std::vector<std::array<int64_t, 2>>>;
using LoopTuple = std::tuple<std::vector<int64_t>, std::vector<OperandTuple>, std::array<int64_t, 4>>;

// Converts a tuple to a strided loop; the last operand is its result.
StridedLoop loop_of(const LoopTuple& tuple) {
  StridedLoop loop;
  loop.sizes = std::get<0>(tuple);
  if (loop.sizes.empty() || std::get<1>(tuple).empty()) refuse("ShapeError", "a loop has axes and a result");
  for (const OperandTuple& operand : std::get<1>(tuple))
    loop.operands.push_back({std::get<0>(operand), std::get<1>(operand), std::get<2>(operand)});
  loop.result = loop.operands.back();
  loop.operands.pop_back();
  const std::array<int64_t, 4>& shape = std::get<2>(tuple);
  loop.n = shape[0], loop.channels = shape[1], loop.height = shape[2], loop.width = shape[3];
  return loop;
}

std::vector<int> as_pixels(Graph& g, std::vector<int> values) {
  for (int& value : values) value = g.channels_last(value);
  return values;
}

// Adds an op that assembles a value from strided copies of its inputs (concatenation, padding).
int add_assemble(Graph& g, const std::vector<int>& inputs, const std::vector<LoopTuple>& tuples, float fill,
                 bool covered) {
  std::vector<StridedLoop> loops;
  for (const LoopTuple& tuple : tuples) {
    loops.push_back(loop_of(tuple));
    if (loops.back().operands.size() != 1) refuse("ShapeError", "a tuple has one operand");
  }
  return g.add(assemble_op(std::move(loops), fill, covered), as_pixels(g, inputs));
}

using Floats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;

int add_recurrent(Graph& g, const std::vector<int>& inputs, const std::string& kind, int64_t steps, bool reverse,
                  Floats weight, Floats bias) {
  check(weight.ndim() == 2 && bias.size() == weight.shape(0), "a recurrent layer has weights (size, gates) and a bias");
  const auto size = static_cast<int64_t>(weight.shape(0)), gates = static_cast<int64_t>(weight.shape(1));
  return g.add(recurrent_op(kind, steps, reverse, weight.data(), size, gates, bias.data()), as_pixels(g, inputs));
}

using GraphClass = nb::class_<Graph>;

// Binds an operator of one channels-last value; the arguments of its factory follow the value.
template <class... Arguments, class... Names>
void bind_pixels(GraphClass& graph, const char* name, OpPtr (*op)(Arguments...), const Names&... names) {
  graph.def(
      name, [op](Graph& g, int x, Arguments... arguments) { return g.add(op(arguments...), {g.channels_last(x)}); },
      nb::arg("x"), names...);
}

// Binds an operator that reads its inputs through strides.
template <class... Arguments, class... Names>
void bind_strided(GraphClass& graph, const char* name, OpPtr (*op)(StridedLoop, Arguments...), const Names&... names) {
  graph.def(
      name,
      [op](Graph& g, const std::vector<int>& inputs, const LoopTuple& loop, Arguments... arguments) {
        return g.add(op(loop_of(loop), arguments...), as_pixels(g, inputs));
      },
      nb::arg("inputs"), nb::arg("loop"), names...);
}

void bind_strided_operators(GraphClass& graph) {
  bind_strided(graph, "map", map_op, nb::arg("kind"), nb::arg("low") = 0.0f, nb::arg("high") = 0.0f);
  bind_strided(graph, "reduce", reduce_op, nb::arg("kind"), nb::arg("reduced"));
  bind_strided(graph, "softmax", softmax_op);
  bind_strided(graph, "cumulative_sum", cumulative_sum_op, nb::arg("axis"));
  bind_strided(graph, "matmul", matmul_op, nb::arg("k"));
  graph.def("assemble", add_assemble, nb::arg("inputs"), nb::arg("parts"), nb::arg("fill"), nb::arg("covered"));
  graph.def(
      "grouped_attention",
      [](Graph& g, const std::vector<int>& inputs, const LoopTuple& loop, int64_t keys, int64_t dim, float scale,
         bool causal) {
        return g.add(grouped_attention_op(loop_of(loop), {keys, dim, scale, causal}), as_pixels(g, inputs));
      },
      nb::arg("inputs"), nb::arg("loop"), nb::arg("keys"), nb::arg("dim"), nb::arg("scale"), nb::arg("causal"));
}

void bind_float_operators(GraphClass& graph) {
  graph.def("conv", add_float_conv, nb::arg("layer"), nb::arg("x"), nb::arg("residual") = -1, nb::arg("algorithm") = "")
      .def("algorithm",
           [](const Graph& g, int value) {
             const Op* op = g.producer(value);
             return std::string(algorithm_name(op == nullptr ? ConvAlgorithm::automatic : algorithm_of(*op)));
           })
      .def(
          "linear",
          [](Graph& g, std::shared_ptr<FloatLinearLayer> layer, int x, const std::string& algorithm) {
            return g.add(linear_op(std::move(layer), g.desc(x).n, algorithm_of(algorithm)), {x});
          },
          nb::arg("layer"), nb::arg("x"), nb::arg("algorithm") = "")
      .def("global_mean", [](Graph& g, int x) { return g.add(global_mean_op(), {g.channels_last(x)}); })
      .def("binary", add_binary, nb::arg("kind"), nb::arg("a"), nb::arg("b"), nb::arg("activation") = "")
      .def(
          "affine",
          [](Graph& g, int x, const std::vector<float>& scale, const std::vector<float>& shift,
             const std::string& activation) {
            return g.add(affine_op(scale, shift, activation_of(activation)), {g.channels_last(x)});
          },
          nb::arg("x"), nb::arg("scale"), nb::arg("shift"), nb::arg("activation") = "")
      .def("attention", add_attention, nb::arg("qkv"), nb::arg("heads"), nb::arg("first"), nb::arg("step"),
           nb::arg("dim"), nb::arg("value_dim"), nb::arg("scale"), nb::arg("causal"));
  graph.def("recurrent", add_recurrent, nb::arg("inputs"), nb::arg("kind"), nb::arg("steps"), nb::arg("reverse"),
            nb::arg("weight"), nb::arg("bias"));
  bind_pixels(graph, "gather_spatial", gather_spatial_op, nb::arg("index"), nb::arg("n"), nb::arg("h"), nb::arg("w"));
  bind_pixels(graph, "resample", resample_op, nb::arg("rows"), nb::arg("positions"), nb::arg("weights"),
              nb::arg("taps"));
  bind_pixels(graph, "transpose", transpose_op);
  bind_pixels(graph, "layer_norm", layer_norm_op, nb::arg("weight"), nb::arg("bias"), nb::arg("eps"));
  bind_pixels(graph, "group_norm", group_norm_op, nb::arg("groups"), nb::arg("weight"), nb::arg("bias"),
              nb::arg("eps"));
  bind_pixels(graph, "rms_norm", rms_norm_op, nb::arg("weight"), nb::arg("eps"));
}

template <class Layer>
int add_int8_conv(Graph& g, std::shared_ptr<Layer> layer, const std::vector<int>& inputs, int padding) {
  return g.add(conv_op(std::move(layer), inputs.size() == 2, padding), inputs);
}

void bind_integer_operators(GraphClass& graph) {
  graph
      .def("quantize", add_quantize, nb::arg("x"), nb::arg("scale"), nb::arg("zero_point"), nb::arg("padding") = 0,
           nb::arg("int16_limit") = 0)
      .def(
          "dequantize",
          [](Graph& g, int x, float scale, bool last) {
            return g.add(dequantize_op(scale, last ? Layout::channels_last : Layout::planes), {x});
          },
          nb::arg("x"), nb::arg("scale"), nb::arg("last") = false)
      .def("to_channels_last", [](Graph& g, int x) { return g.add(layout_op(Layout::channels_last), {x}); })
      .def("to_planes", [](Graph& g, int x) { return g.add(layout_op(Layout::planes), {x}); })
      .def("conv", add_int8_conv<Int8Layer>)
      .def("conv", add_int8_conv<Int8GroupedLayer>)
      .def(
          "conv",
          [](Graph& g, std::shared_ptr<Int16Layer> layer, const std::vector<int>& inputs, int padding, bool relu) {
            return g.add(conv_op(std::move(layer), inputs.size() == 2, relu, padding), inputs);
          },
          nb::arg("layer"), nb::arg("inputs"), nb::arg("padding"), nb::arg("relu") = false)
      .def("linear", [](Graph& g, std::shared_ptr<Int8Layer> layer, int x, bool to_float,
                        bool relu) { return g.add(linear_op(std::move(layer), to_float, relu), {x}); })
      .def("dynamic_linear", add_dynamic_linear, nb::arg("layer"), nb::arg("x"), nb::arg("residual") = -1,
           nb::arg("activation") = "")
      .def("global_mean",
           [](Graph& g, int x, float scale, float out_scale, int out_zero_point, int int16_limit, bool rows,
              int padding) {
             return g.add(global_mean_op({scale, out_scale, out_zero_point, int16_limit}, rows, padding), {x});
           })
      .def("add", [](Graph& g, int a, int b, float a_scale, float b_scale, nb::handle stage,
                     int padding) { return g.add(add_op(a_scale, b_scale, stage_of(stage), padding), {a, b}); })
      .def("mul", [](Graph& g, int a, int b, float scale, float fraction, nb::handle stage,
                     int padding) { return g.add(mul_op(scale, fraction, stage_of(stage), padding), {a, b}); })
      .def("affine",
           [](Graph& g, int x, const std::vector<float>& scale, const std::vector<float>& shift, nb::handle stage,
              int padding) { return g.add(affine_op(scale, shift, stage_of(stage), padding), {x}); })
      .def("pixel_as_row",
           [](Graph& g, int x, bool rows, int padding) { return g.add(pixel_as_row_op(rows, padding), {x}); });
}

void bind_movement(GraphClass& graph) {
  const auto padding = nb::arg("padding") = 0;
  graph
      .def("pool", add_pool, nb::arg("x"), nb::arg("kernel"), nb::arg("stride"), nb::arg("padding"), nb::arg("mean"),
           nb::arg("count_padding") = true, nb::arg("out_padding") = 0)
      .def("concat", add_concat, nb::arg("parts"), padding);
  bind_pixels(graph, "slice", slice_op, nb::arg("first"), nb::arg("count"), padding);
  bind_pixels(graph, "gather_channels", gather_channels_op, nb::arg("channels"), padding);
  bind_pixels(graph, "upsample", upsample_op, nb::arg("by_h"), nb::arg("by_w"), padding);
  bind_pixels(graph, "depth_to_space", depth_to_space_op, nb::arg("by_h"), nb::arg("by_w"), padding);
  bind_pixels(graph, "flatten", flatten_op, nb::arg("channels_first") = true);
}

}  // namespace

void bind_graph(nb::module_& m) {
  m.def("fingerprint", fingerprint);
  nb::class_<FloatConvLayer>(m, "FloatConvLayer")
      .def("__init__", make_conv, nb::arg("weights").none(), nb::arg("bias").none(), nb::arg("stride"),
           nb::arg("padding"), nb::arg("dilation"), nb::arg("groups"), nb::arg("activation"),
           nb::arg("meta") = std::vector<int64_t>())
      .def("release", &FloatConvLayer::release)
      .def("restore", restore);
  nb::class_<FloatLinearLayer>(m, "FloatLinearLayer")
      .def("__init__", make_linear, nb::arg("weights").none(), nb::arg("bias").none(), nb::arg("activation"),
           nb::arg("meta") = std::vector<int64_t>());
  GraphClass graph(m, "Graph");
  graph.def(nb::init<>())
      .def("input", add_input, nb::arg("n"), nb::arg("c"), nb::arg("h"), nb::arg("w"), nb::arg("last") = false)
      .def("dynamic_input", add_dynamic_input, nb::arg("dtype"), nb::arg("rows"), nb::arg("channels"),
           nb::arg("padding") = 0, nb::arg("zero_point") = 0)
      .def(
          "output",
          [](Graph& g, int value, bool last) { last ? g.add_output_channels_last(value) : g.add_output(value); },
          nb::arg("value"), nb::arg("last") = false)
      .def("finish", &Graph::finish)
      .def("run", run_graph, nb::arg("arrays"), nb::arg("table").none() = nb::none(),
           nb::arg("times").none() = nb::none())
      .def("products", graph_products, nb::arg("arrays"))
      .def_prop_ro("values", &Graph::values)
      .def_prop_ro("arena_bytes", [](Graph& g) { return g.schedule()->arena_bytes(); });
  bind_float_operators(graph);
  bind_strided_operators(graph);
  bind_integer_operators(graph);
  bind_movement(graph);
}

}  // namespace tw
