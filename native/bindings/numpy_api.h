// NumPy's C API for entries whose call overhead matters: a METH_FASTCALL function that checks its arrays here costs a
// few hundred nanoseconds, a nanobind signature several times that. The API table is shared by all binding files and
// filled by import_numpy() when the module is loaded. Include this instead of <numpy/arrayobject.h>.
#pragma once

#include <Python.h>

#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL tilewise_numpy_api
#ifndef TILEWISE_FILLS_NUMPY_API
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include <cstdint>

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

inline PyArrayObject* new_float_array(int ndim, const npy_intp* shape) {
  return reinterpret_cast<PyArrayObject*>(PyArray_SimpleNew(ndim, const_cast<npy_intp*>(shape), NPY_FLOAT32));
}

inline PyArrayObject* new_float_array_like(PyArrayObject* array) {
  return new_float_array(PyArray_NDIM(array), PyArray_DIMS(array));
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
