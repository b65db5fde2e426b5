#include "common/int8_grouped_layer.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "common/thread_pool.h"

namespace tw {
namespace {

constexpr int64_t kMinMultiplyAddsPerTask = 1 << 17;  // multiply-adds

void require(bool fits, const char* sentence) {
  if (!fits) throw std::invalid_argument(sentence);
}

template <class T>
Buffer<T> padded(const T* values, int64_t count) {
  Buffer<T> out(static_cast<std::size_t>(round_up(count, kInt8Panel)));
  std::fill(std::copy(values, values + count, out.data()), out.data() + out.size(), T{0});
  return out;
}

}  // namespace

Int8GroupedLayer::Int8GroupedLayer(const GroupedGeometry& geometry, const int8_t* weights, const int32_t* offset,
                                   const float* scale)
    : geometry_(geometry) {
  const GroupedGeometry& g = geometry_;
  const GroupedTaps& t = g.taps;
  require(g.groups >= 1 && g.columns >= 1 && g.columns % g.groups == 0 && g.group_channels >= 1 && t.kernel_h >= 1 &&
              t.kernel_w >= 1,
          "this convolution has no weights, or its groups do not divide its channels");
  require(t.stride_h >= 1 && t.stride_w >= 1 && t.dilation_h >= 1 && t.dilation_w >= 1 &&
              std::min({g.top, g.left, g.bottom, g.right}) >= 0,
          "bad stride, dilation or padding");
  offset_ = padded(offset, g.columns);
  scale_ = padded(scale, g.columns);
  depthwise() ? pack_depthwise(weights) : pack_panels(weights);
}

void Int8GroupedLayer::pack_depthwise(const int8_t* weights) {
  const int64_t taps = geometry_.taps.kernel_h * geometry_.taps.kernel_w,
                padded_columns = round_up(geometry_.columns, kInt8Panel);
  depthwise_weights_ = Buffer<int32_t>(static_cast<std::size_t>(taps * padded_columns));
  std::fill(depthwise_weights_.data(), depthwise_weights_.data() + depthwise_weights_.size(), 0);
  for (int64_t c = 0; c < geometry_.columns; ++c) {
    for (int64_t t = 0; t < taps; ++t) depthwise_weights_[t * padded_columns + c] = weights[c * taps + t];
  }
}

void Int8GroupedLayer::pack_panels(const int8_t* weights) {
  const GroupedGeometry& g = geometry_;
  const int64_t taps = g.taps.kernel_h * g.taps.kernel_w, group_columns = g.columns / g.groups;
  int64_t total = 0;
  for (int64_t panel = 0; panel < g.columns; panel += kInt8Panel) {
    const int64_t last = std::min(panel + kInt8Panel, g.columns) - 1;
    const int64_t first = panel / group_columns * g.group_channels / kInt8Group * kInt8Group;
    const int64_t end = round_up((last / group_columns + 1) * g.group_channels, kInt8Group);
    windows_.push_back(
        {static_cast<int32_t>(first), static_cast<int32_t>((end - first) / kInt8Group), total, PanelFit::none});
    total += taps * (end - first) * kInt8Panel;
  }
  packed_ = Buffer<int8_t>(static_cast<std::size_t>(total));
  std::fill(packed_.data(), packed_.data() + packed_.size(), int8_t{0});
  for (int64_t column = 0; column < g.columns; ++column) {
    for (int64_t t = 0; t < taps; ++t) {
      for (int64_t c = 0; c < g.group_channels; ++c) packed_[packed_at(column, t, c)] = *weights++;
    }
  }
  for (PanelWindow& window : windows_) {
    const int8_t* panel = packed_.data() + window.weights;
    const bool pairs_fit = int8_max_pair_sum(panel, taps * window.groups * kInt8Panel * kInt8Group) >= 2 * 255;
    window.fit = int8_quads_fit(panel, 1, taps, window.groups) ? PanelFit::quads
                 : pairs_fit                                   ? PanelFit::pairs
                                                               : PanelFit::none;
  }
}

int64_t Int8GroupedLayer::packed_at(int64_t column, int64_t tap, int64_t channel) const {
  const GroupedGeometry& g = geometry_;
  const PanelWindow& window = windows_[column / kInt8Panel];
  const int64_t c = column / (g.columns / g.groups) * g.group_channels + channel - window.first;
  return window.weights + ((tap * window.groups + c / kInt8Group) * kInt8Panel + column % kInt8Panel) * kInt8Group +
         c % kInt8Group;
}

void Int8GroupedLayer::set_residual(float scale, int zero) {
  require(zero >= 0 && zero <= 255, "bad residual zero point");
  residual_scale_ = scale;
  residual_zero_ = zero;
}

int64_t Int8GroupedLayer::nbytes() const {
  return static_cast<int64_t>(packed_.size() + 4 * (depthwise_weights_.size() + offset_.size() + scale_.size())) +
         uint8_stage_.nbytes();
}

void Int8GroupedLayer::unpack(int8_t* to) const {
  const GroupedGeometry& g = geometry_;
  const int64_t taps = g.taps.kernel_h * g.taps.kernel_w, padded_columns = round_up(g.columns, kInt8Panel);
  for (int64_t column = 0; column < g.columns; ++column) {
    for (int64_t t = 0; t < taps; ++t) {
      for (int64_t c = 0; c < g.group_channels; ++c) {
        *to++ = depthwise() ? static_cast<int8_t>(depthwise_weights_[t * padded_columns + column])
                            : packed_[packed_at(column, t, c)];
      }
    }
  }
}

Int8Image GroupedGeometry::result(const Int8Image& in, int64_t group) const {
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
  return out;
}

Int8Image Int8GroupedLayer::conv_shape(const Int8Image& in) const {
  const Int8Image out = geometry_.result(in, kInt8Group);
  require(out.images * out.height <= std::numeric_limits<int>::max(), "x has too many rows");
  return out;
}

void Int8GroupedLayer::conv(const Int8Image& in, const uint8_t* x, const Int8Image& skip, const uint8_t* residual,
                            const Int8Image& out, uint8_t* y) const {
  const GroupedGeometry& g = geometry_;
  const int64_t all = out.images * out.height;
  const int64_t work = all * out.width * g.columns * g.taps.kernel_h * g.taps.kernel_w * g.group_channels;
  const int64_t tasks =
      std::max<int64_t>(1, std::min({all, work / kMinMultiplyAddsPerTask, int64_t{2} * num_threads()}));
  const uint8_t* first = x + (in.padding - g.top) * in.row_step() + (in.padding - g.left) * in.pixel;
  const auto some = [&](int64_t image, int64_t row, int64_t rows) {
    GroupedRows r;
    r.x = first + image * in.image_step() + row * g.taps.stride_h * in.row_step();
    r.row_step = in.row_step();
    r.pixel_step = in.pixel;
    r.rows = rows;
    r.width = out.width;
    r.channels = g.columns;
    if (residual != nullptr) r.residual = residual + image * skip.image_step() + skip.inside() + row * skip.row_step();
    r.residual_row = skip.row_step();
    r.residual_pixel = skip.pixel;
    r.residual_scale = residual_scale_;
    r.residual_zero = residual_zero_;
    r.y = y + image * out.image_step() + out.inside() + row * out.row_step();
    r.out_row = out.row_step();
    r.out_pixel = out.pixel;
    r.uint8_stage = uint8_stage_;
    depthwise()
        ? active_int8_grouped().depthwise(g.taps, depthwise_weights_.data(), offset_.data(), scale_.data(), r)
        : active_int8_grouped().grouped(g.taps, windows_.data(), packed_.data(), offset_.data(), scale_.data(), r);
  };
  const auto work_on = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end;) {
      const int64_t image = i / out.height, row = i % out.height, rows = std::min(end - i, out.height - row);
      some(image, row, rows);
      i += rows;
    }
  };
  if (all == 0 || out.width == 0) return;
  if (tasks == 1 || num_threads() == 1) return work_on(0, all);
  parallel_for(static_cast<int>(tasks), [&](int task) { work_on(all * task / tasks, all * (task + 1) / tasks); });
}

}  // namespace tw
