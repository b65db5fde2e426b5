// The operations a plan of integer layers is made of: a shape rule and a call of the kernels each.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "common/int8_plan_rows.h"

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

// A value of the same pixels as another, which it need not lie beside.
PlanShape like(const PlanShape& in, int border, int zero) {
  require(border >= 0 && zero >= 0 && zero <= 255, "bad border or zero point");
  PlanShape out = in;
  out.border = in.rows ? 0 : border;
  out.zero = zero;
  out.pitch = 0;
  return out;
}

int zero_of(const ByteFinish& finish) { return finish.zero; }

// A row of pixels of one image.
BytePixels pixels(const PlanShape& shape, const void* data, int64_t image, int64_t row, float scale) {
  const Int8Image at = shape.image(1);
  return {as_bytes(data) + image * at.image_step() + at.inside() + row * at.row_step(), at.pixel, scale, shape.zero};
}

ByteTarget target(const PlanShape& shape, void* data, int64_t image, int64_t row) {
  const Int8Image at = shape.image(1);
  return {as_bytes(data) + image * at.image_step() + at.inside() + row * at.row_step(), at.pixel};
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

  bool writes_any_pitch() const override { return false; }  // whole groups of four channels

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
    out.pitch = 0;
    return out;
  }

  bool writes_any_pitch() const override { return false; }

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

void check_residual(const PlanShape& skip, const Int8Image& out, int64_t channels) {
  require(skip.bytes && skip.height == out.height && skip.width == out.width && skip.channels == channels,
          "the residual has another shape than the result");
}

// What a plan asks of the geometry of a convolution: channels of its input, multiplications an output, and whether
// pixels of any step are read.
struct ConvReads {
  int64_t channels, products;
  bool any_pitch;
  RowReach rows;
};

ConvReads reads(const Int8Geometry& g) {
  return {
      g.channels, int64_t{g.kernel_h} * g.kernel_w * g.channels, g.kernel_w == 1, {-g.pad_h, g.kernel_h, g.stride_h}};
}

ConvReads reads(const GroupedGeometry& g) {
  return {
      g.channels(), g.taps.kernel_h * g.taps.kernel_w * g.group_channels, true, {-g.top, g.reach_h(), g.taps.stride_h}};
}

template <class Layer>
class Conv : public Int8Op {
 public:
  Conv(std::shared_ptr<const Layer> layer, bool residual, int border)
      : layer_(std::move(layer)), reads_(reads(layer_->geometry())), residual_(residual), border_(border) {}

  PlanShape result(const std::vector<PlanShape>& in) const override {
    require(in[0].bytes && !in[0].wide() && !in[0].rows && in[0].channels == reads_.channels,
            "x has another number of channels than the weights");
    const Int8Image out = layer_->conv_shape(in[0].image(1));
    const int64_t columns = layer_->geometry().columns;
    if (residual_) {
      check_residual(in[1], out, columns);
      require(in[1].wide() == layer_->wide_residual(), "the residual has numbers of another size");
    }
    PlanShape made = bytes_of(out, columns, border_, layer_->zero());
    made.size = layer_->gives_wide() ? 2 : 1;
    return made;
  }

  bool reads_wide() const override { return layer_->wide_residual(); }

  bool reads_any_pitch() const override { return reads_.any_pitch; }
  RowReach reach() const override { return reads_.rows; }
  int64_t weight_bytes() const override { return layer_->nbytes(); }
  int64_t multiply_adds(const PlanShape& out) const override { return out.floats() * reads_.products; }

  void run(int64_t images, const PlanShape* const* shapes, const void* const* in, const PlanShape& out_shape,
           void* out) const override {
    const Int8Image skip = residual_ ? shapes[1]->numbers(images) : Int8Image{};
    layer_->conv(shapes[0]->image(images), as_bytes(in[0]), skip, residual_ ? as_bytes(in[1]) : nullptr,
                 out_shape.numbers(images), as_bytes(out));
  }

 private:
  std::shared_ptr<const Layer> layer_;
  ConvReads reads_;
  bool residual_;
  int border_;
};

class Linear : public Int8Op {
 public:
  Linear(std::shared_ptr<const Int8Layer> layer, bool to_float, bool relu)
      : layer_(std::move(layer)),
        kind_(to_float               ? Int8Out::float32
              : layer_->gives_wide() ? Int8Out::int16
                                     : Int8Out::uint8),
        relu_(relu) {}

  PlanShape result(const std::vector<PlanShape>& in) const override {
    require(in[0].bytes && in[0].rows && in[0].channels == layer_->geometry().channels, "x does not fit the weights");
    layer_->check_linear(round_up(in[0].channels, kInt8Group), kind_);
    PlanShape out = bytes_of({}, layer_->geometry().columns, 0, layer_->zero());
    out.rows = true;
    out.bytes = kind_ != Int8Out::float32;
    out.size = kind_ == Int8Out::int16 ? 2 : 1;
    return out;
  }

  bool reads_any_pitch() const override { return false; }
  bool writes_any_pitch() const override { return false; }
  int64_t weight_bytes() const override { return layer_->nbytes(); }
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
    const int64_t channels = shapes[0]->channels;
    each_row(out_shape, images, [&](int64_t i, int64_t row) {
      PoolWindow window = window_;
      BytePlane plane = to.plane();
      plane.height = 1;
      window.pad_h -= row * window.stride_h;  // the window of this row is the first
      const uint8_t* x = as_bytes(in[0]) + i * from.image_step() + from.inside();
      uint8_t* y = as_bytes(out) + i * to.image_step() + to.inside() + row * to.row_step();
      mean_ ? active_int8_ops().avg_pool(x, from.plane(), channels, window, shapes[0]->zero, y, plane)
            : active_int8_ops().max_pool(x, from.plane(), channels, window, y, plane);
    });
  }

 private:
  PoolWindow window_;
  bool mean_;
  int border_;
};

class GlobalPool : public Int8Op {
 public:
  GlobalPool(float scale, float out_scale, int out_zero, bool rows, int border)
      : scale_(scale), out_scale_(out_scale), out_zero_(out_zero), border_(border), rows_(rows) {}

  PlanShape result(const std::vector<PlanShape>& in) const override {
    require(in[0].bytes && !in[0].rows && in[0].height > 0 && in[0].width > 0, "only images with pixels have a mean");
    PlanShape out = bytes_of({}, in[0].channels, rows_ ? 0 : border_, out_zero_);
    out.rows = rows_;
    return out;
  }

  bool writes_any_pitch() const override { return false; }

  void run(int64_t images, const PlanShape* const* shapes, const void* const* in, const PlanShape& out_shape,
           void* out) const override {
    const Int8Image from = shapes[0]->image(images), to = out_shape.image(images);
    for (int64_t i = 0; i < images; ++i) {
      active_int8_ops().global_pool(as_bytes(in[0]) + i * from.image_step() + from.inside(), from.plane(),
                                    shapes[0]->channels, scale_, shapes[0]->zero, 1.0f / out_scale_, out_zero_,
                                    as_bytes(out) + i * to.image_step() + to.inside());
    }
  }

 private:
  float scale_, out_scale_;
  int out_zero_, border_;
  bool rows_;
};

// (H, W, C) to a row, without padding: in the same order, or as (C, H, W).
class Flatten : public Int8Op {
 public:
  explicit Flatten(bool channels_first) : channels_first_(channels_first) {}

  PlanShape result(const std::vector<PlanShape>& in) const override {
    require(in[0].bytes, "only bytes are flattened");
    PlanShape out = bytes_of({}, in[0].floats(), 0, in[0].zero);
    out.rows = true;
    out.size = in[0].size;
    return out;
  }

  bool reads_wide() const override { return true; }

  bool is_view(const PlanShape& in) const override {
    const bool same_order = !channels_first_ || in.height * in.width == 1;
    return same_order && in.border == 0 && in.channels * in.size == in.pixel();
  }
  bool writes_any_pitch() const override { return false; }

  void run(int64_t images, const PlanShape* const* shapes, const void* const* in, const PlanShape& out_shape,
           void* out) const override {
    const Int8Image from = shapes[0]->image(images);
    const int64_t channels = shapes[0]->channels * shapes[0]->size;
    for (int64_t i = 0; i < images; ++i) {
      uint8_t* to = as_bytes(out) + i * out_shape.storage();
      const uint8_t* image = as_bytes(in[0]) + i * from.image_step() + from.inside();
      if (channels_first_) {
        if (shapes[0]->wide()) {
          transpose(from, shapes[0]->channels, reinterpret_cast<const int16_t*>(image), reinterpret_cast<int16_t*>(to));
        } else {
          transpose(from, shapes[0]->channels, image, to);
        }
      } else {
        for (int64_t y = 0; y < from.height; ++y) {
          for (int64_t x = 0; x < from.width; ++x) {
            std::memcpy(to + (y * from.width + x) * channels, image + y * from.row_step() + x * from.pixel, channels);
          }
        }
      }
      const int64_t used = out_shape.channels * out_shape.size;
      std::memset(to + used, out_shape.zero, out_shape.storage() - used);
    }
  }

 private:
  // (H, W, C) to (C, H, W). The steps of `from` are in bytes.
  template <class T>
  static void transpose(const Int8Image& from, int64_t channels, const T* image, T* to) {
    const int64_t row = from.row_step() / sizeof(T), pixel = from.pixel / sizeof(T);
    for (int64_t c = 0; c < channels; ++c) {
      for (int64_t y = 0; y < from.height; ++y) {
        for (int64_t x = 0; x < from.width; ++x) *to++ = image[y * row + x * pixel + c];
      }
    }
  }

  bool channels_first_;
};

// --- pixel by pixel ---

class Add : public Int8Op {
 public:
  Add(float a_scale, float b_scale, const ByteFinish& finish, int border)
      : a_scale_(a_scale), b_scale_(b_scale), finish_(finish), border_(border) {}

  PlanShape result(const std::vector<PlanShape>& in) const override {
    require(in.size() == 2 && in[0].bytes && in[1].bytes && in[0].floats() == in[1].floats() &&
                in[0].height == in[1].height && in[0].channels == in[1].channels && in[0].rows == in[1].rows,
            "these two do not have one shape");
    return like(in[0], border_, zero_of(finish_));
  }

  void run(int64_t images, const PlanShape* const* shapes, const void* const* in, const PlanShape& out_shape,
           void* out) const override {
    each_row(out_shape, images, [&](int64_t image, int64_t row) {
      active_int8_between().add(pixels(*shapes[0], in[0], image, row, a_scale_),
                                pixels(*shapes[1], in[1], image, row, b_scale_), out_shape.width, out_shape.channels,
                                finish_, target(out_shape, out, image, row));
    });
  }

 private:
  float a_scale_, b_scale_;
  KeptFinish finish_;
  int border_;
};

// The second may be one pixel an image, for all pixels of it.
class Mul : public Int8Op {
 public:
  Mul(float scale, const ByteFinish& finish, int border) : scale_(scale), finish_(finish), border_(border) {}

  PlanShape result(const std::vector<PlanShape>& in) const override {
    require(in.size() == 2 && in[0].bytes && in[1].bytes && in[0].channels == in[1].channels,
            "these two do not have one shape");
    const bool same = in[0].height == in[1].height && in[0].width == in[1].width;
    require(same || in[1].height * in[1].width == 1, "these two do not have one shape");
    return like(in[0], border_, zero_of(finish_));
  }

  void run(int64_t images, const PlanShape* const* shapes, const void* const* in, const PlanShape& out_shape,
           void* out) const override {
    const bool one = shapes[1]->height * shapes[1]->width == 1;
    each_row(out_shape, images, [&](int64_t image, int64_t row) {
      BytePixels gate = pixels(*shapes[1], in[1], image, one ? 0 : row, 0.0f);
      if (one) gate.step = 0;
      active_int8_between().mul(pixels(*shapes[0], in[0], image, row, scale_), gate, out_shape.width,
                                out_shape.channels, finish_, target(out_shape, out, image, row));
    });
  }

 private:
  float scale_;
  KeptFinish finish_;
  int border_;
};

class Affine : public Int8Op {
 public:
  Affine(const std::vector<float>& scale, const std::vector<float>& shift, const ByteFinish& finish, int border)
      : scale_(scale), shift_(shift), finish_(finish), border_(border) {}

  PlanShape result(const std::vector<PlanShape>& in) const override {
    require(in[0].bytes && static_cast<int64_t>(scale_.size()) == in[0].channels && scale_.size() == shift_.size(),
            "a scale and a shift a channel");
    return like(in[0], border_, zero_of(finish_));
  }

  void run(int64_t images, const PlanShape* const* shapes, const void* const* in, const PlanShape& out_shape,
           void* out) const override {
    each_row(out_shape, images, [&](int64_t image, int64_t row) {
      active_int8_between().affine(pixels(*shapes[0], in[0], image, row, 0.0f), scale_.data(), shift_.data(),
                                   out_shape.width, out_shape.channels, finish_, target(out_shape, out, image, row));
    });
  }

 private:
  std::vector<float> scale_, shift_;
  KeptFinish finish_;
  int border_;
};

// --- bytes moved as they are ---

class Concat : public Int8Op {
 public:
  explicit Concat(int border) : border_(border) {}

  PlanShape result(const std::vector<PlanShape>& in) const override {
    PlanShape out = like(in[0], border_, in[0].zero);
    out.channels = 0;
    for (const PlanShape& part : in) {
      require(part.bytes && part.rows == out.rows && part.height == out.height && part.width == out.width &&
                  part.zero == out.zero && part.size == out.size,
              "only images of one size, with one zero point, are concatenated");
      out.channels += part.channels;
    }
    return out;
  }

  bool is_concat() const override { return true; }
  bool reads_wide() const override { return true; }

  void run(int64_t images, const PlanShape* const* shapes, const void* const* in, const PlanShape& out_shape,
           void* out) const override {
    const int64_t bytes = shapes[0]->channels * shapes[0]->size;
    each_row(*shapes[0], images, [&](int64_t image, int64_t row) {
      const BytePixels from = pixels(*shapes[0], in[0], image, row, 0.0f);
      const ByteTarget to = target(out_shape, out, image, row);
      for (int64_t x = 0; x < out_shape.width; ++x)
        std::memcpy(to.data + x * to.step, from.data + x * from.step, bytes);
    });
  }

 private:
  int border_;
};

class Slice : public Int8Op {
 public:
  Slice(int64_t first, int64_t count, int border) : first_(first), count_(count), border_(border) {}

  PlanShape result(const std::vector<PlanShape>& in) const override {
    require(in[0].bytes && first_ >= 0 && count_ > 0 && first_ + count_ <= in[0].channels,
            "the slice lies outside the channels");
    PlanShape out = like(in[0], border_, in[0].zero);
    out.channels = count_;
    return out;
  }

  int64_t slice_from() const override { return first_; }
  bool reads_wide() const override { return true; }

  void run(int64_t images, const PlanShape* const* shapes, const void* const* in, const PlanShape& out_shape,
           void* out) const override {
    each_row(out_shape, images, [&](int64_t image, int64_t row) {
      const BytePixels from = pixels(*shapes[0], in[0], image, row, 0.0f);
      const ByteTarget to = target(out_shape, out, image, row);
      for (int64_t x = 0; x < out_shape.width; ++x) {
        std::memcpy(to.data + x * to.step, from.data + x * from.step + first_ * out_shape.size,
                    count_ * out_shape.size);
      }
    });
  }

 private:
  int64_t first_, count_;
  int border_;
};

// A pixel seen as a row, or a row as a pixel.
class Same : public Int8Op {
 public:
  Same(bool rows, int border) : rows_(rows), border_(border) {}

  PlanShape result(const std::vector<PlanShape>& in) const override {
    require(in[0].bytes && in[0].height * in[0].width == 1, "only one pixel is a row");
    PlanShape out = like(in[0], 0, in[0].zero);
    out.rows = rows_;
    out.border = rows_ ? 0 : border_;
    return out;
  }

  bool is_view(const PlanShape& in) const override { return in.border == 0 && in.is_tight() && border_ == 0; }
  bool reads_wide() const override { return true; }
  bool writes_any_pitch() const override { return !rows_; }

  void run(int64_t images, const PlanShape* const* shapes, const void* const* in, const PlanShape& out_shape,
           void* out) const override {
    for (int64_t i = 0; i < images; ++i) {
      std::memcpy(target(out_shape, out, i, 0).data, pixels(*shapes[0], in[0], i, 0, 0.0f).data,
                  out_shape.channels * out_shape.size);
    }
  }

 private:
  bool rows_;
  int border_;
};

class Take : public Int8Op {
 public:
  Take(const std::vector<int>& channels, int border) : channels_(channels.begin(), channels.end()), border_(border) {
    for (int c : channels) halves_.insert(halves_.end(), {2 * c, 2 * c + 1});
  }

  PlanShape result(const std::vector<PlanShape>& in) const override {
    require(in[0].bytes && !channels_.empty(), "only bytes are taken");
    for (int32_t c : channels_) require(c >= 0 && c < in[0].channels, "there is no such channel");
    PlanShape out = like(in[0], border_, in[0].zero);
    out.channels = static_cast<int64_t>(channels_.size());
    return out;
  }

  bool reads_wide() const override { return true; }

  void run(int64_t images, const PlanShape* const* shapes, const void* const* in, const PlanShape& out_shape,
           void* out) const override {
    const std::vector<int32_t>& taken = out_shape.wide() ? halves_ : channels_;
    each_row(out_shape, images, [&](int64_t image, int64_t row) {
      active_int8_ops().take(pixels(*shapes[0], in[0], image, row, 0.0f).data, shapes[0]->pixel(), taken.data(),
                             static_cast<int64_t>(taken.size()), out_shape.width,
                             target(out_shape, out, image, row).data, out_shape.pixel());
    });
  }

 private:
  std::vector<int32_t> channels_, halves_;  // the latter: the bytes of numbers of two
  int border_;
};

class Upsample : public Int8Op {
 public:
  Upsample(int64_t by_h, int64_t by_w, int border) : by_h_(by_h), by_w_(by_w), border_(border) {}

  PlanShape result(const std::vector<PlanShape>& in) const override {
    require(in[0].bytes && !in[0].rows && by_h_ > 0 && by_w_ > 0, "an image grows by whole numbers");
    PlanShape out = like(in[0], border_, in[0].zero);
    out.height *= by_h_;
    out.width *= by_w_;
    return out;
  }

  bool reads_wide() const override { return true; }

  void run(int64_t images, const PlanShape* const* shapes, const void* const* in, const PlanShape& out_shape,
           void* out) const override {
    each_row(out_shape, images, [&](int64_t image, int64_t row) {
      const BytePixels from = pixels(*shapes[0], in[0], image, row / by_h_, 0.0f);
      const ByteTarget to = target(out_shape, out, image, row);
      const int64_t bytes = out_shape.channels * out_shape.size;
      for (int64_t x = 0; x < out_shape.width; ++x)
        std::memcpy(to.data + x * to.step, from.data + x / by_w_ * from.step, bytes);
    });
  }

 private:
  int64_t by_h_, by_w_;
  int border_;
};

class Spread : public Int8Op {
 public:
  Spread(int64_t by_h, int64_t by_w, int border) : by_h_(by_h), by_w_(by_w), border_(border) {}

  PlanShape result(const std::vector<PlanShape>& in) const override {
    require(in[0].bytes && !in[0].rows && by_h_ > 0 && by_w_ > 0 && in[0].channels % (by_h_ * by_w_) == 0,
            "the channels are no whole number of pixels");
    PlanShape out = like(in[0], border_, in[0].zero);
    out.channels /= by_h_ * by_w_;
    out.height *= by_h_;
    out.width *= by_w_;
    return out;
  }

  bool reads_wide() const override { return true; }

  void run(int64_t images, const PlanShape* const* shapes, const void* const* in, const PlanShape& out_shape,
           void* out) const override {
    const int64_t channels = out_shape.channels * out_shape.size;
    each_row(out_shape, images, [&](int64_t image, int64_t row) {
      const BytePixels from = pixels(*shapes[0], in[0], image, row / by_h_, 0.0f);
      const ByteTarget to = target(out_shape, out, image, row);
      for (int64_t x = 0; x < out_shape.width; ++x) {
        const int64_t part = row % by_h_ * by_w_ + x % by_w_;
        std::memcpy(to.data + x * to.step, from.data + x / by_w_ * from.step + part * channels, channels);
      }
    });
  }

 private:
  int64_t by_h_, by_w_;
  int border_;
};

}  // namespace

std::unique_ptr<Int8Op> quantize_op(float scale, int zero, int border) {
  return std::make_unique<Quantize>(scale, zero, border);
}
std::unique_ptr<Int8Op> dequantize_op(float scale) { return std::make_unique<Dequantize>(scale); }
std::unique_ptr<Int8Op> conv_op(std::shared_ptr<const Int8Layer> layer, bool residual, int border) {
  return std::make_unique<Conv<Int8Layer>>(std::move(layer), residual, border);
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
std::unique_ptr<Int8Op> global_pool_op(float scale, float out_scale, int out_zero, bool rows, int border) {
  return std::make_unique<GlobalPool>(scale, out_scale, out_zero, rows, border);
}
std::unique_ptr<Int8Op> flatten_op(bool channels_first) { return std::make_unique<Flatten>(channels_first); }
std::unique_ptr<Int8Op> grouped_conv_op(std::shared_ptr<const Int8GroupedLayer> layer, bool residual, int border) {
  return std::make_unique<Conv<Int8GroupedLayer>>(std::move(layer), residual, border);
}
std::unique_ptr<Int8Op> add_op(float a_scale, float b_scale, const ByteFinish& finish, int border) {
  return std::make_unique<Add>(a_scale, b_scale, finish, border);
}
std::unique_ptr<Int8Op> mul_op(float scale, const ByteFinish& finish, int border) {
  return std::make_unique<Mul>(scale, finish, border);
}
std::unique_ptr<Int8Op> affine_op(const std::vector<float>& scale, const std::vector<float>& shift,
                                  const ByteFinish& finish, int border) {
  return std::make_unique<Affine>(scale, shift, finish, border);
}
std::unique_ptr<Int8Op> same_op(bool rows, int border) { return std::make_unique<Same>(rows, border); }
std::unique_ptr<Int8Op> concat_op(int border) { return std::make_unique<Concat>(border); }
std::unique_ptr<Int8Op> slice_op(int64_t first, int64_t count, int border) {
  return std::make_unique<Slice>(first, count, border);
}
std::unique_ptr<Int8Op> take_op(const std::vector<int>& channels, int border) {
  return std::make_unique<Take>(channels, border);
}
std::unique_ptr<Int8Op> upsample_op(int64_t by_h, int64_t by_w, int border) {
  return std::make_unique<Upsample>(by_h, by_w, border);
}
std::unique_ptr<Int8Op> spread_op(int64_t by_h, int64_t by_w, int border) {
  return std::make_unique<Spread>(by_h, by_w, border);
}

}  // namespace tw
