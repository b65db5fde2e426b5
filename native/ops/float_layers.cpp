#include "ops/float_layers.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

#include "common/matmul.h"
#include "ops/rows.h"

namespace tw {
namespace {

// Copies `count` floats and appends `padding` zeros.
Buffer<float> copy_padded(const float* from, int64_t count, int64_t padding) {
  Buffer<float> to(static_cast<std::size_t>(count + padding));
  if (count > 0) std::memcpy(to.data(), from, static_cast<std::size_t>(count) * sizeof(float));
  std::fill(to.data() + count, to.data() + count + padding, 0.0f);
  return to;
}

int64_t nonzeros_of(const float* weights, int64_t count) { return count - std::count(weights, weights + count, 0.0f); }

// Returns whether an image has neither infinities nor NaN.
bool is_finite(const LastImage& x) {
  const bool planes = x.pitch == 0;
  const int64_t columns = planes ? x.pixels() * x.c : x.c;
  return active_sparse().finite(x.data, planes ? columns : x.pitch, planes ? 1 : x.pixels(), columns);
}

// The number of outputs along one side; -1 if the window does not fit. `reach` is the extent of the dilated filter.
int64_t output_size(int64_t size, int64_t before, int64_t after, int64_t reach, int64_t stride) {
  const int64_t last = size + before + after - reach;
  return last < 0 ? -1 : last / stride + 1;
}

}  // namespace

// Copies the weights and the bias. A vector of zeros follows the bias, because kernels load whole vectors.
FloatConvLayer::FloatConvLayer(const float* weights, const int64_t shape[4], const float* bias,
                               const ConvGeometry& geometry, ConvActivation activation)
    : o_(shape[0]),
      c_(shape[1] * geometry.groups),
      kh_(shape[2]),
      kw_(shape[3]),
      geometry_(geometry),
      activation_(activation),
      is_meta_(weights == nullptr) {
  const ConvGeometry& g = geometry_;
  const bool positive = g.stride[0] > 0 && g.stride[1] > 0 && g.dilation[0] > 0 && g.dilation[1] > 0 && g.groups > 0;
  if (!positive || o_ % g.groups != 0 || std::min({o_, shape[1], kh_, kw_}) < 1) {
    throw std::invalid_argument(
        "this convolution has no weights, or its strides, dilation or groups are not positive numbers that fit");
  }
  if (*std::min_element(g.padding, g.padding + 4) < 0) throw std::invalid_argument("padding must not be negative");
  if (!is_meta_) {
    weights_ = copy_padded(weights, count(), 0);
    nonzeros_ = nonzeros_of(weights, count());
  }
  if (bias != nullptr) bias_ = copy_padded(bias, o_, kVectorFloats);
}

// Returns the convolution's shape for images (n, c, h, w); throws if they do not fit the weights.
ConvShape FloatConvLayer::shape(int64_t n, int64_t c, int64_t h, int64_t w) const {
  const ConvGeometry& g = geometry_;
  ConvShape s{n,
              c,
              h,
              w,
              o_,
              kh_,
              kw_,
              g.stride[0],
              g.stride[1],
              g.padding[0],
              g.padding[1],
              g.groups,
              0,
              0,
              g.dilation[0],
              g.dilation[1]};
  s.oh = output_size(h, g.padding[0], g.padding[2], s.reach_h(), s.sh);
  s.ow = output_size(w, g.padding[1], g.padding[3], s.reach_w(), s.sw);
  if (c != c_ || s.oh < 1 || s.ow < 1) throw std::invalid_argument("this convolution does not fit its input");
  return s;
}

void FloatConvLayer::release() {
  std::lock_guard<std::mutex> lock(mutex_);
  weights_ = Buffer<float>();
}

void FloatConvLayer::restore(const float* weights) {
  Buffer<float> again = copy_padded(weights, count(), 0);
  std::lock_guard<std::mutex> lock(mutex_);
  weights_ = std::move(again);
}

FloatConvLayer::Packed& FloatConvLayer::slot(ConvAlgorithm algorithm) const {
  return packed_[static_cast<int>(algorithm) - static_cast<int>(ConvAlgorithm::direct)][static_cast<int>(active_isa())];
}

// Recovers released weights from a packed form. Needed when an image has numbers that its algorithm cannot process
// (infinities, NaN), so that another algorithm must pack them.
Buffer<float> FloatConvLayer::unpacked_weights(const ConvShape& s) const {
  if (sparse_ != nullptr) {
    Buffer<float> raw(static_cast<std::size_t>(count()));
    sparse_->to_dense(raw.data());
    return raw;
  }
  for (ConvAlgorithm algorithm : {ConvAlgorithm::winograd_late, ConvAlgorithm::winograd2, ConvAlgorithm::winograd}) {
    const Packed& p = slot(algorithm);
    if (p.floats.size() == 0) continue;
    Buffer<float> raw(static_cast<std::size_t>(count()));
    winograd_kernels(algorithm).unpack(s, p.floats.data(), raw.data());
    return raw;
  }
  throw std::invalid_argument("this graph was built for another instruction set");
}

// Returns the weights packed for an algorithm on the current instruction set, and packs them at the first call.
const FloatConvLayer::Packed& FloatConvLayer::packed(ConvAlgorithm algorithm, const ConvShape& s) const {
  Packed& p = slot(algorithm);
  std::call_once(p.once, [&] {
    std::lock_guard<std::mutex> lock(mutex_);
    const Buffer<float> again = weights_.size() == 0 ? unpacked_weights(s) : Buffer<float>();
    const int64_t taps = kh_ * kw_, row = s.group_c() * taps;
    const WeightView view{weights_.size() == 0 ? again.data() : weights_.data(), s.group_o() * row, row, taps, kw_, 1};
    if (transforms(algorithm)) {
      p.floats = Buffer<float>(static_cast<std::size_t>(winograd_kernels(algorithm).packed_floats(s)));
      p.usable = winograd_kernels(algorithm).pack(s, view, p.floats.data());
      if (!p.usable) p.floats = Buffer<float>();
    } else {
      p.floats = Buffer<float>(static_cast<std::size_t>(active_conv_direct().packed_floats(s)));
      active_conv_direct().pack(s, view, p.floats.data());
    }
  });
  return p;
}

// Falls back to the direct algorithm if Winograd's transformed weights would be too large.
ConvAlgorithm FloatConvLayer::prepare(const ConvShape& s, ConvAlgorithm preferred) const {
  const bool applies = preferred == ConvAlgorithm::direct || (transforms(preferred) && winograd_applies(s));
  const ConvAlgorithm algorithm = applies ? preferred : choose_algorithm(s);
  const bool can_skip = !is_meta_ && s.groups == 1;
  if (can_skip && (preferred == ConvAlgorithm::sparse || PackedSparse::pays(s, algorithm, nonzeros_))) {
    std::call_once(sparse_once_, [&] {
      const bool is_small_m = kh_ * kw_ == 1 && PackedSparse::is_small_batch(s.n * s.oh * s.ow);
      sparse_ = std::make_unique<PackedSparse>(weights_.data(), o_, count() / o_, !is_small_m);
    });
    return ConvAlgorithm::sparse;
  }
  if (is_meta_ || packed(algorithm, s).usable) return algorithm;
  packed(ConvAlgorithm::direct, s);
  return ConvAlgorithm::direct;
}

// Runs the convolution with the algorithm that `prepare` chose; images with NaN or infinity never use sparse kernels.
void FloatConvLayer::run(ConvAlgorithm algorithm, const LastImage& x, const LastImage* residual,
                         const LastImage& y) const {
  const ConvShape s = shape(x.n, x.c, x.h, x.w);
  const ConvEpilogue e{bias_.data(), residual == nullptr ? nullptr : residual->data, activation_};
  const ConvLayout layout{x.pitch, y.pitch, residual == nullptr ? 0 : residual->pitch};
  if (s.n == 0) return;
  // A zero weight times infinity is NaN, which sparse kernels would miss: they are for finite images only.
  if (algorithm == ConvAlgorithm::sparse && is_finite(x)) return sparse_->convolve(s, x.data, e, layout, y.data);
  if (transforms(algorithm)) {
    const Packed& p = packed(algorithm, s);
    const ConvTile tile = resolved_tile(s, algorithm);
    if (p.usable && winograd_kernels(algorithm).forward(s, x.data, p.floats.data(), e, tile, layout, y.data)) return;
  }
  const Packed& p = packed(ConvAlgorithm::direct, s);
  if (!active_conv_channels_last().forward(s, x.data, p.floats.data(), e, layout, y.data)) throw std::bad_alloc();
}

bool FloatConvLayer::pairs_with(const FloatConvLayer& next) const {
  const ConvGeometry& g = geometry_;
  const bool point = kh_ == 1 && kw_ == 1 && g.stride[0] == 1 && g.stride[1] == 1 && g.groups == 1;
  const bool padded = *std::max_element(g.padding, g.padding + 4) > 0;
  return point && !padded && next.c_ == o_ && next.o_ == o_ && next.geometry_.groups == o_ && o_ > 1;
}

// Runs this layer and `next` as a pair, without storing the value between them.
void FloatConvLayer::run_pair(const FloatConvLayer& next, const LastImage& x, const LastImage* residual,
                              const LastImage& y) const {
  const ConvShape first = shape(x.n, x.c, x.h, x.w), second = next.shape(x.n, o_, x.h, x.w);
  if (x.n == 0) return;
  const ConvEpilogue first_epilogue{bias_.data(), nullptr, activation_};
  const ConvEpilogue e{next.bias_.data(), residual == nullptr ? nullptr : residual->data, next.activation_};
  const ConvLayout layout{0, y.pitch, residual == nullptr ? 0 : residual->pitch};
  const float *weights = packed(ConvAlgorithm::direct, first).floats.data(),
              *next_weights = next.packed(ConvAlgorithm::direct, second).floats.data();
  if (!active_conv_channels_last().forward_pair(first, x.data, x.pitch, weights, first_epilogue, second, next_weights,
                                                e, layout, y.data))
    throw std::bad_alloc();
}

// Copies weights (out, in) and bias (out), and counts the weights that are not zero.
FloatLinearLayer::FloatLinearLayer(const float* weights, int64_t out, int64_t in, const float* bias,
                                   ConvActivation activation)
    : out_(out), in_(in), activation_(activation) {
  if (weights != nullptr) {
    weights_ = copy_padded(weights, out * in, 0);
    nonzeros_ = nonzeros_of(weights, out * in);
  }
  if (bias != nullptr) bias_ = copy_padded(bias, out, 0);
}

// Decides between the dense and the sparse product for this number of rows, and packs sparse weights once.
ConvAlgorithm FloatLinearLayer::prepare(int64_t rows, ConvAlgorithm preferred) const {
  const bool is_meta = weights_.size() == 0;
  const bool skips = preferred == ConvAlgorithm::sparse ||
                     (!is_meta && PackedSparse::pays(shape(rows), ConvAlgorithm::direct, nonzeros_));
  if (is_meta || !skips) return ConvAlgorithm::automatic;
  std::call_once(sparse_once_, [&] {
    sparse_ = std::make_unique<PackedSparse>(weights_.data(), out_, in_, !PackedSparse::is_small_batch(rows));
  });
  return ConvAlgorithm::sparse;
}

// y = act(x W^T + bias). The product's epilogue applies ReLU and GELU; other activations are a second pass.
void FloatLinearLayer::run(ConvAlgorithm algorithm, const LastImage& x, const LastImage& y) const {
  const int64_t x_pitch = x.pitch == 0 ? in_ : x.pitch;
  if (algorithm == ConvAlgorithm::sparse && active_sparse().finite(x.data, x_pitch, x.n, in_)) {
    return sparse_->convolve(shape(x.n), x.data, {bias_.data(), nullptr, activation_}, {x_pitch, y.pitch, 0}, y.data);
  }
  Gemm g;
  g.m = x.n, g.n = out_, g.k = in_;
  g.a = x.data, g.a_row = x_pitch, g.a_col = 1;
  g.b = weights_.data(), g.b_row = 1, g.b_col = in_;
  g.c = y.data, g.c_row = y.pitch;
  g.epilogue.bias = bias_.data();
  const bool relu = activation_ == ConvActivation::relu, gelu = activation_ == ConvActivation::gelu;
  if (relu || gelu) g.epilogue.activation = relu ? Activation::relu : Activation::gelu;
  if (!matmul(g, Batch(), nullptr)) throw std::bad_alloc();
  if (relu || gelu || activation_ == ConvActivation::none) return;
  active_channels_last().affine(y, nullptr, nullptr, activation_, y);
}

}  // namespace tw
