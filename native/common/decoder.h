// A whole decoder-only transformer, from token ids to logits, with a KV cache.
//
// The batch is a flat list of rows; a row is one token of one sequence at one position. Several rows of one sequence
// are a prompt (prefill), one row per sequence is a step of generation, and sequences of different lengths are mixed
// without padding. Per layer, the keys and values of all rows are stored in the cache first; then each row attends to
// its own sequence up to its own position. Only the requested logits are computed.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "common/alloc.h"
#include "common/block_matrix.h"
#include "common/matmul.h"
#include "common/sparse_matrix.h"
#include "common/thread_trial.h"
#include "kernels/gemm.h"
#include "kernels/kv_attention.h"

namespace tw {

// Where the weights of the whole model are read from, token after token: caches, or memory in large or small pages.
enum class Reading { cached, large_pages, small_pages };

// Memory that the products of one call share.
struct ProductScratch {
  BlockScratch blocks;
};

// y = act(x W^T + bias + residual). W (outputs, inputs) is float32, in quantized blocks or 16 bits, or sparse.
struct DenseLayer {
  int64_t outputs = 0, inputs = 0;
  const float* weight = nullptr;        // null if only another form exists
  const float* bias = nullptr;          // or null
  const BlockMatrix* blocks = nullptr;  // owned by the caller, like `sparse`
  const PackedSparse* sparse = nullptr;

  bool in_floats() const { return blocks == nullptr && sparse == nullptr; }
  int64_t bytes() const { return sparse ? sparse->nbytes() : blocks ? blocks->bytes() : outputs * inputs * 4; }
  // Rows of y are `y_row` floats apart, rows of the residual `outputs` floats. Returns false if memory is exhausted.
  bool apply(const float* x, int64_t rows, float* y, int64_t y_row, const float* residual, Activation activation,
             ProductScratch& scratch, Reading reading) const;
};

struct NormLayer {
  const float* weight = nullptr;  // null: no norm
  const float* bias = nullptr;    // null in an RMS norm
};

struct DecoderBlock {
  NormLayer norm1, norm2;
  NormLayer post1, post2;          // optional, of the outputs of attention and feed-forward, before they are added
  NormLayer query_norm, key_norm;  // RMS norms of each head, optional
  int64_t window = 0;              // positions that a row attends to, itself included; 0 for all
  std::vector<DenseLayer> qkv;     // one layer, or three whose results are concatenated
  DenseLayer out;
  std::vector<DenseLayer> up;  // one layer, or two: a gate, and the layer it multiplies
  DenseLayer down;
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
  int64_t width = 0, vocabulary = 0, positions = 0;
  int64_t heads = 0, kv_heads = 0, head_width = 0;  // heads / kv_heads neighbouring heads share keys and values
  float eps = 1e-5f;
  Activation activation = Activation::gelu;  // of an up layer without a gate
  bool silu_gate = true;                     // the gate's activation: SiLU, or GELU with tanh
  ScoreRule score_rule = 1.0f;
  float embedding_scale = 1.0f;
  float logit_cap = 0.0f;                     // 0: none
  BlockRows token_embedding;                  // in float32 or in the file's format
  const float* position_embedding = nullptr;  // null if positions are rotary (RoPE)
  std::vector<float> frequencies;             // of RoPE: one per rotated pair of a head's numbers
  std::vector<float> window_frequencies;      // of RoPE in blocks with a window
  std::vector<float> long_frequencies;        // of RoPE in caches of more than long_context positions
  int64_t long_context = 0;                   // positions; 0: no long-context frequencies
  float rotary_magnitude = 1.0f;              // factor of the rotated numbers
  bool side_by_side = false;                  // rotated pairs are neighbours; else halves of the head
  std::vector<DecoderBlock> blocks;
  NormLayer norm;
  DenseLayer head;

  std::vector<const DenseLayer*> layers() const;  // in the order in which they are read

  // Called after the layers are filled: requests large pages for the weights and records which are quantized.
  void settle();
  // Returns whether no weight was changed since settle(), so that the integer copies are still the model's.
  bool fresh() const { return quantized_ == fingerprint(); }

  int64_t weight_bytes() const;  // of the matrices that every token reads: all except the embeddings
  // Computes only the matrix products of one token, on arbitrary inputs, to compare their time with the time to read
  // the weights once. Returns false if memory is exhausted.
  bool products() const;
  // Computes the logits (output_count, vocabulary) of the rows numbered in `output_rows`. Returns false if memory is
  // exhausted.
  bool run(const Row* rows, int64_t count, DecoderCache& cache, const int64_t* output_rows, int64_t output_count,
           float* logits) const;

 private:
  static constexpr int kTrials = 5;  // chosen: calls of 1, 2, 3-4, 5-8 and 9-16 rows; with more all threads are used
  bool run_rows(const Row* rows, int64_t count, DecoderCache& cache, const int64_t* output_rows, int64_t output_count,
                float* logits) const;
  uint64_t fingerprint() const;  // of the float32 weights that have integer copies; 0 if there are none
  bool settle_weights() const;
  Reading reading() const {
    return weight_bytes() <= cache_sizes().l3 ? Reading::cached
           : large_pages_                     ? Reading::large_pages
                                              : Reading::small_pages;
  }

  std::unique_ptr<ThreadTrial[]> trials_{new ThreadTrial[kTrials]};
  bool large_pages_ = true;
  uint64_t quantized_ = 0;
};

}  // namespace tw
