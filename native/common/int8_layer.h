// Layers on uint8 activations with int8 weights.
#pragma once

#include "common/integer_layer.h"

namespace tw {

// A convolution or linear layer without groups and dilation, and with equal padding on opposite sides.
class Int8Layer : public IntegerLayer {
 public:
  // weights (columns, kh, kw, channels); offset, scale and bias (columns); scale and bias may be null
  Int8Layer(const IntegerGeometry& geometry, const int8_t* weights, const int32_t* offset, const float* scale,
            const float* bias);

  int64_t in_pixel() const { return round_up(geometry_.channels(), kInt8Group); }
  int64_t out_pixel() const { return round_up(geometry_.columns, kInt8Group); }
  int64_t nbytes() const { return panels_.size() + stage_bytes(); }
  void unpack(int8_t* weights) const { panels_.unpack(geometry_, weights); }  // inverse of packing

  // The shape of the result without padding. A 1x1 filter accepts any distance between pixels.
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

  PackedPanels<int8_t> panels_;
  int max_pair_sum_;
  bool quads_fit_;
};

// A grouped, depthwise or dilated convolution, or one with asymmetric padding.
class Int8GroupedLayer : public IntegerLayer {
 public:
  // weights (columns, kh, kw, group_channels); offset and scale (columns)
  Int8GroupedLayer(const IntegerGeometry& geometry, const int8_t* weights, const int32_t* offset, const float* scale);

  int64_t nbytes() const;
  void unpack(int8_t* weights) const;  // inverse of packing

  Int8Image conv_shape(const Int8Image& in) const { return geometry_.result(in, kInt8Group); }
  // Like Int8Layer::conv.
  void conv(const Int8Image& in, const uint8_t* x, const Int8Image& skip, const uint8_t* residual, const Int8Image& out,
            uint8_t* y) const;

 private:
  Buffer<int32_t> depthwise_weights_;  // [tap][columns], whole panels
  PackedPanels<int8_t> panels_;        // if not depthwise
};

}  // namespace tw
