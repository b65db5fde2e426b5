// Recurrent layers: one direction of an LSTM, GRU or RNN. The products of the inputs are computed before, for all steps
// together.
#include "common/matmul.h"
#include "kernels/gates.h"
#include "ops/ops.h"
#include "ops/rows.h"

namespace tw {
namespace {

// Values have shape (steps, batch, channels): the pixel of step t and batch element b has number t * batch + b. Inputs:
// the products of all steps, with the input's bias added, and optionally the first hidden state and an LSTM's first
// cell state. The result is the hidden state of every step; an LSTM appends its last cell state as one more step.
class Recurrent : public Op {
 public:
  Recurrent(RecurrentKind kind, int64_t steps, bool reverse, const float* weight, int64_t size, const float* bias)
      : kind_(kind), steps_(steps), reverse_(reverse), size_(size), gates_(gate_count(kind) * size) {
    require(steps > 0 && size > 0, "a recurrent layer has steps and a state");
    weight_ = Buffer<float>(static_cast<std::size_t>(size * gates_));
    std::copy_n(weight, size * gates_, weight_.data());
    bias_ = Buffer<float>(static_cast<std::size_t>(size));
    std::copy_n(bias, size, bias_.data());
  }

  static int64_t gate_count(RecurrentKind kind) {
    return kind == RecurrentKind::lstm ? 4 : kind == RecurrentKind::gru ? 3 : 1;
  }

  TensorDesc infer(const std::vector<TensorDesc>& in) const override {
    require(is_float_pixels(in[0]) && in[0].channels == gates_ && in[0].pixels() % steps_ == 0,
            "a recurrent layer reads the products of its steps");
    const int64_t batch = in[0].pixels() / steps_;
    require(in.size() == 1 || in.size() == (is_lstm() ? 3 : 2), "a state has a hidden part, and of an LSTM a cell");
    for (std::size_t i = 1; i < in.size(); ++i)
      require(is_float_pixels(in[i]) && in[i].channels == size_ && in[i].pixels() == batch, "a state has another size");
    return float_pixels(steps_ + (is_lstm() ? 1 : 0), size_, 1, batch);
  }

  int64_t multiply_adds(const TensorDesc&) const override { return steps_ * size_ * gates_; }
  int64_t weight_bytes() const override { return size_ * gates_ * 4; }

  void run(const OpCall& call) const override {
    const int64_t batch = call.in[0]->pixels() / steps_, x_row = call.in[0]->pixel() / 4, y_row = call.out->pixel() / 4;
    const float* x = static_cast<const float*>(call.in[0].data);
    float* y = static_cast<float*>(call.out.data);
    Buffer<float> product(static_cast<std::size_t>(batch * gates_)), zeros(static_cast<std::size_t>(size_));
    std::fill_n(zeros.data(), size_, 0.0f);
    const bool starts = call.in[1].desc != nullptr;
    State hidden{zeros.data(), 0}, cell{zeros.data(), 0};
    if (starts) hidden = state(call.in[1]);
    if (starts && is_lstm()) cell = state(call.in[2]);
    const State last_cell{y + steps_ * batch * y_row, y_row};
    for (int64_t i = 0; i < steps_; ++i) {
      const int64_t t = reverse_ ? steps_ - 1 - i : i;
      if (i == 0 && !starts) {
        std::fill_n(product.data(), batch * gates_, 0.0f);
      } else {
        multiply(hidden, batch, product.data());
      }
      const State next{y + t * batch * y_row, y_row};
      for (int64_t b = 0; b < batch; ++b) {
        active_gates().step(kind_,
                            {x + (t * batch + b) * x_row, product.data() + b * gates_, bias_.data(), hidden.at(b),
                             cell.at(b), next.at(b), last_cell.at(b)},
                            size_);
      }
      hidden = next, cell = last_cell;
    }
  }

 private:
  struct State {
    float* data;
    int64_t row;
    float* at(int64_t b) const { return data + b * row; }
  };

  static State state(const Operand& operand) { return {static_cast<float*>(operand.data), operand->pixel() / 4}; }

  bool is_lstm() const { return kind_ == RecurrentKind::lstm; }

  void multiply(const State& hidden, int64_t batch, float* product) const {
    Gemm g;
    g.m = batch, g.n = gates_, g.k = size_;
    g.a = hidden.data, g.a_row = hidden.row, g.a_col = 1;
    g.b = weight_.data(), g.b_row = gates_, g.b_col = 1;
    g.c = product, g.c_row = gates_;
    if (!matmul(g, Batch{}, nullptr)) throw std::bad_alloc();
  }

  RecurrentKind kind_;
  int64_t steps_;
  bool reverse_;
  int64_t size_, gates_;
  Buffer<float> weight_, bias_;  // (size, gates); (size)
};

const char* const kRecurrentNames[] = {"lstm", "gru", "rnn_tanh", "rnn_relu"};

}  // namespace

// Creates the op of a recurrent layer by name; throws if the name or the shape of the weights is wrong.
OpPtr recurrent_op(const std::string& kind, int64_t steps, bool reverse, const float* weight, int64_t size,
                   int64_t gates, const float* bias) {
  for (int i = 0; i < 4; ++i) {
    if (kind != kRecurrentNames[i]) continue;
    const auto recurrent = static_cast<RecurrentKind>(i);
    require(gates == size * Recurrent::gate_count(recurrent), "a recurrent layer has weights for its gates");
    return std::make_unique<Recurrent>(recurrent, steps, reverse, weight, size, bias);
  }
  throw std::invalid_argument("there is no recurrent layer " + kind);
}

}  // namespace tw
