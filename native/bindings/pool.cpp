// Pooling from Python, with the signatures of the backend's operations.
#include "kernels/pool.h"

#include "bindings/arguments.h"
#include "bindings/bindings.h"

namespace tw {
namespace {

constexpr int64_t kMinWorkForGilRelease = 20000;

long long show(int64_t number) { return static_cast<long long>(number); }

bool read_window(PyObject* kernel, PyObject* stride, PyObject* padding, PoolShape* s) {
  if (!read_pair(kernel, 1, "the window", &s->kh, &s->kw) || !read_pair(stride, 1, "the stride", &s->sh, &s->sw) ||
      !read_pair(padding, 0, "the padding", &s->ph, &s->pw)) {
    return false;
  }
  if (s->h < 1 || s->w < 1) {
    refuse("ShapeError", "pooling needs planes of at least 1x1, not %lldx%lld", show(s->h), show(s->w));
    return false;
  }
  if (2 * s->ph > s->kh || 2 * s->pw > s->kw) {
    refuse("ShapeError", "pooling may pad by at most half its window of %lldx%lld", show(s->kh), show(s->kw));
    return false;
  }
  const int64_t room_h = s->h + 2 * s->ph - s->kh, room_w = s->w + 2 * s->pw - s->kw;
  if (room_h < 0 || room_w < 0) {
    refuse("ShapeError", "a %lldx%lld window does not fit into a padded input of %lldx%lld", show(s->kh), show(s->kw),
           show(s->h + 2 * s->ph), show(s->w + 2 * s->pw));
    return false;
  }
  s->oh = room_h / s->sh + 1;
  s->ow = room_w / s->sw + 1;
  return true;
}

PyObject* max_pool(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  static const Parameters parameters("max_pool2d", {"x", "kernel", "stride", "padding"}, 4);
  PyObject* v[4] = {};
  ArrayArgument x;
  PoolShape s;
  if (!parameters.read(args, count, keywords, v) || !x.set_floats(v[0], 4, "the input")) return nullptr;
  s.planes = x.dim(0) * x.dim(1), s.h = x.dim(2), s.w = x.dim(3);
  if (!read_window(v[1], v[2], v[3], &s)) return nullptr;
  const npy_intp shape[4] = {x.dim(0), x.dim(1), s.oh, s.ow};
  PyArrayObject* y = new_float_array(4, shape);
  PyArrayObject* argmax = new_array(4, shape, NPY_INT32);
  if (y == nullptr || argmax == nullptr) {
    Py_XDECREF(y);
    Py_XDECREF(argmax);
    return nullptr;
  }
  {
    GilRelease release(s.planes * s.h * s.w > kMinWorkForGilRelease);
    if (s.planes > 0) active_pool().max(s, x.floats(), floats(y), static_cast<int32_t*>(PyArray_DATA(argmax)));
  }
  return Py_BuildValue("(NN)", y, argmax);
}

PyObject* max_pool_grad(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  static const Parameters parameters("max_pool2d_grad", {"gy", "argmax", "x_shape"}, 3);
  PyObject* v[3] = {};
  ArrayArgument gy, argmax;
  int64_t x[4];
  if (!parameters.read(args, count, keywords, v) || !gy.set_floats(v[0], 4, "the gradient") ||
      !argmax.set(v[1], NPY_INT32, 4, "the argmax") || !read_sizes(v[2], 4, "the input's shape", x)) {
    return nullptr;
  }
  for (int i = 0; i < 4; ++i) {
    if (gy.dim(i) != argmax.dim(i) || (i < 2 && gy.dim(i) != x[i])) {
      return refuse("ShapeError", "the gradient, the argmax and the input's shape do not belong together");
    }
  }
  PoolShape s{};
  s.planes = x[0] * x[1], s.h = x[2], s.w = x[3], s.oh = gy.dim(2), s.ow = gy.dim(3);
  const npy_intp shape[4] = {x[0], x[1], x[2], x[3]};
  PyArrayObject* gx = new_float_array(4, shape);
  if (gx == nullptr) return nullptr;
  bool inside = true;
  {
    GilRelease release(s.planes * s.h * s.w > kMinWorkForGilRelease);
    inside =
        s.planes == 0 || active_pool().max_grad(s, gy.floats(), static_cast<const int32_t*>(argmax.data()), floats(gx));
  }
  if (inside) return reinterpret_cast<PyObject*>(gx);
  Py_DECREF(gx);
  return refuse("ShapeError", "an argmax lies outside the plane of %lldx%lld", show(s.h), show(s.w));
}

PyObject* average_pool(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  static const Parameters parameters("avg_pool2d", {"x", "kernel", "stride", "padding"}, 4);
  PyObject* v[4] = {};
  ArrayArgument x;
  PoolShape s;
  if (!parameters.read(args, count, keywords, v) || !x.set_floats(v[0], 4, "the input")) return nullptr;
  s.planes = x.dim(0) * x.dim(1), s.h = x.dim(2), s.w = x.dim(3);
  if (!read_window(v[1], v[2], v[3], &s)) return nullptr;
  const npy_intp shape[4] = {x.dim(0), x.dim(1), s.oh, s.ow};
  PyArrayObject* y = new_float_array(4, shape);
  if (y == nullptr) return nullptr;
  GilRelease release(s.planes * s.h * s.w > kMinWorkForGilRelease);
  if (s.planes > 0) active_pool().average(s, x.floats(), floats(y));
  return reinterpret_cast<PyObject*>(y);
}

PyObject* average_pool_grad(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  static const Parameters parameters("avg_pool2d_grad", {"gy", "x_shape", "kernel", "stride", "padding"}, 5);
  PyObject* v[5] = {};
  ArrayArgument gy;
  PoolShape s;
  int64_t x[4];
  if (!parameters.read(args, count, keywords, v) || !gy.set_floats(v[0], 4, "the gradient") ||
      !read_sizes(v[1], 4, "the input's shape", x)) {
    return nullptr;
  }
  s.planes = x[0] * x[1], s.h = x[2], s.w = x[3];
  if (!read_window(v[2], v[3], v[4], &s)) return nullptr;
  if (gy.dim(0) != x[0] || gy.dim(1) != x[1] || gy.dim(2) != s.oh || gy.dim(3) != s.ow) {
    return refuse("ShapeError", "the gradient must have the shape of the pooled output");
  }
  const npy_intp shape[4] = {x[0], x[1], x[2], x[3]};
  PyArrayObject* gx = new_float_array(4, shape);
  if (gx == nullptr) return nullptr;
  GilRelease release(s.planes * s.h * s.w > kMinWorkForGilRelease);
  if (s.planes > 0) active_pool().average_grad(s, gy.floats(), floats(gx));
  return reinterpret_cast<PyObject*>(gx);
}

PyObject* suits(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject*) {
  if (count >= 1 && is_float32(args[0])) Py_RETURN_NONE;
  return PyUnicode_FromString("the native pooling is float32");
}

PyCFunction entry(PyObject* (*f)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f));
}

PyMethodDef entries[] = {
    {"max_pool2d", entry(max_pool), METH_FASTCALL | METH_KEYWORDS,
     "max_pool2d($module, /, x, kernel, stride, padding)\n--\n\nThe largest value of each window, and where it is."},
    {"max_pool2d_grad", entry(max_pool_grad), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {"avg_pool2d", entry(average_pool), METH_FASTCALL | METH_KEYWORDS,
     "avg_pool2d($module, /, x, kernel, stride, padding)\n--\n\nThe mean of each window."},
    {"avg_pool2d_grad", entry(average_pool_grad), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {"pool_suits", entry(suits), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_pool(nb::module_& m) {
  if (PyModule_AddFunctions(m.ptr(), entries) < 0) throw nb::python_error();
}

}  // namespace tw
