// Python bindings of attention. Arrays (B, H, T, D) are read in place, whatever the strides between examples, heads and
// rows; only rows that are not contiguous are copied. Results are stored as (B, T, H, D) and returned as their (B, H,
// T, D) view, so that concatenating the heads afterwards costs nothing.
#include "common/attention_ops.h"

#include <cmath>

#include "bindings/arrays.h"

namespace tw {
namespace {

bool rows_are_contiguous(PyArrayObject* a) {
  if (PyArray_NDIM(a) != 4 || !PyArray_ISALIGNED(a) || !PyArray_ISNOTSWAPPED(a)) return false;
  if (PyArray_DIM(a, 3) > 1 && PyArray_STRIDE(a, 3) != sizeof(float)) return false;
  for (int i = 0; i < 3; ++i) {
    if (PyArray_STRIDE(a, i) % static_cast<npy_intp>(sizeof(float)) != 0) return false;
  }
  return true;
}

// A (B, H, T, D) float32 input.
class HeadsInput {
 public:
  HeadsInput(PyObject* object, const char* name) {
    if (!is_float32(object)) refuse("DtypeError", "%s must be a float32 array", name);
    const int ndim = PyArray_NDIM(as_array(object));
    if (ndim != 4) refuse("ShapeError", "%s must have four axes (B, H, T, D), not %lld", name, ndim);
    owner_ = rows_are_contiguous(as_array(object))
                 ? nb::borrow(object)
                 : nb::steal(PyArray_FROM_OTF(object, NPY_FLOAT32, NPY_ARRAY_IN_ARRAY));
    if (!owner_.is_valid()) throw nb::python_error();
  }

  PyArrayObject* array() const { return as_array(owner_); }
  npy_intp dim(int i) const { return PyArray_DIM(array(), i); }
  BatchRows rows() const { return {{data<float>(owner_), stride(2)}, {stride(0), stride(1)}}; }

 private:
  int64_t stride(int i) const { return PyArray_STRIDE(array(), i) / static_cast<npy_intp>(sizeof(float)); }
  nb::object owner_;
};

BatchRowsOut rows_out(nb::handle object) {
  PyArrayObject* a = as_array(object);
  const auto stride = [&](int i) { return static_cast<int64_t>(PyArray_STRIDE(a, i) / npy_intp{sizeof(float)}); };
  return {{data<float>(object), stride(2)}, {stride(0), stride(1)}};
}

// Returns a new array, (B, T, H, D) in memory, as its (B, H, T, D) view.
nb::object new_heads(npy_intp b, npy_intp h, npy_intp t, npy_intp d) {
  const NewArray<float> array = new_array({b, t, h, d});
  PyObject* view = PyArray_SwapAxes(as_array(array.object), 1, 2);
  if (view == nullptr) throw nb::python_error();
  return nb::steal(view);
}

// Reads a mask that the caller has broadcast to (B, H, T, S), or None.
void read_mask(PyObject* object, AttentionBatch& p) {
  p.first.mask_kind = MaskKind::none;
  p.first.mask = nullptr;
  if (!is_given(object)) return;
  PyArrayObject* mask = as_array(object);
  const int type = PyArray_Check(object) ? PyArray_TYPE(mask) : NPY_OBJECT;
  if (type != NPY_FLOAT32 && type != NPY_BOOL) refuse("DtypeError", "a mask must be float32 or bool");
  const npy_intp size = type == NPY_BOOL ? 1 : static_cast<npy_intp>(sizeof(float));
  const int64_t expected[4] = {p.batch, p.heads, p.first.queries, p.first.keys};
  bool fits = PyArray_NDIM(mask) == 4 && PyArray_ISALIGNED(mask) && PyArray_ISNOTSWAPPED(mask);
  for (int i = 0; i < 4 && fits; ++i) fits = PyArray_DIM(mask, i) == expected[i] && PyArray_STRIDE(mask, i) % size == 0;
  check(fits, "a mask must have the shape of the scores, (B, H, T, S)");
  p.first.mask_kind = type == NPY_BOOL ? MaskKind::boolean : MaskKind::additive;
  p.first.mask = PyArray_DATA(mask);
  p.mask = {PyArray_STRIDE(mask, 0) / size, PyArray_STRIDE(mask, 1) / size};
  p.first.mask_row = PyArray_STRIDE(mask, 2) / size;
  p.first.mask_column = PyArray_STRIDE(mask, 3) / size;
}

// Reads the arguments that attention and its gradient share, and checks that the shapes fit.
AttentionBatch read_problem(const HeadsInput& q, const HeadsInput& k, const HeadsInput& v, PyObject* causal,
                            PyObject* mask, PyObject* scale) {
  bool fits = q.dim(3) == k.dim(3) && k.dim(2) == v.dim(2);
  for (int i = 0; i < 2; ++i) fits = fits && q.dim(i) == k.dim(i) && q.dim(i) == v.dim(i);
  check(fits, "attention takes q (B, H, T, D), k (B, H, S, D) and v (B, H, S, E)");
  AttentionBatch p{};
  p.batch = q.dim(0), p.heads = q.dim(1);
  const BatchRows qr = q.rows(), kr = k.rows(), vr = v.rows();
  p.q = qr.strides, p.k = kr.strides, p.v = vr.strides;
  AttentionHead& head = p.first;
  head.queries = q.dim(2), head.keys = k.dim(2), head.dim = q.dim(3), head.value_dim = v.dim(3);
  head.q = qr.rows, head.k = kr.rows, head.v = vr.rows;
  head.causal = PyObject_IsTrue(causal) == 1;
  const double factor =
      is_given(scale) ? PyFloat_AsDouble(scale) : 1.0 / std::sqrt(head.dim > 0 ? static_cast<double>(head.dim) : 1.0);
  if (PyErr_Occurred()) throw nb::python_error();
  head.scale = static_cast<float>(factor);
  read_mask(mask, p);
  return p;
}

// attention(q, k, v, causal, mask, scale): returns the result (B, H, T, E) and logsumexp (B, H, T).
nb::object attention_call(const Call& call) {
  static const Parameters parameters("attention", {"q", "k", "v", "causal", "mask", "scale"}, 4);
  const auto values = parameters.read(call);
  const HeadsInput q(values[0], "q"), k(values[1], "k"), v(values[2], "v");
  const AttentionBatch problem = read_problem(q, k, v, values[3], values[4], values[5]);
  const nb::object out = new_heads(q.dim(0), q.dim(1), q.dim(2), v.dim(3));
  const NewArray<float> logsumexp = new_array(3, PyArray_DIMS(q.array()));
  without_gil(true, [&] { attention_forward(problem, rows_out(out), logsumexp.data); });
  return nb::make_tuple(out, logsumexp.object);
}

// Returns the arrays for the gradients of q, k and v: those of `into`, checked, or new ones.
nb::object gradient_arrays(PyObject* into, const HeadsInput* const (&like)[3]) {
  nb::object arrays[3];
  for (int i = 0; i < 3; ++i) {
    const HeadsInput& x = *like[i];
    if (!is_given(into)) {
      arrays[i] = new_heads(x.dim(0), x.dim(1), x.dim(2), x.dim(3));
      continue;
    }
    const bool is_triple = PyTuple_Check(into) && PyTuple_GET_SIZE(into) == 3;
    PyArrayObject* a = is_triple ? as_array(PyTuple_GET_ITEM(into, i)) : nullptr;
    check(is_triple && is_float32(PyTuple_GET_ITEM(into, i)) && PyArray_ISWRITEABLE(a) && rows_are_contiguous(a) &&
              PyArray_SAMESHAPE(a, x.array()),
          "into must be three writeable float32 arrays shaped as q, k and v");
  }
  return is_given(into) ? nb::borrow(into) : nb::make_tuple(arrays[0], arrays[1], arrays[2]);
}

// attention_grad(gout, q, k, v, out, logsumexp, ...): returns the gradients of q, k and v.
nb::object attention_grad_call(const Call& call) {
  static const Parameters parameters("attention_grad",
                                     {"gout", "q", "k", "v", "out", "logsumexp", "causal", "mask", "scale", "into"}, 7);
  const auto values = parameters.read(call);
  const HeadsInput gout(values[0], "gout"), q(values[1], "q"), k(values[2], "k"), v(values[3], "v"),
      out(values[4], "out");
  const Input logsumexp(values[5], "logsumexp");
  const AttentionBatch problem = read_problem(q, k, v, values[6], values[7], values[8]);
  check(PyArray_SAMESHAPE(gout.array(), out.array()) && out.dim(0) == q.dim(0) && out.dim(1) == q.dim(1) &&
            out.dim(2) == q.dim(2) && out.dim(3) == v.dim(3) && logsumexp.size() == q.dim(0) * q.dim(1) * q.dim(2),
        "gout and out must be (B, H, T, E) and logsumexp (B, H, T)");
  nb::object grads = gradient_arrays(values[9], {&q, &k, &v});
  const auto grad = [&](int i) { return rows_out(PyTuple_GET_ITEM(grads.ptr(), i)); };
  without_gil(true, [&] {
    attention_backward(problem, gout.rows(), out.rows(), logsumexp.floats(), grad(0), grad(1), grad(2));
  });
  return grads;
}

PyMethodDef methods[] = {
    method<attention_call>("attention"), method<attention_grad_call>("attention_grad"), {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_attention(nb::module_& m) { add_functions(m, methods); }

}  // namespace tw
