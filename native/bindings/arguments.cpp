#include "bindings/arguments.h"

#include <cstdarg>

namespace tw {

PyObject* refuse(const char* error, const char* format, ...) {
  PyObject* errors = PyImport_ImportModule("tilewise.errors");
  if (errors == nullptr) return nullptr;
  PyObject* type = PyObject_GetAttrString(errors, error);
  Py_DECREF(errors);
  if (type == nullptr) return nullptr;
  va_list args;
  va_start(args, format);
  PyErr_FormatV(type, format, args);
  va_end(args);
  Py_DECREF(type);
  return nullptr;
}

Parameters::Parameters(const char* function, std::initializer_list<const char*> names, int required)
    : function_(function), total_(0), required_(required) {
  for (const char* name : names) names_[total_++] = PyUnicode_InternFromString(name);
}

int Parameters::find(PyObject* keyword) const {
  for (int i = 0; i < total_; ++i) {
    if (names_[i] == keyword) return i;
  }
  for (int i = 0; i < total_; ++i) {
    if (PyUnicode_Compare(names_[i], keyword) == 0) return i;
  }
  return -1;
}

bool Parameters::read(PyObject* const* args, Py_ssize_t count, PyObject* keywords, PyObject** values) const {
  if (count > total_) {
    PyErr_Format(PyExc_TypeError, "%s takes at most %d arguments, not %zd", function_, total_, count);
    return false;
  }
  for (Py_ssize_t i = 0; i < count; ++i) values[i] = args[i];
  const Py_ssize_t extra = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t k = 0; k < extra; ++k) {
    PyObject* keyword = PyTuple_GET_ITEM(keywords, k);
    const int at = find(keyword);
    if (at < count) {  // unknown, or given by position already
      PyErr_Format(PyExc_TypeError, "%s does not take the argument %R here", function_, keyword);
      return false;
    }
    values[at] = args[count + k];
  }
  for (int i = 0; i < required_; ++i) {
    if (values[i] != nullptr) continue;
    PyErr_Format(PyExc_TypeError, "%s needs the argument %R", function_, names_[i]);
    return false;
  }
  return true;
}

bool read_size(PyObject* object, int64_t low, const char* name, int64_t* out) {
  *out = PyLong_AsLongLong(object);
  if (*out == -1 && PyErr_Occurred()) return false;
  if (*out >= low && *out < (int64_t{1} << 31)) return true;
  refuse("ShapeError", "%s must be at least %lld and below 2**31, not %R", name, static_cast<long long>(low), object);
  return false;
}

bool read_sizes(PyObject* object, int count, const char* name, int64_t* out) {
  if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != count) {
    refuse("ShapeError", "%s must be a tuple of %d sizes, not %R", name, count, object);
    return false;
  }
  for (int i = 0; i < count; ++i) {
    if (!read_size(PyTuple_GET_ITEM(object, i), 0, name, &out[i])) return false;
  }
  return true;
}

bool read_pair(PyObject* object, int64_t low, const char* name, int64_t* first, int64_t* second) {
  if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != 2) {
    refuse("ShapeError", "%s must be a pair of sizes, not %R", name, object);
    return false;
  }
  return read_size(PyTuple_GET_ITEM(object, 0), low, name, first) &&
         read_size(PyTuple_GET_ITEM(object, 1), low, name, second);
}

bool is_float32(PyObject* object) {
  return PyArray_Check(object) && PyArray_TYPE(reinterpret_cast<PyArrayObject*>(object)) == NPY_FLOAT32;
}

bool ArrayArgument::set(PyObject* object, int type, int ndim, const char* name) {
  if (PyArray_Check(object)) {
    PyArrayObject* array = reinterpret_cast<PyArrayObject*>(object);
    if (PyArray_TYPE(array) == type && PyArray_ISCARRAY_RO(array)) array_ = array;
  }
  if (array_ == nullptr) {
    owned_ = PyArray_FROMANY(object, type, 0, 0, NPY_ARRAY_CARRAY_RO | NPY_ARRAY_FORCECAST);
    if (owned_ == nullptr) return false;
    array_ = reinterpret_cast<PyArrayObject*>(owned_);
  }
  if (PyArray_NDIM(array_) == ndim) return true;
  refuse("ShapeError", "%s must have %d dimensions, not %d", name, ndim, PyArray_NDIM(array_));
  return false;
}

}  // namespace tw
