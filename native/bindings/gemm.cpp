// Python bindings of matmul. For small matrices the overhead of the call matters; this one takes about a quarter of a
// microsecond. Arrays of any strides are read in place.
#include <algorithm>
#include <memory>

#include "bindings/arrays.h"
#include "bindings/tile_table.h"
#include "common/matmul.h"
#include "common/product_terms.h"
#include "common/thread_pool.h"

namespace tw {
namespace {

// Returns whether this is a float32 array whose strides are whole elements.
bool usable(PyObject* object) {
  if (!PyArray_Check(object)) return false;
  PyArrayObject* array = as_array(object);
  if (PyArray_TYPE(array) != NPY_FLOAT32 || !PyArray_ISBEHAVED_RO(array)) return false;
  for (int d = 0; d < PyArray_NDIM(array); ++d) {
    if (PyArray_STRIDE(array, d) % 4 != 0) return false;
  }
  return PyArray_NDIM(array) >= 1 && PyArray_NDIM(array) <= kMaxBatchDims + 2;
}

// Returns the array, or raises an error that says why it cannot be used.
PyArrayObject* usable_array(PyObject* object, const char* name) {
  PyArrayObject* array = as_array(object);
  if (usable(object)) return array;
  if (!PyArray_Check(object))
    refuse("DtypeError", "matmul takes NumPy arrays, but %s is a %s", name, Py_TYPE(object)->tp_name);
  if (PyArray_NDIM(array) == 0 || PyArray_NDIM(array) > kMaxBatchDims + 2) {
    refuse("ShapeError", "matmul takes arrays of 1 to %lld dimensions, but %s has %lld", kMaxBatchDims + 2, name,
           PyArray_NDIM(array));
  }
  refuse("DtypeError", "the native matmul takes aligned float32 arrays of native byte order, but %s is %R", name,
         reinterpret_cast<PyObject*>(PyArray_DESCR(array)));
}

[[noreturn]] void refuse_shapes(PyArrayObject* a, PyArrayObject* b) {
  const auto shape = [](PyArrayObject* x) { return nb::handle(reinterpret_cast<PyObject*>(x)).attr("shape"); };
  const nb::object left = shape(a), right = shape(b);
  refuse("ShapeError", "matmul cannot multiply arrays of shapes %R and %R", left.ptr(), right.ptr());
}

// The product of two arrays, without its result and epilogue.
struct Product {
  Gemm g;
  Batch batch;
  int dims = 0;  // dimensions of the result
  npy_intp shape[kMaxBatchDims + 2];

  // Reads shapes and strides, broadcasting the batch axes as numpy.matmul does.
  Product(PyObject* left, PyObject* right) {
    PyArrayObject *a = usable_array(left, "a"), *b = usable_array(right, "b");
    const int a_dims = PyArray_NDIM(a), b_dims = PyArray_NDIM(b);
    g.m = a_dims == 1 ? 1 : PyArray_DIM(a, a_dims - 2);
    g.k = PyArray_DIM(a, a_dims - 1);
    g.n = b_dims == 1 ? 1 : PyArray_DIM(b, b_dims - 1);
    if (PyArray_DIM(b, b_dims == 1 ? 0 : b_dims - 2) != g.k) refuse_shapes(a, b);
    g.a = static_cast<const float*>(PyArray_DATA(a));
    g.b = static_cast<const float*>(PyArray_DATA(b));
    g.a_row = a_dims == 1 ? 0 : PyArray_STRIDE(a, a_dims - 2) / 4;
    g.a_col = PyArray_STRIDE(a, a_dims - 1) / 4;
    g.b_row = PyArray_STRIDE(b, b_dims == 1 ? 0 : b_dims - 2) / 4;
    g.b_col = b_dims == 1 ? 0 : PyArray_STRIDE(b, b_dims - 1) / 4;
    // A dimension of size 1 may have any stride: use the one that the fast paths accept.
    if (g.k == 1) g.a_col = g.a_col == 0 ? 0 : 1;
    if (g.k == 1) g.b_row = g.b_row == 0 ? 0 : 1;
    if (g.m == 1) g.a_row = 0;
    if (g.n == 1) g.b_col = 0;
    g.c_row = g.n;
    if (a_dims > 2 || b_dims > 2) broadcast_batch(a, a_dims > 2 ? a_dims - 2 : 0, b, b_dims > 2 ? b_dims - 2 : 0);
    if (a_dims > 1) shape[dims++] = g.m;
    if (b_dims > 1) shape[dims++] = g.n;
  }

  int64_t multiply_adds() const { return g.m * g.n * g.k; }

  // Turns a batch of matrices times one matrix into a single taller product, if all rows are evenly spaced.
  void fold_batch_into_rows() {
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

 private:
  // Batch dimensions as NumPy broadcasts them, right-aligned.
  void broadcast_batch(PyArrayObject* a, int a_batch, PyArrayObject* b, int b_batch) {
    batch.dims = a_batch > b_batch ? a_batch : b_batch;
    for (int d = 0; d < batch.dims; ++d) {
      const int da = d - (batch.dims - a_batch), db = d - (batch.dims - b_batch);
      const int64_t size_a = da >= 0 ? PyArray_DIM(a, da) : 1, size_b = db >= 0 ? PyArray_DIM(b, db) : 1;
      if (size_a != size_b && size_a != 1 && size_b != 1) refuse_shapes(a, b);
      const int64_t size = size_a == 1 ? size_b : size_a;
      batch.shape[d] = size;
      batch.a_stride[d] = da >= 0 && size_a != 1 ? PyArray_STRIDE(a, da) / 4 : 0;
      batch.b_stride[d] = db >= 0 && size_b != 1 ? PyArray_STRIDE(b, db) / 4 : 0;
      batch.count *= size;
      shape[dims++] = size;
    }
  }
};

// Reads bias (n), activation and residual (m, n) of a product; throws if a shape does not fit.
void read_epilogue(PyObject* bias, PyObject* activation, PyObject* residual, Product& p) {
  Epilogue& e = p.g.epilogue;
  if (is_given(bias)) {
    PyArrayObject* array = as_float_array(bias);
    if (array == nullptr || PyArray_NDIM(array) != 1 || PyArray_DIM(array, 0) != p.g.n)
      refuse("ShapeError", "the bias of this matmul must be a contiguous float32 array of %lld elements", p.g.n);
    e.bias = data<float>(bias);
  }
  if (is_given(residual)) {
    PyArrayObject* array = as_float_array(residual);
    check(
        array != nullptr && PyArray_NDIM(array) == p.dims && PyArray_CompareLists(PyArray_DIMS(array), p.shape, p.dims),
        "the residual must be a contiguous float32 array of the result's shape");
    e.residual = data<float>(residual);
    e.residual_row = p.g.n;
    int64_t stride = p.g.m * p.g.n;
    for (int d = p.batch.dims - 1; d >= 0; --d) {
      p.batch.residual_stride[d] = stride;
      stride *= p.batch.shape[d];
    }
  }
  constexpr Activation kActivations[] = {Activation::none, Activation::relu, Activation::gelu};
  e.activation = kActivations[read_activation(activation)];
}

constexpr const char* kPrepared = "tilewise.prepared_tile";

// Reads a Python GemmTile, an object with these attributes, or a tile that was read before and kept as a capsule.
GemmTile read_tile(PyObject* object) {
  if (PyCapsule_CheckExact(object) && PyCapsule_IsValid(object, kPrepared))
    return *static_cast<const GemmTile*>(PyCapsule_GetPointer(object, kPrepared));
  static PyObject* const names[] = {
      PyUnicode_InternFromString("mr"),        PyUnicode_InternFromString("nr"),
      PyUnicode_InternFromString("mc"),        PyUnicode_InternFromString("nc"),
      PyUnicode_InternFromString("kc"),        PyUnicode_InternFromString("pack_a"),
      PyUnicode_InternFromString("pack_b"),    PyUnicode_InternFromString("threads_m"),
      PyUnicode_InternFromString("threads_n"),
  };
  int64_t v[9];
  for (int i = 0; i < 9; ++i) {
    v[i] = tile_attribute(object, names[i], "a TileConfig");
    if (v[i] < 0 || v[i] > (1 << 30)) v[i] = i < 5 ? -1 : 0;
  }
  const auto number = [&](int i) { return static_cast<int>(v[i]); };
  return {number(0), number(1), v[2], v[3], v[4], v[5] != 0, v[6] != 0, number(7), number(8)};
}

// With this few terms, rows or columns, loops without tiles are faster than any tile, and the chooser is not asked.
constexpr int64_t kShortSum = kShortestSum, kThin = kMostSmallColumns;
constexpr const char* kLayouts[] = {"nn", "nt", "tn", "tt"};

// Returns the product's index in kLayouts; -1 if choosers do not cover it.
int chooser_layout(const Gemm& g, int64_t batch, int64_t least_work) {
  if (g.k <= kShortSum || g.m < kThin || g.n <= kThin || batch != 1) return -1;
  if (g.m * g.n * g.k < least_work || std::max({g.m, g.n, g.k}) >= int64_t{1} << 31) return -1;
  const bool along_m = g.a_col != 1 && g.a_row == 1, along_k = g.b_col != 1 && g.b_row == 1;
  return along_k || g.b_col == 1 ? 2 * along_m + along_k : -1;  // a B with gaps either way must be packed
}

GemmTile read_feasible_tile(PyObject* object, const Gemm& g) {
  const GemmTile tile = read_tile(object);
  char reason[160];
  if (tile_problem(tile, g, reason, sizeof reason))
    refuse("ConfigurationError", "this tile cannot be used: %s", reason);
  return tile;
}

// A configuration given by the caller: the name of a path, a tile for the tiled path, or a tile and the number of last
// columns that are computed separately.
void read_config(PyObject* object, const Gemm& g, ProductConfig* config) {
  if (PyTuple_Check(object) && PyTuple_GET_SIZE(object) == 2) {
    config->path = ProductPath::tiled;
    config->tile = read_feasible_tile(PyTuple_GET_ITEM(object, 0), g);
    config->last_columns = read_size(PyTuple_GET_ITEM(object, 1), 0, "the number of last columns");
    if (config->last_columns != 0 && config->last_columns != last_columns_of(g))
      refuse("ConfigurationError", "%lld last columns of this product cannot be computed separately",
             static_cast<long long>(config->last_columns));
    return;
  }
  if (!PyUnicode_Check(object)) return config_of_tile(g, read_feasible_tile(object, g), config);
  ProductPath path;
  const char* name = PyUnicode_AsUTF8(object);
  if (name == nullptr) throw nb::python_error();
  if (!path_from_name(name, &path) || !path_feasible(path, g))
    refuse("ConfigurationError", "%R is not a path of this product; matmul_paths lists them", object);
  config_of_path(g, path, num_threads(), config);
}

// Returns whether the chooser has a tile for this product.
bool chosen_tile(TileTable& table, const Gemm& g, int64_t batch, GemmTile* tile) {
  const int layout = chooser_layout(g, batch, table.least_work);
  if (layout < 0) return false;
  const ProductTable::Key key = {{g.m, g.n, g.k, tile_setting(num_threads(), layout)}};
  return look_up(table.products, key, g.m * g.n * g.k, table.calls_before_asking, tile, [&](GemmTile* out) {
    const nb::object answer = table.ask_chooser("matmul", nb::make_tuple(g.m, g.n, g.k), kLayouts[layout]);
    if (!answer.is_none()) *out = read_feasible_tile(answer.ptr(), g);
    return !answer.is_none();
  });
}

// matmul(a, b, tile, bias, activation, residual): computes the product with the given, tuned or default tile.
nb::object multiply(TileTable* table, const Call& call) {
  static const Parameters parameters("matmul", {"a", "b", "tile", "bias", "activation", "residual"}, 2);
  if (call.count < 2) refuse("ConfigurationError", "matmul takes two arrays, not %lld", call.count);
  const auto v = parameters.read(call);
  Product p(v[0], v[1]);
  Gemm& g = p.g;
  read_epilogue(v[3], v[4], v[5], p);
  if (p.batch.dims > 0) p.fold_batch_into_rows();
  ProductConfig config;
  bool has_config = is_given(v[2]);  // no tile: ask the chooser, if there is one; None: the default
  if (has_config) {
    read_config(v[2], g, &config);
  } else if (v[2] == nullptr && table != nullptr && !batch_invariant()) {
    GemmTile tile;
    has_config = chosen_tile(*table, g, p.batch.count, &tile);
    if (has_config) config_of_tile(g, tile, &config);
  }
  const NewArray<float> c = new_array(p.dims, p.shape);
  g.c = c.data;
  bool enough_memory;
  without_gil(p.multiply_adds() * p.batch.count >= kMinWorkForGilRelease,
              [&] { enough_memory = matmul(g, p.batch, has_config ? &config : nullptr); });
  if (!enough_memory) throw std::bad_alloc();
  return p.dims > 0 ? c.object : nb::steal(PyArray_Return(as_array(nb::object(c.object).release())));
}

nb::object matmul_call(const Call& call) { return multiply(nullptr, call); }

// Returns None if the native matmul supports these arguments, else one sentence why not.
nb::object matmul_suits(const Call& call) {
  if (call.count < 2) return nb::str("it needs two arrays");
  if (!usable(call.args[0]) || !usable(call.args[1])) return nb::str("it takes aligned float32 arrays only");
  static const Parameters arrays("matmul", {"bias", "residual"}, 0);
  const Py_ssize_t extra = call.keywords ? PyTuple_GET_SIZE(call.keywords) : 0;
  for (Py_ssize_t i = 0; i < extra; ++i) {
    PyObject* value = call.args[call.count + i];
    const bool is_array = arrays.find(PyTuple_GET_ITEM(call.keywords, i)) >= 0;
    if (is_array && value != Py_None && as_float_array(value) == nullptr)
      return nb::str("bias and residual must be contiguous float32 arrays");
  }
  return nb::none();
}

// Returns the (path, tile) of matmul(a, b) with this many threads (default: the current number). The tile is that of
// the tiled path, even if another path is used.
nb::object matmul_plan(const Call& call) {
  static const Parameters parameters("matmul_plan", {"a", "b", "threads"}, 2);
  const auto v = parameters.read(call);
  Product p(v[0], v[1]);
  if (p.batch.dims > 0) p.fold_batch_into_rows();
  const int64_t threads = v[2] == nullptr ? num_threads() : read_size(v[2], 1, "threads");
  const int per_item = p.batch.count >= 2 * threads ? 1 : static_cast<int>(threads);
  ProductConfig config = choose_config(p.g, per_item);
  const char* path = path_name(config.path);
  if (config.path != ProductPath::tiled) config_of_path(p.g, ProductPath::tiled, per_item, &config);
  const GemmTile& t = config.tile;
  return nb::make_tuple(path,
                        nb::make_tuple(t.mr, t.nr, t.mc, t.nc, t.kc, t.pack_a, t.pack_b, t.threads_m, t.threads_n));
}

// Returns the counts of the operations of matmul(a, b, config), one per term of the cost model, for fitting it. The
// last argument is the number of last columns that are computed separately.
nb::object matmul_terms(const Call& call) {
  static const Parameters parameters("matmul_terms", {"a", "b", "config", "last_columns"}, 4);
  const auto v = parameters.read(call);
  Product p(v[0], v[1]);
  if (p.batch.dims > 0) p.fold_batch_into_rows();
  ProductConfig config;
  read_config(v[2], p.g, &config);
  config.last_columns = read_size(v[3], 0, "the number of last columns");
  double counts[kCostTerms] = {};
  count_terms(p.g, config, worth_threads(p.multiply_adds()) ? num_threads() : 1, counts);
  nb::list result;
  for (double value : counts) result.append(value);
  return result;
}

// Returns the names of the paths that can compute matmul(a, b); each can be passed as its tile.
nb::object matmul_paths(const Call& call) {
  static const Parameters parameters("matmul_paths", {"a", "b"}, 2);
  const auto v = parameters.read(call);
  Product p(v[0], v[1]);
  if (p.batch.dims > 0) p.fold_batch_into_rows();
  nb::list paths;
  for (int i = 0; i < kProductPaths; ++i) {
    if (path_feasible(static_cast<ProductPath>(i), p.g)) paths.append(path_name(static_cast<ProductPath>(i)));
  }
  return paths;
}

// Returns the key ((m, n, k), layout) of matmul(a, b) for tile choosers; None if they do not cover it.
nb::object matmul_tile_key(const Call& call) {
  if (call.count < 2) refuse("ConfigurationError", "matmul_tile_key takes two arrays");
  Product p(call.args[0], call.args[1]);
  if (p.batch.dims > 0) p.fold_batch_into_rows();
  const int layout = chooser_layout(p.g, p.batch.count, kTinyProduct);
  if (layout < 0) return nb::none();
  return nb::make_tuple(nb::make_tuple(p.g.m, p.g.n, p.g.k), kLayouts[layout]);
}

PyMethodDef methods[] = {
    method<matmul_call>(
        "matmul",
        "matmul($module, /, a, b, tile=None, *, bias=None, activation=None, residual=None)\n--\n\n"
        "The product of two float32 matrices, or of stacks of them, by the compiled kernel.\n\n"
        "`tile` is a TileConfig for its loops; without one the default for the shape is used. `bias` (a row),\n"
        "`activation` ('relu' or 'gelu') and `residual` are applied while the result is in the cache.\n\n"
        ">>> matmul_native(a, b, tile=TileConfig(mr=6, nr=32, mc=96, nc=1024, kc=256))"),
    method<matmul_suits>("matmul_suits", "None if matmul supports these arguments, else the reason why not."),
    method<matmul_plan>("matmul_plan", "The path and the tile that matmul(a, b) uses."),
    method<matmul_paths>("matmul_paths",
                         "Names of the paths that can compute matmul(a, b); each can be passed as its tile."),
    method<matmul_terms>("matmul_terms", "The counts of the terms of the cost model."),
    method<matmul_tile_key>("matmul_tile_key", "The key ((m, n, k), layout) for tile choosers, or None."),
    {nullptr, nullptr, 0, nullptr},
};

// Describes a product by the sizes and strides that tiles depend on.
Gemm product_of(int64_t m, int64_t n, int64_t k, bool transposed_b) {
  Gemm g;
  g.m = m, g.n = n, g.k = k;
  g.b_row = transposed_b ? 1 : n;
  g.b_col = transposed_b ? k : 1;
  return g;
}

// Returns why matmul refuses this tile for an m x k by k x n product, or None. transposed_b: the columns of B are
// contiguous, not its rows.
nb::object check_tile(nb::handle tile, int64_t m, int64_t n, int64_t k, bool transposed_b) {
  char reason[160];
  const bool infeasible = tile_problem(read_tile(tile.ptr()), product_of(m, n, k, transposed_b), reason, sizeof reason);
  return infeasible ? nb::object(nb::str(reason)) : nb::none();
}

// Converts a TileConfig once; matmul accepts the result without reading its Python attributes at every call.
nb::object prepared_tile(nb::handle tile) {
  auto prepared = std::make_unique<GemmTile>(read_tile(tile.ptr()));
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

nb::object table_matmul(const Call& call) { return multiply(&table_of(call.self), call); }

// keep_matmul(shape, layout, threads, tile): stores a tuned tile in the table; None stands for the default tile.
nb::object table_keep_matmul(const Call& call) {
  static const Parameters parameters("keep_matmul", {"shape", "layout", "threads", "tile"}, 4);
  const auto v = parameters.read(call);
  int64_t size[3];
  read_sizes(v[0], 3, 0, "the shape of a product", size);
  const int threads = static_cast<int>(read_size(v[2], 1, "threads"));
  int layout = 0;
  while (layout < 4 && !equals(v[1], kLayouts[layout])) ++layout;
  if (layout == 4) refuse("ConfigurationError", "the layout must be one of nn, nt, tn, tt, not %R", v[1]);
  const Gemm g = product_of(size[0], size[1], size[2], layout % 2 == 1);
  keep(table_of(call.self).products, {{size[0], size[1], size[2], tile_setting(threads, layout)}}, is_given(v[3]),
       is_given(v[3]) ? read_feasible_tile(v[3], g) : GemmTile());
  return nb::none();
}

void bind_gemm(nb::module_& m) {
  add_functions(m, methods);
  m.def("gemm_register_tiles", register_tiles);
  m.def("prepared_tile", prepared_tile, nb::arg("tile"));
  m.def("gemm_tile_problem", check_tile, nb::arg("tile"), nb::arg("m"), nb::arg("n"), nb::arg("k"),
        nb::arg("transposed_b"));
}

}  // namespace tw
