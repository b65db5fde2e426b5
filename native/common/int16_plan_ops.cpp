// Operations of a plan that read or give numbers of two bytes: a shape rule and a call of the kernels each. The image
// steps that kernels/int16.h takes are in numbers.
#include <algorithm>
#include <stdexcept>

#include "common/int8_plan_rows.h"

namespace tw {
namespace {

void require(bool fits, const char* sentence) {
  if (!fits) throw std::invalid_argument(sentence);
}

const int16_t* as_shorts(const void* p) { return static_cast<const int16_t*>(p); }
int16_t* as_shorts(void* p) { return static_cast<int16_t*>(p); }

// A value of the same pixels as another, of bytes or of two.
PlanShape like(const PlanShape& in, int border, bool wide, int zero) {
  require(border >= 0 && zero >= 0 && zero <= 255, "bad border or zero point");
  PlanShape out = in;
  out.bytes = true;
  out.size = wide ? 2 : 1;
  out.border = in.rows ? 0 : border;
  out.zero = wide ? 0 : zero;
  out.pitch = 0;
  return out;
}

// Where a row of an image begins, in bytes.
int64_t row_at(const PlanShape& shape, int64_t image, int64_t row) {
  const Int8Image at = shape.image(1);
  return image * at.image_step() + at.inside() + row * at.row_step();
}

MixedPixels pixels(const PlanShape& shape, const void* data, int64_t image, int64_t row, float scale) {
  return {static_cast<const char*>(data) + row_at(shape, image, row), shape.pixel() / shape.size, scale, shape.zero,
          shape.wide()};
}

MixedTarget target(const PlanShape& shape, void* data, int64_t image, int64_t row) {
  return {static_cast<char*>(data) + row_at(shape, image, row), shape.pixel() / shape.size, shape.wide()};
}

class WideQuantize : public Int8Op {
 public:
  WideQuantize(float scale, int most, int border) : scale_(scale), most_(most), border_(border) {
    require(most > 0 && most <= kWideMost, "bad output range");
  }

  PlanShape result(const std::vector<PlanShape>& in) const override {
    require(!in[0].bytes, "only floats are quantized");
    require(!in[0].rows || border_ == 0, "rows have no border");
    return like(in[0], border_, true, 0);
  }

  void run(int64_t images, const PlanShape* const* shapes, const void* const* in, const PlanShape& out_shape,
           void* out) const override {
    const int64_t plane = out_shape.height * out_shape.width;
    each_row(out_shape, images, [&](int64_t image, int64_t row) {
      const float* x = static_cast<const float*>(in[0]) + image * shapes[0]->floats() + row * out_shape.width;
      const MixedTarget to = target(out_shape, out, image, row);
      active_int16().quantize(x, out_shape.channels, out_shape.width, plane, 1.0f / scale_, most_, as_shorts(to.data),
                              to.step);
    });
  }

 private:
  float scale_;
  int most_, border_;
};

class WideDequantize : public Int8Op {
 public:
  explicit WideDequantize(float scale) : scale_(scale) {}

  PlanShape result(const std::vector<PlanShape>& in) const override {
    require(in[0].wide(), "only numbers of two bytes are dequantized here");
    PlanShape out = like(in[0], 0, false, 0);
    out.bytes = false;
    return out;
  }

  bool reads_wide() const override { return true; }
  bool writes_any_pitch() const override { return false; }

  void run(int64_t images, const PlanShape* const* shapes, const void* const* in, const PlanShape& out_shape,
           void* out) const override {
    const int64_t plane = out_shape.height * out_shape.width;
    each_row(out_shape, images, [&](int64_t image, int64_t row) {
      const MixedPixels x = pixels(*shapes[0], in[0], image, row, 0.0f);
      float* to = static_cast<float*>(out) + image * out_shape.floats() + row * out_shape.width;
      active_int16().dequantize(as_shorts(x.data), x.step, out_shape.channels, out_shape.width, scale_, to, plane);
    });
  }

 private:
  float scale_;
};

class WideLayer : public Int8Op {
 public:
  WideLayer(std::shared_ptr<const Int16Layer> layer, bool residual, bool relu, int border)
      : layer_(std::move(layer)), residual_(residual), relu_(relu), border_(border) {}

  PlanShape result(const std::vector<PlanShape>& in) const override {
    require(in[0].bytes && in[0].wide() != layer_->reads_bytes() && in[0].channels == layer_->geometry().channels(),
            "x has another number of channels than the weights");
    const Int8Image out = layer_->conv_shape(in[0].numbers(1));
    PlanShape made = like(in[0], border_, layer_->kind() == Int8Out::int16, layer_->zero());
    made.channels = layer_->geometry().columns;
    made.height = out.height;
    made.width = out.width;
    made.bytes = layer_->kind() != Int8Out::float32;
    require(made.bytes || (made.rows && !residual_), "only rows become floats");
    if (residual_) {
      require(in[1].bytes && in[1].wide() == layer_->wide_residual() && in[1].height == made.height &&
                  in[1].width == made.width && in[1].channels == made.channels,
              "the residual has another shape than the result");
    }
    return made;
  }

  bool reads_wide() const override { return true; }
  bool writes_any_pitch() const override { return layer_->kind() != Int8Out::float32; }
  RowReach reach() const override {
    const GroupedGeometry& g = layer_->geometry();
    return {-g.top, g.reach_h(), g.taps.stride_h};
  }
  int64_t weight_bytes() const override { return layer_->nbytes(); }

  int64_t multiply_adds(const PlanShape& out) const override {
    const GroupedGeometry& g = layer_->geometry();
    return out.floats() * g.taps.kernel_h * g.taps.kernel_w * g.group_channels;
  }

  void run(int64_t images, const PlanShape* const* shapes, const void* const* in, const PlanShape& out_shape,
           void* out) const override {
    Int8Image to = out_shape.numbers(images);
    if (!out_shape.bytes) to.pixel = out_shape.channels;
    layer_->conv(shapes[0]->numbers(images), in[0], residual_ ? shapes[1]->numbers(images) : Int8Image{},
                 residual_ ? in[1] : nullptr, to, relu_, out);
  }

 private:
  std::shared_ptr<const Int16Layer> layer_;
  bool residual_, relu_;
  int border_;
};

class WidePool : public Int8Op {
 public:
  WidePool(const PoolWindow& window, bool mean, int border) : window_(window), mean_(mean), border_(border) {}

  PlanShape result(const std::vector<PlanShape>& in) const override {
    require(in[0].wide() && !in[0].rows, "only images are pooled");
    const Int8Image made = pooled_shape(in[0].numbers(1), window_);
    PlanShape out = like(in[0], border_, true, 0);
    out.height = made.height;
    out.width = made.width;
    return out;
  }

  bool reads_wide() const override { return true; }

  void run(int64_t images, const PlanShape* const* shapes, const void* const* in, const PlanShape& out_shape,
           void* out) const override {
    const BytePlane from = shapes[0]->numbers(images).plane(), to = out_shape.numbers(images).plane();
    each_row(out_shape, images, [&](int64_t image, int64_t row) {
      PoolWindow window = window_;
      window.pad_h -= row * window.stride_h;  // the window of this row is the first
      active_int16().pool(as_shorts(pixels(*shapes[0], in[0], image, 0, 0.0f).data), from, out_shape.channels, window,
                          mean_, as_shorts(target(out_shape, out, image, row).data), to);
    });
  }

 private:
  PoolWindow window_;
  bool mean_;
  int border_;
};

class WideGlobalPool : public Int8Op {
 public:
  WideGlobalPool(float scale, float out_scale, int out_zero, int most, bool rows, int border)
      : scale_(scale), out_scale_(out_scale), out_zero_(out_zero), most_(most), border_(border), rows_(rows) {
    require(most >= 0 && most <= kWideMost, "bad output range");
  }

  PlanShape result(const std::vector<PlanShape>& in) const override {
    require(in[0].bytes && !in[0].rows && in[0].height * in[0].width > 0 && in[0].width <= kMostSummed,
            "only images with pixels have a mean, and not too many in a row");
    PlanShape out = like(in[0], rows_ ? 0 : border_, most_ > 0, out_zero_);
    out.height = out.width = 1;
    out.rows = rows_;
    return out;
  }

  bool reads_wide() const override { return true; }

  void run(int64_t images, const PlanShape* const* shapes, const void* const* in, const PlanShape& out_shape,
           void* out) const override {
    for (int64_t i = 0; i < images; ++i) {
      const MixedTarget to = target(out_shape, out, i, 0);
      for (int64_t c = 0; c < out_shape.channels; c += kStrip) {
        some(*shapes[0], in[0], i, c, std::min(kStrip, out_shape.channels - c), to);
      }
    }
  }

 private:
  static constexpr int64_t kStrip = 256;

  // The means of `count` channels from `first` on.
  void some(const PlanShape& shape, const void* data, int64_t image, int64_t first, int64_t count,
            const MixedTarget& to) const {
    int64_t total[kStrip] = {};
    const int64_t at_once = kMostSummed / shape.width;
    for (int64_t row = 0; row < shape.height; row += at_once) {
      int32_t sums[kStrip];
      const MixedPixels x = pixels(shape, data, image, row, 0.0f);
      BytePlane plane = shape.numbers(1).plane();
      plane.height = std::min(at_once, shape.height - row);
      active_int16().sums(static_cast<const char*>(x.data) + first * shape.size, x.wide, plane, count, sums);
      for (int64_t c = 0; c < count; ++c) total[c] += sums[c];
    }
    const float cells = static_cast<float>(shape.height * shape.width);
    float mean[kStrip];
    for (int64_t c = 0; c < count; ++c)
      mean[c] = (static_cast<float>(total[c]) / cells - static_cast<float>(shape.zero)) * scale_;
    if (to.wide)
      return active_int16().quantize(mean, 1, count, count, 1.0f / out_scale_, most_, as_shorts(to.data) + first, 1);
    active_int8_ops().quantize(mean, count, 1.0f / out_scale_, out_zero_, static_cast<uint8_t*>(to.data) + first);
  }

  float scale_, out_scale_;
  int out_zero_, most_, border_;  // most: of 16 bits; 0: bytes are given
  bool rows_;
};

// --- pixel by pixel ---

// What an operation on pixels knows besides its numbers.
class Between : public Int8Op {
 public:
  Between(const MixedEnd& end, int border) : kept_(end.bytes), wide_(end.wide), numbers_(end.numbers), border_(border) {
    check_finish(end.numbers);
  }
  bool reads_wide() const override { return true; }

 protected:
  PlanShape shaped(const PlanShape& in) const {
    return like(in, border_, wide_, static_cast<const ByteFinish&>(kept_).zero);
  }
  MixedFinish finish() const { return {kept_, numbers_}; }

 private:
  KeptFinish kept_;
  bool wide_;
  WideFinish numbers_;
  int border_;
};

// A sum, or a product whose second may be one pixel an image, for all pixels of it: a gate.
class WideTwo : public Between {
 public:
  WideTwo(bool product, float a_scale, float b_scale, const MixedEnd& end, int border)
      : Between(end, border), product_(product), a_scale_(a_scale), b_scale_(b_scale) {}

  PlanShape result(const std::vector<PlanShape>& in) const override {
    require(in.size() == 2 && in[0].bytes && in[1].bytes && in[0].channels == in[1].channels,
            "these two do not have one shape");
    const bool same = in[0].height == in[1].height && in[0].width == in[1].width;
    require(same || (product_ && in[1].height * in[1].width == 1), "these two do not have one shape");
    require(!product_ || b_scale_ == 0.0f || in[0].wide(), "fractions are taken of 16 bits");
    return shaped(in[0]);
  }

  bool in_place(const PlanShape& in, const PlanShape& out) const override {  // where no channels are made twice
    return in.pixel() == out.pixel() && in.size == out.size && out.channels % kInt8Panel == 0;
  }

  void run(int64_t images, const PlanShape* const* shapes, const void* const* in, const PlanShape& out_shape,
           void* out) const override {
    const bool one = product_ && shapes[1]->height * shapes[1]->width == 1;
    const MixedFinish finish = this->finish();
    const auto kernel = product_ ? active_int16().mul : active_int16().add;
    const bool framed = out_shape.border + shapes[0]->border + (one ? 0 : shapes[1]->border) > 0;
    each_rows(out_shape, images, framed ? 1 : out_shape.height, [&](int64_t image, int64_t row, int64_t count) {
      MixedPixels other = pixels(*shapes[1], in[1], image, one ? 0 : row, product_ && !one ? 0.0f : b_scale_);
      if (one) other.step = 0;
      kernel(pixels(*shapes[0], in[0], image, row, a_scale_), other, count * out_shape.width, out_shape.channels,
             finish, target(out_shape, out, image, row));
    });
  }

 private:
  bool product_;
  float a_scale_, b_scale_;
};

class WideAffine : public Between {
 public:
  WideAffine(const std::vector<float>& scale, const std::vector<float>& shift, const MixedEnd& end, int border)
      : Between(end, border), scale_(scale), shift_(shift) {}

  PlanShape result(const std::vector<PlanShape>& in) const override {
    require(in[0].bytes && static_cast<int64_t>(scale_.size()) == in[0].channels && scale_.size() == shift_.size(),
            "a scale and a shift a channel");
    return shaped(in[0]);
  }

  void run(int64_t images, const PlanShape* const* shapes, const void* const* in, const PlanShape& out_shape,
           void* out) const override {
    const MixedFinish finish = this->finish();
    each_row(out_shape, images, [&](int64_t image, int64_t row) {
      active_int16().affine(pixels(*shapes[0], in[0], image, row, 0.0f), scale_.data(), shift_.data(), out_shape.width,
                            out_shape.channels, finish, target(out_shape, out, image, row));
    });
  }

 private:
  std::vector<float> scale_, shift_;
};

}  // namespace

std::unique_ptr<Int8Op> wide_quantize_op(float scale, int most, int border) {
  return std::make_unique<WideQuantize>(scale, most, border);
}
std::unique_ptr<Int8Op> wide_dequantize_op(float scale) { return std::make_unique<WideDequantize>(scale); }
std::unique_ptr<Int8Op> wide_layer_op(std::shared_ptr<const Int16Layer> layer, bool residual, bool relu, int border) {
  return std::make_unique<WideLayer>(std::move(layer), residual, relu, border);
}
std::unique_ptr<Int8Op> wide_pool_op(const PoolWindow& window, bool mean, int border) {
  return std::make_unique<WidePool>(window, mean, border);
}
std::unique_ptr<Int8Op> wide_global_pool_op(float scale, float out_scale, int out_zero, int most, bool rows,
                                            int border) {
  return std::make_unique<WideGlobalPool>(scale, out_scale, out_zero, most, rows, border);
}
std::unique_ptr<Int8Op> wide_add_op(float a_scale, float b_scale, const MixedEnd& end, int border) {
  return std::make_unique<WideTwo>(false, a_scale, b_scale, end, border);
}
std::unique_ptr<Int8Op> wide_mul_op(float scale, float fraction, const MixedEnd& end, int border) {
  require(fraction == 0.0f || (end.wide && end.numbers.curve == WideCurve::straight),
          "fractions of 16 bits give 16 bits as they are");
  return std::make_unique<WideTwo>(true, scale, fraction, end, border);
}
std::unique_ptr<Int8Op> wide_affine_op(const std::vector<float>& scale, const std::vector<float>& shift,
                                       const MixedEnd& end, int border) {
  return std::make_unique<WideAffine>(scale, shift, end, border);
}

}  // namespace tw
