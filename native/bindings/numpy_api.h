// NumPy's C API for entries whose call overhead matters: a METH_FASTCALL function that checks its arrays here costs a
// few hundred nanoseconds, a nanobind signature several times that. The API table is shared by all binding files and
// filled by import_numpy() when the module is loaded. Include this instead of <numpy/arrayobject.h>.
#pragma once

#include <Python.h>

#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#define NPY_TARGET_VERSION NPY_1_22_API_VERSION  // the first with allocators for arrays
#define PY_ARRAY_UNIQUE_SYMBOL tilewise_numpy_api
#ifndef TILEWISE_FILLS_NUMPY_API
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include <cstdint>
#include <new>

namespace tw {

// Called once by the module's initialiser; false with a Python error set where NumPy cannot be imported.
bool import_numpy();

// A float32 array of native byte order, aligned, in C order; nullptr (no error set) for anything else.
inline PyArrayObject* as_float_array(PyObject* object) {
  if (!PyArray_Check(object)) return nullptr;
  PyArrayObject* array = reinterpret_cast<PyArrayObject*>(object);
  if (PyArray_TYPE(array) != NPY_FLOAT32 || !PyArray_ISCARRAY_RO(array)) return nullptr;
  return array;
}

inline float* floats(PyArrayObject* array) { return static_cast<float*>(PyArray_DATA(array)); }

// An uninitialised array; a large one takes its memory from the pool (array_pool.h).
PyArrayObject* new_array(int ndim, const npy_intp* shape, int type);

inline PyArrayObject* new_float_array(int ndim, const npy_intp* shape) { return new_array(ndim, shape, NPY_FLOAT32); }

inline PyArrayObject* new_float_array_like(PyArrayObject* array) {
  return new_float_array(PyArray_NDIM(array), PyArray_DIMS(array));
}

// Sets tilewise.errors.ShapeError (a ValueError) or DtypeError (a TypeError) with one sentence; returns nullptr.
PyObject* shape_error(const char* format, ...);
PyObject* dtype_error(const char* format, ...);

// An input of an operation: a float32 array, copied into C order where it is not; empty with an error set where the
// object is no float32 array. Several may be made before they are checked: the first error stays.
class FloatInput {
 public:
  FloatInput(PyObject* object, const char* name);
  ~FloatInput() { Py_XDECREF(reinterpret_cast<PyObject*>(array_)); }
  FloatInput(const FloatInput&) = delete;
  FloatInput& operator=(const FloatInput&) = delete;

  explicit operator bool() const { return array_ != nullptr; }
  PyArrayObject* array() const { return array_; }
  const float* data() const { return floats(array_); }
  int ndim() const { return PyArray_NDIM(array_); }
  npy_intp dim(int i) const { return PyArray_DIM(array_, i); }
  npy_intp size() const { return PyArray_SIZE(array_); }

 private:
  PyArrayObject* array_;
};

bool same_shape(const FloatInput& a, const FloatInput& b);

// The arguments of a METH_FASTCALL | METH_KEYWORDS entry, by position or name, against its parameter names (at most
// 16). Missing trailing ones are nullptr where `required` allows; false with a TypeError set where they do not fit.
class Arguments {
 public:
  static constexpr int kMost = 16;
  bool parse(const char* function, const char* const* names, int count, int required, PyObject* const* args,
             Py_ssize_t nargs, PyObject* kwnames);
  PyObject* operator[](int i) const { return values_[i]; }

 private:
  PyObject* values_[kMost] = {};
};

// Wraps an entry point so that no C++ exception leaves it: std::bad_alloc becomes Python's MemoryError.
template <auto entry>
PyObject* guarded(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  try {
    return entry(self, args, nargs, kwnames);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

// Releases the GIL while a kernel has enough to do for another Python thread to profit.
class GilRelease {
 public:
  explicit GilRelease(bool worth_it) : state_(worth_it ? PyEval_SaveThread() : nullptr) {}
  ~GilRelease() {
    if (state_) PyEval_RestoreThread(state_);
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace tw
