// The record that describes every value of a graph: shape, data type, memory layout and quantization parameters.
//
// A record describes one batch element. A run processes `batch` elements, which follow each other in memory. In a graph
// of a fixed batch the element is the whole batch (n images); otherwise it is one image.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/integer_layer.h"
#include "kernels/channels_last.h"

namespace tw {

enum class DType : uint8_t { float32, uint8, int16 };

// planes: (N, C, H, W) without gaps, the layout of NumPy arrays. channels_last: (N, H, W, C), pixels `pixel()` bytes
// apart.
enum class Layout : uint8_t { planes, channels_last };

struct TensorDesc {
  DType dtype = DType::float32;
  Layout layout = Layout::planes;
  bool rows = false;  // (N, channels): the array has two dimensions, and one pixel per row
  bool sized = true;  // false: an input whose height and width are known at run time only
  int64_t n = 1, channels = 0, height = 1, width = 1;
  int padding = 0;     // pixels around each image that hold the zero point
  int zero_point = 0;  // of uint8
  int64_t pitch = 0;   // bytes from pixel to pixel; 0: the default of the data type

  bool is_integer() const { return dtype != DType::float32; }
  bool is_int16() const { return dtype == DType::int16; }
  int element_size() const { return dtype == DType::float32 ? 4 : is_int16() ? 2 : 1; }
  int64_t pixels() const { return n * height * width; }
  int64_t elements() const { return channels * pixels(); }

  // Bytes from pixel to pixel in a buffer of the value's own. Integers are stored in groups of four channels, as the
  // dot-product instructions read them. Floats are stored in cache lines; one line is added where pixels would be a
  // multiple of 1 KiB apart and share few sets of the first-level cache.
  int64_t default_pitch() const {
    if (is_integer()) return element_size() * round_up(channels, kInt8Group);
    const int64_t line = 64, bytes = std::max(line, round_up(4 * channels, line));
    return bytes % 1024 == 0 ? bytes + line : bytes;
  }
  int64_t pixel() const { return pitch > 0 ? pitch : default_pitch(); }
  bool has_default_pitch() const { return pitch == 0 || pitch == default_pitch(); }

  // The integer kernels' view of `batch` elements, in bytes or in numbers.
  Int8Image image(int64_t batch) const { return {batch * n, height, width, pixel(), padding}; }
  Int8Image numbers(int64_t batch) const { return {batch * n, height, width, pixel() / element_size(), padding}; }

  // The float kernels' view; a pitch of 0 stands for planes.
  LastImage floats(int64_t batch, const void* data) const {
    const int64_t pixel_floats = layout == Layout::planes ? 0 : pixel() / 4;
    return {static_cast<float*>(const_cast<void*>(data)), pixel_floats, batch * n, channels, height, width};
  }

  // Bytes of one batch element, its padding included.
  int64_t storage() const { return layout == Layout::planes ? 4 * elements() : n * image(1).image_step(); }

  // Whether another value may reuse this value's padded buffer without writing its padding again.
  bool same_padded_buffer(const TensorDesc& other) const {
    return dtype == other.dtype && n == other.n && pixel() == other.pixel() && height == other.height &&
           width == other.width && padding == other.padding && zero_point == other.zero_point;
  }

  bool same_pixels(const TensorDesc& other) const {
    return n == other.n && height == other.height && width == other.width;
  }
};

}  // namespace tw
