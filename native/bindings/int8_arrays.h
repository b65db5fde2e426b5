// Conversion of uint8 and int16 arrays, output stages and pooling windows, for the bindings of integer layers and
// graphs.
#pragma once

#include <array>
#include <cstring>
#include <string>
#include <tuple>

#include "bindings/tile_table.h"
#include "common/integer_layer.h"

namespace tw {

using IntPair = std::tuple<int, int>;

// Describes an image buffer of the integer layers: (images, height + 2 padding, width + 2 padding, channels rounded up
// to 4).
inline Int8Image image_of(nb::handle x, int padding, const char* name) {
  const auto array = view_of<uint8_t>(x, 4, name);
  const Int8Image image{array.dim(0), array.dim(1) - 2 * padding, array.dim(2) - 2 * padding, array.dim(3), padding};
  check(padding >= 0 && image.height >= 0 && image.width >= 0, "the padding is wider than the image");
  return image;
}

// Returns a new image whose padding has the zero point. The pixel distance of `image` is in values, not bytes.
template <class T = uint8_t>
nb::object new_image(Int8Image image, int zero) {
  check(image.padding >= 0, "padding cannot be negative");
  const auto out = new_array<T>({image.images, image.full_height(), image.full_width(), image.pixel});
  image.pixel *= sizeof(T);
  fill_padding(image, zero, reinterpret_cast<uint8_t*>(out.data));
  return out.object;
}

inline void check_zero(int zero) { check(zero >= 0 && zero <= 255, "a zero point is between 0 and 255"); }

// An output stage in Python: zero, low, high; lookup table, its grid points per unit, its first grid point; parabola:
// far (0: none), slope; piecewise polynomial: the bytes of a Uint8Piecewise (empty: none).
using Uint8StageTuple = std::tuple<int, int, int, nb::bytes, float, int, float, float, nb::bytes>;

inline Uint8Stage uint8_stage_of(const Uint8StageTuple& values) {
  const auto& [zero, low, high, table, fine, first, far, slope, polynomial] = values;
  check_zero(zero);
  check_zero(low);
  check_zero(high);
  Uint8Stage stage;
  stage.zero = zero, stage.low = low, stage.high = high;
  if (far > 0.0f) {
    stage.approximation = Approximation::parabola;
    stage.parabola = {far, slope};
    return stage;
  }
  if (polynomial.size() > 0) {
    const bool whole = polynomial.size() == sizeof stage.piecewise && high == 255;
    if (whole) std::memcpy(&stage.piecewise, polynomial.data(), sizeof stage.piecewise);
    if (!whole || stage.piecewise.shift < 0 || stage.piecewise.shift > 14)
      refuse("ShapeError", "the piecewise polynomial of an output stage is invalid");
    stage.approximation = Approximation::piecewise;
    return stage;
  }
  if (table.size() == 0) return stage;
  stage.approximation = Approximation::lookup_table;
  if (table.size() > (1u << 17) || first < -(1 << 16) || first > 0 || !(fine > 0.0f))
    refuse("ShapeError", "the lookup table of an output stage is invalid");
  stage.table = {static_cast<const uint8_t*>(table.data()), fine, first, first + static_cast<int>(table.size()) - 1};
  return stage;
}

// An int16 output stage in Python: low, high, the number of an Int16Activation, inverse; far and slope of the parabola;
// the bytes of an Int16Piecewise.
using Int16StageTuple = std::tuple<int, int, int, float, float, float, nb::bytes>;

// Converts a tuple from Python to the output stage of an int16 result, and checks its piecewise polynomial.
inline Int16Stage int16_stage_of(const Int16StageTuple& values) {
  const auto& [low, high, activation, inverse, far, slope, polynomial] = values;
  if (activation < 0 || activation > static_cast<int>(Int16Activation::leaky_relu))
    refuse("ShapeError", "there is no such activation");
  Int16Stage stage{low, high, static_cast<Int16Activation>(activation), inverse, {far, slope}, {}};
  if (stage.activation == Int16Activation::piecewise) {
    const bool whole = polynomial.size() == sizeof stage.piecewise;
    if (whole) std::memcpy(&stage.piecewise, polynomial.data(), sizeof stage.piecewise);
    const Int16Piecewise& p = stage.piecewise;
    const int last = (p.far * p.turn + (1 << 14)) >> 15;  // the last eighth ends at 32767
    const bool fits = whole && p.shift >= 0 && p.shift <= 15 && p.far >= 0 && p.turn >= 0 && last <= (32767 >> p.shift);
    if (!fits || p.step < 0 || p.most < 0 || ((p.most * p.step + (1 << 14)) >> 15) > kInt16Limit)
      refuse("ShapeError", "the piecewise polynomial of an int16 output stage is invalid");
  }
  return stage;
}

using Four = std::tuple<int, int, int, int>;  // top, left, bottom, right

inline PoolWindow window_of(IntPair kernel, IntPair stride, const Four& padding, bool count_padding) {
  const auto [top, left, bottom, right] = padding;
  return {std::get<0>(kernel), std::get<1>(kernel), std::get<0>(stride), std::get<1>(stride), top, left, bottom, right,
          count_padding};
}

// Returns the tuned tile of a product, null for the default. Copy it: the table may change once the GIL is
// released.
inline const Int8Tile* tuned_tile(const TileTable* table, int64_t rows, int64_t columns, int64_t k, int threads) {
  if (table == nullptr || table->int8_products == nullptr) return nullptr;
  const auto* entry = table->int8_products->find({{rows, columns, k, tile_setting(threads)}});
  return entry == nullptr ? nullptr : &entry->tile;
}

}  // namespace tw
