// Python bindings of pooling, with the signatures of the backend's operations.
#include "kernels/pool.h"

#include "bindings/arrays.h"

namespace tw {
namespace {

// Reads the window, and completes a shape whose planes are set by its outputs.
void read_window(PyObject* kernel, PyObject* stride, PyObject* padding, PoolShape* s) {
  int64_t window[2], step[2], pad[2];
  read_sizes(kernel, 2, 1, "the window", window);
  read_sizes(stride, 2, 1, "the stride", step);
  read_sizes(padding, 2, 0, "the padding", pad);
  s->kh = window[0], s->kw = window[1], s->sh = step[0], s->sw = step[1], s->ph = pad[0], s->pw = pad[1];
  if (s->h < 1 || s->w < 1) refuse("ShapeError", "pooling needs planes of at least 1x1, not %lldx%lld", s->h, s->w);
  if (2 * s->ph > s->kh || 2 * s->pw > s->kw)
    refuse("ShapeError", "pooling may pad by at most half its window of %lldx%lld", s->kh, s->kw);
  const int64_t h = s->h + 2 * s->ph, w = s->w + 2 * s->pw;
  if (h < s->kh || w < s->kw)
    refuse("ShapeError", "a %lldx%lld window does not fit into a padded input of %lldx%lld", s->kh, s->kw, h, w);
  s->oh = (h - s->kh) / s->sh + 1;
  s->ow = (w - s->kw) / s->sw + 1;
}

PoolShape shape_of_planes(int64_t n, int64_t c, int64_t h, int64_t w) {
  PoolShape s{};
  s.planes = n * c, s.h = h, s.w = w;
  return s;
}

// max_pool2d: returns the pooled planes and the index of each maximum, for the backward pass.
nb::object max_pool(const Call& call) {
  static const Parameters parameters("max_pool2d", {"x", "kernel", "stride", "padding"}, 4);
  const auto v = parameters.read(call);
  const Input x(v[0], "the input", 4);
  PoolShape s = shape_of_planes(x.dim(0), x.dim(1), x.dim(2), x.dim(3));
  read_window(v[1], v[2], v[3], &s);
  const NewArray<float> y = new_array({x.dim(0), x.dim(1), s.oh, s.ow});
  const auto argmax = new_array<int32_t>({x.dim(0), x.dim(1), s.oh, s.ow});
  without_gil(s.planes * s.h * s.w > kMinWorkForGilRelease, [&] {
    if (s.planes > 0) active_pool().max(s, x.floats(), y.data, argmax.data);
  });
  return nb::make_tuple(y.object, argmax.object);
}

nb::object max_pool_grad(const Call& call) {
  static const Parameters parameters("max_pool2d_grad", {"gy", "argmax", "x_shape"}, 3);
  const auto v = parameters.read(call);
  const Input gy(v[0], "the gradient", 4), argmax(v[1], "the argmax", 4, NPY_INT32);
  int64_t x[4];
  read_sizes(v[2], 4, 0, "the input's shape", x);
  for (int i = 0; i < 4; ++i) {
    check(gy.dim(i) == argmax.dim(i) && (i >= 2 || gy.dim(i) == x[i]),
          "the shapes of the gradient, the argmax and the input do not match");
  }
  PoolShape s = shape_of_planes(x[0], x[1], x[2], x[3]);
  s.oh = gy.dim(2), s.ow = gy.dim(3);
  NewArray<float> gx = new_array({x[0], x[1], x[2], x[3]});
  bool inside;
  without_gil(s.planes * s.h * s.w > kMinWorkForGilRelease, [&] {
    inside = s.planes == 0 || active_pool().max_grad(s, gy.floats(), argmax.numbers<int32_t>(), gx.data);
  });
  if (!inside) refuse("ShapeError", "an argmax lies outside the plane of %lldx%lld", s.h, s.w);
  return std::move(gx.object);
}

nb::object average_pool(const Call& call) {
  static const Parameters parameters("avg_pool2d", {"x", "kernel", "stride", "padding"}, 4);
  const auto v = parameters.read(call);
  const Input x(v[0], "the input", 4);
  PoolShape s = shape_of_planes(x.dim(0), x.dim(1), x.dim(2), x.dim(3));
  read_window(v[1], v[2], v[3], &s);
  NewArray<float> y = new_array({x.dim(0), x.dim(1), s.oh, s.ow});
  without_gil(s.planes * s.h * s.w > kMinWorkForGilRelease, [&] {
    if (s.planes > 0) active_pool().average(s, x.floats(), y.data);
  });
  return std::move(y.object);
}

nb::object average_pool_grad(const Call& call) {
  static const Parameters parameters("avg_pool2d_grad", {"gy", "x_shape", "kernel", "stride", "padding"}, 5);
  const auto v = parameters.read(call);
  const Input gy(v[0], "the gradient", 4);
  int64_t x[4];
  read_sizes(v[1], 4, 0, "the input's shape", x);
  PoolShape s = shape_of_planes(x[0], x[1], x[2], x[3]);
  read_window(v[2], v[3], v[4], &s);
  check(gy.dim(0) == x[0] && gy.dim(1) == x[1] && gy.dim(2) == s.oh && gy.dim(3) == s.ow,
        "the gradient must have the shape of the pooled output");
  NewArray<float> gx = new_array({x[0], x[1], x[2], x[3]});
  without_gil(s.planes * s.h * s.w > kMinWorkForGilRelease, [&] {
    if (s.planes > 0) active_pool().average_grad(s, gy.floats(), gx.data);
  });
  return std::move(gx.object);
}

nb::object suits(const Call& call) {
  if (call.count >= 1 && is_float32(call.args[0])) return nb::none();
  return nb::str("the native pooling is float32");
}

PyMethodDef methods[] = {
    method<max_pool>("max_pool2d",
                     "max_pool2d($module, /, x, kernel, stride, padding)\n--\n\n"
                     "The largest value of each window, and where it is."),
    method<max_pool_grad>("max_pool2d_grad"),
    method<average_pool>("avg_pool2d",
                         "avg_pool2d($module, /, x, kernel, stride, padding)\n--\n\nThe mean of each window."),
    method<average_pool_grad>("avg_pool2d_grad"),
    method<suits>("pool_suits"),
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_pool(nb::module_& m) { add_functions(m, methods); }

}  // namespace tw
