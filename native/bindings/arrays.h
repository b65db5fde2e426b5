// Arguments and results at the boundary to Python, for all binding files: checked arrays, new arrays, errors.
//
// nanobind's signatures suit long calls. A small product takes less time than such a call, so the operations of the
// backend are METH_FASTCALL functions (`method`): checking their arrays costs a few hundred nanoseconds. Both kinds
// raise Python errors as C++ exceptions. Include this instead of <numpy/arrayobject.h>.
#pragma once

#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#define NPY_TARGET_VERSION NPY_1_22_API_VERSION  // the first with allocators for arrays
#define PY_ARRAY_UNIQUE_SYMBOL tilewise_numpy_api
#ifndef TILEWISE_FILLS_NUMPY_API
#define NO_IMPORT_ARRAY
#endif
#include "bindings/bindings.h"  // includes Python.h

#include <numpy/arrayobject.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <new>
#include <type_traits>

namespace tw {

// Loads NumPy's C API, which all binding files share. Called once, when the module is initialized.
void import_numpy();

// --- errors ---

[[noreturn]] void raise(const char* error, const char* format, ...);

// Raises tilewise.errors.<error> with one sentence. Integers are formatted by %lld, objects by %R.
template <class... Values>
[[noreturn]] void refuse(const char* error, const char* format, Values... values) {
  [[maybe_unused]] const auto printable = [](auto value) {
    if constexpr (std::is_integral_v<decltype(value)>) {
      return static_cast<long long>(value);
    } else {
      return value;
    }
  };
  raise(error, format, printable(values)...);
}

inline void check(bool valid, const char* sentence) {
  if (!valid) refuse("ShapeError", "%s", sentence);
}

// --- functions with cheap calls ---

struct Call {
  PyObject* self;
  PyObject* const* args;  // positional arguments, then keyword arguments
  Py_ssize_t count;       // number of positional arguments
  PyObject* keywords;     // tuple of names, or null
};

// The C entry point of a function: turns exceptions into Python errors.
template <nb::object (*function)(const Call&)>
PyObject* entry(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  try {
    return function({self, args, count, keywords}).release().ptr();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  }
  return nullptr;
}

template <nb::object (*function)(const Call&)>
PyMethodDef method(const char* name, const char* doc = nullptr) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(entry<function>)),
          METH_FASTCALL | METH_KEYWORDS, doc};
}

inline void add_functions(nb::module_& m, PyMethodDef* methods) {
  if (PyModule_AddFunctions(m.ptr(), methods) < 0) throw nb::python_error();
}

// The parameters of one function. Use one static instance: names are interned once, so that the keyword of a call,
// which is interned too, is found by comparing addresses.
class Parameters {
 public:
  static constexpr int kMost = 12;  // chosen: most parameters of a function
  using Values = std::array<PyObject*, kMost>;
  Parameters(const char* function, std::initializer_list<const char*> names, int required);

  // Returns the arguments in the order of the names; null if one was not passed.
  Values read(const Call& call) const;
  int find(PyObject* keyword) const;  // index of a parameter, or -1

 private:
  const char* function_;
  PyObject* names_[kMost];
  int total_, required_;
};

inline bool is_given(PyObject* argument) { return argument != nullptr && argument != Py_None; }

inline bool equals(PyObject* object, const char* text) {
  return PyUnicode_Check(object) && PyUnicode_CompareWithASCIIString(object, text) == 0;
}

int read_activation(PyObject* object);  // the index of its name among None, 'relu' and 'gelu'
int64_t read_size(PyObject* object, int64_t low, const char* name);  // at least `low`
void read_sizes(PyObject* object, int count, int64_t low, const char* name,
                int64_t* sizes);  // a tuple of `count` sizes

// Reads an attribute of a tile, which must be a whole number. `name` is a str.
int64_t tile_attribute(PyObject* tile, PyObject* name, const char* type);

// chosen: multiply-adds or elements. Releasing and acquiring the GIL takes 50 ns; this much work takes one microsecond
// (a product) to ten (a row function), which another thread can wait for.
constexpr int64_t kMinWorkForGilRelease = 1 << 16;

// Calls f, without the GIL if the work is long enough for another Python thread to profit. f must not touch objects.
template <class F>
void without_gil(bool worth_it, F&& f) {
  struct Release {
    explicit Release(bool release) : state(release ? PyEval_SaveThread() : nullptr) {}
    ~Release() {
      if (state != nullptr) PyEval_RestoreThread(state);
    }
    PyThreadState* state;
  } release(worth_it);
  f();
}

// --- arrays ---

// NumPy's type number of an element type.
template <class T>
constexpr int numpy_type() {
  return std::is_same_v<T, float>      ? NPY_FLOAT32
         : std::is_same_v<T, int8_t>   ? NPY_INT8
         : std::is_same_v<T, uint8_t>  ? NPY_UINT8
         : std::is_same_v<T, int16_t>  ? NPY_INT16
         : std::is_same_v<T, uint16_t> ? NPY_FLOAT16  // its bits
         : std::is_same_v<T, int32_t>  ? NPY_INT32
                                       : NPY_INT64;
}

inline PyArrayObject* as_array(nb::handle object) { return reinterpret_cast<PyArrayObject*>(object.ptr()); }

// Returns the object if it is a C-contiguous, aligned float32 array of native byte order; else null.
inline PyArrayObject* as_float_array(nb::handle object) {
  if (!PyArray_Check(object.ptr())) return nullptr;
  PyArrayObject* array = as_array(object);
  return PyArray_TYPE(array) == NPY_FLOAT32 && PyArray_ISCARRAY_RO(array) ? array : nullptr;
}

inline bool is_float32(nb::handle object) {
  return PyArray_Check(object.ptr()) && PyArray_TYPE(as_array(object)) == NPY_FLOAT32;
}

template <class T>
T* data(nb::handle array) {
  return static_cast<T*>(PyArray_DATA(as_array(array)));
}

// A C-contiguous array that is read in place.
template <class T>
struct ArrayView {
  PyArrayObject* array;
  T* data;

  int64_t dim(int i) const { return PyArray_DIM(array, i); }
  int64_t size() const { return PyArray_SIZE(array); }
};

// Returns the object as an array; refuses anything but a C-contiguous one of this type and number of dimensions.
PyArrayObject* checked(nb::handle object, int type, int ndim, const char* name);

template <class T>
ArrayView<T> view_of(nb::handle object, int ndim, const char* name) {
  PyArrayObject* array = checked(object, numpy_type<T>(), ndim, name);
  return {array, static_cast<T*>(PyArray_DATA(array))};
}

// An input of an operation: an array of any strides, copied if it is not C-contiguous.
class Input {
 public:
  Input(PyObject* object, const char* name, int ndim = -1, int type = NPY_FLOAT32);  // ndim -1: any

  PyArrayObject* array() const { return as_array(owner_); }
  const float* floats() const { return data<float>(owner_); }
  template <class T>
  const T* numbers() const {
    return data<T>(owner_);
  }
  bool is_copy() const { return is_copy_; }
  int ndim() const { return PyArray_NDIM(array()); }
  npy_intp dim(int i) const { return PyArray_DIM(array(), i); }
  npy_intp size() const { return PyArray_SIZE(array()); }
  npy_intp* shape() const { return PyArray_DIMS(array()); }

 private:
  nb::object owner_;
  bool is_copy_;
};

inline bool same_shape(const Input& a, const Input& b) { return PyArray_SAMESHAPE(a.array(), b.array()); }

// --- arguments of nanobind functions: FloatArray and the like ---

using Longs = nb::ndarray<const int64_t, nb::c_contig, nb::device::cpu>;

inline auto array_arg(const char* name) { return nb::arg(name).noconvert(); }

template <class Array>
bool has_size(const Array& x, int64_t size) {
  return static_cast<int64_t>(x.size()) == size;
}

template <class Array>
bool has_shape(const Array& x, std::initializer_list<int64_t> shape) {
  if (x.ndim() != shape.size()) return false;
  std::size_t axis = 0;
  for (int64_t length : shape) {
    if (static_cast<int64_t>(x.shape(axis++)) != length) return false;
  }
  return true;
}

template <class Array>
int64_t last_size(const Array& x) {
  return x.ndim() == 0 ? 0 : static_cast<int64_t>(x.shape(x.ndim() - 1));
}

// --- results ---

// Returns an uninitialized array; a large one takes its memory from the pool (array_pool.h).
nb::object allocate_array(int ndim, const npy_intp* shape, int type);

template <class T>
struct NewArray {
  nb::object object;
  T* data;
};

template <class T = float>
NewArray<T> new_array(int ndim, const npy_intp* shape) {
  nb::object object = allocate_array(ndim, shape, numpy_type<T>());
  T* const values = data<T>(object);
  return {std::move(object), values};
}

template <class T = float>
NewArray<T> new_array(std::initializer_list<npy_intp> shape) {
  return new_array<T>(static_cast<int>(shape.size()), shape.begin());
}

inline NewArray<float> new_array_like(const Input& x) { return new_array(x.ndim(), x.shape()); }

}  // namespace tw
