// Python bindings of convolution, with the signatures of the backend's operations. A small layer takes a few
// microseconds, so its call must be cheap. Shapes are checked against each other here.
#include "common/convolution.h"

#include <optional>

#include "bindings/array_pool.h"
#include "bindings/arrays.h"
#include "bindings/tile_table.h"
#include "common/weight_cache.h"

namespace tw {
namespace {

// The padding of a convolution: one number per axis, or top, left, bottom, right.
struct Padding {
  int64_t top = 0, left = 0, bottom = 0, right = 0;

  explicit Padding(PyObject* object) {
    if (object == nullptr) return;
    int64_t sides[4];
    const int count = PyTuple_Check(object) && PyTuple_GET_SIZE(object) == 4 ? 4 : 2;
    read_sizes(object, count, 0, "the padding", sides);
    top = sides[0], left = sides[1], bottom = sides[count - 2], right = sides[count - 1];
  }
};

struct Geometry {
  PyObject *stride = nullptr, *padding = nullptr, *groups = nullptr, *dilation = nullptr;

  // Completes a shape whose input and filter sizes are known; `weight_c` is the number of channels of a filter.
  void complete(ConvShape* s, int64_t weight_c) const {
    int64_t steps[2] = {1, 1}, dilations[2] = {1, 1};
    if (stride != nullptr) read_sizes(stride, 2, 1, "the stride", steps);
    const Padding pad(padding);
    s->groups = groups == nullptr ? 1 : read_size(groups, 1, "groups");
    if (dilation != nullptr) read_sizes(dilation, 2, 1, "the dilation", dilations);
    s->sh = steps[0], s->sw = steps[1], s->dh = dilations[0], s->dw = dilations[1];
    s->ph = pad.top, s->pw = pad.left;
    set_output_size(s, pad, weight_c);
  }

 private:
  static void set_output_size(ConvShape* s, const Padding& pad, int64_t weight_c) {
    if (s->c % s->groups != 0 || s->o % s->groups != 0) {
      refuse("ShapeError", "groups=%lld must divide the %lld input and the %lld output channels", s->groups, s->c,
             s->o);
    }
    if (weight_c != s->group_c()) {
      refuse("ShapeError", "the weights take %lld channels a group, the input has %lld", weight_c, s->group_c());
    }
    const int64_t h = s->h + pad.top + pad.bottom, w = s->w + pad.left + pad.right;
    if (s->kh < 1 || s->kw < 1 || h < s->reach_h() || w < s->reach_w()) {
      refuse("ShapeError", "a %lldx%lld kernel does not fit into a padded input of %lldx%lld", s->reach_h(),
             s->reach_w(), h, w);
    }
    s->oh = (h - s->reach_h()) / s->sh + 1;
    s->ow = (w - s->reach_w()) / s->sw + 1;
  }
};

void check_output_shape(const Input& a, const ConvShape& s, const char* name) {
  if (a.dim(0) == s.n && a.dim(1) == s.o && a.dim(2) == s.oh && a.dim(3) == s.ow) return;
  refuse("ShapeError", "%s must have the shape of the output, (%lld, %lld, %lld, %lld)", name, s.n, s.o, s.oh, s.ow);
}

// Reads a Python ConvTile: an object with these attributes.
ConvConfig read_fields(PyObject* tile) {
  static PyObject* const names[] = {
      PyUnicode_InternFromString("mr"),       PyUnicode_InternFromString("nr"),    PyUnicode_InternFromString("block"),
      PyUnicode_InternFromString("channels"), PyUnicode_InternFromString("split"),
  };
  const nb::object algorithm = nb::getattr(tile, "algorithm", nb::none());
  ConvConfig config;
  for (ConvAlgorithm each : {ConvAlgorithm::direct, ConvAlgorithm::winograd, ConvAlgorithm::winograd2}) {
    if (equals(algorithm.ptr(), algorithm_name(each))) config.algorithm = each;
  }
  int64_t* const fields[] = {&config.mr, &config.nr, &config.block, &config.channels, &config.split};
  for (int i = 0; i < 5; ++i) *fields[i] = tile_attribute(tile, names[i], "a ConvTile");
  return config;
}

// Reads a ConvTile, which must be feasible for this shape; None means the default.
ConvConfig read_tile(PyObject* tile, const ConvShape& s) {
  if (!is_given(tile)) return {};
  const ConvConfig config = read_fields(tile);
  char reason[160];
  if (config_problem(s, config, reason, sizeof reason))
    refuse("ConfigurationError", "this tile cannot be used: %s", reason);
  return config;
}

int64_t multiplications(const ConvShape& s) { return s.n * s.o * s.oh * s.ow * s.group_c() * s.kh * s.kw; }

ConvTable::Key table_key(const ConvShape& s, int threads) {
  const auto pair = [](int64_t low, int64_t high) { return low | high << 32; };  // sizes are below 2**31
  return {{pair(s.n, s.c), pair(s.h, s.w), pair(s.o, s.groups), pair(s.kh, s.kw), pair(s.sh, s.sw), pair(s.ph, s.pw),
           tile_setting(threads)}};
}

// Returns whether tiles exist for this shape: their keys have one padding per axis and no dilation.
bool is_tiled(const ConvShape& s) {
  const int64_t oh = (s.h + 2 * s.ph - s.kh) / s.sh + 1, ow = (s.w + 2 * s.pw - s.kw) / s.sw + 1;
  return s.dh == 1 && s.dw == 1 && s.oh == oh && s.ow == ow;
}

// The chooser's tile of a convolution, or the default if there is no chooser.
ConvConfig chosen_tile(TileTable* table, const ConvShape& s) {
  const int64_t work = table == nullptr || !is_tiled(s) ? 0 : multiplications(s);
  ConvConfig tuned;
  if (work == 0) return tuned;
  const auto shape = [&] {
    return nb::make_tuple(s.n, s.c, s.h, s.w, s.o, s.kh, s.kw, s.sh, s.sw, s.ph, s.pw, s.groups);
  };
  const auto ask = [&](ConvConfig* out) {
    const nb::object answer = table->ask_chooser("conv2d", shape(), "nchw");
    *out = read_tile(answer.ptr(), s);
    return !answer.is_none();
  };
  return look_up(table->convolutions, table_key(s, num_threads()), work, table->calls_before_asking, &tuned, ask)
             ? tuned
             : ConvConfig();
}

// Calls f(data) of a new array.
template <class F>
nb::object run_into(const ConvShape& s, std::initializer_list<npy_intp> shape, F&& f) {
  NewArray<float> out = new_array(shape);
  without_gil(multiplications(s) > kMinWorkForGilRelease, [&] { f(out.data); });
  return out.object;
}

void set_input(const Input& x, ConvShape* s) { s->n = x.dim(0), s->c = x.dim(1), s->h = x.dim(2), s->w = x.dim(3); }

void set_weights(const Input& w, ConvShape* s) { s->o = w.dim(0), s->kh = w.dim(2), s->kw = w.dim(3); }

// conv2d(x, w, ...): a convolution of planes (N, C, H, W) with bias, residual and activation.
nb::object convolve(TileTable* table, const Call& call) {
  static const Parameters parameters(
      "conv2d", {"x", "w", "bias", "stride", "padding", "groups", "activation", "residual", "tile", "dilation"}, 2);
  const auto v = parameters.read(call);
  const Input x(v[0], "the input", 4), w(v[1], "the weights", 4);
  ConvShape s;
  set_input(x, &s);
  set_weights(w, &s);
  Geometry{v[3], v[4], v[5], v[9]}.complete(&s, w.dim(1));
  ConvEpilogue epilogue{nullptr, nullptr, ConvActivation::none};
  if (is_given(v[6])) epilogue.activation = read_activation(v[6]) == 1 ? ConvActivation::relu : ConvActivation::gelu;
  const ConvConfig config = v[8] == nullptr ? chosen_tile(table, s) : read_tile(v[8], s);
  std::optional<Input> bias, residual;
  if (is_given(v[2])) {
    bias.emplace(v[2], "the bias", 1);
    if (bias->dim(0) != s.o)
      refuse("ShapeError", "the bias has %lld values for %lld output channels", bias->dim(0), s.o);
    epilogue.bias = bias->floats();
  }
  if (is_given(v[7])) {
    residual.emplace(v[7], "the residual", 4);
    check_output_shape(*residual, s, "the residual");
    epilogue.residual = residual->floats();
  }
  return run_into(s, {s.n, s.o, s.oh, s.ow},
                  [&](float* y) { conv_forward(s, x.floats(), w.floats(), !w.is_copy(), epilogue, config, y); });
}

nb::object conv2d(const Call& call) { return convolve(nullptr, call); }

nb::object grad_input(const Call& call) {
  static const Parameters parameters("conv2d_grad_input", {"gy", "w", "x_shape", "stride", "padding", "groups"}, 3);
  const auto v = parameters.read(call);
  const Input gy(v[0], "the gradient", 4), w(v[1], "the weights", 4);
  int64_t x[4];
  read_sizes(v[2], 4, 0, "the input's shape", x);
  ConvShape s;
  s.n = x[0], s.c = x[1], s.h = x[2], s.w = x[3];
  set_weights(w, &s);
  Geometry{v[3], v[4], v[5]}.complete(&s, w.dim(1));
  check_output_shape(gy, s, "the gradient");
  return run_into(s, {s.n, s.c, s.h, s.w}, [&](float* gx) { conv_grad_input(s, gy.floats(), w.floats(), gx); });
}

nb::object grad_weight(const Call& call) {
  static const Parameters parameters("conv2d_grad_weight", {"gy", "x", "w_shape", "stride", "padding", "groups"}, 3);
  const auto v = parameters.read(call);
  const Input gy(v[0], "the gradient", 4), x(v[1], "the input", 4);
  int64_t w[4];
  read_sizes(v[2], 4, 0, "the weights' shape", w);
  ConvShape s;
  set_input(x, &s);
  s.o = w[0], s.kh = w[2], s.kw = w[3];
  Geometry{v[3], v[4], v[5]}.complete(&s, w[1]);
  check_output_shape(gy, s, "the gradient");
  return run_into(s, {w[0], w[1], w[2], w[3]}, [&](float* gw) { conv_grad_weight(s, gy.floats(), x.floats(), gw); });
}

// Reads the shape of a convolution as tiles have it: (n, c, h, w, o, kh, kw, stride, stride, padding, padding, groups).
ConvShape read_shape(PyObject* object) {
  int64_t v[12];
  read_sizes(object, 12, 0, "the shape of a convolution", v);
  const bool positive = v[0] > 0 && v[1] > 0 && v[2] > 0 && v[3] > 0 && v[4] > 0 && v[7] > 0 && v[8] > 0 && v[11] > 0;
  if (!positive) refuse("ShapeError", "a convolution's sizes, strides and groups must be positive, not %R", object);
  ConvShape s;
  s.n = v[0], s.c = v[1], s.h = v[2], s.w = v[3], s.o = v[4], s.kh = v[5], s.kw = v[6];
  const nb::object stride = nb::make_tuple(v[7], v[8]), padding = nb::make_tuple(v[9], v[10]), groups = nb::int_(v[11]);
  Geometry{stride.ptr(), padding.ptr(), groups.ptr()}.complete(&s, s.c / v[11]);
  return s;
}

// Returns the largest register tile of the active instruction set: (lanes, rows, vectors).
nb::object tile_limits(const Call&) {
  const ConvLimits& limits = active_conv_direct().limits;
  return nb::make_tuple(limits.lanes, limits.max_rows, limits.max_vectors);
}

// Returns the default tile: (algorithm, mr, nr, block, channels, split).
nb::object default_tile(const Call& call) {
  static const Parameters parameters("conv_default_tile", {"shape"}, 1);
  const ConvConfig c = resolved(read_shape(parameters.read(call)[0]), ConvConfig());
  return nb::make_tuple(algorithm_name(c.algorithm), c.mr, c.nr, c.block, c.channels, c.split);
}

// Returns why conv2d refuses this tile for this shape, or None.
nb::object tile_problem(const Call& call) {
  static const Parameters parameters("conv_tile_problem", {"tile", "shape"}, 2);
  const auto v = parameters.read(call);
  char reason[160];
  if (config_problem(read_shape(v[1]), read_fields(v[0]), reason, sizeof reason)) return nb::str(reason);
  return nb::none();
}

// Returns None if the native kernels support these arguments, else the reason why not.
nb::object suits(const Call& call) {
  if (call.count >= 2 && is_float32(call.args[0]) && is_float32(call.args[1])) return nb::none();
  return nb::str("the native convolution is float32");
}

PyMethodDef methods[] = {
    method<conv2d>(
        "conv2d",
        "conv2d($module, /, x, w, bias=None, stride=(1, 1), padding=(0, 0), groups=1, activation=None, residual=None, "
        "tile=None)\n--\n\n"
        "Convolution of float32 images (n, c, h, w) with filters (o, c / groups, kh, kw); `tile` is a ConvTile."),
    method<grad_input>("conv2d_grad_input",
                       "conv2d_grad_input($module, /, gy, w, x_shape, stride=(1, 1), padding=(0, 0), groups=1)\n--\n\n"
                       "The gradient of conv2d with respect to its images."),
    method<grad_weight>(
        "conv2d_grad_weight",
        "conv2d_grad_weight($module, /, gy, x, w_shape, stride=(1, 1), padding=(0, 0), groups=1)\n--\n\n"
        "The gradient of conv2d with respect to its filters."),
    method<suits>("conv_suits"),
    method<tile_limits>("conv_tile_limits"),
    method<default_tile>("conv_default_tile"),
    method<tile_problem>("conv_tile_problem"),
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

nb::object table_conv2d(const Call& call) { return convolve(&table_of(call.self), call); }

nb::object table_keep_conv2d(const Call& call) {
  static const Parameters parameters("keep_conv2d", {"shape", "threads", "tile"}, 3);
  const auto v = parameters.read(call);
  const ConvShape s = read_shape(v[0]);
  const int threads = static_cast<int>(read_size(v[1], 1, "threads"));
  keep(table_of(call.self).convolutions, table_key(s, threads), is_given(v[2]), read_tile(v[2], s));
  return nb::none();
}

void bind_conv(nb::module_& m) {
  add_functions(m, methods);
  m.def("clear_weight_cache", clear_weight_cache);
  m.def("weight_cache_bytes", weight_cache_bytes);
  m.def("weight_cache_limit", weight_cache_limit);
  m.def("set_weight_cache_limit", set_weight_cache_limit, nb::arg("bytes"));
  m.def("keep_weights_here", keep_weights_here, nb::arg("keep"));
  m.def("winograd_transforms", winograd_transforms);
  m.def("allow_winograd", allow_winograd);
  m.def("array_pool_bytes", array_pool_bytes);
  m.def("set_least_pooled", set_least_pooled, nb::arg("bytes"));
  m.def("give_back_memory", give_back_memory);
}

}  // namespace tw
