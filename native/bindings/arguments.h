// What raw METH_FASTCALL entries share: arguments by position or keyword, arrays as contiguous float32, pairs and
// sizes, and refusals as tilewise's own errors.
#pragma once

#include <initializer_list>

#include "bindings/numpy_api.h"

namespace tw {

// Sets tilewise.errors.<error> with a sentence; returns nullptr.
PyObject* refuse(const char* error, const char* format, ...);

// The parameters of one function. Make one static instance: names are interned once, so that a keyword of a call, which
// is interned too, is found by its address.
class Parameters {
 public:
  static constexpr int kMost = 12;
  Parameters(const char* function, std::initializer_list<const char*> names, int required);

  // Fills `values` (as many as there are names) from positional arguments, then keywords; missing ones stay null.
  // False: a Python error is set.
  bool read(PyObject* const* args, Py_ssize_t count, PyObject* keywords, PyObject** values) const;

 private:
  int find(PyObject* keyword) const;

  const char* function_;
  PyObject* names_[kMost];
  int total_, required_;
};

bool read_size(PyObject* object, int64_t low, const char* name, int64_t* out);
bool read_pair(PyObject* object, int64_t low, const char* name, int64_t* first, int64_t* second);
bool read_sizes(PyObject* object, int count, const char* name, int64_t* out);

bool is_float32(PyObject* object);

// An argument as a contiguous array of one type: itself, or a converted copy.
class ArrayArgument {
 public:
  ArrayArgument() = default;
  ~ArrayArgument() { Py_XDECREF(owned_); }
  ArrayArgument(const ArrayArgument&) = delete;
  ArrayArgument& operator=(const ArrayArgument&) = delete;

  bool set(PyObject* object, int type, int ndim, const char* name);
  bool set_floats(PyObject* object, int ndim, const char* name) { return set(object, NPY_FLOAT32, ndim, name); }

  const void* data() const { return array_ == nullptr ? nullptr : PyArray_DATA(array_); }
  const float* floats() const { return static_cast<const float*>(data()); }
  int64_t dim(int i) const { return PyArray_DIM(array_, i); }
  bool is_copy() const { return owned_ != nullptr; }

 private:
  PyArrayObject* array_ = nullptr;
  PyObject* owned_ = nullptr;
};

}  // namespace tw
