#include "kernels/gates.h"

#include "kernels/row_loops.h"
#include "kernels/tanh.h"

namespace tw {
namespace TW_ISA {
namespace {

void lstm(const GateRow& row, int64_t n) {
  each_vector(n, [&](int64_t i, auto lanes) {
    const auto gate = [&](int64_t g) { return lanes.get(row.x + g * n + i) + lanes.get(row.product + g * n + i); };
    const vf cell = vsigmoid(gate(2)) * lanes.get(row.cell + i) + vsigmoid(gate(0)) * vtanh(gate(3));
    lanes.put(row.new_cell + i, cell);
    lanes.put(row.new_hidden + i, vsigmoid(gate(1)) * vtanh(cell));
  });
}

// One time step of a GRU (Cho et al. 2014) for n hidden values, with the reset gate applied after the product.
void gru(const GateRow& row, int64_t n) {
  each_vector(n, [&](int64_t i, auto lanes) {
    const auto x = [&](int64_t g) { return lanes.get(row.x + g * n + i); };
    const auto product = [&](int64_t g) { return lanes.get(row.product + g * n + i); };
    const vf update = vsigmoid(x(0) + product(0)), reset = vsigmoid(x(1) + product(1));
    const vf candidate = vtanh(x(2) + reset * (product(2) + lanes.get(row.bias + i)));
    lanes.put(row.new_hidden + i, candidate + update * (lanes.get(row.hidden + i) - candidate));
  });
}

template <class F>
TW_INLINE void rnn(const GateRow& row, int64_t n, const F& f) {
  each_vector(n, [&](int64_t i, auto lanes) {
    lanes.put(row.new_hidden + i, f(lanes.get(row.x + i) + lanes.get(row.product + i)));
  });
}

void step(RecurrentKind kind, const GateRow& row, int64_t n) {
  switch (kind) {
    case RecurrentKind::lstm:
      return lstm(row, n);
    case RecurrentKind::gru:
      return gru(row, n);
    case RecurrentKind::rnn_tanh:
      return rnn(row, n, [](vf v) { return vtanh(v); });
    case RecurrentKind::rnn_relu:
      return rnn(row, n, [](vf v) { return max_nan(v, vf{}); });
  }
}

}  // namespace

const GateKernels gates = {step};

}  // namespace TW_ISA
}  // namespace tw
