// A tile chooser's answers beside the kernels: a Python object whose methods `matmul` and `conv2d` are the compiled
// functions themselves, with tiles looked up on the way. The chooser, a Python function, is asked once a shape, and
// only when the shape has earned it: when as many multiplications were done in it as `calls_before_asking` says.
// Integer products are handed the table by their layers and plans; they find what was kept for them, and nobody is
// asked.
#pragma once

#include "bindings/numpy_api.h"
#include "common/convolution.h"
#include "common/isa.h"
#include "common/matmul.h"
#include "common/shape_table.h"
#include "common/thread_pool.h"
#include "kernels/int8.h"

namespace tw {

using ProductTable = ShapeTable<4, GemmTile>;
using ConvTable = ShapeTable<7, ConvConfig>;
using Int8Table = ShapeTable<4, Int8Tile>;

struct TileTable {
  PyObject_HEAD PyObject* ask;
  int64_t least_work;  // of a product; smaller ones are not looked up
  int64_t calls_before_asking;
  ProductTable* products;
  ConvTable* convolutions;
  Int8Table* int8_products;  // null until one is kept
};

// The table behind a Python object, null for None; throws nb::type_error for anything else.
TileTable* tile_table_in(PyObject* object);

// Products smaller than this many multiplications are over before a better tile could save anything.
constexpr int64_t kTinyProduct = 50000;

// Packs the settings that a choice depends on besides the shape into one number of its key.
inline int64_t tile_setting(int threads, int layout = 0) {
  return threads | static_cast<int64_t>(active_isa()) << 16 | static_cast<int64_t>(layout) << 24;
}

enum class Answer { failed, keep_default, use_tile };

// Returns the cached choice for a shape, or calls `ask`, which returns the choice and writes the tile. `ask` may run
// Python, and with it other threads and other calls into this table, so no entry is referenced across the call.
template <class Table, class Tile, class Ask>
Answer look_up(Table& table, const typename Table::Key& key, int64_t work, int64_t calls_before_asking, Tile* tile,
               Ask&& ask) {
  using State = typename Table::State;
  auto* entry = table.find_or_make(key);
  if (entry == nullptr || entry->state == State::keep_default) return Answer::keep_default;
  if (entry->state == State::use_tile) {
    *tile = entry->tile;
    return Answer::use_tile;
  }
  entry->work += work;
  if (entry->work < calls_before_asking) return Answer::keep_default;
  const Answer answer = ask(tile);
  if (answer == Answer::failed) return answer;
  entry = table.find_or_make(key);
  if (entry == nullptr) return answer;
  entry->state = answer == Answer::use_tile ? State::use_tile : State::keep_default;
  entry->tile = *tile;
  return answer;
}

// chooser(op, shape, "float32", layout); a new reference, null with an error set. Steals `shape`.
PyObject* ask_chooser(TileTable& table, const char* op, PyObject* shape, const char* layout);

// Methods of the table, in the files of their kernels.
PyObject* table_matmul(PyObject* table, PyObject* const* args, Py_ssize_t count, PyObject* keywords);
PyObject* table_conv2d(PyObject* table, PyObject* const* args, Py_ssize_t count, PyObject* keywords);
// Pins a choice: (m, n, k), layout, threads, tile or None; a convolution's shape, threads, tile or None; an integer
// product's (m, n, k), threads, tile.
PyObject* table_keep_matmul(PyObject* table, PyObject* const* args, Py_ssize_t count, PyObject* keywords);
PyObject* table_keep_conv2d(PyObject* table, PyObject* const* args, Py_ssize_t count, PyObject* keywords);
PyObject* table_keep_int8(PyObject* table, PyObject* const* args, Py_ssize_t count, PyObject* keywords);

}  // namespace tw
