// The gates of recurrent layers: compute the new state of one step from the products of its input and of the old state.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

enum class RecurrentKind : uint8_t { lstm, gru, rnn_tanh, rnn_relu };

// One row of a step. `x` (products of the input) and `product` (of the state) have n numbers per gate, in this order:
// LSTM input, output, forget, candidate; GRU update, reset, candidate. `bias` is added to a GRU's product of the
// candidate.
struct GateRow {
  const float *x, *product, *bias;
  const float *hidden, *cell;
  float *new_hidden, *new_cell;
};

struct GateKernels {
  void (*step)(RecurrentKind kind, const GateRow& row, int64_t n);
};

TW_TABLE(GateKernels, gates)

}  // namespace tw
