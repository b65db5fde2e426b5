// Shared by the integer layers: images, geometry, packed weights, and the output stage. A layer holds the only copy of
// its weights. Invalid shapes throw std::invalid_argument.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "common/alloc.h"
#include "kernels/int16.h"
#include "kernels/int8.h"
#include "kernels/int8_elementwise.h"
#include "kernels/int8_grouped.h"
#include "kernels/int8_ops.h"

namespace tw {

inline void require(bool holds, const char* sentence) {
  if (!holds) throw std::invalid_argument(sentence);
}

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// A batch of NHWC images with `padding` pixels of padding on every side, filled with the zero point. `pixel` is the
// distance between pixels. Rows of a matrix are images of one pixel.
struct Int8Image {
  int64_t images = 0, height = 1, width = 1, pixel = 0, padding = 0;

  int64_t full_height() const { return height + 2 * padding; }
  int64_t full_width() const { return width + 2 * padding; }
  int64_t row_step() const { return full_width() * pixel; }
  int64_t image_step() const { return full_height() * row_step(); }
  // The offset of the first pixel inside the padding.
  int64_t inside() const { return padding * row_step() + padding * pixel; }
  PixelGrid grid() const { return {image_step(), row_step(), pixel}; }
  BytePlane plane() const { return {height, width, row_step(), pixel}; }
};

// Writes `zero` into the padding of all images.
void fill_padding(const Int8Image& image, int zero, uint8_t* data);

// The shape of a pooling result without padding. Throws if the window does not fit.
Int8Image pooled_shape(const Int8Image& in, const PoolWindow& window);

// The geometry of a convolution, or of a linear layer (one tap). `columns` are output channels.
struct IntegerGeometry {
  int64_t columns = 0, group_channels = 0, groups = 1;
  int64_t top = 0, left = 0, bottom = 0, right = 0;  // padding
  GroupedTaps taps;

  int64_t channels() const { return group_channels * groups; }
  int64_t tap_count() const { return taps.kernel_h * taps.kernel_w; }
  int64_t reach_h() const { return (taps.kernel_h - 1) * taps.dilation_h + 1; }
  int64_t reach_w() const { return (taps.kernel_w - 1) * taps.dilation_w + 1; }
  bool is_depthwise() const { return group_channels == 1 && columns == groups; }
  void check_groups() const;
  // The shape of the result without padding, for `in` with pixels of whole groups of `group` channels.
  Int8Image result(const Int8Image& in, int64_t group) const;
};

// Weights in panels of 16 columns: [tap][group of channels][column][channel of the group]. A panel covers the union of
// the input channels that its columns read (its window), with zeros where a column does not read a channel.
template <class T>
struct PackedPanels {
  static constexpr int64_t kGroup = sizeof(T) == 1 ? kInt8Group : kInt16Group;  // definition: channels of a group

  PackedPanels() = default;
  // weights (columns, kh, kw, group_channels)
  PackedPanels(const IntegerGeometry& g, const T* weights) {
    const int64_t group_columns = g.columns / g.groups;
    int64_t total = 0;
    for (int64_t panel = 0; panel < g.columns; panel += kInt8Panel) {
      const int64_t last = std::min(panel + kInt8Panel, g.columns) - 1;
      const int64_t first = panel / group_columns * g.group_channels / kGroup * kGroup;
      const int64_t end = round_up((last / group_columns + 1) * g.group_channels, kGroup);
      windows.push_back({static_cast<int32_t>(first), static_cast<int32_t>((end - first) / kGroup), total});
      total += g.tap_count() * (end - first) * kInt8Panel;
    }
    weights_ = Buffer<T>(static_cast<std::size_t>(total));
    std::fill(weights_.data(), weights_.data() + total, T{0});
    each_weight(g, [&](int64_t at) { weights_[at] = *weights++; });
  }

  void unpack(const IntegerGeometry& g, T* weights) const {
    each_weight(g, [&](int64_t at) { *weights++ = weights_[at]; });
  }

  const T* data() const { return weights_.data(); }
  int64_t size() const { return static_cast<int64_t>(weights_.size()); }

  std::vector<PanelWindow> windows;

 private:
  // Calls f(offset) for all weights in the order (column, tap, channel).
  template <class F>
  void each_weight(const IntegerGeometry& g, F f) const {
    for (int64_t column = 0; column < g.columns; ++column) {
      const PanelWindow& window = windows[column / kInt8Panel];
      const int64_t first = column / (g.columns / g.groups) * g.group_channels - window.first;
      for (int64_t tap = 0; tap < g.tap_count(); ++tap) {
        const int64_t begin = window.weights + (tap * window.groups * kInt8Panel + column % kInt8Panel) * kGroup;
        for (int64_t c = first; c < first + g.group_channels; ++c)
          f(begin + c / kGroup * kInt8Panel * kGroup + c % kGroup);
      }
    }
  }

  Buffer<T> weights_;
};

// An output stage that owns its lookup table.
class OwnedUint8Stage {
 public:
  explicit OwnedUint8Stage(const Uint8Stage& stage = {});  // copies the table
  operator const Uint8Stage&() const { return uint8_stage_; }
  int64_t nbytes() const { return static_cast<int64_t>(table_.size()); }

 private:
  Buffer<uint8_t> table_;
  Uint8Stage uint8_stage_;
};

void check_stage(const Int16Stage& stage);  // throws if the range is invalid

class IntegerLayer {
 public:
  void set_uint8_stage(const Uint8Stage& stage);  // with a lookup table, scales are in real units, not output steps
  void set_int16_stage(const Int16Stage& stage);  // int16 output (kernels/int16.h)
  void set_residual(float scale, int zero, bool is_int16 = false);

  const IntegerGeometry& geometry() const { return geometry_; }
  Int8Out kind() const { return kind_; }  // data type of a convolution's result
  int zero() const { return kind_ == Int8Out::uint8 ? uint8_stage().zero : 0; }
  bool gives_int16() const { return kind_ == Int8Out::int16; }
  bool int16_residual() const { return int16_residual_; }

 protected:
  // offset, scale and bias of length `columns`; scale and bias may be null
  IntegerLayer(const IntegerGeometry& geometry, const int32_t* offset, const float* scale, const float* bias,
               Int8Out kind);

  const Uint8Stage& uint8_stage() const { return uint8_stage_; }
  int64_t stage_bytes() const;
  void set_stage(Int8Problem* p) const;  // columns, scales and output stage
  void set_images(const Int8Image& skip, const void* residual, const Int8Image& out, void* y, Int8Problem* p) const;

  IntegerGeometry geometry_;
  Buffer<int32_t> offset_;  // padded to whole panels, like scale and bias
  Buffer<float> scale_, bias_;
  float residual_scale_ = 0.0f;
  int residual_zero_ = 0;

 private:
  OwnedUint8Stage uint8_stage_;
  Int16Stage int16_stage_;
  Int8Out kind_;
  bool int16_residual_ = false;
};

}  // namespace tw
