// Norms, cross-entropy, embedding gradients and Adam: what a training step needs besides products and activations.
#include <cmath>

#include "bindings/bindings.h"
#include "bindings/numpy_api.h"
#include "common/row_ops.h"
#include "common/unaligned.h"

namespace tw {
namespace {

constexpr int64_t kMinWorkForGilRelease = 4096;

PyObject* three(PyArrayObject* a, PyArrayObject* b, PyArrayObject* c) {
  if (!a || !b || !c) {
    Py_XDECREF(a);
    Py_XDECREF(b);
    Py_XDECREF(c);
    return nullptr;
  }
  PyObject* tuple = PyTuple_New(3);
  if (!tuple) return nullptr;
  PyTuple_SET_ITEM(tuple, 0, reinterpret_cast<PyObject*>(a));
  PyTuple_SET_ITEM(tuple, 1, reinterpret_cast<PyObject*>(b));
  PyTuple_SET_ITEM(tuple, 2, reinterpret_cast<PyObject*>(c));
  return tuple;
}

float* result(PyObject* tuple, int i) { return floats(reinterpret_cast<PyArrayObject*>(PyTuple_GET_ITEM(tuple, i))); }

// A vector of `length` floats, one per column or channel.
bool is_vector(const FloatInput& v, int64_t length) { return v.ndim() == 1 && v.dim(0) == length; }

PyObject* layer_norm_entry(PyObject*, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  static const char* const names[] = {"x", "weight", "bias", "eps"};
  Arguments arguments;
  if (!arguments.parse("layer_norm", names, 4, 4, args, nargs, kwnames)) return nullptr;
  FloatInput x(arguments[0], "x"), weight(arguments[1], "weight"), bias(arguments[2], "bias");
  if (!x || !weight || !bias) return nullptr;
  const double eps = PyFloat_AsDouble(arguments[3]);
  if (eps == -1.0 && PyErr_Occurred()) return nullptr;
  if (x.ndim() < 1) return shape_error("layer_norm needs at least one axis");
  const int64_t columns = x.dim(x.ndim() - 1);
  if (!is_vector(weight, columns) || !is_vector(bias, columns)) {
    return shape_error("layer_norm over %zd columns needs weight and bias of that length", (Py_ssize_t)columns);
  }
  // Not size / columns: a row of no columns still has a mean, which is NaN.
  const int64_t rows = PyArray_MultiplyList(PyArray_DIMS(x.array()), x.ndim() - 1);
  PyObject* out = three(new_float_array_like(x.array()), new_float_array(x.ndim() - 1, PyArray_DIMS(x.array())),
                        new_float_array(x.ndim() - 1, PyArray_DIMS(x.array())));
  if (!out) return nullptr;
  GilRelease release(x.size() >= kMinWorkForGilRelease);
  layer_norm(x.data(), weight.data(), bias.data(), static_cast<float>(eps), result(out, 0), result(out, 1),
             result(out, 2), rows, columns);
  return out;
}

PyObject* layer_norm_grad_entry(PyObject*, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  static const char* const names[] = {"gy", "x", "weight", "mean", "rstd"};
  Arguments arguments;
  if (!arguments.parse("layer_norm_grad", names, 5, 5, args, nargs, kwnames)) return nullptr;
  FloatInput gy(arguments[0], "gy"), x(arguments[1], "x"), weight(arguments[2], "weight"), mean(arguments[3], "mean"),
      rstd(arguments[4], "rstd");
  if (!gy || !x || !weight || !mean || !rstd) return nullptr;
  if (x.ndim() < 1 || !same_shape(gy, x)) return shape_error("gy and x must have the same shape, of one axis or more");
  npy_intp columns = x.dim(x.ndim() - 1);
  const int64_t rows = columns > 0 ? x.size() / columns : 0;
  if (!is_vector(weight, columns) || (columns > 0 && (mean.size() != rows || rstd.size() != rows))) {
    return shape_error("layer_norm_grad needs a weight per column and a mean and rstd per row");
  }
  PyObject* out = three(new_float_array_like(x.array()), new_float_array(1, &columns), new_float_array(1, &columns));
  if (!out) return nullptr;
  GilRelease release(x.size() >= kMinWorkForGilRelease);
  layer_norm_grad(gy.data(), x.data(), weight.data(), mean.data(), rstd.data(), result(out, 0), result(out, 1),
                  result(out, 2), rows, columns);
  return out;
}

BatchShape batch_shape(const FloatInput& x) {
  const int64_t planes = x.dim(0) * x.dim(1);
  return {x.dim(0), x.dim(1), planes > 0 ? x.size() / planes : 0};
}

PyObject* batch_norm_entry(PyObject*, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  static const char* const names[] = {"x", "weight", "bias", "eps"};
  Arguments arguments;
  if (!arguments.parse("batch_norm", names, 4, 4, args, nargs, kwnames)) return nullptr;
  FloatInput x(arguments[0], "x"), weight(arguments[1], "weight"), bias(arguments[2], "bias");
  if (!x || !weight || !bias) return nullptr;
  const double eps = PyFloat_AsDouble(arguments[3]);
  if (eps == -1.0 && PyErr_Occurred()) return nullptr;
  if (x.ndim() < 2) return shape_error("batch_norm needs (N, C, ...), not %d axes", x.ndim());
  npy_intp channels = x.dim(1);
  if (!is_vector(weight, channels) || !is_vector(bias, channels)) {
    return shape_error("batch_norm over %zd channels needs weight and bias of that length", (Py_ssize_t)channels);
  }
  PyObject* out = three(new_float_array_like(x.array()), new_float_array(1, &channels), new_float_array(1, &channels));
  if (!out) return nullptr;
  GilRelease release(x.size() >= kMinWorkForGilRelease);
  batch_norm(x.data(), weight.data(), bias.data(), static_cast<float>(eps), result(out, 0), result(out, 1),
             result(out, 2), batch_shape(x));
  return out;
}

PyObject* batch_norm_grad_entry(PyObject*, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  static const char* const names[] = {"gy", "x", "weight", "mean", "var", "eps"};
  Arguments arguments;
  if (!arguments.parse("batch_norm_grad", names, 6, 6, args, nargs, kwnames)) return nullptr;
  FloatInput gy(arguments[0], "gy"), x(arguments[1], "x"), weight(arguments[2], "weight"), mean(arguments[3], "mean"),
      var(arguments[4], "var");
  if (!gy || !x || !weight || !mean || !var) return nullptr;
  const double eps = PyFloat_AsDouble(arguments[5]);
  if (eps == -1.0 && PyErr_Occurred()) return nullptr;
  if (x.ndim() < 2 || !same_shape(gy, x)) return shape_error("gy and x must have the same shape, (N, C, ...)");
  npy_intp channels = x.dim(1);
  if (!is_vector(weight, channels) || !is_vector(mean, channels) || !is_vector(var, channels)) {
    return shape_error("batch_norm_grad needs weight, mean and var of %zd channels", (Py_ssize_t)channels);
  }
  PyObject* out = three(new_float_array_like(x.array()), new_float_array(1, &channels), new_float_array(1, &channels));
  if (!out) return nullptr;
  GilRelease release(x.size() >= kMinWorkForGilRelease);
  batch_norm_grad(gy.data(), x.data(), weight.data(), mean.data(), var.data(), static_cast<float>(eps), result(out, 0),
                  result(out, 1), result(out, 2), batch_shape(x));
  return out;
}

using Floats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The first id outside [0, limit), or -1 where all are inside; its position is what the error names.
int64_t first_outside(const Ids& ids, int64_t limit) {
  for (size_t i = 0; i < ids.size(); ++i) {
    const int64_t id = at(ids.data(), static_cast<int64_t>(i));
    if (id < 0 || id >= limit) return static_cast<int64_t>(i);
  }
  return -1;
}

void cross_entropy_entry(const Floats& logits, const Ids& targets, FloatOut losses, FloatOut logsumexp) {
  const int64_t rows = static_cast<int64_t>(targets.size());
  const int64_t columns = logits.ndim() == 2 ? static_cast<int64_t>(logits.shape(1)) : 0;
  if (logits.ndim() != 2 || static_cast<int64_t>(logits.shape(0)) != rows ||
      static_cast<int64_t>(losses.size()) != rows || static_cast<int64_t>(logsumexp.size()) != rows) {
    throw nb::value_error("cross_entropy needs (rows, classes) logits and one target per row");
  }
  if (first_outside(targets, columns) >= 0) throw nb::index_error("a target is outside the classes");
  nb::gil_scoped_release release;
  cross_entropy(logits.data(), targets.data(), losses.data(), logsumexp.data(), rows, columns);
}

void cross_entropy_grad_entry(const Floats& logits, const Ids& targets, const Floats& logsumexp, const Floats& weights,
                              FloatOut glogits) {
  const int64_t rows = static_cast<int64_t>(targets.size());
  const int64_t columns = logits.ndim() == 2 ? static_cast<int64_t>(logits.shape(1)) : 0;
  if (logits.ndim() != 2 || static_cast<int64_t>(logits.shape(0)) != rows || glogits.size() != logits.size() ||
      static_cast<int64_t>(logsumexp.size()) != rows || static_cast<int64_t>(weights.size()) != rows) {
    throw nb::value_error("cross_entropy_grad needs (rows, classes) logits and a target, logsumexp and weight per row");
  }
  if (first_outside(targets, columns) >= 0) throw nb::index_error("a target is outside the classes");
  nb::gil_scoped_release release;
  cross_entropy_grad(logits.data(), targets.data(), logsumexp.data(), weights.data(), glogits.data(), rows, columns);
}

void embedding_grad_entry(const Floats& gout, const Ids& ids, FloatOut out) {
  if (gout.ndim() != 2 || out.ndim() != 2 || gout.shape(0) != ids.size() || gout.shape(1) != out.shape(1)) {
    throw nb::value_error("embedding_grad needs one row of gout per id and a table of the same width");
  }
  const int64_t table_rows = static_cast<int64_t>(out.shape(0));
  if (first_outside(ids, table_rows) >= 0) throw nb::index_error("an id is outside the table");
  nb::gil_scoped_release release;
  embedding_grad(gout.data(), ids.data(), out.data(), static_cast<int64_t>(ids.size()), table_rows,
                 static_cast<int64_t>(out.shape(1)));
}

void adam_step_entry(FloatOut param, const Floats& grad, FloatOut m, FloatOut v, double lr, double beta1, double beta2,
                     double eps, double weight_decay, bool decoupled, int64_t step) {
  const size_t n = param.size();
  if (grad.size() != n || m.size() != n || v.size() != n) {
    throw nb::value_error("adam_step needs param, grad, m and v of one shape");
  }
  if (step < 1) throw nb::value_error("adam_step counts its steps from 1");
  AdamSettings s;
  s.decay = static_cast<float>(decoupled ? 1.0 - lr * weight_decay : 1.0);
  s.penalty = static_cast<float>(decoupled ? 0.0 : weight_decay);
  s.beta2 = static_cast<float>(beta2);
  s.eps = static_cast<float>(eps);
  s.rest1 = static_cast<float>(1.0 - beta1);
  s.rest2 = static_cast<float>(1.0 - beta2);
  s.step_size = static_cast<float>(lr / (1.0 - std::pow(beta1, static_cast<double>(step))));
  s.root_factor = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(beta2, static_cast<double>(step))));
  nb::gil_scoped_release release;
  adam_step(param.data(), grad.data(), m.data(), v.data(), s, static_cast<int64_t>(n));
}

void add_in_place(FloatOut total, const Floats& more) {
  if (total.size() != more.size()) throw nb::value_error("add_in_place needs two arrays of one shape");
  nb::gil_scoped_release release;
  map_binary(active_elementwise().add, total.data(), more.data(), total.data(), static_cast<int64_t>(total.size()));
}

void scale_in_place_entry(FloatOut x, double factor) {
  nb::gil_scoped_release release;
  scale_in_place(x.data(), static_cast<float>(factor), static_cast<int64_t>(x.size()));
}

#define TW_KEYWORDS(name, function) \
  {name, (PyCFunction)(void (*)(void))(guarded<function>), METH_FASTCALL | METH_KEYWORDS, nullptr}

PyMethodDef methods[] = {
    TW_KEYWORDS("layer_norm", layer_norm_entry),
    TW_KEYWORDS("layer_norm_grad", layer_norm_grad_entry),
    TW_KEYWORDS("batch_norm", batch_norm_entry),
    TW_KEYWORDS("batch_norm_grad", batch_norm_grad_entry),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void bind_training(nb::module_& m) {
  if (PyModule_AddFunctions(m.ptr(), methods) < 0) throw nb::python_error();
  m.def("cross_entropy", cross_entropy_entry, nb::arg("logits").noconvert(), nb::arg("targets").noconvert(),
        nb::arg("losses").noconvert(), nb::arg("logsumexp").noconvert());
  m.def("cross_entropy_grad", cross_entropy_grad_entry, nb::arg("logits").noconvert(), nb::arg("targets").noconvert(),
        nb::arg("logsumexp").noconvert(), nb::arg("weights").noconvert(), nb::arg("glogits").noconvert());
  m.def("embedding_grad", embedding_grad_entry, nb::arg("gout").noconvert(), nb::arg("ids").noconvert(),
        nb::arg("out").noconvert());
  m.def("adam_step", adam_step_entry, nb::arg("param").noconvert(), nb::arg("grad").noconvert(),
        nb::arg("m").noconvert(), nb::arg("v").noconvert(), nb::arg("lr"), nb::arg("beta1"), nb::arg("beta2"),
        nb::arg("eps"), nb::arg("weight_decay"), nb::arg("decoupled"), nb::arg("step"));
  m.def("add_in_place", add_in_place, nb::arg("total").noconvert(), nb::arg("more").noconvert());
  m.def("scale_in_place", scale_in_place_entry, nb::arg("x").noconvert(), nb::arg("factor"));
}

}  // namespace tw
