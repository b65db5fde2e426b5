// The layers of a float plan that have weights. A layer keeps them in the forms its kernels read, for as long as it
// lives: plans for several image sizes share one layer. Once its plan is made, the weights as they came can be let go
// (`release`) until a plan for another size needs them in another form.
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
  // weights (o, c, kh, kw), or null for an outline: plans are made of it, and none of them runs; bias (o) or null
  PlanConv(const float* weights, const int64_t shape[4], const float* bias, const ConvGeometry& geometry,
           ConvActivation activation);

  // The convolution of images of this size; throws std::invalid_argument where it does not fit.
  ConvShape shape(int64_t n, int64_t c, int64_t h, int64_t w) const;

  // Packs the weights for images of this shape and says by which algorithm they will go: the one that is wanted where
  // it applies, else the default.
  ConvAlgorithm prepare(const ConvShape& s, ConvAlgorithm wanted) const;

  // act(conv(x) + bias + residual); residual may be null; algorithm as `prepare` gave it. Throws std::bad_alloc.
  void run(ConvAlgorithm algorithm, const LastImage& x, const LastImage* residual, const LastImage& y) const;

  // Whether `run_pair` takes this layer, of these images, and `next`, which reads its result.
  bool pairs_with(const PlanConv& next) const;
  // next's run of this layer's result, which is not kept. Both were prepared as direct.
  void run_pair(const PlanConv& next, const LastImage& x, const LastImage* residual, const LastImage& y) const;

  void release();                      // lets the weights go that no kernel reads
  void restore(const float* weights);  // the same ones again

  int64_t groups() const { return geometry_.groups; }
  int64_t count() const { return o_ * (c_ / geometry_.groups) * kh_ * kw_; }  // weights

 private:
  // For the instruction set in force, made when a plan is, or at first use.
  struct Packed {
    std::once_flag once;
    Buffer<float> floats;
    bool usable = true;
  };
  Packed& slot(ConvAlgorithm algorithm) const;
  const Packed& packed(ConvAlgorithm algorithm, const ConvShape& s) const;
  Buffer<float> recovered(const ConvShape& s) const;

  int64_t o_, c_, kh_, kw_;
  ConvGeometry geometry_;
  ConvActivation activation_;
  bool outline_;
  Buffer<float> weights_, bias_;  // the bias with a vector of zeros after it
  mutable std::mutex mutex_;      // of weights_
  mutable Packed packed_[4][3];
};

class PlanLinear {
 public:
  // weights (out, in) or null for an outline; bias (out) or null
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
