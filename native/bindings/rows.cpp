// Python bindings of activations, softmax and the sums of training. A float32 input in another order is first copied to
// C order.
#include "common/row_ops.h"

#include "bindings/arrays.h"

namespace tw {
namespace {

void expect_arrays(const Call& call, Py_ssize_t count) {
  if (call.count != count || call.keywords != nullptr)
    refuse("ConfigurationError", "this function takes %lld arrays, not %lld arguments", count, call.count);
}

int64_t columns_of(const Input& x) { return x.ndim() > 0 ? x.dim(x.ndim() - 1) : 1; }
int64_t rows_of(const Input& x) { return columns_of(x) > 0 ? x.size() / columns_of(x) : 0; }

// y = run(x), element by element or row by row.
template <auto run>
nb::object unary(const Call& call) {
  expect_arrays(call, 1);
  const Input x(call.args[0], "x");
  NewArray<float> y = new_array_like(x);
  without_gil(x.size() >= kMinWorkForGilRelease, [&] { run(x, y.data); });
  return std::move(y.object);
}

template <auto run>
nb::object binary(const Call& call) {
  expect_arrays(call, 2);
  const Input a(call.args[0], "the first array"), b(call.args[1], "the second array");
  check(same_shape(a, b), "the two arrays must have the same shape");
  NewArray<float> y = new_array_like(a);
  without_gil(a.size() >= kMinWorkForGilRelease, [&] { run(a, b, y.data); });
  return std::move(y.object);
}

template <UnaryKernel ElementwiseKernels::*kernel>
void each(const Input& x, float* y) {
  map_unary(active_elementwise().*kernel, x.floats(), y, x.size());
}
template <BinaryKernel ElementwiseKernels::*kernel>
void each_pair(const Input& a, const Input& b, float* y) {
  map_binary(active_elementwise().*kernel, a.floats(), b.floats(), y, a.size());
}
template <UnaryRowKernel SoftmaxKernels::*kernel>
void each_row(const Input& x, float* y) {
  map_rows(active_softmax_kernels().*kernel, x.floats(), y, rows_of(x), columns_of(x));
}
template <BinaryRowKernel SoftmaxKernels::*kernel>
void each_row_pair(const Input& y, const Input& gy, float* gx) {
  map_rows(active_softmax_kernels().*kernel, y.floats(), gy.floats(), gx, rows_of(y), columns_of(y));
}

nb::object sum_rows_call(const Call& call) {
  expect_arrays(call, 1);
  const Input x(call.args[0], "x");
  check(x.ndim() >= 1, "sum_rows needs at least one axis");
  NewArray<float> out = new_array({columns_of(x)});
  without_gil(x.size() >= kMinWorkForGilRelease, [&] { sum_rows(x.floats(), out.data, rows_of(x), columns_of(x)); });
  return std::move(out.object);
}

nb::object sum_channels_call(const Call& call) {
  expect_arrays(call, 1);
  const Input x(call.args[0], "x");
  check(x.ndim() >= 2, "sum_channels needs at least two axes, (N, C, ...)");
  NewArray<float> out = new_array({x.dim(1)});
  const int64_t planes = x.dim(0) * x.dim(1);
  without_gil(x.size() >= kMinWorkForGilRelease,
              [&] { sum_channels(x.floats(), out.data, {x.dim(0), x.dim(1), planes > 0 ? x.size() / planes : 0}); });
  return std::move(out.object);
}

nb::object sum_of_squares_call(const Call& call) {
  expect_arrays(call, 1);
  const Input x(call.args[0], "x");
  double total;
  without_gil(x.size() >= kMinWorkForGilRelease, [&] { total = sum_of_squares(x.floats(), x.size()); });
  return nb::float_(total);
}

// Returns why the native row kernels cannot process these arguments, or None: every array must be float32.
nb::object why_not_float32(const Call& call) {
  const Py_ssize_t total = call.count + (call.keywords ? PyTuple_GET_SIZE(call.keywords) : 0);
  for (Py_ssize_t i = 0; i < total; ++i) {
    if (!PyArray_Check(call.args[i])) continue;
    const int type = PyArray_TYPE(as_array(call.args[i]));
    if (!PyTypeNum_ISINTEGER(type) && type != NPY_FLOAT32) return nb::str("the native kernels take float32 arrays");
  }
  return nb::none();
}

#define TW_DOC(name, parameters, meaning) name, name "($module, " parameters ", /)\n--\n\n" meaning

PyMethodDef methods[] = {
    method<unary<each<&ElementwiseKernels::gelu>>>(TW_DOC("gelu", "x", "GELU of every element.")),
    method<binary<each_pair<&ElementwiseKernels::gelu_grad>>>(
        TW_DOC("gelu_grad", "x, gy", "The gradient of gelu at x.")),
    method<unary<each<&ElementwiseKernels::relu>>>(TW_DOC("relu", "x", "max(x, 0) of every element.")),
    method<binary<each_pair<&ElementwiseKernels::relu_grad>>>(
        TW_DOC("relu_grad", "y, gy", "The gradient of relu, from its result.")),
    method<binary<each_pair<&ElementwiseKernels::add>>>(TW_DOC("add", "a, b", "The sum of two arrays of one shape.")),
    method<unary<each_row<&SoftmaxKernels::softmax>>>(TW_DOC("softmax", "x", "Softmax along the last axis.")),
    method<binary<each_row_pair<&SoftmaxKernels::softmax_grad>>>(
        TW_DOC("softmax_grad", "y, gy", "The gradient of softmax, from its result.")),
    method<unary<each_row<&SoftmaxKernels::log_softmax>>>(
        TW_DOC("log_softmax", "x", "Logarithm of the softmax along the last axis.")),
    method<binary<each_row_pair<&SoftmaxKernels::log_softmax_grad>>>(
        TW_DOC("log_softmax_grad", "y, gy", "The gradient of log_softmax, from its result.")),
    method<sum_rows_call>(TW_DOC("sum_rows", "x", "Sums over all axes but the last.")),
    method<sum_channels_call>(TW_DOC("sum_channels", "x", "Sums over all axes but the second.")),
    method<sum_of_squares_call>(TW_DOC("sum_of_squares", "x", "The sum of all squares.")),
    method<why_not_float32>("why_not_float32"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void bind_rows(nb::module_& m) { add_functions(m, methods); }

}  // namespace tw
