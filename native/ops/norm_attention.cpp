// Normalization and attention on floats.
#include <algorithm>

#include "common/attention_ops.h"
#include "common/thread_pool.h"
#include "kernels/norm.h"
#include "ops/ops.h"
#include "ops/rows.h"

namespace tw {
namespace {

// Layer normalization over the channels of each pixel.
class LayerNorm : public Op {
 public:
  LayerNorm(const std::vector<float>& weight, const std::vector<float>& bias, float eps)
      : weight_(weight), bias_(bias), eps_(eps) {}

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    const auto channels = static_cast<std::size_t>(in[0].channels);
    require(is_float_pixels(in[0]) && weight_.size() == channels && bias_.size() == channels,
            "layer norm has a weight and a bias per channel");
    return like(in[0], 0, 0);
  }

  void run(const OpCall& call) const override {
    const LastImage x = call.in[0].floats(call.batch), y = call.out.floats(call.batch);
    const int64_t pixels = x.pixels(), tasks = std::min(pixels, 1 + pixels * x.c / kTaskElements);
    parallel_near(static_cast<int>(tasks), [&](int task) {
      float mean, rstd;
      for (int64_t p = pixels * task / tasks; p < pixels * (task + 1) / tasks; ++p) {
        active_norm_kernels().layer_norm(x.data + p * x.pitch, weight_.data(), bias_.data(), eps_, y.data + p * y.pitch,
                                         &mean, &rstd, 1, x.c);
      }
    });
  }

 private:
  std::vector<float> weight_, bias_;
  float eps_;
};

// Group normalization: over all pixels of an image and each of `groups` groups of its channels.
class GroupNorm : public Op {
 public:
  GroupNorm(int64_t groups, const std::vector<float>& weight, const std::vector<float>& bias, float eps)
      : groups_(groups), channels_(static_cast<int64_t>(weight.size())), weight_(weight), bias_(bias), eps_(eps) {
    require(weight.size() == bias.size(), "group norm has a weight and a bias per channel");
    weight_.resize(weight_.size() + kVectorFloats);
    bias_.resize(bias_.size() + kVectorFloats);
  }

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(is_float_pixels(in[0]) && channels_ == in[0].channels, "group norm has a weight and a bias per channel");
    require(groups_ > 0 && channels_ % groups_ == 0, "the groups are not a whole number of channels");
    return like(in[0], 0, 0);
  }

  void run(const OpCall& call) const override {
    active_channels_last().group_norm(call.in[0].floats(call.batch), groups_, weight_.data(), bias_.data(), eps_,
                                      call.out.floats(call.batch));
  }

 private:
  int64_t groups_, channels_;
  std::vector<float> weight_, bias_;
  float eps_;
};

// Scaled dot-product attention of tokens (B, T, C), which are images of one row. A mask has the shape (batch or 1,
// heads or 1, queries or 1, keys) and is added to the scores.
class Attention : public Op {
 public:
  explicit Attention(const AttentionHeads& heads) : heads_(heads) {}

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(in.size() >= 3, "attention reads queries, keys and values");
    for (int i = 0; i < 3; ++i) {
      const int64_t width = i == 2 ? heads_.value_dim : heads_.dim,
                    end = heads_.first[i] + (heads_.count - 1) * heads_.step[i] + width;
      require(heads_.count > 0 && width > 0 && heads_.first[i] >= 0 && heads_.step[i] >= 0 && end <= in[i].channels,
              "the heads are outside the channels");
      require(
          is_float_pixels(in[i]) && in[i].height == 1 && in[i].n == in[0].n && (i < 2 || in[i].width == in[1].width),
          "the shapes of queries, keys and values differ");
    }
    const TensorDesc out = float_pixels(in[0].n, heads_.count * heads_.value_dim, 1, in[0].width);
    if (in.size() > 3) {
      const TensorDesc& m = in[3];
      const auto fits = [](int64_t size, int64_t full) { return size == 1 || size == full; };
      require(!m.is_integer() && fits(m.n, out.n) && fits(m.channels, heads_.count) && fits(m.height, out.width) &&
                  m.width == in[1].width,
              "the mask has another shape than the scores");
    }
    return out;
  }

  void run(const OpCall& call) const override {
    LastImage x[3];
    for (int i = 0; i < 3; ++i) x[i] = call.in[i].floats(call.batch);
    const auto rows = [&](int i) { return StridedRows{x[i].data + heads_.first[i], x[i].pitch}; };
    const auto strides = [&](int i) { return HeadStrides{x[i].w * x[i].pitch, heads_.step[i]}; };
    const bool masked = call.in[3].desc != nullptr;
    const LastImage mask = masked ? call.in[3].floats(call.batch) : LastImage{};
    const MaskStrides by = masked ? mask_strides(mask) : MaskStrides{};
    const LastImage out = call.out.floats(call.batch);
    const AttentionHead head{
        x[0].w,    x[1].w,  heads_.dim,   heads_.value_dim, rows(0),
        rows(1),   rows(2), heads_.scale, heads_.causal,    masked ? MaskKind::additive : MaskKind::none,
        mask.data, by.row,  by.column};
    const AttentionBatch batch{out.n, heads_.count, head, strides(0), strides(1), strides(2), {by.image, by.head}};
    attention_forward(batch, {{out.data, out.pitch}, {out.w * out.pitch, heads_.value_dim}}, nullptr);
  }

 private:
  // A stride of 0 repeats the mask along an axis of size 1.
  struct MaskStrides {
    int64_t image, head, row, column;
  };

  static MaskStrides mask_strides(const LastImage& m) {
    const bool planes = m.pitch == 0;
    const int64_t column = planes ? 1 : m.pitch, row = m.w * column, head = planes ? m.h * row : 1,
                  image = planes ? m.c * head : m.h * row;
    return {m.n > 1 ? image : 0, m.c > 1 ? head : 0, m.h > 1 ? row : 0, m.w > 1 ? column : 0};
  }

  AttentionHeads heads_;
};

}  // namespace

OpPtr layer_norm_op(const std::vector<float>& weight, const std::vector<float>& bias, float eps) {
  return std::make_unique<LayerNorm>(weight, bias, eps);
}
OpPtr group_norm_op(int64_t groups, const std::vector<float>& weight, const std::vector<float>& bias, float eps) {
  return std::make_unique<GroupNorm>(groups, weight, bias, eps);
}
OpPtr attention_op(const AttentionHeads& heads) { return std::make_unique<Attention>(heads); }

}  // namespace tw
