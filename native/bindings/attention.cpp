// Attention from Python. Arrays of (B, H, T, D) are read in place whatever the distances between examples, heads and
// rows; only rows that are not contiguous are copied. Results are laid out (B, T, H, D) and handed back as their
// (B, H, T, D) view, so that joining the heads afterwards costs nothing.
#include "common/attention_ops.h"

#include <cmath>

#include "bindings/bindings.h"
#include "bindings/numpy_api.h"

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

// A (B, H, T, D) float32 input; empty with an error set where it is none.
class HeadsInput {
 public:
  HeadsInput(PyObject* object, const char* name) {
    if (PyErr_Occurred()) return;
    PyArrayObject* arguments = PyArray_Check(object) ? reinterpret_cast<PyArrayObject*>(object) : nullptr;
    if (!arguments || PyArray_TYPE(arguments) != NPY_FLOAT32) {
      dtype_error("%s must be a float32 array", name);
    } else if (PyArray_NDIM(arguments) != 4) {
      shape_error("%s must have four axes (B, H, T, D), not %d", name, PyArray_NDIM(arguments));
    } else if (rows_are_contiguous(arguments)) {
      Py_INCREF(object);
      array_ = arguments;
    } else {
      array_ = reinterpret_cast<PyArrayObject*>(PyArray_FROM_OTF(object, NPY_FLOAT32, NPY_ARRAY_IN_ARRAY));
    }
  }
  ~HeadsInput() { Py_XDECREF(reinterpret_cast<PyObject*>(array_)); }
  HeadsInput(const HeadsInput&) = delete;
  HeadsInput& operator=(const HeadsInput&) = delete;

  explicit operator bool() const { return array_ != nullptr; }
  PyArrayObject* array() const { return array_; }
  npy_intp dim(int i) const { return PyArray_DIM(array_, i); }
  BatchRows rows() const { return {{floats(array_), stride(2)}, {stride(0), stride(1)}}; }

 private:
  int64_t stride(int i) const { return PyArray_STRIDE(array_, i) / static_cast<npy_intp>(sizeof(float)); }
  PyArrayObject* array_ = nullptr;
};

BatchRowsOut rows_out(PyObject* object) {
  PyArrayObject* a = reinterpret_cast<PyArrayObject*>(object);
  const auto stride = [&](int i) { return static_cast<int64_t>(PyArray_STRIDE(a, i) / npy_intp{sizeof(float)}); };
  return {{floats(a), stride(2)}, {stride(0), stride(1)}};
}

// (B, T, H, D) in memory, seen as (B, H, T, D).
PyObject* new_heads(npy_intp b, npy_intp h, npy_intp t, npy_intp d) {
  const npy_intp shape[4] = {b, t, h, d};
  PyArrayObject* array = new_float_array(4, shape);
  if (!array) return nullptr;
  PyObject* view = PyArray_SwapAxes(array, 1, 2);
  Py_DECREF(reinterpret_cast<PyObject*>(array));
  return view;
}

// The mask has been broadcast to (B, H, T, S) by the caller; None for no mask.
bool read_mask(PyObject* object, AttentionBatch& p) {
  p.first.mask_kind = MaskKind::none;
  p.first.mask = nullptr;
  if (!object || object == Py_None) return true;
  PyArrayObject* mask = PyArray_Check(object) ? reinterpret_cast<PyArrayObject*>(object) : nullptr;
  const int type = mask ? PyArray_TYPE(mask) : NPY_OBJECT;
  if (type != NPY_FLOAT32 && type != NPY_BOOL) return dtype_error("a mask must be float32 or bool"), false;
  const npy_intp size = type == NPY_BOOL ? 1 : static_cast<npy_intp>(sizeof(float));
  const int64_t expected[4] = {p.batch, p.heads, p.first.queries, p.first.keys};
  bool fits = PyArray_NDIM(mask) == 4 && PyArray_ISALIGNED(mask) && PyArray_ISNOTSWAPPED(mask);
  for (int i = 0; i < 4 && fits; ++i) fits = PyArray_DIM(mask, i) == expected[i] && PyArray_STRIDE(mask, i) % size == 0;
  if (!fits) return shape_error("a mask must have the shape of the scores, (B, H, T, S)"), false;
  p.first.mask_kind = type == NPY_BOOL ? MaskKind::boolean : MaskKind::additive;
  p.first.mask = PyArray_DATA(mask);
  p.mask = {PyArray_STRIDE(mask, 0) / size, PyArray_STRIDE(mask, 1) / size};
  p.first.mask_row = PyArray_STRIDE(mask, 2) / size;
  p.first.mask_column = PyArray_STRIDE(mask, 3) / size;
  return true;
}

bool read_problem(const HeadsInput& q, const HeadsInput& k, const HeadsInput& v, PyObject* causal, PyObject* mask,
                  PyObject* scale, AttentionBatch& p) {
  bool fits = q.dim(3) == k.dim(3);
  for (int i = 0; i < 2; ++i) fits = fits && q.dim(i) == k.dim(i) && q.dim(i) == v.dim(i);
  if (!fits || k.dim(2) != v.dim(2)) {
    return shape_error("attention takes q (B, H, T, D), k (B, H, S, D) and v (B, H, S, E)"), false;
  }
  p = AttentionBatch{};
  p.batch = q.dim(0);
  p.heads = q.dim(1);
  const BatchRows qr = q.rows(), kr = k.rows(), vr = v.rows();
  p.q = qr.strides;
  p.k = kr.strides;
  p.v = vr.strides;
  AttentionHead& head = p.first;
  head.queries = q.dim(2);
  head.keys = k.dim(2);
  head.dim = q.dim(3);
  head.value_dim = v.dim(3);
  head.q = qr.rows;
  head.k = kr.rows;
  head.v = vr.rows;
  const int truth = PyObject_IsTrue(causal);
  if (truth < 0) return false;
  head.causal = truth == 1;
  const bool by_default = !scale || scale == Py_None;
  const double factor =
      by_default ? 1.0 / std::sqrt(head.dim > 0 ? static_cast<double>(head.dim) : 1.0) : PyFloat_AsDouble(scale);
  if (PyErr_Occurred()) return false;
  head.scale = static_cast<float>(factor);
  return read_mask(mask, p);
}

PyObject* attention_entry(PyObject*, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  static const char* const names[] = {"q", "k", "v", "causal", "mask", "scale"};
  Arguments arguments;
  if (!arguments.parse("attention", names, 6, 4, args, nargs, kwnames)) return nullptr;
  HeadsInput q(arguments[0], "q"), k(arguments[1], "k"), v(arguments[2], "v");
  if (!q || !k || !v) return nullptr;
  AttentionBatch problem;
  if (!read_problem(q, k, v, arguments[3], arguments[4], arguments[5], problem)) return nullptr;
  PyObject* out = new_heads(q.dim(0), q.dim(1), q.dim(2), v.dim(3));
  if (!out) return nullptr;
  PyArrayObject* logsumexp = new_float_array(3, PyArray_DIMS(q.array()));
  PyObject* both = logsumexp ? PyTuple_Pack(2, out, logsumexp) : nullptr;
  Py_XDECREF(reinterpret_cast<PyObject*>(logsumexp));
  Py_DECREF(out);
  if (!both) return nullptr;
  GilRelease release(true);
  attention_forward(problem, rows_out(out), floats(logsumexp));
  return both;
}

// The arrays of `into`, checked, or new ones: gradients of q, k and v.
PyObject* gradient_arrays(PyObject* into, const HeadsInput* const* like) {
  if (into && into != Py_None) {
    bool fits = PyTuple_Check(into) && PyTuple_GET_SIZE(into) == 3;
    for (int i = 0; i < 3 && fits; ++i) {
      PyObject* item = PyTuple_GET_ITEM(into, i);
      fits = PyArray_Check(item);
      PyArrayObject* a = reinterpret_cast<PyArrayObject*>(item);
      fits = fits && PyArray_TYPE(a) == NPY_FLOAT32 && PyArray_ISWRITEABLE(a) && rows_are_contiguous(a) &&
             PyArray_SAMESHAPE(a, like[i]->array());
    }
    if (!fits) return shape_error("into must be three writeable float32 arrays shaped as q, k and v");
    Py_INCREF(into);
    return into;
  }
  PyObject* tuple = PyTuple_New(3);
  for (int i = 0; i < 3 && tuple; ++i) {
    PyObject* g = new_heads(like[i]->dim(0), like[i]->dim(1), like[i]->dim(2), like[i]->dim(3));
    if (!g) {
      Py_CLEAR(tuple);
    } else {
      PyTuple_SET_ITEM(tuple, i, g);
    }
  }
  return tuple;
}

PyObject* attention_grad_entry(PyObject*, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  static const char* const names[] = {"gout", "q", "k", "v", "out", "logsumexp", "causal", "mask", "scale", "into"};
  Arguments arguments;
  if (!arguments.parse("attention_grad", names, 10, 7, args, nargs, kwnames)) return nullptr;
  HeadsInput gout(arguments[0], "gout"), q(arguments[1], "q"), k(arguments[2], "k"), v(arguments[3], "v"),
      out(arguments[4], "out");
  FloatInput logsumexp(arguments[5], "logsumexp");
  if (!gout || !q || !k || !v || !out || !logsumexp) return nullptr;
  AttentionBatch problem;
  if (!read_problem(q, k, v, arguments[6], arguments[7], arguments[8], problem)) return nullptr;
  const bool fits = PyArray_SAMESHAPE(gout.array(), out.array()) && out.dim(0) == q.dim(0) && out.dim(1) == q.dim(1) &&
                    out.dim(2) == q.dim(2) && out.dim(3) == v.dim(3) &&
                    logsumexp.size() == q.dim(0) * q.dim(1) * q.dim(2);
  if (!fits) return shape_error("gout and out must be (B, H, T, E) and logsumexp (B, H, T)");
  const HeadsInput* const like[] = {&q, &k, &v};
  PyObject* grads = gradient_arrays(arguments[9], like);
  if (!grads) return nullptr;
  GilRelease release(true);
  attention_backward(problem, gout.rows(), out.rows(), logsumexp.data(), rows_out(PyTuple_GET_ITEM(grads, 0)),
                     rows_out(PyTuple_GET_ITEM(grads, 1)), rows_out(PyTuple_GET_ITEM(grads, 2)));
  return grads;
}

PyMethodDef methods[] = {
    {"attention", (PyCFunction)(void (*)(void))guarded<attention_entry>, METH_FASTCALL | METH_KEYWORDS, nullptr},
    {"attention_grad", (PyCFunction)(void (*)(void))guarded<attention_grad_entry>, METH_FASTCALL | METH_KEYWORDS,
     nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

void bind_attention(nb::module_& m) {
  if (PyModule_AddFunctions(m.ptr(), methods) < 0) throw nb::python_error();
}

}  // namespace tw
