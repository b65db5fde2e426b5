// Activations, softmax and the sums of training, as METH_FASTCALL entries: the arrays are checked, the result
// allocated, the GIL released where there is enough to do. A float32 input in another order is copied into C order
// first.
#include "common/row_ops.h"

#include "bindings/bindings.h"
#include "bindings/numpy_api.h"

namespace tw {
namespace {

constexpr int64_t kMinWorkForGilRelease = 8192;  // elements; below, giving the GIL away costs more than the kernel

PyObject* as_object(PyArrayObject* array) { return reinterpret_cast<PyObject*>(array); }

struct RowShape {
  int64_t rows, columns;
};

RowShape row_shape(const FloatInput& x) {
  const int64_t columns = x.ndim() > 0 ? x.dim(x.ndim() - 1) : 1;
  return {columns > 0 ? x.size() / columns : 0, columns};
}

template <UnaryKernel ElementwiseKernels::*kernel>
PyObject* unary(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 1) return PyErr_Format(PyExc_TypeError, "one array expected, not %zd arguments", nargs);
  FloatInput x(args[0], "x");
  if (!x) return nullptr;
  PyArrayObject* y = new_float_array_like(x.array());
  if (!y) return nullptr;
  GilRelease release(x.size() >= kMinWorkForGilRelease);
  map_unary(active_elementwise().*kernel, x.data(), floats(y), x.size());
  return as_object(y);
}

template <BinaryKernel ElementwiseKernels::*kernel>
PyObject* binary(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 2) return PyErr_Format(PyExc_TypeError, "two arrays expected, not %zd arguments", nargs);
  FloatInput a(args[0], "the first array"), b(args[1], "the second array");
  if (!a || !b) return nullptr;
  if (!same_shape(a, b)) return shape_error("the two arrays must have the same shape");
  PyArrayObject* y = new_float_array_like(a.array());
  if (!y) return nullptr;
  GilRelease release(a.size() >= kMinWorkForGilRelease);
  map_binary(active_elementwise().*kernel, a.data(), b.data(), floats(y), a.size());
  return as_object(y);
}

template <UnaryRowKernel SoftmaxKernels::*kernel>
PyObject* row_unary(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 1) return PyErr_Format(PyExc_TypeError, "one array expected, not %zd arguments", nargs);
  FloatInput x(args[0], "x");
  if (!x) return nullptr;
  PyArrayObject* y = new_float_array_like(x.array());
  if (!y) return nullptr;
  const RowShape shape = row_shape(x);
  GilRelease release(x.size() >= kMinWorkForGilRelease);
  map_rows(active_softmax_kernels().*kernel, x.data(), floats(y), shape.rows, shape.columns);
  return as_object(y);
}

template <BinaryRowKernel SoftmaxKernels::*kernel>
PyObject* row_binary(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 2) return PyErr_Format(PyExc_TypeError, "two arrays expected, not %zd arguments", nargs);
  FloatInput y(args[0], "y"), gy(args[1], "gy");
  if (!y || !gy) return nullptr;
  if (!same_shape(y, gy)) return shape_error("y and gy must have the same shape");
  PyArrayObject* gx = new_float_array_like(y.array());
  if (!gx) return nullptr;
  const RowShape shape = row_shape(y);
  GilRelease release(y.size() >= kMinWorkForGilRelease);
  map_rows(active_softmax_kernels().*kernel, y.data(), gy.data(), floats(gx), shape.rows, shape.columns);
  return as_object(gx);
}

PyObject* sum_rows_entry(PyObject*, PyObject* const* args, Py_ssize_t nargs, PyObject*) {
  if (nargs != 1) return PyErr_Format(PyExc_TypeError, "sum_rows takes one array, not %zd arguments", nargs);
  FloatInput x(args[0], "x");
  if (!x) return nullptr;
  if (x.ndim() < 1) return shape_error("sum_rows needs at least one axis");
  npy_intp columns = x.dim(x.ndim() - 1);
  PyArrayObject* out = new_float_array(1, &columns);
  if (!out) return nullptr;
  GilRelease release(x.size() >= kMinWorkForGilRelease);
  sum_rows(x.data(), floats(out), row_shape(x).rows, columns);
  return as_object(out);
}

PyObject* sum_channels_entry(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 1) return PyErr_Format(PyExc_TypeError, "sum_channels takes one array, not %zd arguments", nargs);
  FloatInput x(args[0], "x");
  if (!x) return nullptr;
  if (x.ndim() < 2) return shape_error("sum_channels needs at least two axes, (N, C, ...)");
  npy_intp channels = x.dim(1);
  PyArrayObject* out = new_float_array(1, &channels);
  if (!out) return nullptr;
  const int64_t planes = x.dim(0) * channels;
  GilRelease release(x.size() >= kMinWorkForGilRelease);
  sum_channels(x.data(), floats(out), {x.dim(0), channels, planes > 0 ? x.size() / planes : 0});
  return as_object(out);
}

PyObject* sum_of_squares_entry(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 1) return PyErr_Format(PyExc_TypeError, "sum_of_squares takes one array, not %zd arguments", nargs);
  FloatInput x(args[0], "x");
  if (!x) return nullptr;
  double total;
  {
    GilRelease release(x.size() >= kMinWorkForGilRelease);
    total = sum_of_squares(x.data(), x.size());
  }
  return PyFloat_FromDouble(total);
}

// Why the native row kernels cannot take these arguments, or None: every array must be float32.
PyObject* why_not_float32(PyObject*, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  const Py_ssize_t total = nargs + (kwnames ? PyTuple_GET_SIZE(kwnames) : 0);
  for (Py_ssize_t i = 0; i < total; ++i) {
    if (!PyArray_Check(args[i])) continue;
    PyArrayObject* array = reinterpret_cast<PyArrayObject*>(args[i]);
    if (PyTypeNum_ISINTEGER(PyArray_TYPE(array)) || PyArray_TYPE(array) == NPY_FLOAT32) continue;
    return PyUnicode_FromString("the native kernels take float32 arrays");
  }
  Py_RETURN_NONE;
}

#define TW_FAST(name, parameters, meaning, function) \
  {name, (PyCFunction)(void (*)(void))(function), METH_FASTCALL, name "($module, " parameters ", /)\n--\n\n" meaning}

PyMethodDef methods[] = {
    TW_FAST("gelu", "x", "GELU of every element.", unary<&ElementwiseKernels::gelu>),
    TW_FAST("gelu_grad", "x, gy", "The gradient of gelu at x.", binary<&ElementwiseKernels::gelu_grad>),
    TW_FAST("relu", "x", "max(x, 0) of every element.", unary<&ElementwiseKernels::relu>),
    TW_FAST("relu_grad", "y, gy", "The gradient of relu, from its result.", binary<&ElementwiseKernels::relu_grad>),
    TW_FAST("add", "a, b", "The sum of two arrays of one shape.", binary<&ElementwiseKernels::add>),
    TW_FAST("softmax", "x", "Softmax along the last axis.", row_unary<&SoftmaxKernels::softmax>),
    TW_FAST("softmax_grad", "y, gy", "The gradient of softmax, from its result.",
            row_binary<&SoftmaxKernels::softmax_grad>),
    TW_FAST("log_softmax", "x", "Logarithm of the softmax along the last axis.",
            row_unary<&SoftmaxKernels::log_softmax>),
    TW_FAST("log_softmax_grad", "y, gy", "The gradient of log_softmax, from its result.",
            row_binary<&SoftmaxKernels::log_softmax_grad>),
    {"sum_rows", (PyCFunction)(void (*)(void))guarded<sum_rows_entry>, METH_FASTCALL | METH_KEYWORDS, nullptr},
    TW_FAST("sum_channels", "x", "Sums over all axes but the second.", sum_channels_entry),
    TW_FAST("sum_of_squares", "x", "The sum of all squares.", sum_of_squares_entry),
    {"why_not_float32", (PyCFunction)(void (*)(void))why_not_float32, METH_FASTCALL | METH_KEYWORDS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void bind_rows(nb::module_& m) {
  if (PyModule_AddFunctions(m.ptr(), methods) < 0) throw nb::python_error();
}

}  // namespace tw
