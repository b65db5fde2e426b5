// What stands between integer products besides pooling: sums to bytes with an activation that bends, additions, products,
// scales by channel. Bytes are channels last; a step of one input or output from pixel to pixel may be wider than its
// channels (a place in a concatenation).
//
// A value in units of the output becomes clamp(round(value) + zero, low, high). With an activation, the value is real and
// becomes clamp(round(act(value) * inverse) + zero, low, high).
#pragma once

#include <cstdint>

#include "common/isa.h"
#include "kernels/conv.h"

namespace tw {

struct ByteFinish {
  ConvActivation activation = ConvActivation::none;
  float inverse = 1.0f;  // 1 / the output's scale
  int zero = 0, low = 0, high = 255;
};

// Pixels of bytes; `step` bytes from one to the next, 0 where all read the same one.
struct BytePixels {
  const uint8_t* data = nullptr;
  int64_t step = 0;
  float scale = 0.0f;
  int zero = 0;
};

struct ByteTarget {
  uint8_t* data;
  int64_t step;
};

struct Int8BetweenKernels {
  // sums[pixel * channels + channel] * scale[channel], plus the residual's (q - zero) * scale where it has data
  void (*sums)(const int32_t* sums, int64_t pixels, int64_t channels, const float* scale, const BytePixels& residual,
               const ByteFinish& finish, const ByteTarget& to);
  void (*add)(const BytePixels& a, const BytePixels& b, int64_t pixels, int64_t channels, const ByteFinish& finish,
              const ByteTarget& to);
  // (a - its zero) * (b - its zero) * a's scale
  void (*mul)(const BytePixels& a, const BytePixels& b, int64_t pixels, int64_t channels, const ByteFinish& finish,
              const ByteTarget& to);
  // (x - its zero) * scale[channel] + shift[channel]
  void (*affine)(const BytePixels& x, const float* scale, const float* shift, int64_t pixels, int64_t channels,
                 const ByteFinish& finish, const ByteTarget& to);
};

TW_TABLE(Int8BetweenKernels, int8_between)

}  // namespace tw
