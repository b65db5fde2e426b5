// A whole GPT, from token ids to logits, over a cache of keys and values.
//
// The batch is a flat list of rows: a row is one token of one sequence at one position. Several rows of one sequence are
// a prompt, one row per sequence is a step of generation, and sequences of different lengths lie side by side without
// padding. Per layer the keys and values of all rows go to the cache first; then each row attends to its own sequence up
// to its own position. Nothing is computed that the caller does not ask for.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "common/alloc.h"
#include "common/matmul.h"
#include "common/thread_trial.h"
#include "kernels/cached.h"
#include "kernels/gemm.h"

namespace tw {

// Where the weights of the whole model come from, token after token.
enum class Reading { cached, large_pages, small_pages };

// y = act(x W^T + bias + residual), W (outputs, inputs) in float32, or in int8 packed with a scale per output.
struct DenseLayer {
  int64_t outputs = 0, inputs = 0;
  const float* weight = nullptr;
  const float* bias = nullptr;    // or null
  const int8_t* packed = nullptr;  // the weight in int8: packed_bytes(), 64-byte aligned; null for float32
  Buffer<int32_t> offset;
  Buffer<float> scale;

  static int64_t packed_bytes(int64_t outputs, int64_t inputs);
  bool pack_int8(int8_t* to);  // from `weight`; false when that holds NaN or infinity
  // `scratch` holds rows * (inputs rounded up to 4) bytes and rows floats when the weights are int8.
  bool apply(const float* x, int64_t rows, float* y, const float* residual, Activation activation, uint8_t* bytes,
             float* row_scales, Reading reading) const;
};

struct NormLayer {
  const float* weight = nullptr;
  const float* bias = nullptr;
};

struct DecoderBlock {
  NormLayer norm1, norm2;
  DenseLayer qkv, out, up, down;
};

struct DecoderCache {
  CacheKind kind = CacheKind::float32;
  int64_t sequences = 0, capacity = 0;  // arrays are (layers, sequences, heads, capacity, head width)
  char* keys = nullptr;
  char* values = nullptr;
  float* key_scales = nullptr;  // (layers, sequences, heads, capacity), int8 only
  float* value_scales = nullptr;
};

struct Row {
  int64_t token, sequence, position;
};

struct Decoder {
  int64_t width = 0, heads = 0, vocabulary = 0, positions = 0;
  float eps = 1e-5f;
  Activation activation = Activation::gelu;
  const float* token_embedding = nullptr;
  const float* position_embedding = nullptr;
  std::vector<DecoderBlock> blocks;
  NormLayer norm;
  DenseLayer head;
  Buffer<int8_t> packed;  // the int8 weights of all layers, in the order in which they are read

  // After the layers are filled: copies of all weights in int8; false when one is NaN or infinite.
  bool pack_int8();
  // After that: large pages under what every token reads, and a note of what was quantized.
  void settle();
  // False when a weight has been changed since settle() and the int8 copies are no longer the model's.
  bool fresh() const { return quantized_ == fingerprint(); }

  int64_t weight_bytes() const;  // of the matrices that every token reads: all but the embeddings
  // The matrix products of one token and nothing else, on inputs that mean nothing: for comparing them with reading the
  // weights once.
  bool products() const;
  // Logits of the rows named in `wanted` (count of them) to `logits` (count, vocabulary); false when memory ran out.
  bool run(const Row* rows, int64_t count, DecoderCache& cache, const int64_t* wanted, int64_t wanted_count,
           float* logits) const;

 private:
  static constexpr int kTrials = 5;  // for steps of 1, 2, 3 to 4, 5 to 8 and 9 to 16 sequences; more share all threads
  bool run_rows(const Row* rows, int64_t count, DecoderCache& cache, const int64_t* wanted, int64_t wanted_count,
                float* logits) const;
  uint64_t fingerprint() const;  // of the float32 weights behind int8 ones; 0 when there are none
  std::vector<const DenseLayer*> layers() const;
  bool settle_weights() const;
  Reading reading() const {
    return weight_bytes() <= cache_sizes().l3 ? Reading::cached : large_pages_ ? Reading::large_pages : Reading::small_pages;
  }

  std::unique_ptr<ThreadTrial[]> trials_{new ThreadTrial[kTrials]};
  bool large_pages_ = true;
  uint64_t quantized_ = 0;
};

}  // namespace tw
