#include "common/decoder.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "common/thread_pool.h"
#include "kernels/int8.h"
#include "kernels/int8_ops.h"
#include "kernels/norm.h"

namespace tw {
namespace {

int64_t element_size(CacheKind kind) { return kind == CacheKind::float32 ? 4 : kind == CacheKind::float16 ? 2 : 1; }

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

struct Workspace {
  Workspace(const Decoder& d, int64_t rows, int64_t longest, int threads)
      : x(rows * d.width), h(rows * d.width), qkv(rows * 3 * d.width), mixed(rows * d.width), hidden(rows * wide(d)),
        moments(2 * rows), scores(longest * threads), bytes(rows * round_up(wide(d), 4)), row_scales(rows) {}

  static int64_t wide(const Decoder& d) { return d.blocks.empty() ? d.width : std::max(d.width, d.blocks[0].up.outputs); }

  Buffer<float> x, h, qkv, mixed, hidden, moments, scores;
  Buffer<uint8_t> bytes;
  Buffer<float> row_scales;
};

void normalize(const NormLayer& norm, const float* x, int64_t rows, int64_t width, float eps, Workspace& w) {
  active_norm_kernels().layer_norm(x, norm.weight, norm.bias, eps, w.h.data(), w.moments.data(), w.moments.data() + rows,
                                   rows, width);
}

// One head of one sequence in one layer.
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

// Asks for the first bytes of a block, as many as the nearest cache has room for beside what is in use.
void fetch(const char* block, int64_t bytes) {
  constexpr int64_t kMost = 16 << 10;
  for (int64_t at = 0; at < std::min(bytes, kMost); at += 64) __builtin_prefetch(block + at);
}

void attend_rows(const Decoder& d, const Row* rows, int64_t count, const DecoderCache& cache, int64_t layer, int tasks,
                 int64_t longest, Workspace& w) {
  const int64_t head_width = d.width / d.heads;
  const float scale = 1.0f / std::sqrt(static_cast<float>(head_width));
  const auto& kernels = active_cached();
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t h = 0; h < d.heads; ++h) {
      const HeadCache at = head_cache(cache, layer, rows[r].sequence, h, d.heads, head_width);
      const float* key = w.qkv.data() + r * 3 * d.width + d.width + h * head_width;
      kernels.store(cache.kind, key, head_width, at.keys, at.key_scales, rows[r].position);
      kernels.store(cache.kind, key + d.width, head_width, at.values, at.value_scales, rows[r].position);
    }
  }
  const int64_t pairs = count * d.heads;
  parallel_for(tasks, [&](int task) {
    for (int64_t p = task; p < pairs; p += tasks) {
      const int64_t r = p / d.heads, h = p % d.heads;
      const HeadCache at = head_cache(cache, layer, rows[r].sequence, h, d.heads, head_width);
      if (count <= cache.sequences && h + tasks < d.heads) {  // a step, not a prompt: the keys of the next head
        const HeadCache next = head_cache(cache, layer, rows[r].sequence, h + tasks, d.heads, head_width);
        fetch(next.keys, (rows[r].position + 1) * head_width * element_size(cache.kind));
      }
      kernels.attend(cache.kind, w.qkv.data() + r * 3 * d.width + h * head_width, {at.keys, at.key_scales},
                     {at.values, at.value_scales}, rows[r].position + 1, head_width, scale,
                     w.scores.data() + task * longest, w.mixed.data() + r * d.width + h * head_width);
    }
  });
}

}  // namespace

int64_t DenseLayer::packed_bytes(int64_t outputs, int64_t inputs) {
  return int8_packed_bytes(outputs, round_up(inputs, kInt8Group) / kInt8Group);
}

bool DenseLayer::pack_int8(int8_t* to) {
  const int64_t padded = round_up(outputs, kInt8Panel);
  packed = to;
  offset = Buffer<int32_t>(padded);
  scale = Buffer<float>(padded);
  std::fill(offset.data(), offset.data() + padded, 0);
  std::fill(scale.data(), scale.data() + padded, 0.0f);
  Buffer<int8_t> q(outputs * inputs);
  for (int64_t i = 0; i < outputs; ++i) {
    if (!active_int8_ops().quantize_weights(weight + i * inputs, inputs, q.data() + i * inputs, &scale[i])) return false;
  }
  pack_int8_weights(q.data(), static_cast<int>(outputs), 1, static_cast<int>(inputs), inputs, 0, 1, to, offset.data());
  for (int64_t i = 0; i < outputs; ++i) offset[i] *= -128;  // activations are stored with 128 added
  return true;
}

bool DenseLayer::apply(const float* x, int64_t rows, float* y, const float* residual, Activation activation,
                       uint8_t* bytes, float* row_scales, Reading reading) const {
  Epilogue epilogue;
  epilogue.bias = bias;
  epilogue.residual = residual;
  epilogue.residual_row = outputs;
  epilogue.activation = activation;
  if (packed == nullptr) {
    Gemm g;
    g.m = rows, g.n = outputs, g.k = inputs;
    g.a = x, g.a_row = inputs, g.a_col = 1;
    g.b = weight, g.b_row = 1, g.b_col = inputs;
    g.c = y, g.c_row = outputs;
    g.epilogue = epilogue;
    g.stream_b = reading != Reading::cached;
    g.large_pages_b = reading != Reading::small_pages;
    return matmul(g, Batch{}, nullptr);
  }
  const int64_t padded = round_up(inputs, kInt8Group);
  for (int64_t r = 0; r < rows; ++r) {
    row_scales[r] = active_int8_ops().quantize_row(x + r * inputs, inputs, padded, bytes + r * padded);
  }
  Int8Problem p;
  p.in = bytes;
  p.in_grid.column_step = padded;
  p.width = static_cast<int>(rows);
  p.groups_per_run = static_cast<int>(padded / kInt8Group);
  p.weights = packed;
  p.columns = p.out_columns = static_cast<int>(outputs);
  p.offset = offset.data();
  p.scale = scale.data();
  p.row_scale = row_scales;
  p.kind = Int8Out::float32;
  p.out = y;
  p.out_grid.column_step = outputs;
  run_int8(p);
  if (epilogue.any()) active_gemm().finish(epilogue, y, outputs, 0, 0, rows, outputs);
  return true;
}

std::vector<const DenseLayer*> Decoder::layers() const {
  std::vector<const DenseLayer*> all;
  for (const DecoderBlock& b : blocks) all.insert(all.end(), {&b.qkv, &b.out, &b.up, &b.down});
  all.push_back(&head);
  return all;
}

bool Decoder::pack_int8() {
  int64_t bytes = 0;
  for (const DenseLayer* layer : layers()) bytes += DenseLayer::packed_bytes(layer->outputs, layer->inputs);
  packed = Buffer<int8_t>(bytes);
  int8_t* to = packed.data();
  bool ok = true;
  auto pack = [&](DenseLayer& layer) {
    ok = ok && layer.pack_int8(to);
    to += DenseLayer::packed_bytes(layer.outputs, layer.inputs);
  };
  for (DecoderBlock& b : blocks) {
    for (DenseLayer* layer : {&b.qkv, &b.out, &b.up, &b.down}) pack(*layer);
  }
  pack(head);
  return ok;
}

// Weights that lie side by side are one range: a large page may hold the end of one and the beginning of the next.
bool Decoder::settle_weights() const {
  struct Range {
    const char *begin, *end;
  };
  std::vector<Range> ranges;
  for (const DenseLayer* layer : layers()) {
    const auto* begin = reinterpret_cast<const char*>(layer->weight);
    ranges.push_back({begin, begin + layer->outputs * layer->inputs * 4});
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  constexpr int64_t kNear = 64 << 10;  // biases and norms lie between
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
  large_pages_ = head.packed == nullptr ? settle_weights() : settle_on_large_pages(packed.data(), packed.size());
}

uint64_t Decoder::fingerprint() const {
  if (head.packed == nullptr) return 0;
  uint64_t all = 1;
  for (const DenseLayer* layer : layers()) {
    all = all * 31 + active_int8_ops().fingerprint(layer->weight, layer->outputs * layer->inputs);
  }
  return all;
}

int64_t Decoder::weight_bytes() const {
  int64_t elements = 0;
  for (const DenseLayer* layer : layers()) elements += layer->outputs * layer->inputs;
  return elements * (head.packed == nullptr ? 4 : 1);
}

bool Decoder::products() const {
  Workspace w(*this, 1, 1, 1);
  Buffer<float> logits(head.outputs);
  const Reading reading = this->reading();
  for (Buffer<float>* input : {&w.h, &w.mixed, &w.hidden}) std::fill(input->data(), input->data() + input->size(), 1.0f);
  auto apply = [&](const DenseLayer& layer, const Buffer<float>& from, Buffer<float>& to) {
    return layer.apply(from.data(), 1, to.data(), nullptr, Activation::none, w.bytes.data(), w.row_scales.data(), reading);
  };
  bool ok = true;
  for (const DecoderBlock& b : blocks) {
    ok = ok && apply(b.qkv, w.h, w.qkv) && apply(b.out, w.mixed, w.x) && apply(b.up, w.h, w.hidden) &&
         apply(b.down, w.hidden, w.x);
  }
  return ok && apply(head, w.h, logits);
}

// A step reads every weight for a few rows: whether a second thread makes that faster is the memory's affair.
bool Decoder::run(const Row* rows, int64_t count, DecoderCache& cache, const int64_t* wanted, int64_t wanted_count,
                  float* logits) const {
  if (count == 0) return true;
  int kind = 0;
  while (kind < kTrials && count > int64_t{1} << kind) ++kind;
  const int most = num_threads();
  if (most == 1 || kind == kTrials) return run_rows(rows, count, cache, wanted, wanted_count, logits);
  const int threads = trials_[kind].threads(most);
  const ThreadLimit limit(threads);
  const auto start = std::chrono::steady_clock::now();
  const bool ok = run_rows(rows, count, cache, wanted, wanted_count, logits);
  trials_[kind].took(threads, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  return ok;
}

bool Decoder::run_rows(const Row* rows, int64_t count, DecoderCache& cache, const int64_t* wanted, int64_t wanted_count,
                       float* logits) const {
  int64_t longest = 0, work = 0;
  for (int64_t r = 0; r < count; ++r) {
    longest = std::max(longest, rows[r].position + 1);
    work += (rows[r].position + 1) * width;
  }
  constexpr int64_t kWorthAThread = 1 << 15;
  const int tasks = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(num_threads(), work / kWorthAThread)));
  Workspace w(*this, count, longest, tasks);
  float* x = w.x.data();
  for (int64_t r = 0; r < count; ++r) {
    const float* token = token_embedding + rows[r].token * width;
    const float* position = position_embedding + rows[r].position * width;
    for (int64_t i = 0; i < width; ++i) x[r * width + i] = token[i] + position[i];
  }
  uint8_t* bytes = w.bytes.data();
  float* scales = w.row_scales.data();
  const Reading reading = this->reading();
  bool ok = true;
  for (std::size_t layer = 0; layer < blocks.size() && ok; ++layer) {
    const DecoderBlock& b = blocks[layer];
    normalize(b.norm1, x, count, width, eps, w);
    ok = ok && b.qkv.apply(w.h.data(), count, w.qkv.data(), nullptr, Activation::none, bytes, scales, reading);
    attend_rows(*this, rows, count, cache, static_cast<int64_t>(layer), tasks, longest, w);
    ok = ok && b.out.apply(w.mixed.data(), count, w.h.data(), x, Activation::none, bytes, scales, reading);
    std::swap(w.x, w.h);
    x = w.x.data();
    normalize(b.norm2, x, count, width, eps, w);
    ok = ok && b.up.apply(w.h.data(), count, w.hidden.data(), nullptr, activation, bytes, scales, reading);
    ok = ok && b.down.apply(w.hidden.data(), count, w.h.data(), x, Activation::none, bytes, scales, reading);
    std::swap(w.x, w.h);
    x = w.x.data();
  }
  for (int64_t i = 0; i < wanted_count; ++i) std::memcpy(w.mixed.data() + i * width, x + wanted[i] * width, width * 4);
  normalize(norm, w.mixed.data(), wanted_count, width, eps, w);
  return ok && head.apply(w.h.data(), wanted_count, logits, nullptr, Activation::none, bytes, scales, reading);
}

}  // namespace tw
