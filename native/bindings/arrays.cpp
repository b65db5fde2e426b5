#define TILEWISE_FILLS_NUMPY_API
#include "bindings/arrays.h"

#include <cstdarg>

namespace tw {

void import_numpy() {
  if (_import_array() < 0) throw nb::python_error();
}

void raise(const char* error, const char* format, ...) {
  const nb::object type = nb::module_::import_("tilewise.errors").attr(error);
  va_list values;
  va_start(values, format);
  PyErr_FormatV(type.ptr(), format, values);
  va_end(values);
  throw nb::python_error();
}

Parameters::Parameters(const char* function, std::initializer_list<const char*> names, int required)
    : function_(function), total_(0), required_(required) {
  for (const char* name : names) names_[total_++] = PyUnicode_InternFromString(name);
}

// Returns the position of the parameter with this name, or -1; interned strings are compared by address first.
int Parameters::find(PyObject* keyword) const {
  for (int i = 0; i < total_; ++i) {
    if (names_[i] == keyword) return i;
  }
  for (int i = 0; i < total_; ++i) {
    if (PyUnicode_Compare(names_[i], keyword) == 0) return i;
  }
  return -1;
}

Parameters::Values Parameters::read(const Call& call) const {
  if (call.count > total_)
    refuse("ConfigurationError", "%s takes at most %lld arguments, not %lld", function_, total_, call.count);
  Values values{};
  for (Py_ssize_t i = 0; i < call.count; ++i) values[i] = call.args[i];
  const Py_ssize_t extra = call.keywords == nullptr ? 0 : PyTuple_GET_SIZE(call.keywords);
  for (Py_ssize_t k = 0; k < extra; ++k) {
    PyObject* keyword = PyTuple_GET_ITEM(call.keywords, k);
    const int at = find(keyword);
    if (at < call.count)  // unknown, or passed by position already
      refuse("ConfigurationError", "%s does not take the argument %R here", function_, keyword);
    values[at] = call.args[call.count + k];
  }
  for (int i = 0; i < required_; ++i) {
    if (values[i] == nullptr) refuse("ConfigurationError", "%s needs the argument %R", function_, names_[i]);
  }
  return values;
}

int read_activation(PyObject* object) {
  if (!is_given(object)) return 0;
  if (equals(object, "relu")) return 1;
  if (equals(object, "gelu")) return 2;
  refuse("ConfigurationError", "the activation must be None, 'relu' or 'gelu', not %R", object);
}

int64_t read_size(PyObject* object, int64_t low, const char* name) {
  const int64_t size = PyLong_AsLongLong(object);
  if (size == -1 && PyErr_Occurred()) throw nb::python_error();
  if (size < low || size >= int64_t{1} << 31)
    refuse("ShapeError", "%s must be at least %lld and below 2**31, not %R", name, low, object);
  return size;
}

void read_sizes(PyObject* object, int count, int64_t low, const char* name, int64_t* sizes) {
  if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != count)
    refuse("ShapeError", "%s must be a tuple of %lld sizes, not %R", name, count, object);
  for (int i = 0; i < count; ++i) sizes[i] = read_size(PyTuple_GET_ITEM(object, i), low, name);
}

int64_t tile_attribute(PyObject* tile, PyObject* name, const char* type) {
  const nb::object value = nb::steal(PyObject_GetAttr(tile, name));
  const int64_t number = value.is_valid() ? PyLong_AsLongLong(value.ptr()) : -1;
  if (number != -1 || !PyErr_Occurred()) return number;
  PyErr_Clear();
  refuse("ConfigurationError", "a tile must be %s with a whole number %U, not %R", type, name, tile);
}

PyArrayObject* checked(nb::handle object, int type, int ndim, const char* name) {
  PyArrayObject* array = as_array(object);
  const bool fits = PyArray_Check(object.ptr()) && PyArray_TYPE(array) == type && PyArray_NDIM(array) == ndim &&
                    PyArray_ISCARRAY_RO(array);
  if (!fits)
    refuse("DtypeError", "%s must be a C-contiguous array of %lld dimensions and the documented dtype", name, ndim);
  return array;
}

// Borrows a NumPy array, or copies it if it is not contiguous; throws if its type or number of axes is wrong.
Input::Input(PyObject* object, const char* name, int ndim, int type) : is_copy_(false) {
  if (!PyArray_Check(object) || PyArray_TYPE(as_array(object)) != type)
    refuse("DtypeError", "%s must be %s array", name, type == NPY_FLOAT32 ? "a float32" : "an int32");
  if (PyArray_ISCARRAY_RO(as_array(object))) {
    owner_ = nb::borrow(object);
  } else {
    owner_ = nb::steal(PyArray_FROM_OTF(object, type, NPY_ARRAY_IN_ARRAY));
    if (!owner_.is_valid()) throw nb::python_error();
    is_copy_ = true;
  }
  if (ndim >= 0 && this->ndim() != ndim)
    refuse("ShapeError", "%s must have %lld dimensions, not %lld", name, ndim, this->ndim());
}

}  // namespace tw
