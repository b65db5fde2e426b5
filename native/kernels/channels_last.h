// Operators between convolutions on NHWC images: pixels of c channels, `pitch` floats apart. As in convolution, a
// vector may read up to one vector past a pixel's last channel and never writes there.
#pragma once

#include "kernels/conv.h"
#include "kernels/pool.h"

namespace tw {

struct LastImage {
  float* data;
  int64_t pitch;  // 0: planes (N, C, H, W)
  int64_t n, c, h, w;

  int64_t pixels() const { return n * h * w; }
};

enum class BinaryKind { add, sub, mul };

struct ChannelsLastOps {
  void (*from_planes)(const LastImage& x, const LastImage& y);
  void (*to_planes)(const LastImage& x, const LastImage& y);
  void (*max_pool)(const PoolShape& s, const LastImage& x, const LastImage& y);  // NaN counts as largest
  void (*avg_pool)(const PoolShape& s, bool count_padding, const LastImage& x, const LastImage& y);
  void (*global_mean)(const LastImage& x, const LastImage& y);  // y: 1 x 1
  // act(a + b), act(a - b) or act(a * b). If b has one pixel per image, it is broadcast over that image.
  void (*binary)(BinaryKind kind, const LastImage& a, const LastImage& b, ConvActivation activation,
                 const LastImage& y);
  // act(x * scale + shift) with scale and shift per channel, padded to whole vectors, or both null
  void (*affine)(const LastImage& x, const float* scale, const float* shift, ConvActivation activation,
                 const LastImage& y);
  // y[pixel, i] = x[pixel, channels[i]]
  void (*gather_channels)(const LastImage& x, const int32_t* channels, const LastImage& y);
  // Group normalization: over all pixels of an image and each of `groups` runs of its channels; weight and bias per
  // channel.
  void (*group_norm)(const LastImage& x, int64_t groups, const float* weight, const float* bias, float eps,
                     const LastImage& y);
  // Copies these `count` pixels of every image, in this order.
  void (*gather)(const LastImage& x, const int32_t* pixels, int64_t count, const LastImage& y);
  void (*transpose)(const LastImage& x, const LastImage& y);  // exchanges pixels and channels
};

TW_TABLE(ChannelsLastOps, channels_last)

}  // namespace tw
