// An integer layer: packed weights with their output stage, applied to images or rows of uint8. It holds the only copy
// of its weights. Invalid shapes throw std::invalid_argument.
#pragma once

#include <cstdint>

#include "common/alloc.h"
#include "kernels/int8.h"
#include "kernels/int8_elementwise.h"
#include "kernels/int8_ops.h"

namespace tw {

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// A uint8 NHWC image with `padding` pixels of padding, filled with the zero point, on every side. Rows are images of
// one pixel.
struct Int8Image {
  int64_t images = 0, height = 1, width = 1, pixel = 0, padding = 0;

  int64_t full_height() const { return height + 2 * padding; }
  int64_t full_width() const { return width + 2 * padding; }
  int64_t row_step() const { return full_width() * pixel; }
  int64_t image_step() const { return full_height() * row_step(); }
  int64_t inside() const { return padding * row_step() + padding * pixel; }
  PixelGrid grid() const { return {image_step(), row_step(), pixel}; }
  BytePlane plane() const { return {height, width, row_step(), pixel}; }
};

// Writes `zero` into the padding of all images.
void fill_padding(const Int8Image& image, int zero, uint8_t* data);

// The shape of a pooling result without padding. Throws if the window does not fit.
Int8Image pooled_shape(const Int8Image& in, const PoolWindow& window);

struct Int8Geometry {
  int columns = 0, kernel_h = 1, kernel_w = 1, channels = 0;
  int stride_h = 1, stride_w = 1, pad_h = 0, pad_w = 0;
};

// An output stage that owns its lookup table.
class OwnedUint8Stage {
 public:
  explicit OwnedUint8Stage(const Uint8Stage& stage = {});  // copies the table
  operator const Uint8Stage&() const { return uint8_stage_; }
  int64_t nbytes() const { return static_cast<int64_t>(table_.size()); }

 private:
  Buffer<uint8_t> table_;
  Uint8Stage uint8_stage_;
};

void check_stage(const Int16Stage& stage);  // throws if the range is invalid

class Int8Layer {
 public:
  // weights (columns, kh, kw, channels); offset, scale and bias of length `columns`; scale and bias may be null
  Int8Layer(const Int8Geometry& geometry, const int8_t* weights, const int32_t* offset, const float* scale,
            const float* bias);

  void set_output(int zero, int low, int high) { set_uint8_stage({zero, low, high, {}, Approximation::none, {}, {}}); }
  void set_uint8_stage(const Uint8Stage& stage);  // with a lookup table, scales are real numbers
  void set_int16_stage(const Int16Stage& stage);  // int16 output (kernels/int16.h)
  void set_residual(float scale, int zero, bool is_int16 = false);

  const Int8Geometry& geometry() const { return geometry_; }
  int zero() const { return gives_int16_ ? 0 : uint8_stage().zero; }
  bool gives_int16() const { return gives_int16_; }
  bool int16_residual() const { return int16_residual_; }
  const Uint8Stage& uint8_stage() const { return uint8_stage_; }
  int64_t in_pixel() const { return static_cast<int64_t>(groups_) * kInt8Group; }
  int64_t out_pixel() const { return round_up(geometry_.columns, kInt8Group); }
  int64_t nbytes() const;
  void unpack(int8_t* weights) const;  // inverse of packing

  // The shape of the result without padding. A 1x1 filter accepts any pixel step.
  Int8Image conv_shape(const Int8Image& in) const;
  // y has the shape conv_shape(in) plus padding, which is not written. `residual` may be null. `skip` and `out` count
  // elements.
  void conv(const Int8Image& in, const uint8_t* x, const Int8Image& skip, const uint8_t* residual, const Int8Image& out,
            uint8_t* y) const;

  // Maps x (rows, in_pixel()) to (rows, columns), or to (rows, out_pixel()) for uint8. `in_step` is the distance of the
  // rows of x in bytes, `out_step` that of float rows in floats; 0 means contiguous.
  void check_linear(int64_t width, Int8Out kind) const;
  // `tile` is null for the default, or one that int8_tile_problem accepts.
  void linear(const uint8_t* x, int64_t rows, Int8Out kind, const float* row_scale, bool relu, void* y,
              const Int8Tile* tile = nullptr, int64_t in_step = 0, int64_t out_step = 0) const;

 private:
  Int8Problem problem() const;

  Int8Geometry geometry_;
  int groups_;  // groups of four channels
  int max_pair_sum_;
  bool quads_fit_;
  Buffer<int8_t> packed_;
  Buffer<int32_t> offset_;
  Buffer<float> scale_, bias_;
  OwnedUint8Stage uint8_stage_;
  Int16Stage int16_stage_;
  bool gives_int16_ = false, int16_residual_ = false;
  int residual_zero_ = 0;
  float residual_scale_ = 0.0f;
};

}  // namespace tw
