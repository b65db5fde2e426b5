// A convolution or linear layer on int16 activations (kernels/int16.h) of any geometry: groups, depthwise, dilation,
// asymmetric padding. The result is float32 unless an output stage is set, which makes it int16 or uint8.
#pragma once

#include "common/integer_layer.h"

namespace tw {

class Int16Layer : public IntegerLayer {
 public:
  // weights (columns, kh, kw, group_channels); offset and scale (columns); bias (columns) of a float result, or null
  Int16Layer(const IntegerGeometry& geometry, const int16_t* weights, const int32_t* offset, const float* scale,
             const float* bias);

  void set_bytes_read(int zero);  // depthwise only: x is uint8 with this zero point

  bool reads_bytes() const { return bytes_zero_ >= 0; }
  int64_t nbytes() const;
  void unpack(int16_t* weights) const;  // inverse of packing

  // Image steps count elements, not bytes.
  Int8Image conv_shape(const Int8Image& in) const { return geometry_.result(in, kInt16Group); }
  void conv(const Int8Image& in, const void* x, const Int8Image& skip, const void* residual, const Int8Image& out,
            bool relu, void* y) const;

 private:
  int64_t in_block(int64_t block, int64_t column, int64_t tap) const;
  void pack_depthwise(const int16_t* weights);
  void run(const Int16Problem& problem) const;

  Buffer<int16_t> depthwise_weights_;
  PackedPanels<int16_t> panels_;  // if not depthwise
  int bytes_zero_ = -1;           // zero point of a uint8 input; -1: the input is int16
};

}  // namespace tw
