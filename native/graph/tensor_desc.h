// Describes one value of a graph: shape, data type, memory layout, padding and quantization parameters.
//
// Sizes are those of one batch element. A run processes `batch` elements, stored one after the other. In a graph with a
// fixed batch, the whole batch of n images is one element; in any other graph, an element is one image.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/integer_layer.h"
#include "kernels/channels_last.h"

namespace tw {

enum class DType : uint8_t { float32, uint8, int16 };

// planes: (N, C, H, W) without gaps, the layout of NumPy arrays. channels_last: (N, H, W, C), where `pixel()` is the
// distance from one pixel to the next in bytes.
enum class Layout : uint8_t { planes, channels_last };

struct TensorDesc {
  DType dtype = DType::float32;
  Layout layout = Layout::planes;
  bool rows = false;  // the caller's array is a matrix (N, channels): each row is one pixel
  bool sized = true;  // false: height and width are known at run time only
  int64_t n = 1, channels = 0, height = 1, width = 1;
  int padding = 0;     // halo: pixels stored on each side of an image, which hold the zero point
  int zero_point = 0;  // of uint8; floats and int16 have 0
  int64_t pitch = 0;   // bytes from pixel to pixel; 0: `default_pitch()`

  bool is_integer() const { return dtype != DType::float32; }
  bool is_int16() const { return dtype == DType::int16; }
  int element_size() const { return dtype == DType::float32 ? 4 : is_int16() ? 2 : 1; }
  int64_t pixels() const { return n * height * width; }
  int64_t elements() const { return channels * pixels(); }

  // The distance between pixels, in bytes, where the value has a buffer to itself. Integers are padded to groups of
  // four channels, which the dot-product instructions read. Floats are padded to cache lines; one more line is added
  // where pixels would be a multiple of 1 KiB apart, because those compete for few sets of the first-level cache.
  int64_t default_pitch() const {
    if (is_integer()) return element_size() * round_up(channels, kInt8Group);
    const int64_t line = 64, bytes = std::max(line, round_up(4 * channels, line));
    return bytes % 1024 == 0 ? bytes + line : bytes;
  }
  int64_t pixel() const { return pitch > 0 ? pitch : default_pitch(); }
  bool has_default_pitch() const { return pitch == 0 || pitch == default_pitch(); }

  // The integer kernels' view of `batch` elements: distances in bytes (`image`) or in elements (`numbers`).
  Int8Image image(int64_t batch) const { return {batch * n, height, width, pixel(), padding}; }
  Int8Image numbers(int64_t batch) const { return {batch * n, height, width, pixel() / element_size(), padding}; }

  // The float kernels' view, with distances in floats; a pitch of 0 stands for planes.
  LastImage floats(int64_t batch, const void* data) const {
    const int64_t pixel_floats = layout == Layout::planes ? 0 : pixel() / 4;
    return {static_cast<float*>(const_cast<void*>(data)), pixel_floats, batch * n, channels, height, width};
  }

  // The bytes of one batch element, padding included.
  int64_t storage() const { return layout == Layout::planes ? 4 * elements() : n * image(1).image_step(); }

  // Returns whether `other` can be stored in this value's buffer while the padding that was written there stays valid.
  bool same_padded_buffer(const TensorDesc& other) const {
    return dtype == other.dtype && n == other.n && pixel() == other.pixel() && height == other.height &&
           width == other.width && padding == other.padding && zero_point == other.zero_point;
  }

  bool same_pixels(const TensorDesc& other) const {
    return n == other.n && height == other.height && width == other.width;
  }
};

}  // namespace tw
