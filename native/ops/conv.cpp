// Convolutions and linear layers: uint8, int16 and float32.
#include <cstring>
#include <stdexcept>

#include "ops/ops.h"
#include "ops/rows.h"

namespace tw {
namespace {

// The properties of an integer convolution that scheduling uses.
struct ConvTraits {
  int64_t channels, multiply_adds;  // input channels; multiply-adds per number of the result
  bool any_pitch;
  ReceptiveField field;
};

ConvTraits conv_traits(const IntegerGeometry& g, bool any_pitch) {
  return {g.channels(), g.tap_count() * g.group_channels, any_pitch, {-g.top, g.reach_h(), g.taps.stride_h}};
}
bool reads_any_pitch(const Int8Layer& layer) { return layer.geometry().taps.kernel_w == 1; }
bool reads_any_pitch(const Int8GroupedLayer&) { return true; }

// A residual must have the result's shape and the data type that the layer expects.
void check_residual(const TensorDesc& residual, const TensorDesc& out, bool int16) {
  require(residual.is_integer() && residual.height == out.height && residual.width == out.width &&
              residual.channels == out.channels && residual.is_int16() == int16,
          "the residual has another shape or data type than the result");
}

// Convolution of uint8: Int8Layer or Int8GroupedLayer.
template <class Layer>
class Int8Conv : public Op {
 public:
  Int8Conv(std::shared_ptr<const Layer> layer, bool residual, int padding)
      : layer_(std::move(layer)),
        traits_(conv_traits(layer_->geometry(), tw::reads_any_pitch(*layer_))),
        residual_(residual),
        padding_(padding) {}

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(in[0].dtype == DType::uint8 && !in[0].rows && in[0].channels == traits_.channels,
            "x has another number of channels than the weights");
    TensorDesc out = integers(layer_->gives_int16() ? DType::int16 : DType::uint8, layer_->conv_shape(in[0].image(1)),
                              layer_->geometry().columns, padding_, layer_->zero());
    out.n = in[0].n;
    if (residual_) check_residual(in[1], out, layer_->int16_residual());
    return out;
  }

  bool reads_int16() const override { return layer_->int16_residual(); }
  bool reads_any_pitch() const override { return traits_.any_pitch; }
  ReceptiveField receptive_field() const override { return traits_.field; }
  int64_t weight_bytes() const override { return layer_->nbytes(); }
  int64_t multiply_adds(const TensorDesc& out) const override { return out.elements() * traits_.multiply_adds; }

  void run(const OpCall& call) const override {
    const Int8Image residual = residual_ ? call.in[1]->numbers(call.batch) : Int8Image{};
    layer_->conv(call.in[0]->image(call.batch), call.in[0].bytes(), residual, residual_ ? call.in[1].bytes() : nullptr,
                 call.out->numbers(call.batch), call.out.bytes());
  }

 private:
  std::shared_ptr<const Layer> layer_;
  ConvTraits traits_;
  bool residual_;
  int padding_;
};

// Convolution or linear layer with int16 weights.
class Int16Conv : public Op {
 public:
  Int16Conv(std::shared_ptr<const Int16Layer> layer, bool residual, bool relu, int padding)
      : layer_(std::move(layer)),
        traits_(conv_traits(layer_->geometry(), true)),
        residual_(residual),
        relu_(relu),
        padding_(padding) {}

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(in[0].is_integer() && in[0].is_int16() != layer_->reads_bytes() && in[0].channels == traits_.channels,
            "x has another number of channels than the weights");
    const bool rows = in[0].rows, to_float = layer_->kind() == Int8Out::float32;
    const DType dtype = layer_->kind() == Int8Out::int16 ? DType::int16 : DType::uint8;
    TensorDesc out = integers(dtype, layer_->conv_shape(in[0].numbers(1)), layer_->geometry().columns,
                              rows ? 0 : padding_, layer_->zero());
    out.rows = rows;
    out.n = in[0].n;
    if (residual_) check_residual(in[1], out, layer_->int16_residual());
    if (to_float) {
      require(rows && !residual_, "only rows become floats");
      out.dtype = DType::float32;
      out.layout = Layout::planes;
    }
    return out;
  }

  bool reads_int16() const override { return true; }
  bool writes_any_pitch() const override { return layer_->kind() != Int8Out::float32; }
  ReceptiveField receptive_field() const override { return traits_.field; }
  int64_t weight_bytes() const override { return layer_->nbytes(); }
  int64_t multiply_adds(const TensorDesc& out) const override { return out.elements() * traits_.multiply_adds; }

  void run(const OpCall& call) const override {
    Int8Image to = call.out->numbers(call.batch);
    if (!call.out->is_integer()) to.pixel = call.out->channels;
    layer_->conv(call.in[0]->numbers(call.batch), call.in[0].data,
                 residual_ ? call.in[1]->numbers(call.batch) : Int8Image{}, residual_ ? call.in[1].data : nullptr, to,
                 relu_, call.out.data);
  }

 private:
  std::shared_ptr<const Int16Layer> layer_;
  ConvTraits traits_;
  bool residual_, relu_;
  int padding_;
};

// Linear layer with int8 weights on rows of uint8.
class Int8Linear : public Op {
 public:
  Int8Linear(std::shared_ptr<const Int8Layer> layer, bool to_float, bool relu)
      : layer_(std::move(layer)),
        kind_(to_float                ? Int8Out::float32
              : layer_->gives_int16() ? Int8Out::int16
                                      : Int8Out::uint8),
        relu_(relu) {}

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(in[0].dtype == DType::uint8 && in[0].rows && in[0].channels == layer_->geometry().channels(),
            "x does not fit the weights");
    layer_->check_linear(round_up(in[0].channels, kInt8Group), kind_);
    TensorDesc out = integers(kind_ == Int8Out::int16 ? DType::int16 : DType::uint8, {}, layer_->geometry().columns, 0,
                              layer_->zero());
    out.rows = true;
    out.n = in[0].n;
    if (kind_ == Int8Out::float32) {
      out.dtype = DType::float32;
      out.layout = Layout::planes;
    }
    return out;
  }

  bool reads_any_pitch() const override { return false; }
  bool writes_any_pitch() const override { return false; }
  int64_t weight_bytes() const override { return layer_->nbytes(); }
  int64_t multiply_adds(const TensorDesc& out) const override { return out.elements() * layer_->geometry().channels(); }
  const Int8Layer* product() const override { return layer_.get(); }

  void run(const OpCall& call) const override {
    layer_->linear(call.in[0].bytes(), call.batch * call.out->n, kind_, nullptr, relu_, call.out.data, call.tile);
  }

 private:
  std::shared_ptr<const Int8Layer> layer_;
  Int8Out kind_;
  bool relu_;
};

// A float convolution by one algorithm; or a pointwise convolution and the depthwise one that reads it (`next`).
class FloatConv : public Op {
 public:
  FloatConv(std::shared_ptr<const FloatConvLayer> layer, ConvAlgorithm algorithm,
            std::shared_ptr<const FloatConvLayer> next)
      : layer_(std::move(layer)), next_(std::move(next)), algorithm_(algorithm) {}

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(!in[0].is_integer(), "this convolution reads floats");
    ConvShape s = layer_->shape(in[0].n, in[0].channels, in[0].height, in[0].width);
    if (next_ != nullptr) s = next_->shape(s.n, s.o, s.oh, s.ow);
    const TensorDesc out = float_pixels(s.n, s.o, s.oh, s.ow);
    require(in.size() < 2 || (is_float_pixels(in[1]) && in[1].same_pixels(out) && in[1].channels == out.channels),
            "the residual has another shape than the result");
    return out;
  }

  int64_t weight_bytes() const override { return 4 * (layer_->count() + (next_ == nullptr ? 0 : next_->count())); }
  int64_t multiply_adds(const TensorDesc& out) const override {
    return out.pixels() * (layer_->count() + (next_ == nullptr ? 0 : next_->count()));
  }

  std::unique_ptr<Op> fuse_with(const Op& reader) const override {
    const auto* conv = dynamic_cast<const FloatConv*>(&reader);
    const bool fits = conv != nullptr && next_ == nullptr && conv->next_ == nullptr &&
                      algorithm_ == ConvAlgorithm::direct && conv->algorithm_ == ConvAlgorithm::direct &&
                      layer_->pairs_with(*conv->layer_);
    return fits ? std::make_unique<FloatConv>(layer_, ConvAlgorithm::direct, conv->layer_) : nullptr;
  }

  void run(const OpCall& call) const override {
    const LastImage x = call.in[0].floats(call.batch), y = call.out.floats(call.batch);
    const bool adds = call.in[1].desc != nullptr;
    const LastImage residual = adds ? call.in[1].floats(call.batch) : LastImage{};
    if (next_ != nullptr) return layer_->run_pair(*next_, x, adds ? &residual : nullptr, y);
    layer_->run(algorithm_, x, adds ? &residual : nullptr, y);
  }

  ConvAlgorithm algorithm() const { return algorithm_; }

 private:
  std::shared_ptr<const FloatConvLayer> layer_, next_;
  ConvAlgorithm algorithm_;
};

class FloatLinear : public Op {
 public:
  FloatLinear(std::shared_ptr<const FloatLinearLayer> layer, ConvAlgorithm algorithm)
      : layer_(std::move(layer)), algorithm_(algorithm) {}

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(!in[0].is_integer() && in[0].height * in[0].width == 1 && in[0].channels == layer_->inputs(),
            "a linear layer takes rows of its own length");
    return float_pixels(in[0].n, layer_->outputs(), 1, 1);
  }

  int64_t weight_bytes() const override { return 4 * layer_->inputs() * layer_->outputs(); }
  int64_t multiply_adds(const TensorDesc& out) const override { return out.elements() * layer_->inputs(); }

  void run(const OpCall& call) const override {
    layer_->run(algorithm_, call.in[0].floats(call.batch), call.out.floats(call.batch));
  }

  ConvAlgorithm algorithm() const { return algorithm_; }

 private:
  std::shared_ptr<const FloatLinearLayer> layer_;
  ConvAlgorithm algorithm_;
};

// A linear layer with int8 weights on dynamically quantized pixels: act(x w + bias + residual), in floats.
class DynamicLinear : public Op {
 public:
  DynamicLinear(std::shared_ptr<const Int8Layer> layer, ConvActivation activation)
      : layer_(std::move(layer)), activation_(activation) {}

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    const int64_t channels = layer_->geometry().channels();
    require(in[0].dtype == DType::uint8 && in[0].channels == RowQuantized::channels(channels),
            "a linear layer takes rows of its own length");
    layer_->check_linear(round_up(channels, kInt8Group), Int8Out::float32);
    const TensorDesc out = float_pixels(in[0].n, layer_->geometry().columns, in[0].height, in[0].width);
    require(in.size() < 2 || (is_float_pixels(in[1]) && in[1].same_pixels(out) && in[1].channels == out.channels),
            "the residual has another shape than the result");
    return out;
  }

  int64_t weight_bytes() const override { return layer_->nbytes(); }
  int64_t multiply_adds(const TensorDesc& out) const override { return out.elements() * layer_->geometry().channels(); }

  void run(const OpCall& call) const override {
    const LastImage y = call.out.floats(call.batch);
    const int64_t step = call.in[0]->pixel(), pixels = y.pixels();
    std::vector<float> scales(static_cast<std::size_t>(pixels));
    for (int64_t p = 0; p < pixels; ++p)
      std::memcpy(&scales[p], call.in[0].bytes() + p * step + layer_->in_pixel(), sizeof(float));
    const bool adds = call.in[1].desc != nullptr, relu = activation_ == ConvActivation::relu && !adds;
    layer_->linear(call.in[0].bytes(), pixels, Int8Out::float32, scales.data(), relu, y.data, nullptr, step, y.pitch);
    if (adds) {
      active_channels_last().binary(BinaryKind::add, y, call.in[1].floats(call.batch), activation_, y);
    } else if (activation_ != ConvActivation::none && !relu) {
      active_channels_last().affine(y, nullptr, nullptr, activation_, y);
    }
  }

 private:
  std::shared_ptr<const Int8Layer> layer_;
  ConvActivation activation_;
};

}  // namespace

OpPtr conv_op(std::shared_ptr<const Int8Layer> layer, bool residual, int padding) {
  return std::make_unique<Int8Conv<Int8Layer>>(std::move(layer), residual, padding);
}
OpPtr conv_op(std::shared_ptr<const Int8GroupedLayer> layer, bool residual, int padding) {
  return std::make_unique<Int8Conv<Int8GroupedLayer>>(std::move(layer), residual, padding);
}
OpPtr conv_op(std::shared_ptr<const Int16Layer> layer, bool residual, bool relu, int padding) {
  return std::make_unique<Int16Conv>(std::move(layer), residual, relu, padding);
}
OpPtr conv_op(std::shared_ptr<const FloatConvLayer> layer, const ConvShape& shape, ConvAlgorithm preferred) {
  const ConvAlgorithm algorithm = layer->prepare(shape, preferred);
  return std::make_unique<FloatConv>(std::move(layer), algorithm, nullptr);
}
OpPtr linear_op(std::shared_ptr<const Int8Layer> layer, bool to_float, bool relu) {
  return std::make_unique<Int8Linear>(std::move(layer), to_float, relu);
}
OpPtr dynamic_linear_op(std::shared_ptr<const Int8Layer> layer, ConvActivation activation) {
  return std::make_unique<DynamicLinear>(std::move(layer), activation);
}
OpPtr linear_op(std::shared_ptr<const FloatLinearLayer> layer, int64_t rows, ConvAlgorithm preferred) {
  const ConvAlgorithm algorithm = layer->prepare(rows, preferred);
  return std::make_unique<FloatLinear>(std::move(layer), algorithm);
}

ConvAlgorithm algorithm_of(const Op& op) {
  if (const auto* linear = dynamic_cast<const FloatLinear*>(&op)) return linear->algorithm();
  const auto* conv = dynamic_cast<const FloatConv*>(&op);
  return conv == nullptr ? ConvAlgorithm::automatic : conv->algorithm();
}

}  // namespace tw
