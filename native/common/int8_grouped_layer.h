// A grouped, depthwise or dilated integer convolution, or one with asymmetric padding (Int8Layer handles the others).
// It holds the only copy of its weights. Invalid shapes throw std::invalid_argument.
#pragma once

#include <cstdint>
#include <vector>

#include "common/alloc.h"
#include "common/int8_layer.h"
#include "kernels/int8_grouped.h"

namespace tw {

struct GroupedGeometry {
  int64_t columns = 0, group_channels = 0, groups = 1;
  int64_t top = 0, left = 0, bottom = 0, right = 0;  // padding
  GroupedTaps taps;

  int64_t channels() const { return group_channels * groups; }
  int64_t reach_h() const { return (taps.kernel_h - 1) * taps.dilation_h + 1; }
  int64_t reach_w() const { return (taps.kernel_w - 1) * taps.dilation_w + 1; }
  // The shape of the result for `in`, whose pixels hold whole groups of `group` channels.
  Int8Image result(const Int8Image& in, int64_t group) const;
};

class Int8GroupedLayer {
 public:
  // weights (columns, kh, kw, group_channels); offset and scale of `columns` numbers
  Int8GroupedLayer(const GroupedGeometry& geometry, const int8_t* weights, const int32_t* offset, const float* scale);

  void set_uint8_stage(const Uint8Stage& stage) { uint8_stage_ = OwnedUint8Stage(stage); }
  void set_residual(float scale, int zero);

  const GroupedGeometry& geometry() const { return geometry_; }
  const Uint8Stage& uint8_stage() const { return uint8_stage_; }
  int zero() const { return uint8_stage().zero; }
  bool gives_int16() const { return false; }  // as Int8Layer may
  bool int16_residual() const { return false; }
  int64_t nbytes() const;
  void unpack(int8_t* weights) const;  // inverse of packing

  Int8Image conv_shape(const Int8Image& in) const;  // shape of the result without padding
  // y has the shape conv_shape(in) plus padding, which is not written. `residual` may be null.
  void conv(const Int8Image& in, const uint8_t* x, const Int8Image& skip, const uint8_t* residual, const Int8Image& out,
            uint8_t* y) const;

 private:
  bool depthwise() const { return geometry_.group_channels == 1 && geometry_.columns == geometry_.groups; }
  void pack_depthwise(const int8_t* weights);
  void pack_panels(const int8_t* weights);
  int64_t packed_at(int64_t column, int64_t tap, int64_t channel) const;  // offset of a weight in its panel

  GroupedGeometry geometry_;
  Buffer<int32_t> depthwise_weights_;  // depthwise
  Buffer<int8_t> packed_;              // other groups
  std::vector<PanelWindow> windows_;
  Buffer<int32_t> offset_;
  Buffer<float> scale_;
  OwnedUint8Stage uint8_stage_;
  float residual_scale_ = 0.0f;
  int residual_zero_ = 0;
};

}  // namespace tw
