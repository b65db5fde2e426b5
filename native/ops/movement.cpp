// Operators that move numbers without computing. Most copy bytes and so serve all data types.
#include <cstring>

#include "kernels/strided.h"
#include "ops/ops.h"
#include "ops/rows.h"

namespace tw {
namespace {

bool is_pixels(const TensorDesc& desc) { return desc.layout == Layout::channels_last; }

// Concatenation along the channels. The executor calls `run` once per input that alias analysis could not move.
class Concat : public Op {
 public:
  explicit Concat(int padding) : padding_(padding) {}

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    TensorDesc out = like(in[0], padding_, in[0].zero_point);
    out.channels = 0;
    for (const TensorDesc& part : in) {
      require(is_pixels(part) && part.rows == out.rows && part.same_pixels(out) && part.zero_point == out.zero_point &&
                  part.dtype == out.dtype,
              "only images of one size, data type and zero point are concatenated");
      out.channels += part.channels;
    }
    return out;
  }

  bool is_concat() const override { return true; }
  bool reads_int16() const override { return true; }

  // Copies one input; `call.out` starts at its first channel in the result.
  void run(const OpCall& call) const override {
    const Operand from = call.in[0], to = call.out;
    const int64_t bytes = from->channels * from->element_size(), step = from->pixel(), to_step = to->pixel();
    for_rows(*from.desc, call.batch, [&](int64_t image, int64_t row) {
      const uint8_t* x = from.row(image, row);
      uint8_t* y = to.row(image, row);
      for (int64_t i = 0; i < to->width; ++i) std::memcpy(y + i * to_step, x + i * step, bytes);
    });
  }

 private:
  int padding_;
};

// A range of channels.
class Slice : public Op {
 public:
  Slice(int64_t first, int64_t count, int padding) : first_(first), count_(count), padding_(padding) {}

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(is_pixels(in[0]) && first_ >= 0 && count_ > 0 && first_ + count_ <= in[0].channels,
            "the slice is outside the channels");
    TensorDesc out = like(in[0], padding_, in[0].zero_point);
    out.channels = count_;
    return out;
  }

  int64_t first_channel() const override { return first_; }
  bool reads_int16() const override { return true; }

  void run(const OpCall& call) const override {
    const int64_t size = call.out->element_size(), bytes = count_ * size;
    for_rows(*call.out.desc, call.batch, [&](int64_t image, int64_t row) {
      const uint8_t* x = call.in[0].row(image, row) + first_ * size;
      uint8_t* y = call.out.row(image, row);
      for (int64_t i = 0; i < call.out->width; ++i)
        std::memcpy(y + i * call.out->pixel(), x + i * call.in[0]->pixel(), bytes);
    });
  }

 private:
  int64_t first_, count_;
  int padding_;
};

// Channels in any order, such as a channel shuffle.
class GatherChannels : public Op {
 public:
  GatherChannels(const std::vector<int>& channels, int padding)
      : channels_(channels.begin(), channels.end()), padding_(padding) {
    for (int c : channels) int16_bytes_.insert(int16_bytes_.end(), {2 * c, 2 * c + 1});
  }

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(is_pixels(in[0]) && !channels_.empty(), "channels are gathered from channels-last images");
    for (int32_t c : channels_) require(c >= 0 && c < in[0].channels, "there is no such channel");
    TensorDesc out = like(in[0], padding_, in[0].zero_point);
    out.channels = static_cast<int64_t>(channels_.size());
    return out;
  }

  bool reads_int16() const override { return true; }

  void run(const OpCall& call) const override {
    if (!call.out->is_integer()) {
      return active_channels_last().gather_channels(call.in[0].floats(call.batch), channels_.data(),
                                                    call.out.floats(call.batch));
    }
    const std::vector<int32_t>& bytes = call.out->is_int16() ? int16_bytes_ : channels_;
    for_rows(*call.out.desc, call.batch, [&](int64_t image, int64_t row) {
      active_int8_ops().gather_channels(call.in[0].row(image, row), call.in[0]->pixel(), bytes.data(),
                                        static_cast<int64_t>(bytes.size()), call.out->width, call.out.row(image, row),
                                        call.out->pixel());
    });
  }

 private:
  std::vector<int32_t> channels_, int16_bytes_;
  int padding_;
};

// Nearest-neighbour upsampling, or depth to space: each input pixel becomes by_h x by_w pixels, which are copies of it,
// or groups of its channels.
class Upsample : public Op {
 public:
  Upsample(int64_t by_h, int64_t by_w, bool depth_to_space, int padding)
      : by_h_(by_h), by_w_(by_w), depth_to_space_(depth_to_space), padding_(padding) {}

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(is_pixels(in[0]) && !in[0].rows && by_h_ > 0 && by_w_ > 0, "an image grows by whole numbers");
    const int64_t groups = depth_to_space_ ? by_h_ * by_w_ : 1;
    require(in[0].channels % groups == 0, "the channels are not a whole number of pixels");
    TensorDesc out = like(in[0], padding_, in[0].zero_point);
    out.channels /= groups;
    out.height *= by_h_;
    out.width *= by_w_;
    return out;
  }

  bool reads_int16() const override { return true; }

  void run(const OpCall& call) const override {
    const int64_t bytes = call.out->channels * call.out->element_size(), group_bytes = depth_to_space_ ? bytes : 0;
    for_rows(*call.out.desc, call.batch, [&](int64_t image, int64_t row) {
      const uint8_t* x = call.in[0].row(image, row / by_h_);
      uint8_t* y = call.out.row(image, row);
      for (int64_t i = 0; i < call.out->width; ++i) {
        const int64_t group = row % by_h_ * by_w_ + i % by_w_;
        std::memcpy(y + i * call.out->pixel(), x + i / by_w_ * call.in[0]->pixel() + group * group_bytes, bytes);
      }
    });
  }

 private:
  int64_t by_h_, by_w_;
  bool depth_to_space_;
  int padding_;
};

// Images (H, W, C) to rows, in the order (H, W, C) or (C, H, W).
class Flatten : public Op {
 public:
  explicit Flatten(bool channels_first) : channels_first_(channels_first) {}

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(is_pixels(in[0]), "only channels-last images are flattened");
    const int64_t length = in[0].channels * in[0].height * in[0].width;
    if (!in[0].is_integer()) {
      require(channels_first_ || in[0].height * in[0].width == 1, "rows of floats have the order (C, H, W)");
      return float_pixels(in[0].n, length, 1, 1);
    }
    TensorDesc out = integers(in[0].dtype, {}, length, 0, in[0].zero_point);
    out.rows = true;
    out.n = in[0].n;
    return out;
  }

  bool reads_int16() const override { return true; }
  bool writes_any_pitch() const override { return false; }

  // Only a single pixel of floats is a view: several pixels have gaps between them.
  bool is_view(const TensorDesc& in) const override {
    const bool one_pixel = in.height * in.width == 1;
    if (!in.is_integer()) return one_pixel && in.has_default_pitch();
    return (one_pixel || !channels_first_) && in.padding == 0 && in.channels * in.element_size() == in.pixel();
  }

  void run(const OpCall& call) const override {
    const TensorDesc &in = *call.in[0].desc, &out = *call.out.desc;
    for (int64_t i = 0; i < call.batch * in.n; ++i) {
      uint8_t* to = call.out.row(i, 0);
      if (!in.is_integer()) {
        TensorDesc one = in;
        one.n = 1;
        const LastImage x = one.floats(1, call.in[0].row(i, 0));
        active_channels_last().to_planes(x, {reinterpret_cast<float*>(to), 0, 1, x.c, x.h, x.w});
        continue;
      }
      const int64_t used = out.channels * out.element_size();
      flatten_integers(call.in[0], i, to);
      std::memset(to + used, out.zero_point, out.pixel() - used);
    }
  }

 private:
  // Writes the numbers of one image to a row.
  void flatten_integers(const Operand& in, int64_t image, uint8_t* to) const {
    if (!channels_first_) {
      const int64_t bytes = in->channels * in->element_size();
      for (int64_t y = 0; y < in->height; ++y) {
        const uint8_t* x = in.row(image, y);
        for (int64_t i = 0; i < in->width; ++i, to += bytes) std::memcpy(to, x + i * in->pixel(), bytes);
      }
    } else if (in->is_int16()) {
      transpose<int16_t>(in, image, to);
    } else {
      transpose<uint8_t>(in, image, to);
    }
  }

  // Writes one image (H, W, C) as (C, H, W).
  template <class T>
  static void transpose(const Operand& in, int64_t image, uint8_t* row) {
    T* to = reinterpret_cast<T*>(row);
    for (int64_t c = 0; c < in->channels; ++c) {
      for (int64_t y = 0; y < in->height; ++y) {
        const T* x = reinterpret_cast<const T*>(in.row(image, y)) + c;
        for (int64_t i = 0; i < in->width; ++i) *to++ = x[i * (in->pixel() / static_cast<int64_t>(sizeof(T)))];
      }
    }
  }

  bool channels_first_;
};

// Reinterprets one integer pixel as a row, or a row as one pixel.
class PixelAsRow : public Op {
 public:
  PixelAsRow(bool rows, int padding) : rows_(rows), padding_(padding) {}

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(in[0].is_integer() && in[0].height * in[0].width == 1, "only one pixel is a row");
    TensorDesc out = like(in[0], 0, in[0].zero_point);
    out.rows = rows_;
    out.padding = rows_ ? 0 : padding_;
    return out;
  }

  bool is_view(const TensorDesc& in) const override {
    return in.padding == 0 && in.has_default_pitch() && padding_ == 0;
  }
  bool reads_int16() const override { return true; }
  bool writes_any_pitch() const override { return !rows_; }

  void run(const OpCall& call) const override {
    const int64_t bytes = call.out->channels * call.out->element_size();
    for (int64_t i = 0; i < call.batch * call.out->n; ++i) std::memcpy(call.out.row(i, 0), call.in[0].row(i, 0), bytes);
  }

 private:
  bool rows_;
  int padding_;
};

// Gathers pixels of floats into the shape (n, h, w): those with the given numbers from every image, or all in order.
class GatherSpatial : public Op {
 public:
  GatherSpatial(const std::vector<int>& index, int64_t n, int64_t h, int64_t w)
      : index_(index.begin(), index.end()), n_(n), h_(h), w_(w) {}

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(is_float_pixels(in[0]), "pixels are gathered from channels-last floats");
    const int64_t plane = in[0].height * in[0].width;
    const int64_t per_image = index_.empty() ? plane : static_cast<int64_t>(index_.size());
    const TensorDesc out = float_pixels(n_, in[0].channels, h_, w_);
    require(out.pixels() == in[0].n * per_image, "the number of pixels changes");
    for (int32_t pixel : index_) require(pixel >= 0 && pixel < plane, "there is no such pixel");
    return out;
  }

  int64_t first_channel() const override { return index_.empty() ? 0 : -1; }

  void run(const OpCall& call) const override {
    const LastImage x = call.in[0].floats(call.batch), y = call.out.floats(call.batch);
    if (!index_.empty()) return active_channels_last().gather(x, index_.data(), static_cast<int64_t>(index_.size()), y);
    for (int64_t p = 0; p < y.pixels(); ++p)
      std::memcpy(y.data + p * y.pitch, x.data + p * x.pitch, static_cast<std::size_t>(x.c) * sizeof(float));
  }

 private:
  std::vector<int32_t> index_;
  int64_t n_, h_, w_;
};

// Resampling along rows or columns, by weighted sums of `taps` of them: bilinear and cubic interpolation.
class Resample : public Op {
 public:
  Resample(bool rows, const std::vector<int>& positions, const std::vector<float>& weights, int64_t taps)
      : rows_(rows), positions_(positions.begin(), positions.end()), weights_(weights), taps_(taps) {
    require(taps > 0 && !positions.empty() && positions.size() == weights.size() &&
                positions.size() % static_cast<std::size_t>(taps) == 0,
            "resampling has taps for every row");
    size_ = static_cast<int64_t>(positions.size()) / taps;
  }

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(is_float_pixels(in[0]), "channels-last floats are resampled");
    for (int32_t p : positions_) require(p >= 0 && p < (rows_ ? in[0].height : in[0].width), "there is no such row");
    TensorDesc out = like(in[0], 0, 0);
    (rows_ ? out.height : out.width) = size_;
    return out;
  }

  void run(const OpCall& call) const override {
    const Operand &x = call.in[0], &y = call.out;
    const auto floats = [](uint8_t* bytes) { return reinterpret_cast<float*>(bytes); };
    const int64_t x_step = x->pixel() / 4, y_step = y->pixel() / 4;
    for_rows(*y.desc, call.batch, [&](int64_t image, int64_t row) {
      std::vector<ResampleTap> taps(static_cast<std::size_t>(taps_));
      for (int64_t t = 0; t < taps_; ++t) {
        const float* weights = weights_.data() + t * size_;
        const int32_t* positions = positions_.data() + t * size_;
        taps[t] = rows_ ? ResampleTap{floats(x.row(image, positions[row])), nullptr, weights + row, 0}
                        : ResampleTap{floats(x.row(image, row)), positions, weights, 1};
      }
      active_strided().resample(taps.data(), static_cast<int>(taps_), x_step, floats(y.row(image, row)), y_step,
                                y->width, y->channels);
    });
  }

 private:
  bool rows_;
  std::vector<int32_t> positions_;
  std::vector<float> weights_;
  int64_t taps_, size_;
};

// (N, H, W, C) to (N, C, H * W): exchanges pixels and channels.
class Transpose : public Op {
 public:
  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(is_float_pixels(in[0]), "only channels-last floats are transposed");
    return float_pixels(in[0].n, in[0].height * in[0].width, 1, in[0].channels);
  }
  void run(const OpCall& call) const override {
    active_channels_last().transpose(call.in[0].floats(call.batch), call.out.floats(call.batch));
  }
};

}  // namespace

OpPtr concat_op(int padding) { return std::make_unique<Concat>(padding); }
OpPtr slice_op(int64_t first, int64_t count, int padding) { return std::make_unique<Slice>(first, count, padding); }
OpPtr gather_channels_op(const std::vector<int>& channels, int padding) {
  return std::make_unique<GatherChannels>(channels, padding);
}
OpPtr upsample_op(int64_t by_h, int64_t by_w, int padding) {
  return std::make_unique<Upsample>(by_h, by_w, false, padding);
}
OpPtr depth_to_space_op(int64_t by_h, int64_t by_w, int padding) {
  return std::make_unique<Upsample>(by_h, by_w, true, padding);
}
OpPtr flatten_op(bool channels_first) { return std::make_unique<Flatten>(channels_first); }
OpPtr pixel_as_row_op(bool rows, int padding) { return std::make_unique<PixelAsRow>(rows, padding); }
OpPtr gather_spatial_op(const std::vector<int>& index, int64_t n, int64_t h, int64_t w) {
  return std::make_unique<GatherSpatial>(index, n, h, w);
}
OpPtr resample_op(bool rows, const std::vector<int>& positions, const std::vector<float>& weights, int64_t taps) {
  return std::make_unique<Resample>(rows, positions, weights, taps);
}
OpPtr transpose_op() { return std::make_unique<Transpose>(); }

}  // namespace tw
