// Float plans seen from Python. Arrays are checked here; what the steps mean is in common/float_plan.h, whose
// std::invalid_argument becomes Python's ValueError.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>

#include <optional>
#include <string>

#include "bindings/bindings.h"
#include "bindings/numpy_api.h"
#include "common/float_plan.h"

namespace tw {
namespace {

using FloatPlanTimes = nb::ndarray<int64_t, nb::c_contig, nb::device::cpu>;

ConvActivation activation_of(const std::string& name) {
  const char* const names[] = {"",           "relu",    "gelu",         "relu6",    "silu",
                               "hard_swish", "sigmoid", "hard_sigmoid", "gelu_tanh"};
  for (int i = 0; i < 9; ++i) {
    if (name == names[i]) return static_cast<ConvActivation::Kind>(i);
  }
  const std::string leaky = "leaky_relu ";  // and its slope
  if (name.compare(0, leaky.size(), leaky) == 0)
    return {ConvActivation::leaky_relu, std::stof(name.substr(leaky.size()))};
  throw nb::value_error(("a plan has no activation " + name).c_str());
}

BinaryKind binary_of(const std::string& name) {
  if (name == "add") return BinaryKind::add;
  if (name == "sub") return BinaryKind::sub;
  if (name == "mul") return BinaryKind::mul;
  throw nb::value_error(("a plan has no step " + name).c_str());
}

const float* bias_of(const std::optional<FloatArray>& bias, int64_t count) {
  if (!bias) return nullptr;
  if (bias->ndim() != 1 || static_cast<int64_t>(bias->shape(0)) != count)
    throw nb::value_error("the bias has a number for every output");
  return bias->data();
}

// The shape of weights, or the one given where there are none: of an outline.
std::vector<int64_t> shape_of(const std::optional<FloatArray>& weights, const std::vector<int64_t>& given) {
  if (!weights) return given;
  std::vector<int64_t> shape;
  for (std::size_t i = 0; i < weights->ndim(); ++i) shape.push_back(static_cast<int64_t>(weights->shape(i)));
  return shape;
}

void make_conv(PlanConv* self, std::optional<FloatArray> weights, std::optional<FloatArray> bias,
               std::vector<int64_t> stride, std::vector<int64_t> padding, std::vector<int64_t> dilation, int64_t groups,
               const std::string& activation, const std::vector<int64_t>& outline) {
  const std::vector<int64_t> shape = shape_of(weights, outline);
  if (shape.size() != 4 || stride.size() != 2 || padding.size() != 4 || dilation.size() != 2) {
    throw nb::value_error("a convolution has weights of four dimensions, two strides, four paddings, two dilations");
  }
  const ConvGeometry geometry{
      {stride[0], stride[1]}, {padding[0], padding[1], padding[2], padding[3]}, {dilation[0], dilation[1]}, groups};
  new (self) PlanConv(weights ? weights->data() : nullptr, shape.data(), bias_of(bias, shape[0]), geometry,
                      activation_of(activation));
}

void make_linear(PlanLinear* self, std::optional<FloatArray> weights, std::optional<FloatArray> bias,
                 const std::string& activation, const std::vector<int64_t>& outline) {
  const std::vector<int64_t> shape = shape_of(weights, outline);
  if (shape.size() != 2) throw nb::value_error("a linear layer has weights of two dimensions");
  new (self) PlanLinear(weights ? weights->data() : nullptr, shape[0], shape[1], bias_of(bias, shape[0]),
                        activation_of(activation));
}

ConvAlgorithm algorithm_of(const std::string& name) {
  for (int i = 0; i < 5; ++i) {
    if (name == algorithm_name(static_cast<ConvAlgorithm>(i))) return static_cast<ConvAlgorithm>(i);
  }
  throw nb::value_error(("a convolution has no algorithm " + name).c_str());
}

void restore(PlanConv& layer, const FloatArray& weights) {
  if (static_cast<int64_t>(weights.size()) != layer.count())
    throw nb::value_error("this layer has another number of weights");
  layer.restore(weights.data());
}

PoolShape window_of(const std::vector<int64_t>& kernel, const std::vector<int64_t>& stride,
                    const std::vector<int64_t>& padding) {
  if (kernel.size() != 2 || stride.size() != 2 || padding.size() != 4)
    throw nb::value_error("a window has two sides, two strides, four paddings");
  PoolShape s{};
  s.kh = kernel[0], s.kw = kernel[1], s.sh = stride[0], s.sw = stride[1], s.ph = padding[0], s.pw = padding[1];
  return s;
}

int attention(FloatPlan& plan, const std::vector<int>& qkv, int64_t heads, const std::vector<int64_t>& first,
              const std::vector<int64_t>& step, int64_t dim, int64_t value_dim, float scale, bool causal) {
  if (qkv.size() < 3 || qkv.size() > 4 || first.size() != 3 || step.size() != 3)
    throw nb::value_error("attention reads queries, keys, values and perhaps a mask");
  const PlanHeads shape{heads, {first[0], first[1], first[2]}, {step[0], step[1], step[2]}, dim, value_dim, scale,
                        causal};
  return plan.attention({qkv[0], qkv[1], qkv[2]}, shape, qkv.size() > 3 ? qkv[3] : -1);
}

nb::list run(const FloatPlan& plan, const std::vector<FloatArray>& arrays, std::optional<FloatPlanTimes> times) {
  const auto& sizes = plan.inputs();
  if (arrays.size() != sizes.size()) throw nb::value_error("this plan has another number of inputs");
  std::vector<const float*> in;
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    const auto& s = sizes[i];
    if (static_cast<int64_t>(arrays[i].size()) != s.n * s.c * s.h * s.w)
      throw nb::value_error("this plan is for inputs of another size");
    in.push_back(arrays[i].data());
  }
  if (times && times->size() != plan.values()) throw nb::value_error("a time for every value");
  nb::list results;
  std::vector<float*> out;
  for (const auto& s : plan.outputs()) {
    const npy_intp shape[4] = {s.n, s.c, s.h, s.w};
    PyArrayObject* array = new_float_array(4, shape);
    if (array == nullptr) throw nb::python_error();
    results.append(nb::steal(reinterpret_cast<PyObject*>(array)));
    out.push_back(floats(array));
  }
  GilRelease release(true);
  plan.run(in, out, times ? times->data() : nullptr);
  return results;
}

}  // namespace

void bind_float_plan(nb::module_& m) {
  nb::class_<PlanConv>(m, "PlanConv")
      .def("__init__", make_conv, nb::arg("weights").none(), nb::arg("bias").none(), nb::arg("stride"),
           nb::arg("padding"), nb::arg("dilation"), nb::arg("groups"), nb::arg("activation"),
           nb::arg("outline") = std::vector<int64_t>())
      .def("release", &PlanConv::release)
      .def("restore", restore);
  nb::class_<PlanLinear>(m, "PlanLinear")
      .def("__init__", make_linear, nb::arg("weights").none(), nb::arg("bias").none(), nb::arg("activation"),
           nb::arg("outline") = std::vector<int64_t>());
  nb::class_<FloatPlan>(m, "FloatPlan")
      .def(nb::init<>())
      .def(
          "input",
          [](FloatPlan& p, int64_t n, int64_t c, int64_t h, int64_t w, bool last) {
            return p.input({n, c, h, w}, last);
          },
          nb::arg("n"), nb::arg("c"), nb::arg("h"), nb::arg("w"), nb::arg("last") = false)
      .def(
          "conv",
          [](FloatPlan& p, std::shared_ptr<PlanConv> layer, int x, int residual, const std::string& algorithm) {
            return p.conv(std::move(layer), x, residual, algorithm_of(algorithm));
          },
          nb::arg("layer"), nb::arg("x"), nb::arg("residual") = -1, nb::arg("algorithm") = "")
      .def("algorithm", [](const FloatPlan& p, int value) { return std::string(algorithm_name(p.algorithm(value))); })
      .def("linear",
           [](FloatPlan& p, std::shared_ptr<PlanLinear> layer, int x) { return p.linear(std::move(layer), x); })
      .def(
          "pool",
          [](FloatPlan& p, int x, std::vector<int64_t> kernel, std::vector<int64_t> stride,
             std::vector<int64_t> padding, bool mean, bool count_padding) {
            const PoolShape window = window_of(kernel, stride, padding);
            return p.pool(window, padding[2], padding[3], mean, count_padding, x);
          },
          nb::arg("x"), nb::arg("kernel"), nb::arg("stride"), nb::arg("padding"), nb::arg("mean"),
          nb::arg("count_padding") = true)
      .def("global_mean", &FloatPlan::global_mean)
      .def(
          "binary",
          [](FloatPlan& p, const std::string& kind, int a, int b, const std::string& activation) {
            return p.binary(binary_of(kind), a, b, activation_of(activation));
          },
          nb::arg("kind"), nb::arg("a"), nb::arg("b"), nb::arg("activation") = "")
      .def(
          "affine",
          [](FloatPlan& p, int x, const std::vector<float>& scale, const std::vector<float>& shift,
             const std::string& activation) { return p.affine(x, scale, shift, activation_of(activation)); },
          nb::arg("x"), nb::arg("scale"), nb::arg("shift"), nb::arg("activation") = "")
      .def("concat", &FloatPlan::concat)
      .def("slice", &FloatPlan::slice)
      .def("take", &FloatPlan::take)
      .def("pixels", &FloatPlan::pixels)
      .def("transpose", &FloatPlan::transpose)
      .def("upsample", &FloatPlan::upsample)
      .def("spread", &FloatPlan::spread)
      .def("flatten", &FloatPlan::flatten)
      .def("layer_norm", &FloatPlan::layer_norm)
      .def("group_norm", &FloatPlan::group_norm)
      .def("attention", attention, nb::arg("qkv"), nb::arg("heads"), nb::arg("first"), nb::arg("step"), nb::arg("dim"),
           nb::arg("value_dim"), nb::arg("scale"), nb::arg("causal"))
      .def("output", &FloatPlan::output, nb::arg("value"), nb::arg("last") = false)
      .def("finish", &FloatPlan::finish)
      .def("run", run, nb::arg("arrays"), nb::arg("times").none() = nb::none())
      .def_prop_ro("values", &FloatPlan::values)
      .def_prop_ro("arena_bytes", &FloatPlan::arena_bytes);
}

}  // namespace tw
