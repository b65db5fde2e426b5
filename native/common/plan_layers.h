// The layers of a float plan that have weights. A layer keeps them in the form its kernels read, for as long as it lives:
// plans for several image sizes share one layer.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "common/alloc.h"
#include "common/convolution.h"
#include "kernels/channels_last.h"

namespace tw {

// Of a convolution, besides its weights. Padding: top, left, bottom, right.
struct ConvGeometry {
  int64_t stride[2], padding[4], dilation[2], groups;
};

class PlanConv {
 public:
  // weights (o, c, kh, kw); bias (o) or null
  PlanConv(const float* weights, const int64_t shape[4], const float* bias, const ConvGeometry& geometry, ConvActivation activation);

  // The convolution of images of this size; throws std::invalid_argument where it does not fit.
  ConvShape shape(int64_t n, int64_t c, int64_t h, int64_t w) const;

  // act(conv(x) + bias + residual); residual may be null. Throws std::bad_alloc.
  void run(const LastImage& x, const LastImage* residual, const LastImage& y) const;

  int64_t groups() const { return geometry_.groups; }

 private:
  // Packed for the instruction set in force, made at first use.
  struct Packed {
    std::once_flag once;
    Buffer<float> floats;
    bool usable = true;
  };
  const Packed& packed(ConvAlgorithm algorithm, const ConvShape& s) const;

  int64_t o_, c_, kh_, kw_;
  ConvGeometry geometry_;
  ConvActivation activation_;
  Buffer<float> weights_, bias_;  // the bias with a vector of zeros after it
  mutable Packed packed_[2][3];
};

class PlanLinear {
 public:
  // weights (out, in); bias (out) or null
  PlanLinear(const float* weights, int64_t out, int64_t in, const float* bias, ConvActivation activation);

  int64_t inputs() const { return in_; }
  int64_t outputs() const { return out_; }
  void run(const LastImage& x, const LastImage& y) const;  // one pixel an image

 private:
  int64_t out_, in_;
  ConvActivation activation_;
  Buffer<float> weights_, bias_;
};

}  // namespace tw
