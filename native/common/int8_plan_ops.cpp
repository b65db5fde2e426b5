// The operations a plan of integer layers is made of: a shape rule and a call of the kernels each.
#include <cstring>
#include <stdexcept>

#include "common/int8_plan.h"

namespace tw {
namespace {

void require(bool fits, const char* sentence) {
  if (!fits) throw std::invalid_argument(sentence);
}

const uint8_t* as_bytes(const void* p) { return static_cast<const uint8_t*>(p); }
uint8_t* as_bytes(void* p) { return static_cast<uint8_t*>(p); }

PlanShape bytes_of(const Int8Image& image, int64_t channels, int border, int zero) {
  require(border >= 0 && zero >= 0 && zero <= 255, "bad border or zero point");
  PlanShape out;
  out.bytes = true;
  out.channels = channels;
  out.height = image.height;
  out.width = image.width;
  out.border = border;
  out.zero = zero;
  return out;
}

class Quantize : public Int8Op {
 public:
  Quantize(float scale, int zero, int border) : scale_(scale), zero_(zero), border_(border) {}

  PlanShape result(const std::vector<PlanShape>& in) const override {
    require(!in[0].bytes, "only floats are quantized");
    PlanShape out = bytes_of({0, in[0].height, in[0].width, 0, 0}, in[0].channels, border_, zero_);
    out.rows = in[0].rows;
    require(!out.rows || border_ == 0, "rows have no border");
    return out;
  }

  void run(int64_t images, const PlanShape* const* shapes, const void* const* in, const PlanShape& out_shape,
           void* out) const override {
    const Int8Image image = out_shape.image(images);
    const int64_t floats = shapes[0]->floats();
    for (int64_t i = 0; i < images; ++i) {
      const float* x = static_cast<const float*>(in[0]) + i * floats;
      uint8_t* to = as_bytes(out) + i * image.image_step() + image.inside();
      if (out_shape.rows) {
        active_int8_ops().quantize(x, floats, 1.0f / scale_, zero_, to);
        std::memset(to + floats, zero_, image.pixel - floats);
      } else {
        active_int8_ops().quantize_image(x, shapes[0]->channels, 1.0f / scale_, zero_, image.plane(), to);
      }
    }
  }

 private:
  float scale_;
  int zero_, border_;
};

class Dequantize : public Int8Op {
 public:
  explicit Dequantize(float scale) : scale_(scale) {}

  PlanShape result(const std::vector<PlanShape>& in) const override {
    require(in[0].bytes, "only bytes are dequantized");
    PlanShape out = in[0];
    out.bytes = false;
    out.border = 0;
    return out;
  }

  void run(int64_t images, const PlanShape* const* shapes, const void* const* in, const PlanShape& out_shape,
           void* out) const override {
    const Int8Image image = shapes[0]->image(images);
    for (int64_t i = 0; i < images; ++i) {
      active_int8_ops().dequantize_image(as_bytes(in[0]) + i * image.image_step() + image.inside(), image.plane(),
                                         shapes[0]->channels, scale_, shapes[0]->zero,
                                         static_cast<float*>(out) + i * out_shape.floats());
    }
  }

 private:
  float scale_;
};

class Conv : public Int8Op {
 public:
  Conv(std::shared_ptr<const Int8Layer> layer, bool residual, int border)
      : layer_(std::move(layer)), residual_(residual), border_(border) {}

  PlanShape result(const std::vector<PlanShape>& in) const override {
    require(in[0].bytes && !in[0].rows && in[0].channels == layer_->geometry().channels,
            "x has another number of channels than the weights");
    const Int8Image out = layer_->conv_shape(in[0].image(1));
    if (residual_) {
      const Int8Image skip = in[1].image(1);
      require(in[1].bytes && skip.height == out.height && skip.width == out.width && skip.pixel == out.pixel,
              "the residual has another shape than the result");
    }
    return bytes_of(out, layer_->geometry().columns, border_, layer_->zero());
  }

  int64_t multiply_adds(const PlanShape& out) const override {
    const ConvGeometry& g = layer_->geometry();
    return out.floats() * g.kernel_h * g.kernel_w * g.channels;
  }

  void run(int64_t images, const PlanShape* const* shapes, const void* const* in, const PlanShape& out_shape,
           void* out) const override {
    const Int8Image skip = residual_ ? shapes[1]->image(images) : Int8Image{};
    layer_->conv(shapes[0]->image(images), as_bytes(in[0]), skip, residual_ ? as_bytes(in[1]) : nullptr,
                 out_shape.image(images), as_bytes(out));
  }

 private:
  std::shared_ptr<const Int8Layer> layer_;
  bool residual_;
  int border_;
};

class Linear : public Int8Op {
 public:
  Linear(std::shared_ptr<const Int8Layer> layer, bool to_float, bool relu)
      : layer_(std::move(layer)), kind_(to_float ? Int8Out::float32 : Int8Out::uint8), relu_(relu) {}

  PlanShape result(const std::vector<PlanShape>& in) const override {
    require(in[0].bytes && in[0].rows && in[0].channels == layer_->geometry().channels, "x does not fit the weights");
    layer_->check_linear(in[0].image(1).pixel, kind_);
    PlanShape out = bytes_of({}, layer_->geometry().columns, 0, layer_->zero());
    out.rows = true;
    out.bytes = kind_ == Int8Out::uint8;
    return out;
  }

  int64_t multiply_adds(const PlanShape& out) const override { return out.channels * layer_->geometry().channels; }

  void run(int64_t images, const PlanShape* const*, const void* const* in, const PlanShape&, void* out) const override {
    layer_->linear(as_bytes(in[0]), images, kind_, nullptr, relu_, out);
  }

  const Int8Layer* product() const override { return layer_.get(); }
  void run_tiled(int64_t images, const void* in, void* out, const Int8Tile& tile) const override {
    layer_->linear(as_bytes(in), images, kind_, nullptr, relu_, out, &tile);
  }

 private:
  std::shared_ptr<const Int8Layer> layer_;
  Int8Out kind_;
  bool relu_;
};

class Pool : public Int8Op {
 public:
  Pool(const PoolWindow& window, bool mean, int border) : window_(window), mean_(mean), border_(border) {}

  PlanShape result(const std::vector<PlanShape>& in) const override {
    require(in[0].bytes && !in[0].rows, "only images are pooled");
    return bytes_of(pooled_shape(in[0].image(1), window_), in[0].channels, border_, in[0].zero);
  }

  void run(int64_t images, const PlanShape* const* shapes, const void* const* in, const PlanShape& out_shape,
           void* out) const override {
    const Int8Image from = shapes[0]->image(images), to = out_shape.image(images);
    for (int64_t i = 0; i < images; ++i) {
      const uint8_t* x = as_bytes(in[0]) + i * from.image_step() + from.inside();
      uint8_t* y = as_bytes(out) + i * to.image_step() + to.inside();
      mean_ ? active_int8_ops().avg_pool(x, from.plane(), window_, shapes[0]->zero, y, to.plane())
            : active_int8_ops().max_pool(x, from.plane(), window_, y, to.plane());
    }
  }

 private:
  PoolWindow window_;
  bool mean_;
  int border_;
};

class GlobalPool : public Int8Op {
 public:
  GlobalPool(float scale, float out_scale, int out_zero) : scale_(scale), out_scale_(out_scale), out_zero_(out_zero) {}

  PlanShape result(const std::vector<PlanShape>& in) const override {
    require(in[0].bytes && !in[0].rows && in[0].height > 0 && in[0].width > 0, "only images with pixels have a mean");
    PlanShape out = bytes_of({}, in[0].channels, 0, out_zero_);
    out.rows = true;
    return out;
  }

  void run(int64_t images, const PlanShape* const* shapes, const void* const* in, const PlanShape& out_shape,
           void* out) const override {
    const Int8Image from = shapes[0]->image(images);
    for (int64_t i = 0; i < images; ++i) {
      active_int8_ops().global_pool(as_bytes(in[0]) + i * from.image_step() + from.inside(), from.plane(),
                                    shapes[0]->channels, scale_, shapes[0]->zero, 1.0f / out_scale_, out_zero_,
                                    as_bytes(out) + i * out_shape.storage());
    }
  }

 private:
  float scale_, out_scale_;
  int out_zero_;
};

// (H, W, C) to a row in the same order, without frame and padding channels.
class Flatten : public Int8Op {
 public:
  PlanShape result(const std::vector<PlanShape>& in) const override {
    require(in[0].bytes, "only bytes are flattened");
    PlanShape out = bytes_of({}, in[0].floats(), 0, in[0].zero);
    out.rows = true;
    return out;
  }

  bool is_view(const PlanShape& in) const override { return in.border == 0 && in.channels % kInt8Group == 0; }

  void run(int64_t images, const PlanShape* const* shapes, const void* const* in, const PlanShape& out_shape,
           void* out) const override {
    const Int8Image from = shapes[0]->image(images);
    const int64_t channels = shapes[0]->channels;
    for (int64_t i = 0; i < images; ++i) {
      uint8_t* to = as_bytes(out) + i * out_shape.storage();
      for (int64_t y = 0; y < from.height; ++y) {
        const uint8_t* row = as_bytes(in[0]) + i * from.image_step() + from.inside() + y * from.row_step();
        for (int64_t x = 0; x < from.width; ++x, to += channels) std::memcpy(to, row + x * from.pixel, channels);
      }
      std::memset(to, out_shape.zero, out_shape.storage() - out_shape.channels);
    }
  }
};

}  // namespace

std::unique_ptr<Int8Op> quantize_op(float scale, int zero, int border) {
  return std::make_unique<Quantize>(scale, zero, border);
}
std::unique_ptr<Int8Op> dequantize_op(float scale) { return std::make_unique<Dequantize>(scale); }
std::unique_ptr<Int8Op> conv_op(std::shared_ptr<const Int8Layer> layer, bool residual, int border) {
  return std::make_unique<Conv>(std::move(layer), residual, border);
}
std::unique_ptr<Int8Op> linear_op(std::shared_ptr<const Int8Layer> layer, bool to_float, bool relu) {
  return std::make_unique<Linear>(std::move(layer), to_float, relu);
}
std::unique_ptr<Int8Op> max_pool_op(const PoolWindow& window, int border) {
  return std::make_unique<Pool>(window, false, border);
}
std::unique_ptr<Int8Op> avg_pool_op(const PoolWindow& window, int border) {
  return std::make_unique<Pool>(window, true, border);
}
std::unique_ptr<Int8Op> global_pool_op(float scale, float out_scale, int out_zero) {
  return std::make_unique<GlobalPool>(scale, out_scale, out_zero);
}
std::unique_ptr<Int8Op> flatten_op() { return std::make_unique<Flatten>(); }

}  // namespace tw
