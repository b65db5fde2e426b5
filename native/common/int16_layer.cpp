#include "common/int16_layer.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "common/thread_pool.h"

namespace tw {
namespace {

constexpr int64_t kMinMultiplyAddsPerTask = 1 << 17;  // multiply-adds
constexpr int64_t kTile = 12;                         // pixels: work is split among threads at multiples of this

void require(bool fits, const char* sentence) {
  if (!fits) throw std::invalid_argument(sentence);
}

template <class T>
Buffer<T> padded(const T* values, int64_t count) {
  if (values == nullptr) return {};
  Buffer<T> out(static_cast<std::size_t>(round_up(count, kInt8Panel)));
  std::fill(std::copy(values, values + count, out.data()), out.data() + out.size(), T{0});
  return out;
}

}  // namespace

Int16Layer::Int16Layer(const GroupedGeometry& geometry, const int16_t* weights, const int32_t* offset,
                       const float* scale, const float* bias)
    : geometry_(geometry) {
  const GroupedGeometry& g = geometry_;
  require(g.groups >= 1 && g.columns >= 1 && g.columns % g.groups == 0 && g.group_channels >= 1 &&
              g.taps.kernel_h >= 1 && g.taps.kernel_w >= 1,
          "this convolution has no weights, or its groups do not divide its channels");
  require(g.taps.stride_h >= 1 && g.taps.stride_w >= 1 && g.taps.dilation_h >= 1 && g.taps.dilation_w >= 1 &&
              std::min({g.top, g.left, g.bottom, g.right}) >= 0,
          "bad stride, dilation or padding");
  offset_ = padded(offset, g.columns);
  scale_ = padded(scale, g.columns);
  bias_ = padded(bias, g.columns);
  depthwise() ? pack_depthwise(weights) : pack_panels(weights);
}

// Offset of a depthwise weight: a channel's tap in its block (kernels/int16.h describes the layout).
int64_t Int16Layer::in_block(int64_t block, int64_t column, int64_t tap) const {
  const GroupedTaps& t = geometry_.taps;
  const int64_t y = tap / t.kernel_w, x = tap % t.kernel_w, c = column - block_at(block, geometry_.columns);
  const bool last = y + 1 == t.kernel_h && t.kernel_h % 2 == 1;  // an odd last row pairs neighbouring taps
  const int64_t two = (block * ((t.kernel_h + 1) / 2) + y / 2) * t.kernel_w + (last ? x / 2 : x);
  return (two * kInt8Panel + 4 * kBlockOrder[c / 4] + c % 4) * 2 + (last ? x : y) % 2;
}

void Int16Layer::pack_depthwise(const int16_t* weights) {
  const GroupedGeometry& g = geometry_;
  const int64_t taps = g.taps.kernel_h * g.taps.kernel_w, blocks = (g.columns + kInt8Panel - 1) / kInt8Panel;
  const int64_t rows = round_up(g.taps.kernel_h, 2);
  packed_ = Buffer<int16_t>(static_cast<std::size_t>(blocks * rows * g.taps.kernel_w * kInt8Panel));
  std::fill(packed_.data(), packed_.data() + packed_.size(), int16_t{0});
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t first = block_at(block, g.columns);
    for (int64_t c = first; c < std::min(first + kInt8Panel, g.columns); ++c) {
      for (int64_t t = 0; t < taps; ++t) packed_[in_block(block, c, t)] = weights[c * taps + t];
    }
  }
}

void Int16Layer::pack_panels(const int16_t* weights) {
  const GroupedGeometry& g = geometry_;
  const int64_t taps = g.taps.kernel_h * g.taps.kernel_w, group_columns = g.columns / g.groups;
  int64_t total = 0;
  for (int64_t panel = 0; panel < g.columns; panel += kInt8Panel) {
    const int64_t last = std::min(panel + kInt8Panel, g.columns) - 1;
    const int64_t first = panel / group_columns * g.group_channels / kInt16Group * kInt16Group;
    const int64_t end = round_up((last / group_columns + 1) * g.group_channels, kInt16Group);
    windows_.push_back({static_cast<int32_t>(first), static_cast<int32_t>((end - first) / kInt16Group), total});
    total += taps * (end - first) * kInt8Panel;
  }
  packed_ = Buffer<int16_t>(static_cast<std::size_t>(total));
  std::fill(packed_.data(), packed_.data() + packed_.size(), int16_t{0});
  for (int64_t column = 0; column < g.columns; ++column) {
    for (int64_t t = 0; t < taps; ++t) {
      for (int64_t c = 0; c < g.group_channels; ++c) packed_[packed_at(column, t, c)] = *weights++;
    }
  }
}

int64_t Int16Layer::packed_at(int64_t column, int64_t tap, int64_t channel) const {
  const GroupedGeometry& g = geometry_;
  const Int16Window& window = windows_[column / kInt8Panel];
  const int64_t c = column / (g.columns / g.groups) * g.group_channels + channel - window.first;
  return window.weights + ((tap * window.pairs + c / kInt16Group) * kInt8Panel + column % kInt8Panel) * kInt16Group +
         c % kInt16Group;
}

void Int16Layer::set_uint8_stage(const Uint8Stage& stage) {
  uint8_stage_ = OwnedUint8Stage(stage);
  kind_ = Int8Out::uint8;
}

void Int16Layer::set_int16_stage(const Int16Stage& stage) {
  check_stage(stage);
  int16_stage_ = stage;
  kind_ = Int8Out::int16;
}

void Int16Layer::set_residual(float scale, int zero, bool is_int16) {
  require(zero >= 0 && zero <= 255 && (!is_int16 || kind_ == Int8Out::int16), "bad residual");
  residual_scale_ = scale;
  residual_zero_ = zero;
  int16_residual_ = is_int16;
}

void Int16Layer::set_bytes_read(int zero) {
  require(depthwise() && zero >= 0 && zero <= 255, "only depthwise layers of 16 bits read bytes");
  bytes_zero_ = zero;
}

int64_t Int16Layer::nbytes() const {
  return static_cast<int64_t>(2 * packed_.size() + 4 * (offset_.size() + scale_.size() + bias_.size())) +
         uint8_stage_.nbytes();
}

void Int16Layer::unpack(int16_t* to) const {
  const GroupedGeometry& g = geometry_;
  const int64_t taps = g.taps.kernel_h * g.taps.kernel_w, last = (g.columns - 1) / kInt8Panel;
  for (int64_t column = 0; column < g.columns; ++column) {
    // The last block overlaps the one before it.
    const int64_t block = column >= block_at(last, g.columns) ? last : column / kInt8Panel;
    for (int64_t t = 0; t < taps; ++t) {
      for (int64_t c = 0; c < g.group_channels; ++c) {
        *to++ = packed_[depthwise() ? in_block(block, column, t) : packed_at(column, t, c)];
      }
    }
  }
}

Int8Image Int16Layer::conv_shape(const Int8Image& in) const {
  const Int8Image out = geometry_.result(in, kInt16Group);
  require(out.images <= std::numeric_limits<int>::max() && out.height * out.width <= std::numeric_limits<int>::max(),
          "x has too many pixels");
  return out;
}

void Int16Layer::conv(const Int8Image& in, const void* x, const Int8Image& skip, const void* residual,
                      const Int8Image& out, bool relu, void* y) const {
  const GroupedGeometry& g = geometry_;
  Int16Problem p;
  const int64_t first = (in.padding - g.top) * in.row_step() + (in.padding - g.left) * in.pixel;
  if (reads_bytes()) {
    p.bytes = static_cast<const uint8_t*>(x) + first;
    p.zero = bytes_zero_;
  } else {
    p.x = static_cast<const int16_t*>(x) + first;
  }
  p.kernel_h = g.taps.kernel_h;
  p.kernel_w = g.taps.kernel_w;
  p.tap_row = g.taps.dilation_h * in.row_step();
  p.tap_step = g.taps.dilation_w * in.pixel;
  p.windows = windows_.data();
  p.weights = packed_.data();
  Int8Problem& to = p.to;
  to.images = static_cast<int>(out.images);
  to.height = static_cast<int>(out.height);
  to.width = static_cast<int>(out.width);
  to.in_grid = {in.image_step(), g.taps.stride_h * in.row_step(), g.taps.stride_w * in.pixel};
  to.columns = static_cast<int>(g.columns);
  to.offset = offset_.data();
  to.scale = scale_.data();
  to.bias = bias_.size() > 0 ? bias_.data() : nullptr;
  to.relu = relu;
  to.kind = kind_;
  to.out_grid = out.grid();
  to.out_columns = to.columns;
  to.uint8_stage = uint8_stage_;
  to.int16_stage = int16_stage_;
  to.residual_scale = residual_scale_;
  to.residual_zero = residual_zero_;
  to.int16_residual = int16_residual_;
  if (residual != nullptr) {
    to.residual = static_cast<const uint8_t*>(residual) + skip.inside() * (int16_residual_ ? 2 : 1);
    to.residual_grid = skip.grid();
  }
  const int64_t size = kind_ == Int8Out::uint8 ? 1 : kind_ == Int8Out::int16 ? 2 : 4;
  to.out = static_cast<char*>(y) + out.inside() * size;
  run(p);
}

void Int16Layer::run(const Int16Problem& p) const {
  const GroupedGeometry& g = geometry_;
  const int64_t pixels = static_cast<int64_t>(p.to.images) * p.to.height * p.to.width;
  if (pixels == 0) return;
  const int panels = static_cast<int>((g.columns + kInt8Panel - 1) / kInt8Panel);
  const int64_t work = pixels * g.columns * g.taps.kernel_h * g.taps.kernel_w * g.group_channels;
  const int64_t max_tasks = std::min<int64_t>(work / kMinMultiplyAddsPerTask, int64_t{2} * num_threads());
  const bool by_pixels = depthwise() || pixels >= kTile * max_tasks;
  const int64_t units = by_pixels ? (pixels + kTile - 1) / kTile : panels;
  const int64_t tasks = num_threads() == 1 ? 1 : std::max<int64_t>(1, std::min(max_tasks, units));
  const auto some = [&](int64_t first, int64_t last) {
    const int64_t end = std::min(last * kTile, pixels);
    if (depthwise()) return active_int16().depthwise(p, first * kTile, end);
    if (by_pixels) return active_int16().rows(p, first * kTile, end, 0, panels);
    active_int16().rows(p, 0, pixels, static_cast<int>(first), static_cast<int>(last));
  };
  if (tasks == 1) return some(0, units);
  parallel_for(static_cast<int>(tasks), [&](int task) { some(units * task / tasks, units * (task + 1) / tasks); });
}

}  // namespace tw
