// A whole decoder-only transformer, from token ids to logits, over a cache of keys and values.
//
// The batch is a flat list of rows: a row is one token of one sequence at one position. Several rows of one sequence
// are a prompt, one row per sequence is a step of generation, and sequences of different lengths lie side by side
// without padding. Per layer the keys and values of all rows go to the cache first; then each row attends to its own
// sequence up to its own position. Nothing is computed that the caller does not ask for.
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

// Where the weights of the whole model come from, token after token.
enum class Reading { cached, large_pages, small_pages };

// Memory that the products of one call share.
struct ProductScratch {
  BlockScratch blocks;
};

// y = act(x W^T + bias + residual), W (outputs, inputs) in float32, in quantized blocks or 16 bits, or sparse.
struct DenseLayer {
  int64_t outputs = 0, inputs = 0;
  const float* weight = nullptr;        // null if only the other forms exist
  const float* bias = nullptr;          // or null
  const BlockMatrix* blocks = nullptr;  // owned by the caller, as are the non-zero weights
  const PackedSparse* sparse = nullptr;

  bool in_floats() const { return blocks == nullptr && sparse == nullptr; }
  int64_t bytes() const { return sparse ? sparse->nbytes() : blocks ? blocks->bytes() : outputs * inputs * 4; }
  // Rows of y are `y_row` floats apart, those of the residual `outputs`.
  bool apply(const float* x, int64_t rows, float* y, int64_t y_row, const float* residual, Activation activation,
             ProductScratch& scratch, Reading reading) const;
};

struct NormLayer {
  const float* weight = nullptr;  // null: no norm
  const float* bias = nullptr;    // null in an RMS norm
};

struct DecoderBlock {
  NormLayer norm1, norm2;
  NormLayer post1, post2;          // of the attention's and the feed-forward's outputs, before they are added; optional
  NormLayer query_norm, key_norm;  // RMS norms of each head, optional
  int64_t window = 0;              // positions that a row attends to, itself included; 0 for all
  std::vector<DenseLayer> qkv;     // one layer, or three whose results lie side by side
  DenseLayer out;
  std::vector<DenseLayer> up;  // one layer, or a gate and what it lets through
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
  int64_t heads = 0, kv_heads = 0, head_width = 0;  // heads is a multiple of kv_heads, which neighbours share
  float eps = 1e-5f;
  Activation activation = Activation::gelu;  // of an up layer without a gate
  bool silu_gate = true;                     // the gate's activation: SiLU, or GELU with tanh
  ScoreRule score_rule = 1.0f;
  float embedding_scale = 1.0f;
  float logit_cap = 0.0f;                     // 0: none
  BlockRows token_embedding;                  // in float32 or as a file has them
  const float* position_embedding = nullptr;  // null where positions are rotary
  std::vector<float> frequencies;             // of rotary positions: one per pair of a head's numbers that is turned
  std::vector<float> window_frequencies;      // those of blocks with a window
  std::vector<float> long_frequencies;        // those that replace `frequencies` in caches of more than long_context
  int64_t long_context = 0;                   // positions; 0: no long-context frequencies
  float rotary_magnitude = 1.0f;              // factor of the rotated numbers
  bool side_by_side = false;                  // the pairs are neighbours, not halves
  std::vector<DecoderBlock> blocks;
  NormLayer norm;
  DenseLayer head;

  std::vector<const DenseLayer*> layers() const;  // in the order in which they are read

  // Called after the layers are filled: requests large pages for the weights and records which are quantized.
  void settle();
  // False when a weight has been changed since settle() and the integer copies are no longer the model's.
  bool fresh() const { return quantized_ == fingerprint(); }

  int64_t weight_bytes() const;  // of the matrices that every token reads: all but the embeddings
  // The matrix products of one token and nothing else, on inputs that mean nothing: for comparing them with reading the
  // weights once.
  bool products() const;
  // Logits of the rows named in `output_rows` (count of them) to `logits` (count, vocabulary); false when memory ran
  // out.
  bool run(const Row* rows, int64_t count, DecoderCache& cache, const int64_t* output_rows, int64_t output_count,
           float* logits) const;

 private:
  static constexpr int kTrials = 5;  // for steps of 1, 2, 3 to 4, 5 to 8 and 9 to 16 sequences; more share all threads
  bool run_rows(const Row* rows, int64_t count, DecoderCache& cache, const int64_t* output_rows, int64_t output_count,
                float* logits) const;
  uint64_t fingerprint() const;  // of the float32 weights behind integer ones; 0 when there are none
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
