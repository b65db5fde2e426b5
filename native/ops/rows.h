// Helpers of operators that process a value row by row.
#pragma once

#include <algorithm>

#include "common/thread_pool.h"
#include "graph/op.h"

namespace tw {

constexpr int64_t kVectorFloats = 16;  // hardware: of the widest vector; kernels read whole vectors
constexpr int64_t kTaskFloats = 8192;  // elements of a task: fewer take as long as waking a thread

// Calls f(image, first row, rows) for all rows of all images, at most `max_rows` of an image at a time, shared among
// the threads where there is enough work.
template <class F>
void for_row_blocks(const TensorDesc& desc, int64_t batch, int64_t max_rows, F&& f) {
  constexpr int64_t kTaskBytes = 4 * kTaskFloats;
  const int64_t rows = batch * desc.n * desc.height;
  const int64_t tasks =
      std::min({rows, batch * desc.elements() * desc.element_size() / kTaskBytes, int64_t{2} * num_threads()});
  const auto some = [&](int64_t first, int64_t last) {
    while (first < last) {
      const int64_t row = first % desc.height, count = std::min({max_rows, desc.height - row, last - first});
      f(first / desc.height, row, count);
      first += count;
    }
  };
  if (tasks < 2 || num_threads() == 1) return some(0, rows);
  parallel_for(static_cast<int>(tasks), [&](int task) { some(rows * task / tasks, rows * (task + 1) / tasks); });
}

template <class F>
void for_rows(const TensorDesc& desc, int64_t batch, F&& f) {
  for_row_blocks(desc, batch, 1, [&](int64_t image, int64_t row, int64_t) { f(image, row); });
}

// Describes a result with the pixels of `in`, in a separate buffer.
inline TensorDesc like(const TensorDesc& in, int padding, int zero_point) {
  require(padding >= 0 && zero_point >= 0 && zero_point <= 255, "bad padding or zero point");
  TensorDesc out = in;
  out.padding = in.rows || !in.is_integer() ? 0 : padding;
  out.zero_point = zero_point;
  out.pitch = 0;
  return out;
}

// Describes an integer result of this size.
inline TensorDesc integers(DType dtype, const Int8Image& image, int64_t channels, int padding, int zero_point) {
  require(padding >= 0 && zero_point >= 0 && zero_point <= 255, "bad padding or zero point");
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

inline bool is_float_pixels(const TensorDesc& desc) {
  return !desc.is_integer() && desc.layout == Layout::channels_last;
}

}  // namespace tw
