#include "common/int8_layer.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "common/thread_pool.h"

namespace tw {
namespace {

constexpr int kMaxTableSize = 1 << 16;  // entries of a lookup table on either side of 0

void require(bool fits, const char* sentence) {
  if (!fits) throw std::invalid_argument(sentence);
}

template <class T>
Buffer<T> padded(const T* values, int count) {
  if (values == nullptr) return {};
  Buffer<T> out(round_up(count, kInt8Panel));
  std::fill(std::copy(values, values + count, out.data()), out.data() + out.size(), T{0});
  return out;
}

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

Int8Layer::Int8Layer(const Int8Geometry& geometry, const int8_t* weights, const int32_t* offset, const float* scale,
                     const float* bias)
    : geometry_(geometry) {
  const Int8Geometry& g = geometry_;
  require(g.stride_h >= 1 && g.stride_w >= 1 && g.pad_h >= 0 && g.pad_w >= 0, "bad stride or padding");
  groups_ = static_cast<int>(round_up(g.channels, kInt8Group)) / kInt8Group;
  const int taps = g.kernel_h * g.kernel_w;
  packed_ = Buffer<int8_t>(int8_packed_bytes(g.columns, static_cast<int64_t>(taps) * groups_));
  Buffer<int32_t> sums(g.columns);
  pack_int8_weights(weights, g.columns, taps, g.channels, static_cast<int64_t>(taps) * g.channels, g.channels, 1,
                    packed_.data(), sums.data());
  max_pair_sum_ = int8_max_pair_sum(packed_.data(), static_cast<int64_t>(packed_.size()));
  quads_fit_ = int8_quads_fit(packed_.data(), (g.columns + kInt8Panel - 1) / kInt8Panel, g.kernel_h,
                              int64_t{g.kernel_w} * groups_);
  offset_ = padded(offset, g.columns);
  scale_ = padded(scale, g.columns);
  bias_ = padded(bias, g.columns);
}

OwnedUint8Stage::OwnedUint8Stage(const Uint8Stage& stage) : uint8_stage_(stage) {
  const LookupTable& t = stage.table;
  const auto is_byte = [](int v) { return v >= 0 && v <= 255; };
  require(is_byte(stage.zero) && is_byte(stage.low) && is_byte(stage.high) && stage.low <= stage.high,
          "bad output range");
  require((stage.approximation == Approximation::lookup_table) == (t.bytes != nullptr), "bad table");
  if (t.bytes == nullptr) return;
  require(t.first <= t.last && -kMaxTableSize <= t.first && t.last <= kMaxTableSize, "bad table");
  table_ = Buffer<uint8_t>(static_cast<std::size_t>(t.last - t.first + 1));
  std::copy(t.bytes, t.bytes + table_.size(), table_.data());
  uint8_stage_.table.bytes = table_.data();
}

void Int8Layer::set_uint8_stage(const Uint8Stage& stage) { uint8_stage_ = OwnedUint8Stage(stage); }

void check_stage(const Int16Stage& stage) {
  require(-kInt16Limit <= stage.low && stage.low <= stage.high && stage.high <= kInt16Limit, "bad output range");
}

void Int8Layer::set_int16_stage(const Int16Stage& stage) {
  check_stage(stage);
  int16_stage_ = stage;
  gives_int16_ = true;
}

void Int8Layer::set_residual(float scale, int zero, bool is_int16) {
  require(zero >= 0 && zero <= 255 && (!is_int16 || gives_int16_), "bad residual");
  int16_residual_ = is_int16;
  residual_scale_ = scale;
  residual_zero_ = zero;
}

int64_t Int8Layer::nbytes() const {
  return static_cast<int64_t>(packed_.size() + 4 * (offset_.size() + scale_.size() + bias_.size())) +
         uint8_stage_.nbytes();
}

void Int8Layer::unpack(int8_t* to) const {
  const int taps = geometry_.kernel_h * geometry_.kernel_w, step = kInt8Panel * kInt8Group;
  for (int column = 0; column < geometry_.columns; ++column) {
    for (int t = 0; t < taps; ++t) {
      const int64_t at =
          (static_cast<int64_t>(column / kInt8Panel) * taps + t) * groups_ * step + column % kInt8Panel * kInt8Group;
      for (int c = 0; c < geometry_.channels; ++c) *to++ = packed_[at + c / kInt8Group * step + c % kInt8Group];
    }
  }
}

Int8Problem Int8Layer::problem() const {
  Int8Problem p;
  p.groups_per_run = groups_;
  p.weights = packed_.data();
  p.columns = geometry_.columns;
  p.max_pair_sum = max_pair_sum_;
  p.quads_fit = quads_fit_;
  p.offset = offset_.data();
  p.scale = scale_.data();
  p.bias = bias_.data();
  p.uint8_stage = uint8_stage_;
  p.int16_stage = int16_stage_;
  p.int16_residual = int16_residual_;
  p.residual_scale = residual_scale_;
  p.residual_zero = residual_zero_;
  return p;
}

Int8Image Int8Layer::conv_shape(const Int8Image& in) const {
  const Int8Geometry& g = geometry_;
  const bool fits = g.kernel_w == 1 ? in.pixel >= in_pixel() : in.pixel == in_pixel();
  require(fits, "x has another number of channels than the weights");
  require(in.padding >= g.pad_h && in.padding >= g.pad_w && in.height >= 0 && in.width >= 0,
          "x has less padding than the filter needs");
  require(in.height + 2 * g.pad_h >= g.kernel_h && in.width + 2 * g.pad_w >= g.kernel_w,
          "the filter is larger than the padded image");
  require(scale_.size() > 0 || g.columns == 0, "the layer has no output scale");
  Int8Image out;
  out.images = in.images;
  out.height = (in.height + 2 * g.pad_h - g.kernel_h) / g.stride_h + 1;
  out.width = (in.width + 2 * g.pad_w - g.kernel_w) / g.stride_w + 1;
  out.pixel = out_pixel();
  require(out.images <= std::numeric_limits<int>::max() && out.height * out.width <= std::numeric_limits<int>::max(),
          "x has too many pixels");
  return out;
}

void Int8Layer::conv(const Int8Image& in, const uint8_t* x, const Int8Image& skip, const uint8_t* residual,
                     const Int8Image& out, uint8_t* y) const {
  const Int8Geometry& g = geometry_;
  Int8Problem p = problem();
  p.images = static_cast<int>(out.images);
  p.height = static_cast<int>(out.height);
  p.width = static_cast<int>(out.width);
  p.in = x + ((in.padding - g.pad_h) * in.full_width() + (in.padding - g.pad_w)) * in.pixel;
  p.in_grid = {in.image_step(), g.stride_h * in.row_step(), g.stride_w * in.pixel};
  p.runs = g.kernel_h;
  p.run_step = in.row_step();
  p.groups_per_run = g.kernel_w * groups_;
  if (residual != nullptr) {
    p.residual = residual + skip.inside() * (int16_residual_ ? 2 : 1);
    p.residual_grid = skip.grid();
  }
  p.kind = gives_int16_ ? Int8Out::int16 : Int8Out::uint8;
  p.out = y + out.inside() * (gives_int16_ ? 2 : 1);
  p.out_grid = out.grid();
  p.out_columns = out.pixel == out_pixel() ? static_cast<int>(out.pixel) : g.columns;
  run_int8(p);
}

void Int8Layer::check_linear(int64_t width, Int8Out kind) const {
  require(geometry_.kernel_h == 1 && geometry_.kernel_w == 1 && width == in_pixel(), "x does not fit the weights");
  require(kind == Int8Out::int32 || scale_.size() > 0 || geometry_.columns == 0, "the layer has no output scale");
}

void Int8Layer::linear(const uint8_t* x, int64_t rows, Int8Out kind, const float* row_scale, bool relu, void* y,
                       const Int8Tile* tile, int64_t in_step, int64_t out_step) const {
  Int8Problem p = problem();
  p.width = static_cast<int>(rows);
  p.in = x;
  p.in_grid.column_step = in_step > 0 ? in_step : in_pixel();
  p.kind = kind;
  p.relu = relu;
  p.row_scale = row_scale;
  p.out_columns = kind == Int8Out::uint8 ? static_cast<int>(out_pixel()) : geometry_.columns;
  p.out = y;
  p.out_grid.column_step = out_step > 0 ? out_step : kind == Int8Out::int16 ? out_pixel() : p.out_columns;
  tile == nullptr ? run_int8(p) : run_int8(p, *tile);
}

}  // namespace tw
