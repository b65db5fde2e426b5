// matmul seen from Python. A plain METH_FASTCALL function: on small matrices the call itself decides, and this one
// costs about a quarter of a microsecond. Arrays of any strides are taken as they are.
#include <algorithm>
#include <memory>

#include "bindings/arguments.h"
#include "bindings/bindings.h"
#include "bindings/numpy_api.h"
#include "bindings/tile_table.h"
#include "common/matmul.h"
#include "common/product_terms.h"
#include "common/thread_pool.h"

namespace tw {
namespace {

// Releasing the GIL costs more than a product this small.
constexpr int64_t kMinWorkForGilRelease = 1 << 16;

struct Call {
  PyObject* a = nullptr;
  PyObject* b = nullptr;
  PyObject* bias = Py_None;
  PyObject* activation = Py_None;
  PyObject* residual = Py_None;
  PyObject* tile = nullptr;  // not given: the chooser is asked, where there is one; None: the default
};

struct Names {
  PyObject *bias, *activation, *residual, *tile, *mr, *nr, *mc, *nc, *kc, *pack_a, *pack_b, *threads_m, *threads_n;
};

const Names& names() {
  static const Names interned = {
      PyUnicode_InternFromString("bias"),      PyUnicode_InternFromString("activation"),
      PyUnicode_InternFromString("residual"),  PyUnicode_InternFromString("tile"),
      PyUnicode_InternFromString("mr"),        PyUnicode_InternFromString("nr"),
      PyUnicode_InternFromString("mc"),        PyUnicode_InternFromString("nc"),
      PyUnicode_InternFromString("kc"),        PyUnicode_InternFromString("pack_a"),
      PyUnicode_InternFromString("pack_b"),    PyUnicode_InternFromString("threads_m"),
      PyUnicode_InternFromString("threads_n"),
  };
  return interned;
}

bool same_name(PyObject* name, PyObject* interned) {
  return name == interned || PyUnicode_Compare(name, interned) == 0;
}

bool assign_keyword(Call& call, PyObject* name, PyObject* value) {
  const Names& n = names();
  if (same_name(name, n.bias)) {
    call.bias = value;
  } else if (same_name(name, n.activation)) {
    call.activation = value;
  } else if (same_name(name, n.residual)) {
    call.residual = value;
  } else if (same_name(name, n.tile)) {
    call.tile = value;
  } else {
    refuse("ConfigurationError", "matmul has no parameter %R; it takes bias, activation, residual and tile", name);
    return false;
  }
  return true;
}

bool parse(PyObject* const* args, Py_ssize_t count, PyObject* keywords, Call& call) {
  if (count < 2 || count > 3) {
    refuse("ConfigurationError", "matmul takes two arrays and optionally a tile, not %zd arguments", count);
    return false;
  }
  call.a = args[0];
  call.b = args[1];
  if (count == 3) call.tile = args[2];
  const Py_ssize_t extra = keywords ? PyTuple_GET_SIZE(keywords) : 0;
  for (Py_ssize_t i = 0; i < extra; ++i) {
    if (!assign_keyword(call, PyTuple_GET_ITEM(keywords, i), args[count + i])) return false;
  }
  return true;
}

// A float32 array whose strides are whole elements; anything else is refused with a reason.
bool usable(PyObject* object) {
  if (!PyArray_Check(object)) return false;
  PyArrayObject* array = reinterpret_cast<PyArrayObject*>(object);
  if (PyArray_TYPE(array) != NPY_FLOAT32 || !PyArray_ISBEHAVED_RO(array)) return false;
  for (int d = 0; d < PyArray_NDIM(array); ++d) {
    if (PyArray_STRIDE(array, d) % 4 != 0) return false;
  }
  return PyArray_NDIM(array) >= 1 && PyArray_NDIM(array) <= kMaxBatchDims + 2;
}

bool check_usable(PyObject* object, const char* name) {
  if (usable(object)) return true;
  if (!PyArray_Check(object)) {
    refuse("DtypeError", "matmul takes NumPy arrays, but %s is a %s", name, Py_TYPE(object)->tp_name);
    return false;
  }
  PyArrayObject* array = reinterpret_cast<PyArrayObject*>(object);
  if (PyArray_NDIM(array) == 0 || PyArray_NDIM(array) > kMaxBatchDims + 2) {
    refuse("ShapeError", "matmul takes arrays of 1 to %d dimensions, but %s has %d", kMaxBatchDims + 2, name,
           PyArray_NDIM(array));
    return false;
  }
  refuse("DtypeError", "the native matmul takes aligned float32 arrays of native byte order, but %s is %R", name,
         reinterpret_cast<PyObject*>(PyArray_DESCR(array)));
  return false;
}

struct Shape {
  int dims = 0;
  npy_intp at[kMaxBatchDims + 2];
};

// Sets a ShapeError that names both shapes, and returns false.
bool raise_shape_error(PyArrayObject* a, PyArrayObject* b) {
  PyObject* left = PyObject_GetAttrString(reinterpret_cast<PyObject*>(a), "shape");
  PyObject* right = PyObject_GetAttrString(reinterpret_cast<PyObject*>(b), "shape");
  if (left && right) refuse("ShapeError", "matmul cannot multiply arrays of shapes %R and %R", left, right);
  Py_XDECREF(left);
  Py_XDECREF(right);
  return false;
}

// Batch dimensions as NumPy broadcasts them, right-aligned.
bool broadcast_batch(PyArrayObject* a, int a_batch, PyArrayObject* b, int b_batch, Batch& batch, Shape& shape) {
  batch.dims = a_batch > b_batch ? a_batch : b_batch;
  for (int d = 0; d < batch.dims; ++d) {
    const int da = d - (batch.dims - a_batch), db = d - (batch.dims - b_batch);
    const int64_t size_a = da >= 0 ? PyArray_DIM(a, da) : 1, size_b = db >= 0 ? PyArray_DIM(b, db) : 1;
    if (size_a != size_b && size_a != 1 && size_b != 1) return raise_shape_error(a, b);
    const int64_t size = size_a == 1 ? size_b : size_a;
    batch.shape[d] = size;
    batch.a_stride[d] = da >= 0 && size_a != 1 ? PyArray_STRIDE(a, da) / 4 : 0;
    batch.b_stride[d] = db >= 0 && size_b != 1 ? PyArray_STRIDE(b, db) / 4 : 0;
    batch.count *= size;
    shape.at[shape.dims++] = size;
  }
  return true;
}

bool describe(PyArrayObject* a, PyArrayObject* b, Gemm& g, Batch& batch, Shape& shape) {
  const int a_dims = PyArray_NDIM(a), b_dims = PyArray_NDIM(b);
  g.m = a_dims == 1 ? 1 : PyArray_DIM(a, a_dims - 2);
  g.k = PyArray_DIM(a, a_dims - 1);
  g.n = b_dims == 1 ? 1 : PyArray_DIM(b, b_dims - 1);
  if (PyArray_DIM(b, b_dims == 1 ? 0 : b_dims - 2) != g.k) return raise_shape_error(a, b);
  g.a = static_cast<const float*>(PyArray_DATA(a));
  g.b = static_cast<const float*>(PyArray_DATA(b));
  g.a_row = a_dims == 1 ? 0 : PyArray_STRIDE(a, a_dims - 2) / 4;
  g.a_col = PyArray_STRIDE(a, a_dims - 1) / 4;
  g.b_row = PyArray_STRIDE(b, b_dims == 1 ? 0 : b_dims - 2) / 4;
  g.b_col = b_dims == 1 ? 0 : PyArray_STRIDE(b, b_dims - 1) / 4;
  // A dimension of size 1 may carry any stride; say the one that lets the fast paths see what they need.
  if (g.k == 1) g.a_col = g.a_col == 0 ? 0 : 1;
  if (g.k == 1) g.b_row = g.b_row == 0 ? 0 : 1;
  if (g.m == 1) g.a_row = 0;
  if (g.n == 1) g.b_col = 0;
  g.c_row = g.n;
  if ((a_dims > 2 || b_dims > 2) &&
      !broadcast_batch(a, a_dims > 2 ? a_dims - 2 : 0, b, b_dims > 2 ? b_dims - 2 : 0, batch, shape)) {
    return false;
  }
  if (a_dims > 1) shape.at[shape.dims++] = g.m;
  if (b_dims > 1) shape.at[shape.dims++] = g.n;
  return true;
}

// Turns a batch of matrices times one matrix into a single taller product, if all rows are evenly spaced.
void fold_batch_into_rows(Gemm& g, Batch& batch) {
  int64_t rows = g.m, row = g.a_row;
  for (int d = batch.dims - 1; d >= 0; --d) {
    if (batch.shape[d] == 1) continue;
    if (rows == 1) row = batch.a_stride[d];
    if (batch.b_stride[d] != 0 || batch.a_stride[d] != rows * row) return;
    rows *= batch.shape[d];
  }
  g.m = rows;
  g.a_row = row;
  g.epilogue.residual_row = g.n;
  batch.count = 1;
  batch.dims = 0;
}

bool parse_epilogue(const Call& call, Gemm& g, Batch& batch, const Shape& shape) {
  Epilogue& e = g.epilogue;
  if (call.bias != Py_None) {
    PyArrayObject* bias = as_float_array(call.bias);
    if (bias == nullptr || PyArray_NDIM(bias) != 1 || PyArray_DIM(bias, 0) != g.n) {
      refuse("ShapeError", "the bias of this matmul must be a contiguous float32 array of %lld elements",
             static_cast<long long>(g.n));
      return false;
    }
    e.bias = floats(bias);
  }
  if (call.residual != Py_None) {
    PyArrayObject* residual = as_float_array(call.residual);
    bool fits = residual != nullptr && PyArray_NDIM(residual) == shape.dims;
    for (int d = 0; fits && d < shape.dims; ++d) fits = PyArray_DIM(residual, d) == shape.at[d];
    if (!fits) {
      refuse("ShapeError", "the residual must be a contiguous float32 array of the result's shape");
      return false;
    }
    e.residual = floats(residual);
    e.residual_row = g.n;
    int64_t stride = g.m * g.n;
    for (int d = batch.dims - 1; d >= 0; --d) {
      batch.residual_stride[d] = stride;
      stride *= batch.shape[d];
    }
  }
  if (call.activation != Py_None) {
    if (PyUnicode_Check(call.activation) && PyUnicode_CompareWithASCIIString(call.activation, "relu") == 0) {
      e.activation = Activation::relu;
    } else if (PyUnicode_Check(call.activation) && PyUnicode_CompareWithASCIIString(call.activation, "gelu") == 0) {
      e.activation = Activation::gelu;
    } else {
      refuse("ConfigurationError", "activation must be None, 'relu' or 'gelu', not %R", call.activation);
      return false;
    }
  }
  return true;
}

bool read_field(PyObject* tile, PyObject* name, int64_t& out) {
  PyObject* value = PyObject_GetAttr(tile, name);
  if (value == nullptr) {
    PyErr_Clear();
    refuse("ConfigurationError", "a matmul tile must be a TileConfig, but %R has no %U", tile, name);
    return false;
  }
  out = PyLong_AsLongLong(value);
  Py_DECREF(value);
  if (out == -1 && PyErr_Occurred()) {
    PyErr_Clear();
    refuse("ConfigurationError", "the tile's %U must be a whole number", name);
    return false;
  }
  return true;
}

constexpr const char* kPrepared = "tilewise.prepared_tile";

bool read_tile(PyObject* object, GemmTile& t) {
  if (PyCapsule_CheckExact(object) && PyCapsule_IsValid(object, kPrepared)) {
    t = *static_cast<const GemmTile*>(PyCapsule_GetPointer(object, kPrepared));
    return true;
  }
  const Names& n = names();
  PyObject* const fields[] = {n.mr, n.nr, n.mc, n.nc, n.kc, n.pack_a, n.pack_b, n.threads_m, n.threads_n};
  int64_t v[9];
  for (int i = 0; i < 9; ++i) {
    if (!read_field(object, fields[i], v[i])) return false;
    if (v[i] < 0 || v[i] > (1 << 30)) v[i] = i < 5 ? -1 : 0;
  }
  t.mr = static_cast<int>(v[0]);
  t.nr = static_cast<int>(v[1]);
  t.mc = v[2];
  t.nc = v[3];
  t.kc = v[4];
  t.pack_a = v[5] != 0;
  t.pack_b = v[6] != 0;
  t.threads_m = static_cast<int>(v[7]);
  t.threads_n = static_cast<int>(v[8]);
  return true;
}

// Sums of so few terms, so few rows or columns: the loops without tiles are faster than any tile, and nobody is asked.
constexpr int64_t kShortSum = 12, kThin = 4;
constexpr const char* kLayouts[] = {"nn", "nt", "tn", "tt"};

// Returns the index in kLayouts; -1 for a product that choosers do not cover.
int chooser_layout(const Gemm& g, int64_t batch, int64_t least_work) {
  if (g.k <= kShortSum || g.m < kThin || g.n <= kThin || batch != 1) return -1;
  if (g.m * g.n * g.k < least_work || std::max({g.m, g.n, g.k}) >= int64_t{1} << 31) return -1;
  const bool a_lies = g.a_col != 1 && g.a_row == 1, b_lies = g.b_col != 1 && g.b_row == 1;
  return b_lies || g.b_col == 1 ? 2 * a_lies + b_lies : -1;  // a B with gaps either way must be packed
}

bool feasible(const GemmTile& tile, const Gemm& g) {
  char reason[160];
  if (!tile_problem(tile, g, reason, sizeof reason)) return true;
  refuse("ConfigurationError", "this tile cannot be used: %s", reason);
  return false;
}

// A configuration given by the caller: the name of a path, or a tile for the tiled path.
bool read_config(PyObject* object, const Gemm& g, ProductConfig& config) {
  if (!PyUnicode_Check(object)) {
    GemmTile tile;
    if (!read_tile(object, tile) || !feasible(tile, g)) return false;
    config_of_tile(g, tile, &config);
    return true;
  }
  ProductPath path;
  const char* name = PyUnicode_AsUTF8(object);
  if (name == nullptr) return false;
  if (!path_from_name(name, &path) || !path_feasible(path, g)) {
    refuse("ConfigurationError", "%R is not a path of this product; matmul_paths lists them", object);
    return false;
  }
  config_of_path(g, path, num_threads(), &config);
  return true;
}

Answer chosen_tile(TileTable& table, const Gemm& g, int64_t batch, GemmTile* tile) {
  const int layout = chooser_layout(g, batch, table.least_work);
  if (layout < 0) return Answer::keep_default;
  const ProductTable::Key key = {{g.m, g.n, g.k, tile_setting(num_threads(), layout)}};
  return look_up(*table.products, key, g.m * g.n * g.k, table.calls_before_asking, tile, [&](GemmTile* out) {
    PyObject* shape =
        Py_BuildValue("(LLL)", static_cast<long long>(g.m), static_cast<long long>(g.n), static_cast<long long>(g.k));
    PyObject* answer = ask_chooser(table, "matmul", shape, kLayouts[layout]);
    if (answer == nullptr) return Answer::failed;
    const bool none = answer == Py_None, usable = none || (read_tile(answer, *out) && feasible(*out, g));
    Py_DECREF(answer);
    return !usable ? Answer::failed : none ? Answer::keep_default : Answer::use_tile;
  });
}

PyObject* multiply(TileTable* table, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  Call call;
  if (!parse(args, count, keywords, call)) return nullptr;
  if (!check_usable(call.a, "a") || !check_usable(call.b, "b")) return nullptr;
  PyArrayObject* a = reinterpret_cast<PyArrayObject*>(call.a);
  PyArrayObject* b = reinterpret_cast<PyArrayObject*>(call.b);
  Gemm g;
  Batch batch;
  Shape shape;
  if (!describe(a, b, g, batch, shape) || !parse_epilogue(call, g, batch, shape)) return nullptr;
  if (batch.dims > 0) fold_batch_into_rows(g, batch);
  ProductConfig config;
  Answer answer = Answer::keep_default;
  if (call.tile == nullptr) {
    GemmTile tile;
    if (table != nullptr && !batch_invariant()) answer = chosen_tile(*table, g, batch.count, &tile);
    if (answer == Answer::failed) return nullptr;
    if (answer == Answer::use_tile) config_of_tile(g, tile, &config);
  } else if (call.tile != Py_None) {
    if (!read_config(call.tile, g, config)) return nullptr;
    answer = Answer::use_tile;
  }
  PyArrayObject* c = new_float_array(shape.dims, shape.at);
  if (c == nullptr) return nullptr;
  g.c = floats(c);
  bool ok;
  {
    GilRelease release(g.m * g.n * g.k * batch.count >= kMinWorkForGilRelease);
    ok = matmul(g, batch, answer == Answer::use_tile ? &config : nullptr);
  }
  if (!ok) {
    Py_DECREF(c);
    return PyErr_NoMemory();
  }
  return shape.dims == 0 ? PyArray_Return(c) : reinterpret_cast<PyObject*>(c);
}

PyObject* matmul_call(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  return multiply(nullptr, args, count, keywords);
}

// Returns None if the native matmul supports these arguments, else one sentence why not.
PyObject* matmul_suits(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  if (count < 2) return PyUnicode_FromString("it needs two arrays");
  for (int i = 0; i < 2; ++i) {
    if (!usable(args[i])) return PyUnicode_FromString("it takes aligned float32 arrays only");
  }
  const Py_ssize_t extra = keywords ? PyTuple_GET_SIZE(keywords) : 0;
  for (Py_ssize_t i = 0; i < extra; ++i) {
    PyObject* name = PyTuple_GET_ITEM(keywords, i);
    PyObject* value = args[count + i];
    const bool array = same_name(name, names().bias) || same_name(name, names().residual);
    if (array && value != Py_None && as_float_array(value) == nullptr) {
      return PyUnicode_FromString("bias and residual must be contiguous float32 arrays");
    }
  }
  Py_RETURN_NONE;
}

PyObject* tile_tuple(const GemmTile& t) {
  return Py_BuildValue("(iiLLLNNii)", t.mr, t.nr, static_cast<long long>(t.mc), static_cast<long long>(t.nc),
                       static_cast<long long>(t.kc), PyBool_FromLong(t.pack_a), PyBool_FromLong(t.pack_b), t.threads_m,
                       t.threads_n);
}

// Reads the product of a and b and folds its batch into rows if possible; false with a Python error set.
bool read_product(PyObject* a, PyObject* b, Gemm& g, Batch& batch) {
  Shape shape;
  if (!describe(reinterpret_cast<PyArrayObject*>(a), reinterpret_cast<PyArrayObject*>(b), g, batch, shape))
    return false;
  if (batch.dims > 0) fold_batch_into_rows(g, batch);
  return true;
}

// Returns the (path, tile) of matmul(a, b) with this many threads (default: the current number). The tile is that of
// the tiled path, even if another path is used.
PyObject* matmul_plan(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count < 2 || count > 3 || !check_usable(args[0], "a") || !check_usable(args[1], "b")) {
    return PyErr_Occurred() ? nullptr
                            : refuse("ConfigurationError", "matmul_plan takes two arrays and a number of threads");
  }
  Gemm g;
  Batch batch;
  if (!read_product(args[0], args[1], g, batch)) return nullptr;
  int64_t threads = num_threads();
  if (count == 3 && !read_size(args[2], 1, "threads", &threads)) return nullptr;
  const int per_item = batch.count >= 2 * threads ? 1 : static_cast<int>(threads);
  ProductConfig config = choose_config(g, per_item);
  const char* path = path_name(config.path);
  if (config.path != ProductPath::tiled) config_of_path(g, ProductPath::tiled, per_item, &config);
  return Py_BuildValue("(sN)", path, tile_tuple(config.tile));
}

// Counts of what matmul(a, b, config) does, one for each term of the cost model; for fitting. The last argument is the
// number of last columns that are computed separately.
PyObject* matmul_terms(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Gemm g;
  Batch batch;
  ProductConfig config;
  if (count != 4) return refuse("ConfigurationError", "matmul_terms takes two arrays, a configuration and a number");
  if (!check_usable(args[0], "a") || !check_usable(args[1], "b") || !read_product(args[0], args[1], g, batch) ||
      !read_config(args[2], g, config) || !read_size(args[3], 0, "the number of last columns", &config.last_columns)) {
    return nullptr;
  }
  double counts[kCostTerms] = {};
  count_terms(g, config, worth_threads(g.m * g.n * g.k) ? num_threads() : 1, counts);
  nb::list result;
  for (double value : counts) result.append(value);
  return result.release().ptr();
}

// Names of the paths that can compute matmul(a, b); each can be passed as its tile.
PyObject* matmul_paths(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2) return refuse("ConfigurationError", "matmul_paths takes two arrays");
  Gemm g;
  Batch batch;
  if (!check_usable(args[0], "a") || !check_usable(args[1], "b") || !read_product(args[0], args[1], g, batch)) {
    return nullptr;
  }
  nb::list paths;
  for (int i = 0; i < kProductPaths; ++i) {
    if (path_feasible(static_cast<ProductPath>(i), g)) paths.append(path_name(static_cast<ProductPath>(i)));
  }
  return paths.release().ptr();
}

// Returns the key ((m, n, k), layout) of matmul(a, b) for tile choosers; None if they do not cover it.
PyObject* matmul_tile_key(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count < 2 || !check_usable(args[0], "a") || !check_usable(args[1], "b")) {
    return PyErr_Occurred() ? nullptr : refuse("ConfigurationError", "matmul_tile_key takes two arrays");
  }
  Gemm g;
  Batch batch;
  if (!read_product(args[0], args[1], g, batch)) return nullptr;
  const int layout = chooser_layout(g, batch.count, kTinyProduct);
  if (layout < 0) Py_RETURN_NONE;
  return Py_BuildValue("((LLL)s)", static_cast<long long>(g.m), static_cast<long long>(g.n),
                       static_cast<long long>(g.k), kLayouts[layout]);
}

PyMethodDef methods[] = {
    {"matmul", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(matmul_call)), METH_FASTCALL | METH_KEYWORDS,
     "matmul($module, /, a, b, tile=None, *, bias=None, activation=None, residual=None)\n--\n\n"
     "The product of two float32 matrices, or of stacks of them, by the compiled kernel.\n\n"
     "`tile` is a TileConfig that drives its loops; without one the default for the shape is taken. `bias` (a row),\n"
     "`activation` ('relu' or 'gelu') and `residual` are applied while the result is in registers.\n\n"
     ">>> matmul_native(a, b, tile=TileConfig(mr=6, nr=32, mc=96, nc=1024, kc=256))"},
    {"matmul_suits", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(matmul_suits)),
     METH_FASTCALL | METH_KEYWORDS, "None when matmul takes these arguments, else the reason against."},
    {"matmul_plan", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(matmul_plan)), METH_FASTCALL,
     "The path and the tile that matmul(a, b) uses."},
    {"matmul_paths", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(matmul_paths)), METH_FASTCALL,
     "Names of the paths that can compute matmul(a, b); each can be passed as its tile."},
    {"matmul_terms", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(matmul_terms)), METH_FASTCALL,
     "Counts of the terms of the cost model."},
    {"matmul_tile_key", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(matmul_tile_key)), METH_FASTCALL,
     "((m, n, k), layout) as a tile chooser is asked, or None."},
    {nullptr, nullptr, 0, nullptr},
};

// Describes a product by the sizes and strides that tiles depend on.
Gemm product_of(int64_t m, int64_t n, int64_t k, bool transposed_b) {
  Gemm g;
  g.m = m;
  g.n = n;
  g.k = k;
  g.b_row = transposed_b ? 1 : n;
  g.b_col = transposed_b ? k : 1;
  return g;
}

int layout_index(PyObject* name) {
  for (int i = 0; i < 4; ++i) {
    if (PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(name, kLayouts[i]) == 0) return i;
  }
  refuse("ConfigurationError", "the layout must be one of nn, nt, tn, tt, not %R", name);
  return -1;
}

// Why matmul refuses this tile for an m x k by k x n product, or None. transposed_b: B's rows, not columns, contiguous.
nb::object check_tile(nb::handle tile, int64_t m, int64_t n, int64_t k, bool transposed_b) {
  GemmTile t;
  if (!read_tile(tile.ptr(), t)) throw nb::python_error();
  const Gemm g = product_of(m, n, k, transposed_b);
  char reason[160];
  return tile_problem(t, g, reason, sizeof reason) ? nb::cast(std::string(reason)) : nb::none();
}

// Converts a TileConfig once; matmul accepts the result without reading its Python attributes at every call.
nb::object prepared_tile(nb::handle tile) {
  auto prepared = std::make_unique<GemmTile>();
  if (!read_tile(tile.ptr(), *prepared)) throw nb::python_error();
  PyObject* capsule = PyCapsule_New(prepared.get(), kPrepared, [](PyObject* self) {
    delete static_cast<GemmTile*>(PyCapsule_GetPointer(self, kPrepared));
  });
  if (capsule == nullptr) throw nb::python_error();
  prepared.release();
  return nb::steal(capsule);
}

// Lists the register tiles (mr, nr) of the active instruction set, for every mr that fits.
std::vector<std::pair<int, int>> register_tiles() {
  const GemmKernels& kernels = active_gemm();
  std::vector<std::pair<int, int>> tiles;
  for (int v = 1; v <= 4; ++v) {
    for (int mr = 1; mr <= kernels.max_rows[v]; ++mr) tiles.emplace_back(mr, v * kernels.lanes);
  }
  return tiles;
}

}  // namespace

PyObject* table_matmul(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  return multiply(reinterpret_cast<TileTable*>(self), args, count, keywords);
}

PyObject* table_keep_matmul(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject*) {
  int64_t size[3], threads;
  if (count != 4) return refuse("ConfigurationError", "keep_matmul takes a shape, a layout, threads and a tile");
  if (!read_sizes(args[0], 3, "the shape of a product", size) || !read_size(args[2], 1, "threads", &threads))
    return nullptr;
  const int layout = layout_index(args[1]);
  if (layout < 0) return nullptr;
  GemmTile tile;
  const bool has_tile = args[3] != Py_None;
  if (has_tile &&
      !(read_tile(args[3], tile) && feasible(tile, product_of(size[0], size[1], size[2], layout % 2 == 1)))) {
    return nullptr;
  }
  ProductTable& table = *reinterpret_cast<TileTable*>(self)->products;
  auto* entry = table.find_or_make({{size[0], size[1], size[2], tile_setting(static_cast<int>(threads), layout)}});
  if (entry == nullptr) Py_RETURN_NONE;  // its places are taken by others that were kept: asked when it is met
  entry->state = has_tile ? ProductTable::State::use_tile : ProductTable::State::keep_default;
  entry->tile = tile;
  entry->pinned = true;
  Py_RETURN_NONE;
}

void bind_gemm(nb::module_& m) {
  if (PyModule_AddFunctions(m.ptr(), methods) < 0) throw nb::python_error();
  m.def("gemm_register_tiles", register_tiles);
  m.def("prepared_tile", prepared_tile, nb::arg("tile"));
  m.def("gemm_tile_problem", check_tile, nb::arg("tile"), nb::arg("m"), nb::arg("n"), nb::arg("k"),
        nb::arg("transposed_b"));
}

}  // namespace tw
