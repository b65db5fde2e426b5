// Elementwise operators with an activation: uint8 and int16 in any mixture, and float32.
#include "ops/ops.h"
#include "ops/rows.h"

namespace tw {
namespace {

// One row of uint8 pixels as the kernels receive it.
BytePixels uint8_pixels(const Operand& x, int64_t image, int64_t row, float scale) {
  return {x.row(image, row), x->pixel(), scale, x->zero_point};
}

// One row of pixels that are uint8 or int16.
MixedPixels mixed_pixels(const Operand& x, int64_t image, int64_t row, float scale) {
  return {x.row(image, row), x->pixel() / x->element_size(), scale, x->zero_point, x->is_int16()};
}

// Base of the integer operators: the result has the shape of the first input and passes through an output stage.
class IntegerElementwise : public Op {
 public:
  IntegerElementwise(const OutputStage& stage, int padding)
      : is_int16_(stage.is_int16), uint8_(stage.uint8), int16_(stage.int16), padding_(padding) {
    check_stage(stage.int16);
  }
  bool reads_int16() const override { return true; }

 protected:
  TensorDesc shaped(const TensorDesc& in) const {
    TensorDesc out = like(in, padding_, is_int16_ ? 0 : stage().zero);
    out.dtype = is_int16_ ? DType::int16 : DType::uint8;
    return out;
  }

  // The uint8 kernels apply where neither an input nor the result is int16.
  static bool all_uint8(const OpCall& call) {
    const bool second = call.in[1].desc != nullptr && call.in[1]->is_int16();
    return !call.in[0]->is_int16() && !second && !call.out->is_int16();
  }

  const Uint8Stage& stage() const { return uint8_; }
  MixedStage mixed_stage() const { return {uint8_, int16_}; }

  static ByteTarget uint8_target(const Operand& out, int64_t image, int64_t row) {
    return {out.row(image, row), out->pixel()};
  }
  static MixedTarget mixed_target(const Operand& out, int64_t image, int64_t row) {
    return {out.row(image, row), out->pixel() / out->element_size(), out->is_int16()};
  }

 private:
  bool is_int16_;
  OwnedUint8Stage uint8_;
  Int16Stage int16_;
  int padding_;
};

// A sum, or a product whose second factor may have one pixel per image (a gate).
class IntegerBinary : public IntegerElementwise {
 public:
  IntegerBinary(bool product, float a_scale, float b_scale, const OutputStage& stage, int padding)
      : IntegerElementwise(stage, padding), product_(product), a_scale_(a_scale), b_scale_(b_scale) {}

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(in.size() == 2 && in[0].is_integer() && in[1].is_integer() && in[0].channels == in[1].channels,
            "the shapes of the two inputs differ");
    const bool equal_size = in[0].height == in[1].height && in[0].width == in[1].width;
    require(equal_size || (product_ && in[1].height * in[1].width == 1), "the shapes of the two inputs differ");
    require(!product_ || b_scale_ == 0.0f || in[0].is_int16(), "fractions are taken of int16");
    return shaped(in[0]);
  }

  // Channels that do not fill whole vectors are computed with a last vector that overlaps the one before it; in place,
  // the overlap would be computed from results instead of inputs.
  bool runs_in_place(const TensorDesc& in, const TensorDesc& out) const override {
    return in.is_int16() && out.is_int16() && in.pixel() == out.pixel() && out.channels % kInt8Panel == 0;
  }

  void run(const OpCall& call) const override {
    const TensorDesc& out = *call.out.desc;
    const bool gate = product_ && call.in[1]->height * call.in[1]->width == 1;
    const bool padded = out.padding + call.in[0]->padding + (gate ? 0 : call.in[1]->padding) > 0;
    const float b_scale = product_ && !gate ? 0.0f : b_scale_;
    const bool uint8 = all_uint8(call);
    const MixedStage mixed = mixed_stage();
    for_row_blocks(out, call.batch, padded ? 1 : out.height, [&](int64_t image, int64_t row, int64_t rows) {
      const int64_t pixels = rows * out.width, second_row = gate ? 0 : row;
      if (uint8) {
        BytePixels second = uint8_pixels(call.in[1], image, second_row, b_scale);
        if (gate) second.step = 0;
        const auto kernel = product_ ? active_int8_elementwise().mul : active_int8_elementwise().add;
        return kernel(uint8_pixels(call.in[0], image, row, a_scale_), second, pixels, out.channels, stage(),
                      uint8_target(call.out, image, row));
      }
      MixedPixels second = mixed_pixels(call.in[1], image, second_row, b_scale);
      if (gate) second.step = 0;
      const auto kernel = product_ ? active_int16().mul : active_int16().add;
      kernel(mixed_pixels(call.in[0], image, row, a_scale_), second, pixels, out.channels, mixed,
             mixed_target(call.out, image, row));
    });
  }

 private:
  bool product_;
  float a_scale_, b_scale_;
};

// x * scale + shift, with a scale and a shift per channel.
class IntegerAffine : public IntegerElementwise {
 public:
  IntegerAffine(const std::vector<float>& scale, const std::vector<float>& shift, const OutputStage& stage, int padding)
      : IntegerElementwise(stage, padding), scale_(scale), shift_(shift) {}

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(
        in[0].is_integer() && static_cast<int64_t>(scale_.size()) == in[0].channels && scale_.size() == shift_.size(),
        "an affine operator has a scale and a shift per channel");
    return shaped(in[0]);
  }

  void run(const OpCall& call) const override {
    const TensorDesc& out = *call.out.desc;
    const bool uint8 = all_uint8(call);
    const MixedStage mixed = mixed_stage();
    for_rows(out, call.batch, [&](int64_t image, int64_t row) {
      if (uint8) {
        return active_int8_elementwise().affine(uint8_pixels(call.in[0], image, row, 0.0f), scale_.data(),
                                                shift_.data(), out.width, out.channels, stage(),
                                                uint8_target(call.out, image, row));
      }
      active_int16().affine(mixed_pixels(call.in[0], image, row, 0.0f), scale_.data(), shift_.data(), out.width,
                            out.channels, mixed, mixed_target(call.out, image, row));
    });
  }

 private:
  std::vector<float> scale_, shift_;
};

// A binary function of floats. The second input may have one pixel per image, which is broadcast.
class FloatBinary : public Op {
 public:
  FloatBinary(BinaryKind kind, ConvActivation activation) : kind_(kind), activation_(activation) {}

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(in.size() == 2 && is_float_pixels(in[0]) && is_float_pixels(in[1]) && in[0].n == in[1].n &&
                in[0].channels == in[1].channels && (in[0].same_pixels(in[1]) || in[1].height * in[1].width == 1),
            "the shapes of the two inputs differ");
    return like(in[0], 0, 0);
  }

  bool runs_in_place(const TensorDesc& in, const TensorDesc& out) const override { return in.pixel() == out.pixel(); }

  void run(const OpCall& call) const override {
    active_channels_last().binary(kind_, call.in[0].floats(call.batch), call.in[1].floats(call.batch), activation_,
                                  call.out.floats(call.batch));
  }

 private:
  BinaryKind kind_;
  ConvActivation activation_;
};

// act(x * scale + shift) with a scale and a shift per channel, or act(x) alone.
class FloatAffine : public Op {
 public:
  FloatAffine(const std::vector<float>& scale, const std::vector<float>& shift, ConvActivation activation)
      : scale_(scale), shift_(shift), channels_(static_cast<int64_t>(scale.size())), activation_(activation) {
    require(scale.size() == shift.size(), "an affine operator has a scale and a shift per channel");
    scale_.resize(scale_.size() + kVectorFloats);
    shift_.resize(shift_.size() + kVectorFloats);
  }

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(is_float_pixels(in[0]) && (channels_ == 0 || channels_ == in[0].channels),
            "an affine operator has a scale and a shift per channel");
    return like(in[0], 0, 0);
  }

  bool runs_in_place(const TensorDesc& in, const TensorDesc& out) const override { return in.pixel() == out.pixel(); }

  void run(const OpCall& call) const override {
    const bool scales = channels_ > 0;
    active_channels_last().affine(call.in[0].floats(call.batch), scales ? scale_.data() : nullptr,
                                  scales ? shift_.data() : nullptr, activation_, call.out.floats(call.batch));
  }

 private:
  std::vector<float> scale_, shift_;
  int64_t channels_;  // 0: the activation alone
  ConvActivation activation_;
};

}  // namespace

OpPtr add_op(float a_scale, float b_scale, const OutputStage& stage, int padding) {
  return std::make_unique<IntegerBinary>(false, a_scale, b_scale, stage, padding);
}
OpPtr mul_op(float scale, float fraction, const OutputStage& stage, int padding) {
  require(fraction == 0.0f || (stage.is_int16 && stage.int16.activation == Int16Activation::none),
          "fractions of int16 give int16 without an activation");
  return std::make_unique<IntegerBinary>(true, scale, fraction, stage, padding);
}
OpPtr affine_op(const std::vector<float>& scale, const std::vector<float>& shift, const OutputStage& stage,
                int padding) {
  return std::make_unique<IntegerAffine>(scale, shift, stage, padding);
}
OpPtr binary_op(BinaryKind kind, ConvActivation activation) { return std::make_unique<FloatBinary>(kind, activation); }
OpPtr affine_op(const std::vector<float>& scale, const std::vector<float>& shift, ConvActivation activation) {
  return std::make_unique<FloatAffine>(scale, shift, activation);
}

}  // namespace tw
