// A convolution or linear layer on int16 activations (kernels/int16.h) of any geometry: groups, depthwise, dilation,
// asymmetric padding. It produces int16, uint8 or float32 and holds the only copy of its weights. Invalid shapes throw
// std::invalid_argument.
#pragma once

#include <cstdint>
#include <vector>

#include "common/alloc.h"
#include "common/int8_grouped_layer.h"
#include "kernels/int16.h"

namespace tw {

class Int16Layer {
 public:
  // weights (columns, kh, kw, group_channels); offset and scale of length `columns`; bias of a float result likewise,
  // or null
  Int16Layer(const GroupedGeometry& geometry, const int16_t* weights, const int32_t* offset, const float* scale,
             const float* bias);

  void set_uint8_stage(const Uint8Stage& stage);  // uint8 output
  void set_int16_stage(const Int16Stage& stage);  // int16 output
  void set_residual(float scale, int zero, bool is_int16);
  void set_bytes_read(int zero);  // depthwise only: x is uint8

  const GroupedGeometry& geometry() const { return geometry_; }
  Int8Out kind() const { return kind_; }  // float32 unless a stage was set
  int zero() const { return kind_ == Int8Out::uint8 ? static_cast<const Uint8Stage&>(uint8_stage_).zero : 0; }
  bool int16_residual() const { return int16_residual_; }
  bool reads_bytes() const { return bytes_zero_ >= 0; }
  int64_t nbytes() const;
  void unpack(int16_t* weights) const;  // inverse of packing

  // Image steps count elements, not bytes.
  Int8Image conv_shape(const Int8Image& in) const;  // shape of the result without padding
  void conv(const Int8Image& in, const void* x, const Int8Image& skip, const void* residual, const Int8Image& out,
            bool relu, void* y) const;

 private:
  bool depthwise() const { return geometry_.group_channels == 1 && geometry_.columns == geometry_.groups; }
  int64_t packed_at(int64_t column, int64_t tap, int64_t channel) const;
  int64_t in_block(int64_t block, int64_t column, int64_t tap) const;
  void pack_depthwise(const int16_t* weights);
  void pack_panels(const int16_t* weights);
  void run(const Int16Problem& problem) const;

  GroupedGeometry geometry_;
  Buffer<int16_t> packed_;
  std::vector<Int16Window> windows_;
  Buffer<int32_t> offset_;
  Buffer<float> scale_, bias_;
  OwnedUint8Stage uint8_stage_;
  Int16Stage int16_stage_;
  Int8Out kind_ = Int8Out::float32;
  float residual_scale_ = 0.0f;
  int residual_zero_ = 0;
  bool int16_residual_ = false;
  int bytes_zero_ = -1;  // zero point of a uint8 input; -1: the input is int16
};

}  // namespace tw
