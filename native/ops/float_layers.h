// Packed float layers: convolutions and linear layers. Graphs for several image sizes share one layer, which packs its
// weights once per algorithm and instruction set. After packing, the original weights can be freed (`release`); they
// are unpacked again if a graph for another size needs another form.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "common/alloc.h"
#include "common/convolution.h"
#include "common/sparse_matrix.h"
#include "kernels/channels_last.h"

namespace tw {

// A convolution without its weights. Padding: top, left, bottom, right.
struct ConvGeometry {
  int64_t stride[2], padding[4], dilation[2], groups;
};

class FloatConvLayer {
 public:
  // weights (o, c / groups, kh, kw), or null for a meta layer: its graphs are planned but never run. bias (o) or null.
  FloatConvLayer(const float* weights, const int64_t shape[4], const float* bias, const ConvGeometry& geometry,
                 ConvActivation activation);

  // Returns the convolution of images of this size; throws std::invalid_argument if it does not fit.
  ConvShape shape(int64_t n, int64_t c, int64_t h, int64_t w) const;

  // Packs the weights for images of this shape and returns the algorithm: `preferred` if it applies, else the default,
  // or the sparse one if enough weights are zero.
  ConvAlgorithm prepare(const ConvShape& s, ConvAlgorithm preferred) const;

  // act(conv(x) + bias + residual); residual may be null; `algorithm` is what `prepare` returned. Throws
  // std::bad_alloc.
  void run(ConvAlgorithm algorithm, const LastImage& x, const LastImage* residual, const LastImage& y) const;

  // Returns whether `run_pair` applies: this layer is pointwise, and `next` is a depthwise layer that reads its result.
  bool pairs_with(const FloatConvLayer& next) const;
  // Runs this layer and `next` without storing the value between them. Both were prepared for the direct algorithm.
  void run_pair(const FloatConvLayer& next, const LastImage& x, const LastImage* residual, const LastImage& y) const;

  void release();                      // frees the original weights; packed ones stay
  void restore(const float* weights);  // undoes `release`; the weights must be the same

  int64_t groups() const { return geometry_.groups; }
  int64_t count() const { return o_ * (c_ / geometry_.groups) * kh_ * kw_; }  // weights

 private:
  // One packed form of the weights, made when a graph is built or at first use.
  struct Packed {
    std::once_flag once;
    Buffer<float> floats;
    bool usable = true;  // false: Winograd's transformed weights would exceed `kWinogradLimit`
  };
  Packed& slot(ConvAlgorithm algorithm) const;
  const Packed& packed(ConvAlgorithm algorithm, const ConvShape& s) const;
  Buffer<float> unpacked_weights(const ConvShape& s) const;

  int64_t o_, c_, kh_, kw_;
  ConvGeometry geometry_;
  ConvActivation activation_;
  bool is_meta_;
  Buffer<float> weights_, bias_;  // a vector of zeros follows the bias
  int64_t nonzeros_ = 0;
  mutable std::mutex mutex_;     // protects weights_
  mutable Packed packed_[4][3];  // per algorithm from `direct` on, per instruction set
  mutable std::once_flag sparse_once_;
  mutable std::unique_ptr<const PackedSparse> sparse_;  // for all instruction sets
};

class FloatLinearLayer {
 public:
  // weights (out, in), or null for a meta layer; bias (out) or null
  FloatLinearLayer(const float* weights, int64_t out, int64_t in, const float* bias, ConvActivation activation);

  int64_t inputs() const { return in_; }
  int64_t outputs() const { return out_; }
  // Packs the weights for this number of rows and returns the algorithm: sparse if enough weights are zero, else
  // automatic.
  ConvAlgorithm prepare(int64_t rows, ConvAlgorithm preferred) const;
  void run(ConvAlgorithm algorithm, const LastImage& x, const LastImage& y) const;  // (n, in) to (n, out)

 private:
  ConvShape shape(int64_t rows) const { return {rows, in_, 1, 1, out_, 1, 1, 1, 1, 0, 0, 1, 1, 1}; }

  int64_t out_, in_, nonzeros_ = 0;
  ConvActivation activation_;
  Buffer<float> weights_, bias_;
  mutable std::once_flag sparse_once_;
  mutable std::unique_ptr<const PackedSparse> sparse_;
};

}  // namespace tw
