#include "common/integer_layer.h"

#include <cstring>
#include <limits>

namespace tw {
namespace {

constexpr int kMaxTableSize = 1 << 16;  // chosen: entries of a lookup table on either side of 0

bool is_byte(int v) { return v >= 0 && v <= 255; }

// Copies `count` values and appends zeros up to a whole panel.
template <class T>
Buffer<T> padded(const T* values, int64_t count) {
  if (values == nullptr) return {};
  Buffer<T> out(static_cast<std::size_t>(round_up(count, kInt8Panel)));
  std::fill(std::copy(values, values + count, out.data()), out.data() + out.size(), T{0});
  return out;
}

int64_t element_size(Int8Out kind) { return kind == Int8Out::uint8 ? 1 : kind == Int8Out::int16 ? 2 : 4; }

}  // namespace

void fill_padding(const Int8Image& image, int zero, uint8_t* data) {
  if (image.padding == 0) return;
  const int64_t row = image.row_step(), side = image.padding * image.pixel;
  for (int64_t i = 0; i < image.images; ++i, data += image.image_step()) {
    std::memset(data, zero, image.padding * row + side);
    // The right padding of one row and the left padding of the next are adjacent.
    for (int64_t y = 1; y < image.height; ++y) std::memset(data + (image.padding + y) * row - side, zero, 2 * side);
    std::memset(data + (image.padding + image.height) * row - side, zero, side + image.padding * row);
  }
}

Int8Image pooled_shape(const Int8Image& in, const PoolWindow& w) {
  require(w.kernel_h >= 1 && w.kernel_w >= 1 && w.stride_h >= 1 && w.stride_w >= 1 && w.pad_h >= 0 && w.pad_w >= 0 &&
              w.end_h >= 0 && w.end_w >= 0 && std::max(w.pad_h, w.end_h) < w.kernel_h &&
              std::max(w.pad_w, w.end_w) < w.kernel_w && in.height + w.pad_h + w.end_h >= w.kernel_h &&
              in.width + w.pad_w + w.end_w >= w.kernel_w,
          "the pooling window does not fit the image");
  Int8Image out = in;
  out.height = (in.height + w.pad_h + w.end_h - w.kernel_h) / w.stride_h + 1;
  out.width = (in.width + w.pad_w + w.end_w - w.kernel_w) / w.stride_w + 1;
  out.padding = 0;
  return out;
}

void IntegerGeometry::check_groups() const {
  require(groups >= 1 && columns >= 1 && columns % groups == 0 && group_channels >= 1 && taps.kernel_h >= 1 &&
              taps.kernel_w >= 1,
          "this convolution has no weights, or its groups do not divide its channels");
}

Int8Image IntegerGeometry::result(const Int8Image& in, int64_t group) const {
  require(in.pixel >= round_up(channels(), group), "x has another number of channels than the weights");
  require(in.padding >= std::max({top, left, bottom, right}) && in.height >= 0 && in.width >= 0,
          "x has less padding than the filter needs");
  const int64_t room_h = in.height + top + bottom - reach_h(), room_w = in.width + left + right - reach_w();
  require(room_h >= 0 && room_w >= 0, "the filter is larger than the padded image");
  Int8Image out;
  out.images = in.images;
  out.height = room_h / taps.stride_h + 1;
  out.width = room_w / taps.stride_w + 1;
  out.pixel = round_up(columns, kInt8Group);
  const int64_t most = std::numeric_limits<int>::max();
  require(out.images <= most && out.height * out.width <= most, "x has too many pixels");
  return out;
}

OwnedUint8Stage::OwnedUint8Stage(const Uint8Stage& stage) : uint8_stage_(stage) {
  const LookupTable& t = stage.table;
  require(is_byte(stage.zero) && is_byte(stage.low) && is_byte(stage.high) && stage.low <= stage.high,
          "zero, low and high of a uint8 result must be between 0 and 255, and low at most high");
  require((stage.approximation == Approximation::lookup_table) == (t.bytes != nullptr),
          "an output stage has a lookup table if and only if its approximation is one");
  if (t.bytes == nullptr) return;
  require(t.first <= t.last && -kMaxTableSize <= t.first && t.last <= kMaxTableSize,
          "the grid of a lookup table must increase and stay within 2**16 points of 0");
  table_ = Buffer<uint8_t>(static_cast<std::size_t>(t.last - t.first + 1));
  std::copy(t.bytes, t.bytes + table_.size(), table_.data());
  uint8_stage_.table.bytes = table_.data();
}

void check_stage(const Int16Stage& stage) {
  require(-kInt16Limit <= stage.low && stage.low <= stage.high && stage.high <= kInt16Limit,
          "low and high of an int16 result must be within 32767 of 0, and low at most high");
}

// Checks the geometry of an integer layer and copies its offsets, scales and bias, padded to whole vectors.
IntegerLayer::IntegerLayer(const IntegerGeometry& geometry, const int32_t* offset, const float* scale,
                           const float* bias, Int8Out kind)
    : geometry_(geometry),
      offset_(padded(offset, geometry.columns)),
      scale_(padded(scale, geometry.columns)),
      bias_(padded(bias, geometry.columns)),
      kind_(kind) {
  const GroupedTaps& t = geometry_.taps;
  require(t.stride_h >= 1 && t.stride_w >= 1 && t.dilation_h >= 1 && t.dilation_w >= 1 &&
              std::min({geometry_.top, geometry_.left, geometry_.bottom, geometry_.right}) >= 0,
          "strides and dilations must be positive and padding must not be negative");
}

void IntegerLayer::set_uint8_stage(const Uint8Stage& stage) {
  uint8_stage_ = OwnedUint8Stage(stage);
  kind_ = Int8Out::uint8;
}

void IntegerLayer::set_int16_stage(const Int16Stage& stage) {
  check_stage(stage);
  int16_stage_ = stage;
  kind_ = Int8Out::int16;
}

void IntegerLayer::set_residual(float scale, int zero, bool is_int16) {
  require(is_byte(zero) && (!is_int16 || gives_int16()),
          "the zero point of a residual must be between 0 and 255, and int16 only if the result is");
  residual_scale_ = scale;
  residual_zero_ = zero;
  int16_residual_ = is_int16;
}

int64_t IntegerLayer::stage_bytes() const {
  return static_cast<int64_t>(4 * (offset_.size() + scale_.size() + bias_.size())) + uint8_stage_.nbytes();
}

void IntegerLayer::set_stage(Int8Problem* p) const {
  p->columns = static_cast<int>(geometry_.columns);
  p->offset = offset_.data();
  p->scale = scale_.data();
  p->bias = bias_.data();
  p->uint8_stage = uint8_stage_;
  p->int16_stage = int16_stage_;
  p->int16_residual = int16_residual_;
  p->residual_scale = residual_scale_;
  p->residual_zero = residual_zero_;
}

// Fills the output and residual of a problem; `skip` is the residual's image.
void IntegerLayer::set_images(const Int8Image& skip, const void* residual, const Int8Image& out, void* y,
                              Int8Problem* p) const {
  p->images = static_cast<int>(out.images);
  p->height = static_cast<int>(out.height);
  p->width = static_cast<int>(out.width);
  p->kind = kind_;
  p->out = static_cast<char*>(y) + out.inside() * element_size(kind_);
  p->out_grid = out.grid();
  if (residual == nullptr) return;
  p->residual = static_cast<const uint8_t*>(residual) + skip.inside() * (int16_residual_ ? 2 : 1);
  p->residual_grid = skip.grid();
}

}  // namespace tw
