// Pooling over windows and over whole images: uint8, int16 and float32.
#include <algorithm>

#include "ops/ops.h"
#include "ops/rows.h"

namespace tw {
namespace {

// Max or average pooling over windows.
class Pool : public Op {
 public:
  Pool(const PoolWindow& window, bool mean, int padding) : window_(window), mean_(mean), padding_(padding) {}

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(in[0].layout == Layout::channels_last && !in[0].rows, "only images with channels last are pooled");
    const Int8Image pooled = pooled_shape(in[0].image(1), window_);
    TensorDesc out = like(in[0], padding_, in[0].zero_point);
    out.height = pooled.height;
    out.width = pooled.width;
    return out;
  }

  bool reads_int16() const override { return true; }

  void run(const OpCall& call) const override {
    if (!call.out->is_integer()) return pool_floats(call);
    const BytePlane from = call.in[0]->numbers(1).plane(), to = call.out->numbers(1).plane();
    const int64_t channels = call.out->channels;
    for_rows(*call.out.desc, call.batch, [&](int64_t image, int64_t row) {
      PoolWindow window = window_;
      window.pad_h -= row * window.stride_h;  // this row's window becomes the first
      const uint8_t* x = call.in[0].row(image, 0);
      uint8_t* y = call.out.row(image, row);
      if (call.out->is_int16()) {
        return active_int16().pool(reinterpret_cast<const int16_t*>(x), from, channels, window, mean_,
                                   reinterpret_cast<int16_t*>(y), to);
      }
      BytePlane one = to;
      one.height = 1;
      mean_ ? active_int8_ops().avg_pool(x, from, channels, window, call.in[0]->zero_point, y, one)
            : active_int8_ops().max_pool(x, from, channels, window, y, one);
    });
  }

 private:
  // Passes the window and sizes to the float kernel.
  void pool_floats(const OpCall& call) const {
    const LastImage x = call.in[0].floats(call.batch), y = call.out.floats(call.batch);
    const PoolShape s{0,
                      x.h,
                      x.w,
                      window_.kernel_h,
                      window_.kernel_w,
                      window_.stride_h,
                      window_.stride_w,
                      window_.pad_h,
                      window_.pad_w,
                      y.h,
                      y.w};
    mean_ ? active_channels_last().avg_pool(s, window_.count_padding, x, y) : active_channels_last().max_pool(s, x, y);
  }

  PoolWindow window_;
  bool mean_;
  int padding_;
};

// The mean of each channel over all pixels, of floats.
class FloatGlobalMean : public Op {
 public:
  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(is_float_pixels(in[0]), "the mean of floats is over channels-last images");
    return float_pixels(in[0].n, in[0].channels, 1, 1);
  }
  void run(const OpCall& call) const override {
    active_channels_last().global_mean(call.in[0].floats(call.batch), call.out.floats(call.batch));
  }
};

// The mean of each channel over all pixels, requantized to uint8 or int16.
class GlobalMean : public Op {
 public:
  GlobalMean(const PoolScales& scales, bool rows, int padding) : scales_(scales), padding_(padding), rows_(rows) {
    require(scales.int16_limit >= 0 && scales.int16_limit <= kInt16Limit,
            "the limit of an int16 result is at most 32767");
  }

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(in[0].is_integer() && !in[0].rows && in[0].height > 0 && in[0].width > 0 && in[0].width <= kMaxSummedPixels,
            "only images with pixels have a mean, and not too many in a row");
    const DType dtype = scales_.int16_limit > 0 ? DType::int16 : DType::uint8;
    TensorDesc out = integers(dtype, {}, in[0].channels, rows_ ? 0 : padding_, scales_.out_zero_point);
    out.rows = rows_;
    out.n = in[0].n;
    return out;
  }

  bool reads_int16() const override { return true; }
  bool writes_any_pitch() const override { return scales_.int16_limit > 0; }  // uint8: whole groups of four channels

  void run(const OpCall& call) const override {
    const TensorDesc& in = *call.in[0].desc;
    for (int64_t image = 0; image < call.batch * in.n; ++image) {
      if (!in.is_int16() && !call.out->is_int16()) {
        active_int8_ops().global_pool(call.in[0].row(image, 0), in.image(1).plane(), in.channels, scales_.scale,
                                      in.zero_point, 1.0f / scales_.out_scale, scales_.out_zero_point,
                                      call.out.row(image, 0));
        continue;
      }
      mean_of_image(call, image);
    }
  }

 private:
  // The means of one image, where the input or the result is int16.
  void mean_of_image(const OpCall& call, int64_t image) const {
    const TensorDesc& in = *call.in[0].desc;
    std::vector<int64_t> total(static_cast<std::size_t>(in.channels));
    std::vector<int32_t> sums(total.size());
    const int64_t rows_at_once = kMaxSummedPixels / in.width;  // whose sum fits into 32 bits
    for (int64_t row = 0; row < in.height; row += rows_at_once) {
      BytePlane plane = in.numbers(1).plane();
      plane.height = std::min(rows_at_once, in.height - row);
      active_int16().sums(call.in[0].row(image, row), in.is_int16(), plane, in.channels, sums.data());
      for (std::size_t c = 0; c < total.size(); ++c) total[c] += sums[c];
    }
    const float cells = static_cast<float>(in.height * in.width), inverse = 1.0f / scales_.out_scale;
    std::vector<float> mean(total.size());
    for (std::size_t c = 0; c < total.size(); ++c)
      mean[c] = (static_cast<float>(total[c]) / cells - static_cast<float>(in.zero_point)) * scales_.scale;
    uint8_t* to = call.out.row(image, 0);
    if (call.out->is_int16()) {
      return active_int16().quantize(mean.data(), 1, in.channels, in.channels, inverse, scales_.int16_limit,
                                     reinterpret_cast<int16_t*>(to), 1);
    }
    active_int8_ops().quantize(mean.data(), in.channels, inverse, scales_.out_zero_point, to);
  }

  PoolScales scales_;
  int padding_;
  bool rows_;
};

}  // namespace

OpPtr pool_op(const PoolWindow& window, bool mean, int padding) {
  return std::make_unique<Pool>(window, mean, padding);
}
OpPtr global_mean_op() { return std::make_unique<FloatGlobalMean>(); }
OpPtr global_mean_op(const PoolScales& scales, bool rows, int padding) {
  return std::make_unique<GlobalMean>(scales, rows, padding);
}

}  // namespace tw
