// Python bindings of norms, cross-entropy, embedding gradients and Adam: what a training step needs besides products
// and activations.
#include <cmath>

#include "bindings/arrays.h"
#include "common/row_ops.h"
#include "common/unaligned.h"

namespace tw {
namespace {

bool is_vector(const Input& v, int64_t length) { return v.ndim() == 1 && v.dim(0) == length; }

float read_eps(PyObject* object) {
  const double eps = PyFloat_AsDouble(object);
  if (eps == -1.0 && PyErr_Occurred()) throw nb::python_error();
  return static_cast<float>(eps);
}

// layer_norm(x, weight, bias, eps): returns y, and mean and 1 / standard deviation of each row.
nb::object layer_norm_call(const Call& call) {
  static const Parameters parameters("layer_norm", {"x", "weight", "bias", "eps"}, 4);
  const auto v = parameters.read(call);
  const Input x(v[0], "x"), weight(v[1], "weight"), bias(v[2], "bias");
  const float eps = read_eps(v[3]);
  check(x.ndim() >= 1, "layer_norm needs at least one axis");
  const int64_t columns = x.dim(x.ndim() - 1);
  if (!is_vector(weight, columns) || !is_vector(bias, columns))
    refuse("ShapeError", "layer_norm over %lld columns needs weight and bias of that length", columns);
  // Not size / columns: a row of no columns still has a mean, which is NaN.
  const int64_t rows = PyArray_MultiplyList(x.shape(), x.ndim() - 1);
  const NewArray<float> y = new_array_like(x), mean = new_array(x.ndim() - 1, x.shape()),
                        rstd = new_array(x.ndim() - 1, x.shape());
  without_gil(x.size() >= kMinWorkForGilRelease, [&] {
    layer_norm(x.floats(), weight.floats(), bias.floats(), eps, y.data, mean.data, rstd.data, rows, columns);
  });
  return nb::make_tuple(y.object, mean.object, rstd.object);
}

nb::object layer_norm_grad_call(const Call& call) {
  static const Parameters parameters("layer_norm_grad", {"gy", "x", "weight", "mean", "rstd"}, 5);
  const auto v = parameters.read(call);
  const Input gy(v[0], "gy"), x(v[1], "x"), weight(v[2], "weight"), mean(v[3], "mean"), rstd(v[4], "rstd");
  check(x.ndim() >= 1 && same_shape(gy, x), "gy and x must have the same shape, of one axis or more");
  const npy_intp columns = x.dim(x.ndim() - 1);
  const int64_t rows = columns > 0 ? x.size() / columns : 0;
  check(is_vector(weight, columns) && (columns == 0 || (mean.size() == rows && rstd.size() == rows)),
        "layer_norm_grad needs a weight per column and a mean and rstd per row");
  const NewArray<float> gx = new_array_like(x), gweight = new_array({columns}), gbias = new_array({columns});
  without_gil(x.size() >= kMinWorkForGilRelease, [&] {
    layer_norm_grad(gy.floats(), x.floats(), weight.floats(), mean.floats(), rstd.floats(), gx.data, gweight.data,
                    gbias.data, rows, columns);
  });
  return nb::make_tuple(gx.object, gweight.object, gbias.object);
}

BatchShape batch_shape(const Input& x) {
  const int64_t planes = x.dim(0) * x.dim(1);
  return {x.dim(0), x.dim(1), planes > 0 ? x.size() / planes : 0};
}

// batch_norm(x, weight, bias, eps) in training: returns y, and mean and variance of each channel.
nb::object batch_norm_call(const Call& call) {
  static const Parameters parameters("batch_norm", {"x", "weight", "bias", "eps"}, 4);
  const auto v = parameters.read(call);
  const Input x(v[0], "x"), weight(v[1], "weight"), bias(v[2], "bias");
  const float eps = read_eps(v[3]);
  if (x.ndim() < 2) refuse("ShapeError", "batch_norm needs (N, C, ...), not %lld axes", x.ndim());
  const npy_intp channels = x.dim(1);
  if (!is_vector(weight, channels) || !is_vector(bias, channels))
    refuse("ShapeError", "batch_norm over %lld channels needs weight and bias of that length", channels);
  const NewArray<float> y = new_array_like(x), mean = new_array({channels}), variance = new_array({channels});
  without_gil(x.size() >= kMinWorkForGilRelease, [&] {
    batch_norm(x.floats(), weight.floats(), bias.floats(), eps, y.data, mean.data, variance.data, batch_shape(x));
  });
  return nb::make_tuple(y.object, mean.object, variance.object);
}

nb::object batch_norm_grad_call(const Call& call) {
  static const Parameters parameters("batch_norm_grad", {"gy", "x", "weight", "mean", "var", "eps"}, 6);
  const auto v = parameters.read(call);
  const Input gy(v[0], "gy"), x(v[1], "x"), weight(v[2], "weight"), mean(v[3], "mean"), variance(v[4], "var");
  const float eps = read_eps(v[5]);
  check(x.ndim() >= 2 && same_shape(gy, x), "gy and x must have the same shape, (N, C, ...)");
  const npy_intp channels = x.dim(1);
  if (!is_vector(weight, channels) || !is_vector(mean, channels) || !is_vector(variance, channels))
    refuse("ShapeError", "batch_norm_grad needs weight, mean and var of %lld channels", channels);
  const NewArray<float> gx = new_array_like(x), gweight = new_array({channels}), gbias = new_array({channels});
  without_gil(x.size() >= kMinWorkForGilRelease, [&] {
    batch_norm_grad(gy.floats(), x.floats(), weight.floats(), mean.floats(), variance.floats(), eps, gx.data,
                    gweight.data, gbias.data, batch_shape(x));
  });
  return nb::make_tuple(gx.object, gweight.object, gbias.object);
}

using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check_inside(const Ids& ids, int64_t limit, const char* sentence) {
  for (int64_t i = 0; i < static_cast<int64_t>(ids.size()); ++i) {
    const int64_t id = at(ids.data(), i);
    if (id < 0 || id >= limit) throw nb::index_error(sentence);
  }
}

void cross_entropy_entry(const FloatArray& logits, const Ids& targets, FloatOut losses, FloatOut logsumexp) {
  const int64_t rows = static_cast<int64_t>(targets.size()), columns = last_size(logits);
  check(has_shape(logits, {rows, columns}) && has_size(losses, rows) && has_size(logsumexp, rows),
        "cross_entropy needs (rows, classes) logits and one target per row");
  check_inside(targets, columns, "a target is outside the classes");
  nb::gil_scoped_release release;
  cross_entropy(logits.data(), targets.data(), losses.data(), logsumexp.data(), rows, columns);
}

void cross_entropy_grad_entry(const FloatArray& logits, const Ids& targets, const FloatArray& logsumexp,
                              const FloatArray& weights, FloatOut glogits) {
  const int64_t rows = static_cast<int64_t>(targets.size()), columns = last_size(logits);
  check(has_shape(logits, {rows, columns}) && has_size(glogits, rows * columns) && has_size(logsumexp, rows) &&
            has_size(weights, rows),
        "cross_entropy_grad needs (rows, classes) logits and a target, logsumexp and weight per row");
  check_inside(targets, columns, "a target is outside the classes");
  nb::gil_scoped_release release;
  cross_entropy_grad(logits.data(), targets.data(), logsumexp.data(), weights.data(), glogits.data(), rows, columns);
}

// Writes the gradient of an embedding table: row t of `out` is the sum of the rows of gout whose id is t.
void embedding_grad_entry(const FloatArray& gout, const Ids& ids, FloatOut out) {
  const int64_t rows = static_cast<int64_t>(ids.size()), columns = last_size(out);
  const int64_t table_rows = out.ndim() == 2 ? static_cast<int64_t>(out.shape(0)) : -1;
  check(has_shape(gout, {rows, columns}) && has_shape(out, {table_rows, columns}),
        "embedding_grad needs one row of gout per id and a table of the same width");
  check_inside(ids, table_rows, "an id is outside the table");
  nb::gil_scoped_release release;
  embedding_grad(gout.data(), ids.data(), out.data(), rows, table_rows, columns);
}

// Updates a parameter and its moments in place by Adam, or by AdamW with `decoupled` weight decay.
void adam_step_entry(FloatOut param, const FloatArray& grad, FloatOut m, FloatOut v, double lr, double beta1,
                     double beta2, double eps, double weight_decay, bool decoupled, int64_t step) {
  const size_t n = param.size();
  check(grad.size() == n && m.size() == n && v.size() == n, "adam_step needs param, grad, m and v of one shape");
  check(step >= 1, "adam_step counts its steps from 1");
  AdamSettings s;
  s.decay = static_cast<float>(decoupled ? 1.0 - lr * weight_decay : 1.0);
  s.penalty = static_cast<float>(decoupled ? 0.0 : weight_decay);
  s.beta2 = static_cast<float>(beta2);
  s.eps = static_cast<float>(eps);
  s.one_minus_beta1 = static_cast<float>(1.0 - beta1);
  s.one_minus_beta2 = static_cast<float>(1.0 - beta2);
  s.step_size = static_cast<float>(lr / (1.0 - std::pow(beta1, static_cast<double>(step))));
  s.root_factor = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2, static_cast<double>(step))));
  nb::gil_scoped_release release;
  adam_step(param.data(), grad.data(), m.data(), v.data(), s, static_cast<int64_t>(n));
}

void add_in_place(FloatOut total, const FloatArray& more) {
  check(total.size() == more.size(), "add_in_place needs two arrays of one shape");
  nb::gil_scoped_release release;
  map_binary(active_elementwise().add, total.data(), more.data(), total.data(), static_cast<int64_t>(total.size()));
}

void scale_in_place_entry(FloatOut x, double factor) {
  nb::gil_scoped_release release;
  scale_in_place(x.data(), static_cast<float>(factor), static_cast<int64_t>(x.size()));
}

PyMethodDef methods[] = {
    method<layer_norm_call>("layer_norm"), method<layer_norm_grad_call>("layer_norm_grad"),
    method<batch_norm_call>("batch_norm"), method<batch_norm_grad_call>("batch_norm_grad"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void bind_training(nb::module_& m) {
  add_functions(m, methods);
  m.def("cross_entropy", cross_entropy_entry, array_arg("logits"), array_arg("targets"), array_arg("losses"),
        array_arg("logsumexp"));
  m.def("cross_entropy_grad", cross_entropy_grad_entry, array_arg("logits"), array_arg("targets"),
        array_arg("logsumexp"), array_arg("weights"), array_arg("glogits"));
  m.def("embedding_grad", embedding_grad_entry, array_arg("gout"), array_arg("ids"), array_arg("out"));
  m.def("adam_step", adam_step_entry, array_arg("param"), array_arg("grad"), array_arg("m"), array_arg("v"),
        nb::arg("lr"), nb::arg("beta1"), nb::arg("beta2"), nb::arg("eps"), nb::arg("weight_decay"),
        nb::arg("decoupled"), nb::arg("step"));
  m.def("add_in_place", add_in_place, array_arg("total"), array_arg("more"));
  m.def("scale_in_place", scale_in_place_entry, array_arg("x"), nb::arg("factor"));
}

}  // namespace tw
