// Arrays of bytes, as the bindings of integer layers and of plans see them.
#pragma once

#include <array>
#include <cstring>
#include <string>
#include <tuple>

#include "bindings/bindings.h"
#include "bindings/numpy_api.h"
#include "bindings/tile_table.h"
#include "common/int8_layer.h"

namespace tw {

inline PyArrayObject* checked(nb::handle object, int type, int ndim, const char* what) {
  PyObject* raw = object.ptr();
  if (!PyArray_Check(raw)) throw nb::type_error((std::string(what) + " must be a NumPy array").c_str());
  auto* array = reinterpret_cast<PyArrayObject*>(raw);
  if (PyArray_TYPE(array) != type || PyArray_NDIM(array) != ndim || !PyArray_ISCARRAY_RO(array)) {
    throw nb::type_error((std::string(what) + " must be C-contiguous with " + std::to_string(ndim) +
                          " dimensions and the documented dtype")
                             .c_str());
  }
  return array;
}

inline nb::object new_object(int ndim, const npy_intp* shape, int type) {
  PyArrayObject* array = new_array(ndim, shape, type);
  if (array == nullptr) throw nb::python_error();
  return nb::steal(reinterpret_cast<PyObject*>(array));
}

template <class T>
T* data(nb::handle array) {
  return static_cast<T*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr())));
}

using IntPair = std::tuple<int, int>;

// An image buffer of the integer layers: (images, height + 2 padding, width + 2 padding, channels rounded up to 4).
inline Int8Image image_of(nb::handle x, int padding, const char* what) {
  PyArrayObject* array = checked(x, NPY_UINT8, 4, what);
  const Int8Image image{PyArray_DIM(array, 0), PyArray_DIM(array, 1) - 2 * padding, PyArray_DIM(array, 2) - 2 * padding,
                        PyArray_DIM(array, 3), padding};
  if (padding < 0 || image.height < 0 || image.width < 0) throw nb::value_error("the padding is wider than the image");
  return image;
}

inline nb::object new_image(const Int8Image& image, int zero) {
  if (image.padding < 0) throw nb::value_error("padding cannot be negative");
  const npy_intp shape[4] = {image.images, image.full_height(), image.full_width(), image.pixel};
  nb::object out = new_object(4, shape, NPY_UINT8);
  fill_padding(image, zero, data<uint8_t>(out));
  return out;
}

// Creates an int16 image filled with its zero point, 0; the sizes of `image` are in values, not bytes.
inline nb::object new_int16_image(Int8Image image) {
  const npy_intp shape[4] = {image.images, image.full_height(), image.full_width(), image.pixel};
  nb::object out = new_object(4, shape, NPY_INT16);
  image.pixel *= 2;
  fill_padding(image, 0, data<uint8_t>(out));
  return out;
}

inline void fill_all(nb::handle array, int zero) {
  auto* bytes = reinterpret_cast<PyArrayObject*>(array.ptr());
  std::memset(PyArray_DATA(bytes), zero, static_cast<std::size_t>(PyArray_NBYTES(bytes)));
}

template <class T>
const T* per_column(nb::handle values, int type, int columns, const char* what) {
  if (values.is_none()) return nullptr;
  if (PyArray_DIM(checked(values, type, 1, what), 0) != columns) {
    throw nb::value_error((std::string(what) + " needs one number per column").c_str());
  }
  return data<const T>(values);
}

inline void check_zero(int zero) {
  if (zero < 0 || zero > 255) throw nb::value_error("a zero point lies between 0 and 255");
}

// zero, low, high; and of an activation that bytes cannot have by being clamped: the table, points of its grid in 1,
// its first, or the bend: how far it reaches (0: there is none), and its slope; or the pieces: Uint8Piecewise as it
// lies in memory
using Uint8StageTuple = std::tuple<int, int, int, nb::bytes, float, int, float, float, nb::bytes>;

inline Uint8Stage uint8_stage_of(const Uint8StageTuple& values) {
  const auto& [zero, low, high, table, fine, first, far, slope, pieces] = values;
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
  if (pieces.size() > 0) {
    const bool whole = pieces.size() == sizeof stage.piecewise && high == 255;
    if (whole) std::memcpy(&stage.piecewise, pieces.data(), sizeof stage.piecewise);
    if (!whole || stage.piecewise.shift < 0 || stage.piecewise.shift > 14) throw nb::value_error("bad pieces");
    stage.approximation = Approximation::piecewise;
    return stage;
  }
  if (table.size() == 0) return stage;
  stage.approximation = Approximation::lookup_table;
  if (table.size() > (1u << 17) || first < -(1 << 16) || first > 0 || !(fine > 0.0f))
    throw nb::value_error("bad table");
  stage.table = {static_cast<const uint8_t*>(table.data()), fine, first, first + static_cast<int>(table.size()) - 1};
  return stage;
}

// low, high, curve (the places of Int16Activation), inverse; far and slope of a bend; the bytes of its pieces
using Int16StageTuple = std::tuple<int, int, int, float, float, float, nb::bytes>;

inline Int16Stage int16_stage_of(const Int16StageTuple& values) {
  const auto& [low, high, curve, inverse, far, slope, pieces] = values;
  if (curve < 0 || curve > static_cast<int>(Int16Activation::leaky_relu))
    throw nb::value_error("there is no such activation");
  Int16Stage stage{low, high, static_cast<Int16Activation>(curve), inverse, {far, slope}, {}};
  if (stage.activation == Int16Activation::piecewise) {
    const bool whole = pieces.size() == sizeof stage.piecewise;
    if (whole) std::memcpy(&stage.piecewise, pieces.data(), sizeof stage.piecewise);
    const Int16Piecewise& p = stage.piecewise;
    const int last = (p.far * p.turn + (1 << 14)) >> 15;  // the eighths end at 32767
    const bool fits = whole && p.shift >= 0 && p.shift <= 15 && p.far >= 0 && p.turn >= 0 && last <= (32767 >> p.shift);
    if (!fits || p.step < 0 || p.most < 0 || ((p.most * p.step + (1 << 14)) >> 15) > kInt16Limit)
      throw nb::value_error("bad pieces");
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
