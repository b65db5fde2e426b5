// A cache of a tile chooser's answers: a Python object whose methods `matmul` and `conv2d` are the compiled functions
// with a tile lookup. The chooser, a Python function, is asked once per shape, and only after `calls_before_asking`
// multiplications were done in that shape. Integer layers and graphs receive the table and use the tiles that were
// stored for them; they never ask.
#pragma once

#include <memory>

#include "bindings/arrays.h"
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
  TileTable(nb::object ask, int64_t least_work, int64_t calls_before_asking);

  // chooser(op, shape, "float32", layout)
  nb::object ask_chooser(const char* op, const nb::tuple& shape, const char* layout);

  nb::object ask;
  int64_t least_work;  // multiplications of a product; smaller ones are not looked up
  int64_t calls_before_asking;
  ProductTable products;
  ConvTable convolutions;
  std::unique_ptr<Int8Table> int8_products;  // null until a tile is stored
};

inline TileTable& table_of(PyObject* self) { return *nb::inst_ptr<TileTable>(self); }

// Products with fewer multiplications are too short for a better tile to save anything.
constexpr int64_t kTinyProduct = 50000;  // chosen

// Packs the settings on which a choice depends, besides the shape, into one number of its key.
inline int64_t tile_setting(int threads, int layout = 0) {
  return threads | static_cast<int64_t>(active_isa()) << 16 | static_cast<int64_t>(layout) << 24;
}

// Returns whether there is a tile for a shape: the cached choice, or the answer of `ask`, which writes the tile and
// returns false for the default. `ask` may run Python, and with it other threads and other calls into this table, so no
// reference to an entry is used across the call.
template <class Table, class Tile, class Ask>
bool look_up(Table& table, const typename Table::Key& key, int64_t work, int64_t calls_before_asking, Tile* tile,
             Ask&& ask) {
  using State = typename Table::State;
  auto* entry = table.find_or_make(key);
  if (entry == nullptr || entry->state == State::keep_default) return false;
  if (entry->state == State::use_tile) {
    *tile = entry->tile;
    return true;
  }
  entry->work += work;
  if (entry->work < calls_before_asking) return false;
  const bool has_tile = ask(tile);
  entry = table.find_or_make(key);
  if (entry == nullptr) return has_tile;
  entry->state = has_tile ? State::use_tile : State::keep_default;
  entry->tile = *tile;
  return has_tile;
}

// Stores and pins a choice. If all ways of its set are pinned by others, the chooser will be asked instead.
template <class Table, class Tile>
void keep(Table& table, const typename Table::Key& key, bool has_tile, const Tile& tile) {
  auto* entry = table.find_or_make(key);
  if (entry == nullptr) return;
  entry->state = has_tile ? Table::State::use_tile : Table::State::keep_default;
  entry->tile = tile;
  entry->pinned = true;
}

// Methods of the table, in the files of their kernels.
nb::object table_matmul(const Call& call);
nb::object table_conv2d(const Call& call);
nb::object table_keep_matmul(const Call& call);
nb::object table_keep_conv2d(const Call& call);
nb::object table_keep_int8(const Call& call);

}  // namespace tw
