// The gates of recurrent layers: from the products of a step's input and of the state to the new state.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace tw {

enum class RecurrentKind : uint8_t { lstm, gru, rnn_tanh, rnn_relu };

// One row of a step. `x` and `product` have the gates one after the other, n numbers each: of an LSTM input, output,
// forget and candidate, of a GRU update, reset and candidate. `bias` is added to a GRU's product of the candidate.
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
