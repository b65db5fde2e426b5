// Fills the NumPy API table that the other binding files use, and checks arguments for them (numpy_api.h).
#define TILEWISE_FILLS_NUMPY_API
#include "bindings/numpy_api.h"

#include <cstdarg>

namespace tw {
namespace {

PyObject* raise(const char* error_class, PyObject* fallback, const char* format, va_list values) {
  PyObject* errors = PyImport_ImportModule("tilewise.errors");
  PyObject* type = errors ? PyObject_GetAttrString(errors, error_class) : nullptr;
  if (!type) PyErr_Clear();
  PyErr_FormatV(type ? type : fallback, format, values);
  Py_XDECREF(type);
  Py_XDECREF(errors);
  return nullptr;
}

int find_name(PyObject* name, const char* const* names, int count) {
  for (int i = 0; i < count; ++i) {
    if (PyUnicode_CompareWithASCIIString(name, names[i]) == 0) return i;
  }
  return -1;
}

}  // namespace

bool import_numpy() { return _import_array() >= 0; }

PyObject* shape_error(const char* format, ...) {
  va_list values;
  va_start(values, format);
  raise("ShapeError", PyExc_ValueError, format, values);
  va_end(values);
  return nullptr;
}

PyObject* dtype_error(const char* format, ...) {
  va_list values;
  va_start(values, format);
  raise("DtypeError", PyExc_TypeError, format, values);
  va_end(values);
  return nullptr;
}

FloatInput::FloatInput(PyObject* object, const char* name) : array_(as_float_array(object)) {
  if (array_) {
    Py_INCREF(object);
  } else if (PyErr_Occurred()) {
    return;
  } else if (PyArray_Check(object) && PyArray_TYPE(reinterpret_cast<PyArrayObject*>(object)) == NPY_FLOAT32) {
    array_ = reinterpret_cast<PyArrayObject*>(PyArray_FROM_OTF(object, NPY_FLOAT32, NPY_ARRAY_IN_ARRAY));
  } else {
    dtype_error("%s must be a float32 array", name);
  }
}

bool same_shape(const FloatInput& a, const FloatInput& b) { return PyArray_SAMESHAPE(a.array(), b.array()); }

bool Arguments::parse(const char* function, const char* const* names, int count, int required, PyObject* const* args,
                      Py_ssize_t nargs, PyObject* kwnames) {
  if (nargs > count) {
    PyErr_Format(PyExc_TypeError, "%s takes %d arguments, not %zd", function, count, nargs);
    return false;
  }
  for (Py_ssize_t i = 0; i < nargs; ++i) values_[i] = args[i];
  const Py_ssize_t keywords = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
  for (Py_ssize_t k = 0; k < keywords; ++k) {
    PyObject* name = PyTuple_GET_ITEM(kwnames, k);
    const int at = find_name(name, names, count);
    if (at < 0 || values_[at]) {
      PyErr_Format(PyExc_TypeError, "%s has no free parameter %R", function, name);
      return false;
    }
    values_[at] = args[nargs + k];
  }
  for (int i = 0; i < required; ++i) {
    if (!values_[i]) {
      PyErr_Format(PyExc_TypeError, "%s misses its argument '%s'", function, names[i]);
      return false;
    }
  }
  return true;
}

}  // namespace tw
