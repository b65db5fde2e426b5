// A convolution or linear layer on numbers of 16 bits (kernels/int16.h), of every geometry: groups, depthwise,
// dilation, uneven padding. It gives numbers of 16 bits, bytes or floats. It holds the only copy of its weights; a
// misfit throws std::invalid_argument with one sentence.
#pragma once

#include <cstdint>
#include <vector>

#include "common/alloc.h"
#include "common/int8_grouped_layer.h"
#include "kernels/int16.h"

namespace tw {

class Int16Layer {
 public:
  // weights (columns, kh, kw, group_channels); offset and scale of `columns` numbers; bias, of float results, likewise
  // or null
  Int16Layer(const GroupedGeometry& geometry, const int16_t* weights, const int32_t* offset, const float* scale,
             const float* bias);

  void set_finish(const Uint8Stage& finish);       // gives bytes
  void set_int16_stage(const Int16Stage& finish);  // gives 16 bits
  void set_residual(float scale, int zero, bool wide);
  void set_bytes_read(int zero);  // depthwise only: x is bytes

  const GroupedGeometry& geometry() const { return geometry_; }
  Int8Out kind() const { return kind_; }  // float32, where no finish was set
  int zero() const { return kind_ == Int8Out::uint8 ? static_cast<const Uint8Stage&>(finish_).zero : 0; }
  bool int16_residual() const { return int16_residual_; }
  bool reads_bytes() const { return bytes_zero_ >= 0; }
  int64_t nbytes() const;
  void unpack(int16_t* weights) const;  // as they were given

  // Images are in numbers, not bytes: their pixels are so many numbers apart.
  Int8Image conv_shape(const Int8Image& in) const;  // of the result, without a border
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
  OwnedUint8Stage finish_;
  Int16Stage int16_stage_;
  Int8Out kind_ = Int8Out::float32;
  float residual_scale_ = 0.0f;
  int residual_zero_ = 0;
  bool int16_residual_ = false;
  int bytes_zero_ = -1;  // of the bytes that are read; -1: 16 bits are
};

}  // namespace tw
