// Conversions: floats to integers and back, and between the memory layouts of floats.
#include <algorithm>
#include <cstring>

#include "ops/ops.h"
#include "ops/rows.h"

namespace tw {
namespace {

// Floats to uint8 or int16.
class Quantize : public Op {
 public:
  // limit 0: uint8; else int16 in [-limit, limit]
  Quantize(float scale, int zero_point, int limit, int padding)
      : scale_(scale), zero_point_(zero_point), limit_(limit), padding_(padding) {
    require(limit >= 0 && limit <= kInt16Limit, "the limit of an int16 result is at most 32767");
  }

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(!in[0].is_integer(), "only floats are quantized");
    require(!in[0].rows || padding_ == 0, "rows have no padding");
    const DType dtype = limit_ > 0 ? DType::int16 : DType::uint8;
    TensorDesc out =
        integers(dtype, {0, in[0].height, in[0].width, 0, 0}, in[0].channels, padding_, limit_ > 0 ? 0 : zero_point_);
    out.rows = in[0].rows;
    out.n = in[0].n;
    return out;
  }

  bool writes_any_pitch() const override { return limit_ > 0; }  // uint8: whole groups of four channels

  void run(const OpCall& call) const override {
    const TensorDesc &in = *call.in[0].desc, &out = *call.out.desc;
    const float* floats = static_cast<const float*>(call.in[0].data);
    const int64_t plane = out.height * out.width, image_floats = in.channels * plane;
    if (in.layout == Layout::channels_last) return quantize_pixels(call);
    if (limit_ > 0) {
      return for_rows(out, call.batch, [&](int64_t image, int64_t row) {
        active_int16().quantize(floats + image * image_floats + row * out.width, out.channels, out.width, plane,
                                1.0f / scale_, limit_, reinterpret_cast<int16_t*>(call.out.row(image, row)),
                                out.pixel() / 2);
      });
    }
    for (int64_t i = 0; i < call.batch * out.n; ++i) {
      const float* x = floats + i * image_floats;
      uint8_t* to = call.out.row(i, 0);
      if (out.rows) {
        active_int8_ops().quantize(x, image_floats, 1.0f / scale_, zero_point_, to);
        std::memset(to + image_floats, zero_point_, out.pixel() - image_floats);
      } else {
        active_int8_ops().quantize_image(x, in.channels, 1.0f / scale_, zero_point_, out.image(1).plane(), to);
      }
    }
  }

 private:
  // Quantizes channels-last floats pixel by pixel. Channels that fill up the last group of four get the zero point.
  void quantize_pixels(const OpCall& call) const {
    const TensorDesc &in = *call.in[0].desc, &out = *call.out.desc;
    for_rows(out, call.batch, [&](int64_t image, int64_t row) {
      const uint8_t* from = call.in[0].row(image, row);
      uint8_t* to = call.out.row(image, row);
      for (int64_t i = 0; i < out.width; ++i, from += in.pixel(), to += out.pixel()) {
        const float* x = reinterpret_cast<const float*>(from);
        if (limit_ > 0) {
          active_int16().quantize(x, 1, in.channels, in.channels, 1.0f / scale_, limit_, reinterpret_cast<int16_t*>(to),
                                  1);
        } else {
          active_int8_ops().quantize(x, in.channels, 1.0f / scale_, zero_point_, to);
          std::memset(to + in.channels, zero_point_, out.pixel() - in.channels);
        }
      }
    });
  }

  float scale_;
  int zero_point_, limit_, padding_;
};

// uint8 or int16 to floats.
class Dequantize : public Op {
 public:
  Dequantize(float scale, Layout layout) : scale_(scale), layout_(layout) {}

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(in[0].is_integer(), "only integers are dequantized");
    TensorDesc out = in[0];
    out.dtype = DType::float32;
    out.layout = layout_;
    out.padding = out.zero_point = 0;
    out.pitch = 0;
    return out;
  }

  bool reads_int16() const override { return true; }
  bool writes_any_pitch() const override { return layout_ == Layout::channels_last; }

  void run(const OpCall& call) const override {
    const TensorDesc &in = *call.in[0].desc, &out = *call.out.desc;
    if (layout_ == Layout::channels_last) return dequantize_pixels(call);
    float* floats = static_cast<float*>(call.out.data);
    const int64_t plane = out.height * out.width, image_floats = out.channels * plane;
    if (in.is_int16()) {
      return for_rows(out, call.batch, [&](int64_t image, int64_t row) {
        active_int16().dequantize(reinterpret_cast<const int16_t*>(call.in[0].row(image, row)), in.pixel() / 2,
                                  out.channels, out.width, scale_, floats + image * image_floats + row * out.width,
                                  plane);
      });
    }
    for (int64_t i = 0; i < call.batch * in.n; ++i) {
      active_int8_ops().dequantize_image(call.in[0].row(i, 0), in.image(1).plane(), in.channels, scale_, in.zero_point,
                                         floats + i * image_floats);
    }
  }

 private:
  // Dequantizes to channels-last floats, pixel by pixel.
  void dequantize_pixels(const OpCall& call) const {
    const TensorDesc &in = *call.in[0].desc, &out = *call.out.desc;
    for_rows(out, call.batch, [&](int64_t image, int64_t row) {
      const uint8_t* from = call.in[0].row(image, row);
      uint8_t* to = call.out.row(image, row);
      for (int64_t i = 0; i < out.width; ++i, from += in.pixel(), to += out.pixel()) {
        float* y = reinterpret_cast<float*>(to);
        if (in.is_int16()) {
          active_int16().dequantize(reinterpret_cast<const int16_t*>(from), 1, 1, in.channels, scale_, y, in.channels);
        } else {
          active_int8_ops().dequantize(from, in.channels, scale_, in.zero_point, y);
        }
      }
    });
  }

  float scale_;
  Layout layout_;
};

// Dynamic quantization with a scale per pixel: one row of a token matrix, for example.
class QuantizeRows : public Op {
 public:
  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(is_float_pixels(in[0]), "only channels-last floats are quantized by row");
    TensorDesc out = integers(DType::uint8, {0, in[0].height, in[0].width, 0, 0},
                              RowQuantized::channels(in[0].channels), 0, kZeroPoint);
    out.n = in[0].n;
    return out;
  }

  void run(const OpCall& call) const override {
    const LastImage x = call.in[0].floats(call.batch);
    const int64_t pixels = x.pixels(), tasks = std::min(pixels, 1 + pixels * x.c / kTaskElements);
    const int64_t padded = round_up(x.c, kInt8Group), step = call.out->pixel();
    parallel_near(static_cast<int>(tasks), [&](int task) {
      for (int64_t p = pixels * task / tasks; p < pixels * (task + 1) / tasks; ++p) {
        uint8_t* to = call.out.bytes() + p * step;
        const float scale = active_int8_ops().quantize_row(x.data + p * x.pitch, x.c, padded, to);
        std::memcpy(to + padded, &scale, sizeof scale);
      }
    });
  }

 private:
  static constexpr int kZeroPoint = 128;  // definition: the middle of uint8, for a symmetric range
};

// Floats from planes to channels last, or back; or copied with another pitch.
class ChangeLayout : public Op {
 public:
  ChangeLayout(Layout layout, bool dense) : layout_(layout), dense_(dense) {}

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(!in[0].is_integer(), "only the layout of floats is changed");
    TensorDesc out = float_pixels(in[0].n, in[0].channels, in[0].height, in[0].width);
    out.layout = layout_;
    out.rows = in[0].rows;
    if (dense_) out.pitch = 4 * out.channels;
    return out;
  }

  void run(const OpCall& call) const override {
    const LastImage x = call.in[0].floats(call.batch), y = call.out.floats(call.batch);
    if (x.pitch == 0) return active_channels_last().from_planes(x, y);
    if (y.pitch == 0) return active_channels_last().to_planes(x, y);
    // Copies exactly the channels: the caller's array may end right after the last pixel.
    for (int64_t p = 0; p < x.pixels(); ++p)
      std::memcpy(y.data + p * y.pitch, x.data + p * x.pitch, static_cast<std::size_t>(x.c) * sizeof(float));
  }

 private:
  Layout layout_;
  bool dense_;
};

}  // namespace

OpPtr quantize_op(float scale, int zero_point, int padding) {
  return std::make_unique<Quantize>(scale, zero_point, 0, padding);
}
OpPtr quantize_int16_op(float scale, int limit, int padding) {
  require(limit > 0, "the limit of an int16 result must be positive");
  return std::make_unique<Quantize>(scale, 0, limit, padding);
}
OpPtr quantize_rows_op() { return std::make_unique<QuantizeRows>(); }
OpPtr dequantize_op(float scale, Layout layout) { return std::make_unique<Dequantize>(scale, layout); }
OpPtr layout_op(Layout layout) { return std::make_unique<ChangeLayout>(layout, false); }
OpPtr dense_op() { return std::make_unique<ChangeLayout>(Layout::channels_last, true); }

}  // namespace tw
