#include "common/decoder.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <vector>

#include "common/machine.h"
#include "common/thread_pool.h"
#include "kernels/attention.h"
#include "kernels/int8_ops.h"
#include "kernels/norm.h"
#include "kernels/rope_rmsnorm.h"

namespace tw {
namespace {

int64_t element_size(CacheKind kind) { return kind == CacheKind::float32 ? 4 : kind == CacheKind::float16 ? 2 : 1; }

int64_t qkv_width(const Decoder& d) { return (d.heads + 2 * d.kv_heads) * d.head_width; }
int64_t hidden_width(const Decoder& d) { return d.blocks.empty() ? 0 : d.blocks[0].up[0].outputs; }

// Returns the first row of each run, and the number of rows. A run is rows of one sequence at consecutive positions.
std::vector<int64_t> runs_of(const Row* rows, int64_t count) {
  std::vector<int64_t> starts;
  for (int64_t r = 0; r < count; ++r) {
    const bool continues =
        r > 0 && rows[r].sequence == rows[r - 1].sequence && rows[r].position == rows[r - 1].position + 1;
    if (!continues) starts.push_back(r);
  }
  starts.push_back(count);
  return starts;
}

// Cosines and sines of the angles by which RoPE rotates the rows of a call, (rows, rotations).
struct RotaryTable {
  void fill(const std::vector<float>& frequencies, float magnitude, const Row* rows, int64_t count) {
    rotations = static_cast<int64_t>(frequencies.size());
    float* cosine = cosines.grow(count * rotations);
    float* sine = sines.grow(count * rotations);
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t i = 0; i < rotations; ++i) {
        const double angle = static_cast<double>(rows[r].position) * frequencies[i];
        *cosine++ = static_cast<float>(std::cos(angle)) * magnitude;
        *sine++ = static_cast<float>(std::sin(angle)) * magnitude;
      }
    }
  }

  int64_t rotations = 0;
  Buffer<float> cosines, sines;
};

// The memory of one call, with rows of the residual stream (x), normalized rows (h) and the results of each layer.
struct Workspace {
  Workspace(const Decoder& d, const Row* batch, int64_t rows, int64_t longest, int threads)
      : x(rows * d.width),
        h(rows * d.width),
        qkv(rows * qkv_width(d)),
        mixed(rows * std::max(d.width, d.heads * d.head_width)),
        hidden(rows * hidden_width(d)),
        gated(rows * (d.blocks.empty() || d.blocks[0].up.size() == 1 ? 0 : hidden_width(d))),
        moments(2 * rows),
        attention_floats(std::max(longest, active_attention().forward_workspace(d.head_width, d.head_width))),
        attention(attention_floats * threads),
        runs(runs_of(batch, rows)) {}

  Buffer<float> x, h, qkv, mixed, hidden, gated, moments;
  int64_t attention_floats;  // per thread: the scores of one row, or the workspace of a block of rows
  Buffer<float> attention;
  Buffer<float> keys, values;         // the cache of a layer as floats, (heads, positions, head width)
  RotaryTable angles, window_angles;  // of blocks without and with a window
  std::vector<int64_t> runs;          // of rows whose attention is computed together
  ProductScratch scratch;
};

// h = norm(x): RMS norm if it has no bias, else layer norm.
void normalize(const Decoder& d, const NormLayer& norm, const float* x, int64_t rows, Workspace& w) {
  if (norm.bias == nullptr) return active_rope_rmsnorm().rms_norm(x, norm.weight, d.eps, w.h.data(), rows, d.width);
  active_norm_kernels().layer_norm(x, norm.weight, norm.bias, d.eps, w.h.data(), w.moments.data(),
                                   w.moments.data() + rows, rows, d.width);
}

void fill_angles(const Decoder& d, const Row* rows, int64_t count, int64_t capacity, Workspace& w) {
  const bool is_long = d.long_context > 0 && capacity > d.long_context;
  w.angles.fill(is_long ? d.long_frequencies : d.frequencies, d.rotary_magnitude, rows, count);
  w.window_angles.fill(d.window_frequencies, d.rotary_magnitude, rows, count);
}

// Prepares the queries and keys of all rows: normalizes each head if the block does that, then applies RoPE.
void normalize_and_rotate(const Decoder& d, const DecoderBlock& b, int64_t count, Workspace& w) {
  const RopeRmsNormKernels& kernels = active_rope_rmsnorm();
  const RotaryTable& angles = b.window > 0 ? w.window_angles : w.angles;
  for (int64_t r = 0; r < count; ++r) {
    float* queries = w.qkv.data() + r * qkv_width(d);
    float* keys = queries + d.heads * d.head_width;
    if (b.query_norm.weight != nullptr) {
      kernels.rms_norm(queries, b.query_norm.weight, d.eps, queries, d.heads, d.head_width);
      kernels.rms_norm(keys, b.key_norm.weight, d.eps, keys, d.kv_heads, d.head_width);
    }
    for (int64_t h = 0; angles.rotations > 0 && h < d.heads + d.kv_heads; ++h) {
      kernels.rotate(queries + h * d.head_width, angles.cosines.data() + r * angles.rotations,
                     angles.sines.data() + r * angles.rotations, angles.rotations, d.side_by_side);
    }
  }
}

// The cache of one head of one sequence in one layer.
struct HeadCache {
  char* keys;
  char* values;
  float* key_scales;
  float* value_scales;
};

HeadCache head_cache(const DecoderCache& cache, int64_t layer, int64_t sequence, int64_t head, int64_t heads,
                     int64_t head_width) {
  const int64_t first = ((layer * cache.sequences + sequence) * heads + head) * cache.capacity;
  const int64_t bytes = first * head_width * element_size(cache.kind);
  const bool scaled = cache.kind == CacheKind::int8;
  return {cache.keys + bytes, cache.values + bytes, scaled ? cache.key_scales + first : nullptr,
          scaled ? cache.value_scales + first : nullptr};
}

// Returns the cached keys or values of a head from row `first` on.
CachedRows rows_from(const char* data, const float* scales, int64_t first, int64_t row_bytes) {
  return {data + first * row_bytes, scales == nullptr ? nullptr : scales + first};
}

// Prefetches the first bytes of a block, half of what L1 holds.
void fetch(const char* block, int64_t bytes) {
  for (int64_t at = 0; at < std::min(bytes, kSmallestL1 / 2); at += 64) __builtin_prefetch(block + at);
}

// Computes the attention of one row and one head over all earlier positions, or those in the block's window.
void attend_row(const Decoder& d, const Row& row, const DecoderCache& cache, const HeadCache& at, int64_t window,
                const float* query, float* scores, float* out) {
  const int64_t row_bytes = d.head_width * element_size(cache.kind), length = row.position + 1;
  const int64_t first = window > 0 ? std::max<int64_t>(0, length - window) : 0;
  active_kv_attention().attend(cache.kind, query, rows_from(at.keys, at.key_scales, first, row_bytes),
                               rows_from(at.values, at.value_scales, first, row_bytes), length - first, d.head_width,
                               d.score_rule, scores, out);
}

// Computes attention of the rows [first, end) one by one.
void attend_each(const Decoder& d, const Row* rows, int64_t first, int64_t end, const DecoderCache& cache,
                 int64_t layer, int tasks, Workspace& w) {
  const int64_t head_width = d.head_width, shared = d.heads / d.kv_heads;  // heads that share keys
  parallel_for(tasks, [&](int task) {
    for (int64_t p = first * d.heads + task; p < end * d.heads; p += tasks) {
      const int64_t r = p / d.heads, h = p % d.heads;
      if (h + tasks < d.heads) {  // the keys of the next head
        const HeadCache next = head_cache(cache, layer, rows[r].sequence, (h + tasks) / shared, d.kv_heads, head_width);
        fetch(next.keys, (rows[r].position + 1) * head_width * element_size(cache.kind));
      }
      const HeadCache at = head_cache(cache, layer, rows[r].sequence, h / shared, d.kv_heads, head_width);
      attend_row(d, rows[r], cache, at, d.blocks[layer].window, w.qkv.data() + r * qkv_width(d) + h * head_width,
                 w.attention.data() + task * w.attention_floats, w.mixed.data() + p * head_width);
    }
  });
}

// Computes attention of a run of rows in blocks of queries and keys (kernels/attention.h). The cache is converted to
// float32 first, once for all queries and heads.
void attend_run(const Decoder& d, const Row* rows, int64_t first, int64_t end, const DecoderCache& cache, int64_t layer,
                int tasks, Workspace& w) {
  const auto& kernels = active_kv_attention();
  const auto& flash = active_attention();
  const int64_t width = d.head_width, shared = d.heads / d.kv_heads, window = d.blocks[layer].window;
  const int64_t skipped = window > 0 ? std::max<int64_t>(0, rows[first].position + 1 - window) : 0;
  const int64_t length = rows[end - 1].position + 1 - skipped, row_bytes = width * element_size(cache.kind);
  const bool in_floats = cache.kind == CacheKind::float32;
  const auto head_at = [&](int64_t h) { return head_cache(cache, layer, rows[first].sequence, h, d.kv_heads, width); };
  float* keys = in_floats ? nullptr : w.keys.grow(d.kv_heads * length * width);
  float* values = in_floats ? nullptr : w.values.grow(d.kv_heads * length * width);
  parallel_for(in_floats ? 0 : tasks, [&](int task) {
    const int64_t from = length * task / tasks, count = length * (task + 1) / tasks - from;
    for (int64_t h = 0; h < d.kv_heads; ++h) {
      const HeadCache at = head_at(h);
      const int64_t to = (h * length + from) * width;
      kernels.read(cache.kind, rows_from(at.keys, at.key_scales, skipped + from, row_bytes), count, width, keys + to);
      kernels.read(cache.kind, rows_from(at.values, at.value_scales, skipped + from, row_bytes), count, width,
                   values + to);
    }
  });
  const int64_t queries = end - first, block = flash.queries_per_block, blocks = (queries + block - 1) / block;
  parallel_for(tasks, [&](int task) {
    for (int64_t p = task; p < d.heads * blocks; p += tasks) {
      const int64_t h = p / blocks, from = p % blocks * block, kv_head = h / shared;
      const HeadCache at = head_at(kv_head);
      AttentionHead head = {};
      head.queries = queries, head.keys = length, head.dim = head.value_dim = width;
      head.q = {w.qkv.data() + first * qkv_width(d) + h * width, qkv_width(d)};
      head.k = {in_floats ? reinterpret_cast<float*>(at.keys) + skipped * width : keys + kv_head * length * width,
                width};
      head.v = {in_floats ? reinterpret_cast<float*>(at.values) + skipped * width : values + kv_head * length * width,
                width};
      head.scale = d.score_rule.scale, head.cap = d.score_rule.cap;
      head.causal = true, head.window = window;
      const int64_t out_row = d.heads * width;
      flash.forward(head, from, std::min(queries, from + block),
                    {w.mixed.data() + first * out_row + h * width, out_row}, nullptr,
                    w.attention.data() + task * w.attention_floats);
    }
  });
}

// Stores the keys and values of all rows in the cache, then computes attention, by runs of rows or row by row.
void attend_rows(const Decoder& d, const Row* rows, int64_t count, const DecoderCache& cache, int64_t layer, int tasks,
                 Workspace& w) {
  const int64_t head_width = d.head_width, row_width = qkv_width(d);
  const int64_t keys_at = d.heads * head_width, values_at = keys_at + d.kv_heads * head_width;
  const auto& kernels = active_kv_attention();
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t h = 0; h < d.kv_heads; ++h) {
      const HeadCache at = head_cache(cache, layer, rows[r].sequence, h, d.kv_heads, head_width);
      const float* row = w.qkv.data() + r * row_width + h * head_width;
      kernels.store(cache.kind, row + keys_at, head_width, at.keys, at.key_scales, rows[r].position);
      kernels.store(cache.kind, row + values_at, head_width, at.values, at.value_scales, rows[r].position);
    }
  }
  constexpr int64_t kMinRunRows = 4;  // chosen: fewer rows do not repay converting and transposing the keys
  if (count <= cache.sequences || batch_invariant()) return attend_each(d, rows, 0, count, cache, layer, tasks, w);
  for (std::size_t i = 0; i + 1 < w.runs.size(); ++i) {
    const int64_t first = w.runs[i], end = w.runs[i + 1];
    const auto attend = end - first < kMinRunRows ? attend_each : attend_run;
    attend(d, rows, first, end, cache, layer, tasks, w);
  }
}

// x = the token embeddings, scaled, plus the position embeddings if there are any.
void embed(const Decoder& d, const Row* rows, int64_t count, Workspace& w) {
  for (int64_t r = 0; r < count; ++r) {
    float* x = w.x.data() + r * d.width;
    d.token_embedding.row(rows[r].token, x);
    if (d.embedding_scale != 1.0f) {
      for (int64_t i = 0; i < d.width; ++i) x[i] *= d.embedding_scale;
    }
    if (d.position_embedding == nullptr) continue;
    const float* position = d.position_embedding + rows[r].position * d.width;
    for (int64_t i = 0; i < d.width; ++i) x[i] += position[i];
  }
}

// Computes the hidden rows of the feed-forward layer: activated, or multiplied by an activated gate.
bool feed_forward_hidden(const Decoder& d, const DecoderBlock& b, int64_t count, Workspace& w, Reading reading) {
  const int64_t width = b.up[0].outputs;
  const bool gated = b.up.size() == 2;
  const Activation activation = gated ? Activation::none : d.activation;
  w.scratch.blocks.share_rows(gated);
  bool ok = b.up[0].apply(w.h.data(), count, w.hidden.data(), width, nullptr, activation, w.scratch, reading);
  if (!gated) return ok;
  ok = ok && b.up[1].apply(w.h.data(), count, w.gated.data(), width, nullptr, activation, w.scratch, reading);
  w.scratch.blocks.share_rows(false);
  if (!ok) return false;
  const auto product = d.silu_gate ? active_rope_rmsnorm().silu_product : active_rope_rmsnorm().gelu_product;
  product(w.hidden.data(), w.gated.data(), count * width);
  return true;
}

// Adds the layer's result to x: fused into the product, or after the norm that follows it.
bool add_result(const Decoder& d, const DenseLayer& layer, const NormLayer& post, const float* from, int64_t count,
                Workspace& w, Reading reading) {
  const float* residual = post.weight == nullptr ? w.x.data() : nullptr;
  if (!layer.apply(from, count, w.h.data(), d.width, residual, Activation::none, w.scratch, reading)) return false;
  if (residual != nullptr) {
    std::swap(w.x, w.h);
    return true;
  }
  active_rope_rmsnorm().rms_norm(w.h.data(), post.weight, d.eps, w.h.data(), count, d.width);
  for (int64_t i = 0; i < count * d.width; ++i) w.x[i] += w.h[i];
  return true;
}

}  // namespace

// Computes a dense layer y = act(x W' + bias) + residual, with weights in float32, float16, bfloat16 or blocks.
bool DenseLayer::apply(const float* x, int64_t rows, float* y, int64_t y_row, const float* residual,
                       Activation activation, ProductScratch& scratch, Reading reading) const {
  Epilogue epilogue;
  epilogue.bias = bias;
  epilogue.residual = residual;
  epilogue.residual_row = outputs;
  epilogue.activation = activation;
  if (in_floats()) {
    Gemm g;
    g.m = rows, g.n = outputs, g.k = inputs;
    g.a = x, g.a_row = inputs, g.a_col = 1;
    g.b = weight, g.b_row = 1, g.b_col = inputs;
    g.c = y, g.c_row = y_row;
    g.epilogue = epilogue;
    g.stream_b = reading != Reading::cached;
    g.large_pages_b = reading != Reading::small_pages;
    return matmul(g, Batch{}, nullptr);
  }
  if (sparse != nullptr) {
    sparse->times_rows(x, inputs, rows, SparseEpilogue{}, y, y_row);
  } else if (!blocks->apply(x, rows, y, y_row, scratch.blocks)) {
    return false;
  }
  if (epilogue.any()) active_gemm().apply_epilogue(epilogue, y, y_row, 0, 0, rows, outputs);
  return true;
}

std::vector<const DenseLayer*> Decoder::layers() const {
  std::vector<const DenseLayer*> all;
  for (const DecoderBlock& b : blocks) {
    for (const DenseLayer& layer : b.qkv) all.push_back(&layer);
    all.push_back(&b.out);
    for (const DenseLayer& layer : b.up) all.push_back(&layer);
    all.push_back(&b.down);
  }
  all.push_back(&head);
  return all;
}

// Moves the weights to large pages. Adjacent weights are one range: a large page may hold the end of one and the
// beginning of the next.
bool Decoder::settle_weights() const {
  struct Range {
    const char *begin, *end;
  };
  std::vector<Range> ranges;
  for (const DenseLayer* layer : layers()) {
    if (layer->sparse != nullptr) continue;
    const auto* begin = layer->blocks ? reinterpret_cast<const char*>(layer->blocks->data())
                                      : reinterpret_cast<const char*>(layer->weight);
    ranges.push_back({begin, begin + layer->bytes()});
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  constexpr int64_t kNear = 64 << 10;  // chosen: bytes; biases and norms are stored between
  bool all = true;
  for (std::size_t i = 0; i < ranges.size();) {
    Range range = ranges[i++];
    while (i < ranges.size() && ranges[i].begin - range.end < kNear) range.end = std::max(range.end, ranges[i++].end);
    all = settle_on_large_pages(range.begin, range.end - range.begin) && all;
  }
  return all;
}

void Decoder::settle() {
  quantized_ = fingerprint();
  if (weight_bytes() <= cache_sizes().l3) return;
  large_pages_ = settle_weights();
}

uint64_t Decoder::fingerprint() const {
  uint64_t all = 0;
  for (const DenseLayer* layer : layers()) {
    if (layer->in_floats() || layer->weight == nullptr) continue;
    all = (all + 1) * 31 + active_int8_ops().fingerprint(layer->weight, layer->outputs * layer->inputs);
  }
  return all;
}

int64_t Decoder::weight_bytes() const {
  int64_t bytes = 0;
  for (const DenseLayer* layer : layers()) bytes += layer->bytes();
  return bytes;
}

bool Decoder::products() const {
  int64_t widest = 0;
  for (const DenseLayer* layer : layers()) widest = std::max({widest, layer->inputs, layer->outputs});
  Buffer<float> from(widest), to(widest);
  std::fill(from.data(), from.data() + widest, 1.0f);
  ProductScratch scratch;
  const Reading reading = this->reading();
  bool ok = true;
  for (const DenseLayer* layer : layers()) {
    ok = ok && layer->apply(from.data(), 1, to.data(), layer->outputs, nullptr, Activation::none, scratch, reading);
  }
  return ok;
}

// A step of generation reads every weight for a few rows. Whether a second thread makes that faster depends on the
// memory, so the number of threads is found by trial.
bool Decoder::run(const Row* rows, int64_t count, DecoderCache& cache, const int64_t* output_rows, int64_t output_count,
                  float* logits) const {
  if (count == 0) return true;
  int kind = 0;
  while (kind < kTrials && count > int64_t{1} << kind) ++kind;
  const int most = num_threads();
  if (most == 1 || kind == kTrials) return run_rows(rows, count, cache, output_rows, output_count, logits);
  const int threads = trials_[kind].threads(most);
  const ThreadLimit limit(threads);
  const auto start = std::chrono::steady_clock::now();
  const bool ok = run_rows(rows, count, cache, output_rows, output_count, logits);
  trials_[kind].took(threads, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  return ok;
}

// The forward pass. Per block: norm, q k v, attention, residual; norm, feed-forward, residual. Then the final norm and
// the head for the requested rows.
bool Decoder::run_rows(const Row* rows, int64_t count, DecoderCache& cache, const int64_t* output_rows,
                       int64_t output_count, float* logits) const {
  int64_t longest = 0, work = 0;
  for (int64_t r = 0; r < count; ++r) {
    longest = std::max(longest, rows[r].position + 1);
    work += (rows[r].position + 1) * heads * head_width;
  }
  constexpr int64_t kMinWorkPerThread = 1 << 15;  // chosen: multiply-adds of attention
  const int tasks = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(num_threads(), work / kMinWorkPerThread)));
  Workspace w(*this, rows, count, longest, tasks);
  embed(*this, rows, count, w);
  fill_angles(*this, rows, count, cache.capacity, w);
  const Reading reading = this->reading();
  bool ok = true;
  for (std::size_t layer = 0; layer < blocks.size() && ok; ++layer) {
    const DecoderBlock& b = blocks[layer];
    normalize(*this, b.norm1, w.x.data(), count, w);
    int64_t at = 0;
    w.scratch.blocks.share_rows(true);
    for (const DenseLayer& part : b.qkv) {
      ok = ok && part.apply(w.h.data(), count, w.qkv.data() + at, qkv_width(*this), nullptr, Activation::none,
                            w.scratch, reading);
      at += part.outputs;
    }
    w.scratch.blocks.share_rows(false);
    normalize_and_rotate(*this, b, count, w);
    attend_rows(*this, rows, count, cache, static_cast<int64_t>(layer), tasks, w);
    ok = ok && add_result(*this, b.out, b.post1, w.mixed.data(), count, w, reading);
    normalize(*this, b.norm2, w.x.data(), count, w);
    ok = ok && feed_forward_hidden(*this, b, count, w, reading);
    ok = ok && add_result(*this, b.down, b.post2, w.hidden.data(), count, w, reading);
  }
  const float* x = w.x.data();
  for (int64_t i = 0; i < output_count; ++i)
    std::memcpy(w.mixed.data() + i * width, x + output_rows[i] * width, width * 4);
  normalize(*this, norm, w.mixed.data(), output_count, w);
  ok = ok && head.apply(w.h.data(), output_count, logits, head.outputs, nullptr, Activation::none, w.scratch, reading);
  if (logit_cap > 0.0f) active_rope_rmsnorm().soft_cap(logits, logit_cap, output_count * head.outputs);
  return ok;
}

}  // namespace tw
