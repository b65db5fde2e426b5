#include "common/int8_layer.h"

#include "common/thread_pool.h"

namespace tw {

Int8Layer::Int8Layer(const IntegerGeometry& geometry, const int8_t* weights, const int32_t* offset, const float* scale,
                     const float* bias)
    : IntegerLayer(geometry, offset, scale, bias, Int8Out::uint8), panels_(geometry, weights) {
  const IntegerGeometry& g = geometry_;
  max_pair_sum_ = int8_max_pair_sum(panels_.data(), panels_.size());
  quads_fit_ = int8_quads_fit(panels_.data(), static_cast<int64_t>(panels_.windows.size()), g.taps.kernel_h,
                              g.taps.kernel_w * in_pixel() / kInt8Group);
}

// Describes a product with this layer's weights to the kernels, without the images.
Int8Problem Int8Layer::problem() const {
  Int8Problem p;
  set_stage(&p);
  p.groups_per_run = static_cast<int>(in_pixel() / kInt8Group);
  p.weights = panels_.data();
  p.max_pair_sum = max_pair_sum_;
  p.quads_fit = quads_fit_;
  return p;
}

Int8Image Int8Layer::conv_shape(const Int8Image& in) const {
  require(geometry_.taps.kernel_w == 1 || in.pixel == in_pixel(), "x has another number of channels than the weights");
  require(scale_.size() > 0 || geometry_.columns == 0, "the layer has no output scale");
  return geometry_.result(in, kInt8Group);
}

// Computes an INT8 convolution as an implicit matrix product: a run of a filter row is contiguous in NHWC.
void Int8Layer::conv(const Int8Image& in, const uint8_t* x, const Int8Image& skip, const uint8_t* residual,
                     const Int8Image& out, uint8_t* y) const {
  const IntegerGeometry& g = geometry_;
  Int8Problem p = problem();
  set_images(skip, residual, out, y, &p);
  p.in = x + ((in.padding - g.top) * in.full_width() + (in.padding - g.left)) * in.pixel;
  p.in_grid = {in.image_step(), g.taps.stride_h * in.row_step(), g.taps.stride_w * in.pixel};
  p.runs = static_cast<int>(g.taps.kernel_h);
  p.run_step = in.row_step();
  p.groups_per_run *= static_cast<int>(g.taps.kernel_w);
  p.out_columns = out.pixel == out_pixel() ? static_cast<int>(out.pixel) : p.columns;
  run_int8(p);
}

void Int8Layer::check_linear(int64_t width, Int8Out kind) const {
  require(geometry_.tap_count() == 1 && width == in_pixel(), "x does not fit the weights");
  require(kind == Int8Out::int32 || scale_.size() > 0 || geometry_.columns == 0, "the layer has no output scale");
}

// Computes an INT8 linear layer of `rows` rows; the result is requantized or float32, as `kind` says.
void Int8Layer::linear(const uint8_t* x, int64_t rows, Int8Out kind, const float* row_scale, bool relu, void* y,
                       const Int8Tile* tile, int64_t in_step, int64_t out_step) const {
  Int8Problem p = problem();
  p.width = static_cast<int>(rows);
  p.in = x;
  p.in_grid.column_step = in_step > 0 ? in_step : in_pixel();
  p.kind = kind;
  p.relu = relu;
  p.row_scale = row_scale;
  p.out_columns = kind == Int8Out::uint8 ? static_cast<int>(out_pixel()) : p.columns;
  p.out = y;
  p.out_grid.column_step = out_step > 0 ? out_step : kind == Int8Out::int16 ? out_pixel() : p.out_columns;
  tile == nullptr ? run_int8(p) : run_int8(p, *tile);
}

// Packs the weights, and classifies each panel of a grouped layer by its saturation safety.
Int8GroupedLayer::Int8GroupedLayer(const IntegerGeometry& geometry, const int8_t* weights, const int32_t* offset,
                                   const float* scale)
    : IntegerLayer(geometry, offset, scale, nullptr, Int8Out::uint8) {
  const IntegerGeometry& g = geometry_;
  g.check_groups();
  if (g.is_depthwise()) {
    const int64_t step = round_up(g.columns, kInt8Panel);
    depthwise_weights_ = Buffer<int32_t>(static_cast<std::size_t>(g.tap_count() * step));
    std::fill(depthwise_weights_.data(), depthwise_weights_.data() + depthwise_weights_.size(), 0);
    for (int64_t i = 0; i < g.columns * g.tap_count(); ++i)
      depthwise_weights_[i % g.tap_count() * step + i / g.tap_count()] = weights[i];
    return;
  }
  panels_ = PackedPanels<int8_t>(g, weights);
  for (PanelWindow& window : panels_.windows) {
    const int8_t* panel = panels_.data() + window.weights;
    const int64_t bytes = g.tap_count() * window.groups * kInt8Panel * kInt8Group;
    window.fit = int8_quads_fit(panel, 1, g.tap_count(), window.groups) ? PanelFit::quads
                 : int8_max_pair_sum(panel, bytes) >= 2 * 255           ? PanelFit::pairs
                                                                        : PanelFit::none;
  }
}

int64_t Int8GroupedLayer::nbytes() const {
  return panels_.size() + static_cast<int64_t>(4 * depthwise_weights_.size()) + stage_bytes();
}

void Int8GroupedLayer::unpack(int8_t* to) const {
  const IntegerGeometry& g = geometry_;
  if (!g.is_depthwise()) return panels_.unpack(g, to);
  for (int64_t i = 0; i < g.columns * g.tap_count(); ++i) {
    const int64_t at = i % g.tap_count() * round_up(g.columns, kInt8Panel) + i / g.tap_count();
    to[i] = static_cast<int8_t>(depthwise_weights_[at]);
  }
}

// Computes an INT8 convolution with groups (also depthwise), with rows of the result shared by threads.
void Int8GroupedLayer::conv(const Int8Image& in, const uint8_t* x, const Int8Image& skip, const uint8_t* residual,
                            const Int8Image& out, uint8_t* y) const {
  const IntegerGeometry& g = geometry_;
  const int64_t all = out.images * out.height;
  const int64_t work = all * out.width * g.columns * g.tap_count() * g.group_channels;
  const int64_t tasks = std::max<int64_t>(1, std::min({all, work / kTaskMultiplyAdds, int64_t{2} * num_threads()}));
  const uint8_t* first = x + (in.padding - g.top) * in.row_step() + (in.padding - g.left) * in.pixel;
  const auto compute_rows = [&](int64_t image, int64_t row, int64_t rows) {
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
    r.uint8_stage = uint8_stage();
    const auto& kernels = active_int8_grouped();
    g.is_depthwise()
        ? kernels.depthwise(g.taps, depthwise_weights_.data(), offset_.data(), scale_.data(), r)
        : kernels.grouped(g.taps, panels_.windows.data(), panels_.data(), offset_.data(), scale_.data(), r);
  };
  const auto work_on = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end;) {
      const int64_t image = i / out.height, row = i % out.height, rows = std::min(end - i, out.height - row);
      compute_rows(image, row, rows);
      i += rows;
    }
  };
  if (all == 0 || out.width == 0) return;
  if (tasks == 1 || num_threads() == 1) return work_on(0, all);
  parallel_for(static_cast<int>(tasks), [&](int task) { work_on(all * task / tasks, all * (task + 1) / tasks); });
}

}  // namespace tw
