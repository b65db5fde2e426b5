// Convolution from Python, with the signatures of the backend's operations. Raw METH_FASTCALL entries: a small layer
// takes a few microseconds, so the call may not. Shapes are checked against each other here; arrays that are not
// contiguous float32 are converted.
#include "common/convolution.h"

#include <new>

#include "bindings/arguments.h"
#include "bindings/array_pool.h"
#include "bindings/bindings.h"
#include "bindings/tile_table.h"
#include "common/weight_cache.h"

namespace tw {
namespace {

// Below this many multiply-adds a call is shorter than handing the GIL over and back.
constexpr int64_t kMinWorkForGilRelease = 20000;

long long show(int64_t number) { return static_cast<long long>(number); }

struct Geometry {
  PyObject *stride = nullptr, *padding = nullptr, *groups = nullptr, *dilation = nullptr;

  bool read(ConvShape* s) const {
    s->sh = s->sw = s->groups = 1;
    return (stride == nullptr || read_pair(stride, 1, "the stride", &s->sh, &s->sw)) && read_padding(s) &&
           (groups == nullptr || read_size(groups, 1, "groups", &s->groups)) &&
           (dilation == nullptr || read_pair(dilation, 1, "the dilation", &s->dh, &s->dw));
  }

  // One number for both sides, or two for before and after. Until `check_shape` oh and ow hold what comes after.
  bool read_padding(ConvShape* s) const {
    s->ph = s->pw = s->oh = s->ow = 0;
    if (padding == nullptr) return true;
    if (PyTuple_Check(padding) && PyTuple_GET_SIZE(padding) == 4) {
      int64_t sides[4];
      if (!read_sizes(padding, 4, "the padding", sides)) return false;
      s->ph = sides[0], s->pw = sides[1], s->oh = sides[2], s->ow = sides[3];
      return true;
    }
    if (!read_pair(padding, 0, "the padding", &s->ph, &s->pw)) return false;
    s->oh = s->ph, s->ow = s->pw;
    return true;
  }
};

// Computes oh and ow; sets an error if no convolution has such a shape.
bool check_shape(ConvShape* s, int64_t weight_c) {
  if (s->c % s->groups != 0 || s->o % s->groups != 0) {
    refuse("ShapeError", "groups=%lld must divide the %lld input and the %lld output channels", show(s->groups),
           show(s->c), show(s->o));
    return false;
  }
  if (weight_c != s->group_c()) {
    refuse("ShapeError", "the weights take %lld channels a group, the input has %lld", show(weight_c),
           show(s->group_c()));
    return false;
  }
  const int64_t full_h = s->h + s->ph + s->oh, full_w = s->w + s->pw + s->ow;
  const int64_t room_h = full_h - s->reach_h(), room_w = full_w - s->reach_w();
  if (s->kh < 1 || s->kw < 1 || room_h < 0 || room_w < 0) {
    refuse("ShapeError", "a %lldx%lld kernel does not fit into a padded input of %lldx%lld", show(s->reach_h()),
           show(s->reach_w()), show(full_h), show(full_w));
    return false;
  }
  s->oh = room_h / s->sh + 1;
  s->ow = room_w / s->sw + 1;
  return true;
}

bool has_output_shape(const ArrayArgument& a, const ConvShape& s, const char* name) {
  if (a.dim(0) == s.n && a.dim(1) == s.o && a.dim(2) == s.oh && a.dim(3) == s.ow) return true;
  refuse("ShapeError", "%s must have the shape of the output, (%lld, %lld, %lld, %lld)", name, show(s.n), show(s.o),
         show(s.oh), show(s.ow));
  return false;
}

bool read_activation(PyObject* object, ConvActivation* out) {
  *out = ConvActivation::none;
  if (object == nullptr || object == Py_None) return true;
  if (PyUnicode_Check(object) && PyUnicode_CompareWithASCIIString(object, "relu") == 0) {
    *out = ConvActivation::relu;
  } else if (PyUnicode_Check(object) && PyUnicode_CompareWithASCIIString(object, "gelu") == 0) {
    *out = ConvActivation::gelu;
  } else {
    refuse("ConfigurationError", "the activation must be None, 'relu' or 'gelu', not %R", object);
    return false;
  }
  return true;
}

PyObject* tile_attribute(PyObject* tile, const char* name) {
  PyObject* value = PyObject_GetAttrString(tile, name);
  if (value != nullptr) return value;
  PyErr_Clear();
  return refuse("ConfigurationError", "a convolution's tile must be a ConvTile, but %R has no %s", tile, name);
}

bool read_number(PyObject* tile, const char* name, int64_t* out) {
  PyObject* value = tile_attribute(tile, name);
  if (value == nullptr) return false;
  *out = PyLong_AsLongLong(value);
  Py_DECREF(value);
  if (*out != -1 || !PyErr_Occurred()) return true;
  PyErr_Clear();
  refuse("ConfigurationError", "the tile's %s must be a whole number", name);
  return false;
}

bool read_algorithm(PyObject* tile, ConvAlgorithm* out) {
  PyObject* name = tile_attribute(tile, "algorithm");
  if (name == nullptr) return false;
  const bool text = PyUnicode_Check(name);
  for (ConvAlgorithm algorithm : {ConvAlgorithm::direct, ConvAlgorithm::winograd, ConvAlgorithm::winograd2}) {
    if (text && PyUnicode_CompareWithASCIIString(name, algorithm_name(algorithm)) == 0) *out = algorithm;
  }
  Py_DECREF(name);
  return true;
}

bool read_fields(PyObject* tile, ConvConfig* config) {
  return read_algorithm(tile, &config->algorithm) && read_number(tile, "mr", &config->mr) &&
         read_number(tile, "nr", &config->nr) && read_number(tile, "block", &config->block) &&
         read_number(tile, "channels", &config->channels) && read_number(tile, "split", &config->split);
}

bool read_tile(PyObject* tile, const ConvShape& s, ConvConfig* config) {
  if (tile == nullptr || tile == Py_None) return true;
  if (!read_fields(tile, config)) return false;
  char reason[160];
  if (!config_problem(s, *config, reason, sizeof reason)) return true;
  refuse("ConfigurationError", "this tile cannot be used: %s", reason);
  return false;
}

int64_t multiplications(const ConvShape& s) { return s.n * s.o * s.oh * s.ow * s.group_c() * s.kh * s.kw; }

ConvTable::Key table_key(const ConvShape& s, int threads) {
  const auto pair = [](int64_t low, int64_t high) { return low | high << 32; };  // sizes lie below 2**31
  return {{pair(s.n, s.c), pair(s.h, s.w), pair(s.o, s.groups), pair(s.kh, s.kw), pair(s.sh, s.sw), pair(s.ph, s.pw),
           tile_setting(threads)}};
}

PyObject* shape_tuple(const ConvShape& s) {
  return Py_BuildValue("(LLLLLLLLLLLL)", show(s.n), show(s.c), show(s.h), show(s.w), show(s.o), show(s.kh), show(s.kw),
                       show(s.sh), show(s.sw), show(s.ph), show(s.pw), show(s.groups));
}

// Returns whether tiles exist for this shape: their keys have one padding per axis and no dilation.
bool is_tiled(const ConvShape& s) {
  const int64_t oh = (s.h + 2 * s.ph - s.kh) / s.sh + 1, ow = (s.w + 2 * s.pw - s.kw) / s.sw + 1;
  return s.dh == 1 && s.dw == 1 && s.oh == oh && s.ow == ow;
}

// Asks the chooser, if there is one, for the tile of a non-empty convolution; false with an error set.
bool choose_tile(TileTable* table, const ConvShape& s, ConvConfig* config) {
  const int64_t work = table == nullptr || !is_tiled(s) ? 0 : multiplications(s);
  if (work == 0) return true;
  ConvConfig tuned;
  const Answer answer = look_up(*table->convolutions, table_key(s, num_threads()), work, table->calls_before_asking,
                                &tuned, [&](ConvConfig* out) {
                                  PyObject* answer = ask_chooser(*table, "conv2d", shape_tuple(s), "nchw");
                                  if (answer == nullptr) return Answer::failed;
                                  const bool none = answer == Py_None, usable = read_tile(answer, s, out);
                                  Py_DECREF(answer);
                                  return !usable ? Answer::failed : none ? Answer::keep_default : Answer::use_tile;
                                });
  if (answer == Answer::use_tile) *config = tuned;
  return answer != Answer::failed;
}

// Runs f(data of `out`), without the GIL if there is enough work, and returns `out`.
template <class F>
PyObject* run_into(const ConvShape& s, PyArrayObject* out, F&& f) {
  if (out == nullptr) return nullptr;
  bool enough_memory = true;
  {
    GilRelease release(multiplications(s) > kMinWorkForGilRelease);
    try {
      f(floats(out));
    } catch (const std::bad_alloc&) {
      enough_memory = false;
    }
  }
  if (enough_memory) return reinterpret_cast<PyObject*>(out);
  Py_DECREF(out);
  return PyErr_NoMemory();
}

void set_input(const ArrayArgument& x, ConvShape* s) {
  s->n = x.dim(0), s->c = x.dim(1), s->h = x.dim(2), s->w = x.dim(3);
}

void set_weights(const ArrayArgument& w, ConvShape* s) { s->o = w.dim(0), s->kh = w.dim(2), s->kw = w.dim(3); }

PyObject* convolve(TileTable* table, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  static const Parameters parameters(
      "conv2d", {"x", "w", "bias", "stride", "padding", "groups", "activation", "residual", "tile", "dilation"}, 2);
  PyObject* v[10] = {};
  if (!parameters.read(args, count, keywords, v)) return nullptr;
  ArrayArgument x, w, bias, residual;
  ConvShape s;
  ConvConfig config;
  ConvEpilogue epilogue{nullptr, nullptr, ConvActivation::none};
  if (!x.set_floats(v[0], 4, "the input") || !w.set_floats(v[1], 4, "the weights") ||
      !Geometry{v[3], v[4], v[5], v[9]}.read(&s)) {
    return nullptr;
  }
  set_input(x, &s);
  set_weights(w, &s);
  if (!check_shape(&s, w.dim(1)) || !read_activation(v[6], &epilogue.activation)) return nullptr;
  if (!(v[8] == nullptr ? choose_tile(table, s, &config) : read_tile(v[8], s, &config))) return nullptr;
  if (v[2] != nullptr && v[2] != Py_None) {
    if (!bias.set_floats(v[2], 1, "the bias")) return nullptr;
    if (bias.dim(0) != s.o) {
      return refuse("ShapeError", "the bias has %lld values for %lld output channels", show(bias.dim(0)), show(s.o));
    }
    epilogue.bias = bias.floats();
  }
  if (v[7] != nullptr && v[7] != Py_None) {
    if (!residual.set_floats(v[7], 4, "the residual") || !has_output_shape(residual, s, "the residual")) return nullptr;
    epilogue.residual = residual.floats();
  }
  const npy_intp shape[4] = {s.n, s.o, s.oh, s.ow};
  return run_into(s, new_float_array(4, shape),
                  [&](float* y) { conv_forward(s, x.floats(), w.floats(), !w.is_copy(), epilogue, config, y); });
}

PyObject* conv2d(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  return convolve(nullptr, args, count, keywords);
}

PyObject* grad_input(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  static const Parameters parameters("conv2d_grad_input", {"gy", "w", "x_shape", "stride", "padding", "groups"}, 3);
  PyObject* v[6] = {};
  if (!parameters.read(args, count, keywords, v)) return nullptr;
  ArrayArgument gy, w;
  ConvShape s;
  int64_t x[4];
  if (!gy.set_floats(v[0], 4, "the gradient") || !w.set_floats(v[1], 4, "the weights") ||
      !read_sizes(v[2], 4, "the input's shape", x) || !Geometry{v[3], v[4], v[5]}.read(&s)) {
    return nullptr;
  }
  s.n = x[0], s.c = x[1], s.h = x[2], s.w = x[3];
  set_weights(w, &s);
  if (!check_shape(&s, w.dim(1)) || !has_output_shape(gy, s, "the gradient")) return nullptr;
  const npy_intp shape[4] = {s.n, s.c, s.h, s.w};
  return run_into(s, new_float_array(4, shape), [&](float* gx) { conv_grad_input(s, gy.floats(), w.floats(), gx); });
}

PyObject* grad_weight(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  static const Parameters parameters("conv2d_grad_weight", {"gy", "x", "w_shape", "stride", "padding", "groups"}, 3);
  PyObject* v[6] = {};
  if (!parameters.read(args, count, keywords, v)) return nullptr;
  ArrayArgument gy, x;
  ConvShape s;
  int64_t w[4];
  if (!gy.set_floats(v[0], 4, "the gradient") || !x.set_floats(v[1], 4, "the input") ||
      !read_sizes(v[2], 4, "the weights' shape", w) || !Geometry{v[3], v[4], v[5]}.read(&s)) {
    return nullptr;
  }
  set_input(x, &s);
  s.o = w[0], s.kh = w[2], s.kw = w[3];
  if (!check_shape(&s, w[1]) || !has_output_shape(gy, s, "the gradient")) return nullptr;
  const npy_intp shape[4] = {w[0], w[1], w[2], w[3]};
  return run_into(s, new_float_array(4, shape), [&](float* gw) { conv_grad_weight(s, gy.floats(), x.floats(), gw); });
}

// (n, c, h, w, o, kh, kw, stride, stride, padding, padding, groups), the shape of a convolution for tiles.
bool read_shape(PyObject* object, ConvShape* s) {
  int64_t v[12];
  if (!read_sizes(object, 12, "the shape of a convolution", v)) return false;
  *s = {v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], v[9], v[10]};
  const bool positive = v[0] > 0 && v[1] > 0 && v[2] > 0 && v[3] > 0 && v[4] > 0 && v[7] > 0 && v[8] > 0 && v[11] > 0;
  if (positive) return check_shape(s, s->c / s->groups);
  refuse("ShapeError", "a convolution's sizes, strides and groups must be positive, not %R", object);
  return false;
}

// Returns the largest register tile of the active instruction set: (lanes, rows, vectors).
PyObject* tile_limits(PyObject*, PyObject* const*, Py_ssize_t, PyObject*) {
  const ConvLimits& limits = active_conv_direct().limits;
  return Py_BuildValue("(LLL)", show(limits.lanes), show(limits.max_rows), show(limits.max_vectors));
}

// Returns the default tile: (algorithm, mr, nr, block, channels, split).
PyObject* default_tile(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject*) {
  ConvShape s;
  if (count != 1) return refuse("ConfigurationError", "conv_default_tile takes a shape");
  if (!read_shape(args[0], &s)) return nullptr;
  const ConvConfig c = resolved(s, ConvConfig());
  return Py_BuildValue("(sLLLLL)", algorithm_name(c.algorithm), show(c.mr), show(c.nr), show(c.block), show(c.channels),
                       show(c.split));
}

// Why conv2d refuses this tile for this shape, or None.
PyObject* tile_problem(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject*) {
  ConvShape s;
  ConvConfig config;
  char reason[160];
  if (count != 2) return refuse("ConfigurationError", "conv_tile_problem takes a tile and a shape");
  if (!read_shape(args[1], &s) || !read_fields(args[0], &config)) return nullptr;
  if (config_problem(s, config, reason, sizeof reason)) return PyUnicode_FromString(reason);
  Py_RETURN_NONE;
}

// Returns None if the native kernels support these arguments, else the reason why not.
PyObject* suits(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject*) {
  if (count >= 2 && is_float32(args[0]) && is_float32(args[1])) Py_RETURN_NONE;
  return PyUnicode_FromString("the native convolution is float32");
}

PyCFunction entry(PyObject* (*f)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f));
}

PyMethodDef entries[] = {
    {"conv2d", entry(conv2d), METH_FASTCALL | METH_KEYWORDS,
     "conv2d($module, /, x, w, bias=None, stride=(1, 1), padding=(0, 0), groups=1, activation=None, residual=None, "
     "tile=None)\n--\n\n"
     "Convolution of float32 images (n, c, h, w) with filters (o, c / groups, kh, kw); `tile` is a ConvTile."},
    {"conv2d_grad_input", entry(grad_input), METH_FASTCALL | METH_KEYWORDS,
     "conv2d_grad_input($module, /, gy, w, x_shape, stride=(1, 1), padding=(0, 0), groups=1)\n--\n\n"
     "The gradient of conv2d with respect to its images."},
    {"conv2d_grad_weight", entry(grad_weight), METH_FASTCALL | METH_KEYWORDS,
     "conv2d_grad_weight($module, /, gy, x, w_shape, stride=(1, 1), padding=(0, 0), groups=1)\n--\n\n"
     "The gradient of conv2d with respect to its filters."},
    {"conv_suits", entry(suits), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {"conv_tile_limits", entry(tile_limits), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {"conv_default_tile", entry(default_tile), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {"conv_tile_problem", entry(tile_problem), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

PyObject* table_conv2d(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  return convolve(reinterpret_cast<TileTable*>(self), args, count, keywords);
}

PyObject* table_keep_conv2d(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject*) {
  ConvShape s;
  ConvConfig config;
  int64_t threads;
  if (count != 3) return refuse("ConfigurationError", "keep_conv2d takes a shape, threads and a tile");
  if (!read_shape(args[0], &s) || !read_size(args[1], 1, "threads", &threads) || !read_tile(args[2], s, &config))
    return nullptr;
  auto* entry = reinterpret_cast<TileTable*>(self)->convolutions->find_or_make(table_key(s, static_cast<int>(threads)));
  if (entry == nullptr) Py_RETURN_NONE;  // its places are taken by others that were kept: asked when it is met
  entry->state = args[2] == Py_None ? ConvTable::State::keep_default : ConvTable::State::use_tile;
  entry->tile = config;
  entry->pinned = true;
  Py_RETURN_NONE;
}

void bind_conv(nb::module_& m) {
  if (PyModule_AddFunctions(m.ptr(), entries) < 0) throw nb::python_error();
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
