#include "common/int16_layer.h"

#include "common/thread_pool.h"

namespace tw {
namespace {

constexpr int64_t kTile = 12;  // definition: pixels of the largest register tile; work is split at multiples of it

}  // namespace

Int16Layer::Int16Layer(const IntegerGeometry& geometry, const int16_t* weights, const int32_t* offset,
                       const float* scale, const float* bias)
    : IntegerLayer(geometry, offset, scale, bias, Int8Out::float32) {
  geometry_.check_groups();
  if (geometry_.is_depthwise()) {
    pack_depthwise(weights);
  } else {
    panels_ = PackedPanels<int16_t>(geometry_, weights);
  }
}

// The offset of a depthwise weight: a channel's tap in its block (kernels/int16.h describes the layout).
int64_t Int16Layer::in_block(int64_t block, int64_t column, int64_t tap) const {
  const GroupedTaps& t = geometry_.taps;
  const int64_t y = tap / t.kernel_w, x = tap % t.kernel_w, c = column - block_at(block, geometry_.columns);
  const bool last = y + 1 == t.kernel_h && t.kernel_h % 2 == 1;  // an odd last row pairs neighbouring taps
  const int64_t two = (block * ((t.kernel_h + 1) / 2) + y / 2) * t.kernel_w + (last ? x / 2 : x);
  return (two * kInt8Panel + 4 * kBlockOrder[c / 4] + c % 4) * 2 + (last ? x : y) % 2;
}

// Packs depthwise weights in blocks of kInt8Panel channels, with pairs of filter rows next to each other.
void Int16Layer::pack_depthwise(const int16_t* weights) {
  const IntegerGeometry& g = geometry_;
  const int64_t taps = g.tap_count(), blocks = (g.columns + kInt8Panel - 1) / kInt8Panel;
  const int64_t rows = round_up(g.taps.kernel_h, 2);
  depthwise_weights_ = Buffer<int16_t>(static_cast<std::size_t>(blocks * rows * g.taps.kernel_w * kInt8Panel));
  std::fill(depthwise_weights_.data(), depthwise_weights_.data() + depthwise_weights_.size(), int16_t{0});
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t first = block_at(block, g.columns);
    for (int64_t c = first; c < std::min(first + kInt8Panel, g.columns); ++c) {
      for (int64_t t = 0; t < taps; ++t) depthwise_weights_[in_block(block, c, t)] = weights[c * taps + t];
    }
  }
}

void Int16Layer::set_bytes_read(int zero) {
  require(geometry_.is_depthwise() && zero >= 0 && zero <= 255,
          "only depthwise int16 layers read uint8, with a zero point from 0 to 255");
  bytes_zero_ = zero;
}

int64_t Int16Layer::nbytes() const {
  return 2 * (panels_.size() + static_cast<int64_t>(depthwise_weights_.size())) + stage_bytes();
}

void Int16Layer::unpack(int16_t* to) const {
  const IntegerGeometry& g = geometry_;
  if (!g.is_depthwise()) return panels_.unpack(g, to);
  const int64_t last = (g.columns - 1) / kInt8Panel;
  for (int64_t column = 0; column < g.columns; ++column) {
    // The last block overlaps the one before it.
    const int64_t block = column >= block_at(last, g.columns) ? last : column / kInt8Panel;
    for (int64_t t = 0; t < g.tap_count(); ++t) *to++ = depthwise_weights_[in_block(block, column, t)];
  }
}

// Computes a convolution with int16 weights of an int16 or uint8 image.
void Int16Layer::conv(const Int8Image& in, const void* x, const Int8Image& skip, const void* residual,
                      const Int8Image& out, bool relu, void* y) const {
  const IntegerGeometry& g = geometry_;
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
  p.windows = panels_.windows.data();
  p.weights = g.is_depthwise() ? depthwise_weights_.data() : panels_.data();
  set_stage(&p.to);
  set_images(skip, residual, out, y, &p.to);
  p.to.in_grid = {in.image_step(), g.taps.stride_h * in.row_step(), g.taps.stride_w * in.pixel};
  p.to.relu = relu;
  p.to.out_columns = p.to.columns;
  run(p);
}

// Splits the work among the threads, by pixels if there are enough, else by panels of output channels.
void Int16Layer::run(const Int16Problem& p) const {
  const IntegerGeometry& g = geometry_;
  const int64_t pixels = static_cast<int64_t>(p.to.images) * p.to.height * p.to.width;
  if (pixels == 0) return;
  const int panels = static_cast<int>((g.columns + kInt8Panel - 1) / kInt8Panel);
  const int64_t work = pixels * g.columns * g.tap_count() * g.group_channels;
  const int64_t max_tasks = std::min<int64_t>(work / kTaskMultiplyAdds, int64_t{2} * num_threads());
  const bool by_pixels = geometry_.is_depthwise() || pixels >= kTile * max_tasks;
  const int64_t units = by_pixels ? (pixels + kTile - 1) / kTile : panels;
  const int64_t tasks = num_threads() == 1 ? 1 : std::max<int64_t>(1, std::min(max_tasks, units));
  const auto compute = [&](int64_t first, int64_t last) {
    const int64_t end = std::min(last * kTile, pixels);
    if (geometry_.is_depthwise()) return active_int16().depthwise(p, first * kTile, end);
    if (by_pixels) return active_int16().rows(p, first * kTile, end, 0, panels);
    active_int16().rows(p, 0, pixels, static_cast<int>(first), static_cast<int>(last));
  };
  if (tasks == 1) return compute(0, units);
  parallel_for(static_cast<int>(tasks), [&](int task) { compute(units * task / tasks, units * (task + 1) / tasks); });
}

}  // namespace tw
