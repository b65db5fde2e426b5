// Helpers of operators that process a value row by row.
#pragma once

#include <algorithm>

#include "common/thread_pool.h"
#include "graph/op.h"

namespace tw {

constexpr int64_t kVectorFloats = 16;  // hardware: floats of the widest vector; kernels read whole vectors

// Calls f(image, first row, rows) for all rows of all images, at most `max_rows` rows of one image at a time. The
// threads share the calls if there is enough work.
template <class F>
void for_row_blocks(const TensorDesc& desc, int64_t batch, int64_t max_rows, F&& f) {
  constexpr int64_t kTaskBytes = 4 * kTaskElements;
  const int64_t rows = batch * desc.n * desc.height;
  const int64_t tasks =
      std::min({rows, batch * desc.elements() * desc.element_size() / kTaskBytes, int64_t{2} * num_threads()});
  const auto visit = [&](int64_t first, int64_t last) {
    while (first < last) {
      const int64_t row = first % desc.height, count = std::min({max_rows, desc.height - row, last - first});
      f(first / desc.height, row, count);
      first += count;
    }
  };
  if (tasks < 2 || num_threads() == 1) return visit(0, rows);
  parallel_for(static_cast<int>(tasks), [&](int task) { visit(rows * task / tasks, rows * (task + 1) / tasks); });
}

// Calls f(image, row) for all rows of all images.
template <class F>
void for_rows(const TensorDesc& desc, int64_t batch, F&& f) {
  for_row_blocks(desc, batch, 1, [&](int64_t image, int64_t row, int64_t) { f(image, row); });
}

// Describes a result of the same shape and data type as `in`, in a buffer of default pitch.
inline TensorDesc like(const TensorDesc& in, int padding, int zero_point) {
  require(padding >= 0 && zero_point >= 0 && zero_point <= 255,
          "padding must not be negative, and a zero point is between 0 and 255");
  TensorDesc out = in;
  out.padding = in.rows || !in.is_integer() ? 0 : padding;
  out.zero_point = zero_point;
  out.pitch = 0;
  return out;
}

// Describes an integer result with the height and width of `image`.
inline TensorDesc integers(DType dtype, const Int8Image& image, int64_t channels, int padding, int zero_point) {
  require(padding >= 0 && zero_point >= 0 && zero_point <= 255,
          "padding must not be negative, and a zero point is between 0 and 255");
  TensorDesc out;
  out.dtype = dtype;
  out.layout = Layout::channels_last;
  out.channels = channels;
  out.height = image.height;
  out.width = image.width;
  out.padding = padding;
  out.zero_point = dtype == DType::int16 ? 0 : zero_point;
  return out;
}

// Describes channels-last floats of this size.
inline TensorDesc float_pixels(int64_t n, int64_t channels, int64_t height, int64_t width) {
  require(n >= 0 && channels > 0 && height > 0 && width > 0, "a value has channels and pixels");
  TensorDesc out;
  out.layout = Layout::channels_last;
  out.n = n;
  out.channels = channels;
  out.height = height;
  out.width = width;
  return out;
}

// Returns whether a value is floats in the layout channels_last.
inline bool is_float_pixels(const TensorDesc& desc) {
  return !desc.is_integer() && desc.layout == Layout::channels_last;
}

}  // namespace tw
