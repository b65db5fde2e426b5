#include "common/convolution.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>

#include "common/alloc.h"
#include "common/matmul.h"
#include "common/thread_blocks.h"
#include "common/thread_pool.h"
#include "common/weight_cache.h"

namespace tw {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t weight_count(const ConvShape& s) { return s.o * s.group_c() * s.kh * s.kw; }

// The view of contiguous weights (o, c / groups, kh, kw).
WeightView plain_view(const ConvShape& s, const float* w) {
  const int64_t taps = s.kh * s.kw, row = s.group_c() * taps;
  return {w, s.group_o() * row, row, taps, s.kw, 1};
}

OutputGrid whole_output(const ConvShape& s) { return {s.oh, s.ow, 0, 0, 1, 1}; }

void check(bool done) {
  if (!done) throw std::bad_alloc();
}

// Memory for weights that are packed for one call. The thread keeps it up to a bound.
class CallWeights {
 public:
  explicit CallWeights(int64_t floats) : data_(thread_scratch<float>(Scratch::call_weights, floats)) {}
  ~CallWeights() { thread_blocks().trim(Scratch::call_weights); }
  float* data() { return data_; }

 private:
  float* data_;
};

ConvTile analytical_tile(const ConvShape& s, ConvAlgorithm algorithm) {
  const int64_t threads = num_threads();
  return transforms(algorithm) ? winograd_kernels(algorithm).default_tile(s, threads)
                               : active_conv_direct().default_tile(s, threads);
}

// Returns the kernels' tile of a configuration for `algorithm`, which may differ from the algorithm that the
// configuration names.
ConvTile tile_of(const ConvShape& s, const ConvConfig& config, ConvAlgorithm algorithm) {
  ConvTile tile = analytical_tile(s, algorithm);
  if (config.algorithm != algorithm) return tile;
  const int64_t lanes = active_conv_direct().limits.lanes;
  if (config.mr > 0) tile.mr = config.mr;
  if (config.nr > 0) tile.vectors = config.nr / lanes;
  if (config.block > 0) tile.block = config.block;
  if (config.channels > 0) tile.channels = config.channels / lanes;
  if (config.split > 0) tile.split = config.split;
  return tile;
}

WeightKey key_of(const ConvShape& s, const float* w, ConvAlgorithm algorithm) {
  const int64_t kind = static_cast<int64_t>(algorithm) * 16 + static_cast<int64_t>(active_isa());
  return {w, {s.o, s.c, s.kh, s.kw, s.groups, kind, 0, 0}};
}

// Packs these weights, and caches the result if there is room.
template <class Kernels>
std::shared_ptr<const PackedWeights> pack_and_cache_weights(const Kernels& kernels, const ConvShape& s,
                                                            const WeightKey& key) {
  auto weights = new_weights(key, weight_count(s), kernels.packed_floats(s));
  const WeightView view = plain_view(s, weights->raw.data());
  if constexpr (std::is_same_v<decltype(kernels.pack(s, view, nullptr)), bool>) {
    weights->usable = kernels.pack(s, view, weights->packed.data());
  } else {
    kernels.pack(s, view, weights->packed.data());
  }
  keep_weights(key, weights);
  return weights;
}

std::atomic<int64_t> transformed{0};
std::atomic<bool> winograd_allowed{true};

// Returns the transformed filters from the cache, after adding them if there is room; else null: transforming them at
// every call would cost more than Winograd's shorter product saves.
std::shared_ptr<const PackedWeights> cached_transformed_filters(ConvAlgorithm algorithm, const ConvShape& s,
                                                                const float* w) {
  const WinogradKernels& kernels = winograd_kernels(algorithm);
  const WeightKey key = key_of(s, w, algorithm);
  if (auto cached = find_weights(key, weight_count(s))) return cached;
  if (!weights_fit(key, weight_count(s), kernels.packed_floats(s), true)) return nullptr;
  ++transformed;
  return pack_and_cache_weights(kernels, s, key);
}

// Runs Winograd kernels. Returns false if the direct kernels must be used instead.
bool forward_winograd(ConvAlgorithm algorithm, const ConvShape& s, const float* x, const float* w, bool keep,
                      const ConvEpilogue& e, const ConvConfig& config, float* y) {
  const WinogradKernels& kernels = winograd_kernels(algorithm);
  const ConvTile tile = tile_of(s, config, algorithm);
  if (keep) {
    const auto weights = cached_transformed_filters(algorithm, s, w);
    return weights && weights->usable && kernels.forward(s, x, weights->packed.data(), e, tile, {}, y);
  }
  CallWeights packed(kernels.packed_floats(s));
  return kernels.pack(s, plain_view(s, w), packed.data()) && kernels.forward(s, x, packed.data(), e, tile, {}, y);
}

// Runs the direct kernels with packed weights from the cache, or packed for this call.
void forward_direct(const ConvShape& s, const float* x, const float* w, bool keep, const ConvEpilogue& e,
                    const ConvConfig& config, float* y) {
  const DirectKernels& kernels = active_conv_direct();
  const ConvTile tile = tile_of(s, config, ConvAlgorithm::direct);
  const WeightKey key = key_of(s, w, ConvAlgorithm::direct);
  std::shared_ptr<const PackedWeights> weights = keep ? find_weights(key, weight_count(s)) : nullptr;
  if (keep && !weights && weights_fit(key, weight_count(s), kernels.packed_floats(s), false)) {
    weights = pack_and_cache_weights(kernels, s, key);
  }
  if (weights) {
    check(kernels.forward(s, x, weights->packed.data(), e, tile, whole_output(s), y));
    return;
  }
  CallWeights packed(kernels.packed_floats(s));
  kernels.pack(s, plain_view(s, w), packed.data());
  check(kernels.forward(s, x, packed.data(), e, tile, whole_output(s), y));
}

// One phase of one dimension of a strided convolution's input gradient: the outputs that share the filter taps first,
// first + stride, ... form a stride-1 convolution.
struct Phase {
  int64_t first_tap, taps;  // kernel positions first_tap + stride * (0 ... taps - 1)
  int64_t first_out, outs;  // input positions first_out + stride * (0 ... outs - 1)
  int64_t pad;
};

// Finds the taps of a filter and the inputs they reach for one phase of a strided convolution's input gradient.
Phase phase_of(int64_t tap, int64_t stride, int64_t kernel, int64_t padding, int64_t size) {
  Phase f;
  f.first_tap = tap;
  f.taps = tap < kernel ? ceil_div(kernel - tap, stride) : 0;
  f.first_out = ((tap - padding) % stride + stride) % stride;
  f.outs = f.first_out < size ? ceil_div(size - f.first_out, stride) : 0;
  f.pad = f.taps - 1 - (f.first_out + padding - tap) / stride;
  return f;
}

// The convolution that computes one phase of the input gradient: gy with flipped taps and exchanged channels.
ConvShape phase_shape(const ConvShape& s, const Phase& fy, const Phase& fx) {
  return {s.n, s.o, s.oh, s.ow, s.c, fy.taps, fx.taps, 1, 1, fy.pad, fx.pad, s.groups, fy.outs, fx.outs};
}

WeightView flipped_view(const ConvShape& s, const float* w, const Phase& fy, const Phase& fx) {
  const int64_t taps = s.kh * s.kw, out = s.group_c() * taps;
  const int64_t last = (fy.first_tap + s.sh * (fy.taps - 1)) * s.kw + fx.first_tap + s.sw * (fx.taps - 1);
  return {w + last, s.group_o() * out, taps, out, -s.sh * s.kw, -s.sw};
}

// Copies the part of the image that a convolution with negative padding reads, and sets that padding to 0.
const float* cropped(ConvShape* s, const float* x, Buffer<float>* memory) {
  const int64_t top = s->ph < 0 ? -s->ph : 0, left = s->pw < 0 ? -s->pw : 0;
  if (top == 0 && left == 0) return x;
  const int64_t h = s->h > top ? s->h - top : 0, w = s->w > left ? s->w - left : 0;
  *memory = Buffer<float>(static_cast<std::size_t>(s->n * s->c * h * w));
  float* to = memory->data();
  for (int64_t plane = 0; plane < s->n * s->c && w > 0; ++plane) {
    for (int64_t y = 0; y < h; ++y, to += w) {
      std::memcpy(to, x + (plane * s->h + y + top) * s->w + left, static_cast<std::size_t>(w) * sizeof(float));
    }
  }
  s->h = h;
  s->w = w;
  s->ph += top;
  s->pw += left;
  return memory->data();
}

// A tuned block may be this many times as large as L2: transformed tiles are read and written in long runs, which L3
// keeps up with (benchmarks/conv.py --layers, "3x3 64-64 at 56").
constexpr int64_t kCacheShare = 2;                // chosen
constexpr int64_t kMostBlock = int64_t{1} << 24;  // chosen: most units or channels of a block

int64_t working_bytes(const ConvShape& s, const ConvConfig& config) {
  const ConvTile tile = tile_of(s, config, config.algorithm);
  return transforms(config.algorithm) ? winograd_kernels(config.algorithm).block_bytes(s, tile)
                                      : active_conv_direct().block_bytes(s, tile);
}

// Returns why the loops cannot run this configuration, or null.
const char* shape_problem(const ConvShape& s, const ConvConfig& c) {
  const ConvLimits& limits = active_conv_direct().limits;
  const int64_t panel = limits.lanes * limits.max_vectors;
  if (c.algorithm == ConvAlgorithm::automatic) return "its algorithm is none of 'direct', 'winograd' and 'winograd2'";
  if (transforms(c.algorithm) && !winograd_applies(s)) return "winograd is for 3x3 kernels with stride 1";
  if (c.mr < 0 || c.mr > limits.max_rows) return "the register tile mr x nr does not fit the register file";
  if (c.nr != 0 && c.nr != limits.lanes && c.nr != panel)
    return "nr must be one or two vectors of this instruction set";
  if (c.channels < 0 || c.channels % panel != 0)
    return "channels must be a multiple of two vectors of this instruction set";
  if (c.block < 0 || c.block > kMostBlock || c.channels > kMostBlock)
    return "block and channels must be between 0 and 2**24";
  if (c.split < 0 || c.split > 1024) return "split must be between 0 and 1024";
  return nullptr;
}

// Computes the input gradient of one pair of phases as a stride-1 convolution.
void grad_input_phase(const ConvShape& s, const float* gy, const float* w, const Phase& fy, const Phase& fx,
                      float* gx) {
  ConvShape t = phase_shape(s, fy, fx);
  Buffer<float> memory;
  gy = cropped(&t, gy, &memory);
  const WeightView view = flipped_view(s, w, fy, fx);
  const ConvEpilogue none{nullptr, nullptr, ConvActivation::none};
  const ConvAlgorithm algorithm = s.sh == 1 && s.sw == 1 ? choose_algorithm(t) : ConvAlgorithm::direct;
  if (transforms(algorithm)) {
    const WinogradKernels& kernels = winograd_kernels(algorithm);
    CallWeights packed(kernels.packed_floats(t));
    const ConvTile tile = analytical_tile(t, algorithm);
    if (kernels.pack(t, view, packed.data()) && kernels.forward(t, gy, packed.data(), none, tile, {}, gx)) return;
  }
  const DirectKernels& kernels = active_conv_direct();
  CallWeights packed(kernels.packed_floats(t));
  kernels.pack(t, view, packed.data());
  const OutputGrid grid{s.h, s.w, fy.first_out, fx.first_out, s.sh, s.sw};
  check(kernels.forward(t, gy, packed.data(), none, analytical_tile(t, ConvAlgorithm::direct), grid, gx));
}

}  // namespace

int64_t winograd_transforms() { return transformed.load(); }

void forget_call_weights() { thread_blocks().forget(Scratch::call_weights); }

void allow_winograd(bool allow) { winograd_allowed.store(allow, std::memory_order_relaxed); }

bool winograd_applies(const ConvShape& s) {
  return s.kh == 3 && s.kw == 3 && s.sh == 1 && s.sw == 1 && s.dh == 1 && s.dw == 1;
}

namespace {

// Estimates the cost of an algorithm in vector multiplications: its instructions, or the time to stream its filters if
// that is longer. Filters larger than the L2 cache are read once per call, at a fixed number of bytes per vector
// multiplication (two vectors of eight lanes, or one of sixteen, are multiplied per cycle).
int64_t cost(int64_t instructions, int64_t filter_bytes) {
  const int64_t bytes_per_vector = std::max<int64_t>(1, active_conv_direct().limits.lanes * 3 / 8);
  return std::max(instructions, filter_bytes > cache_sizes().l2 ? filter_bytes / bytes_per_vector : 0);
}

int64_t winograd_cost(const ConvShape& s, const WinogradKernels& w) {
  const int64_t lanes = active_conv_direct().limits.lanes, c = s.group_c();
  const int64_t c_vectors = ceil_div(c, lanes), o_vectors = ceil_div(s.group_o(), lanes);
  const int64_t tiles = s.n * ceil_div(s.oh, w.tile) * ceil_div(s.ow, w.tile);
  const int64_t per_tile = w.positions * c * o_vectors + w.input_cost * c_vectors + w.output_cost * o_vectors;
  return cost(s.groups * tiles * per_tile, w.positions * s.c * s.group_o() * 4);
}

}  // namespace

// Direct convolution multiplies 9 times per pixel, Winograd 36 times per 16 pixels or 16 times per 4, plus transforms.
// benchmarks/algorithms.py compares all three with the choice of the cheapest on AVX2 and AVX-512.
int64_t algorithm_cost(const ConvShape& s, ConvAlgorithm algorithm) {
  if (transforms(algorithm)) return winograd_cost(s, winograd_kernels(algorithm));
  const int64_t taps = s.kh * s.kw, vectors = ceil_div(s.group_o(), active_conv_direct().limits.lanes);
  return cost(s.n * s.groups * s.oh * s.ow * taps * s.group_c() * vectors, taps * s.c * s.group_o() * 4);
}

ConvAlgorithm choose_algorithm(const ConvShape& s) {
  if (!winograd_applies(s) || !winograd_allowed.load(std::memory_order_relaxed)) return ConvAlgorithm::direct;
  const int64_t lanes = active_conv_direct().limits.lanes;
  // Not Winograd if several groups share a vector, or if the products have so few channels that they take less time
  // than the transforms.
  if (s.groups > 1 && (s.group_o() * 2 <= lanes || (s.group_o() <= lanes && s.group_c() <= 8)))
    return ConvAlgorithm::direct;
  ConvAlgorithm best = ConvAlgorithm::direct;
  for (ConvAlgorithm algorithm : {ConvAlgorithm::winograd2, ConvAlgorithm::winograd}) {
    if (algorithm_cost(s, algorithm) < algorithm_cost(s, best)) best = algorithm;
  }
  return best;
}

ConvTile resolved_tile(const ConvShape& s, ConvAlgorithm algorithm) { return analytical_tile(s, algorithm); }

ConvConfig resolved(const ConvShape& s, const ConvConfig& config) {
  ConvConfig full = config;
  if (full.algorithm == ConvAlgorithm::automatic) full.algorithm = choose_algorithm(s);
  const int64_t lanes = active_conv_direct().limits.lanes;
  const ConvTile tile = tile_of(s, full, full.algorithm);
  return {full.algorithm, tile.mr, tile.vectors * lanes, tile.block, tile.channels * lanes, tile.split};
}

bool config_problem(const ConvShape& s, const ConvConfig& config, char* reason, std::size_t size) {
  const char* problem = shape_problem(s, config);
  if (problem != nullptr) {
    std::snprintf(reason, size, "%s", problem);
    return true;
  }
  const int64_t bytes = working_bytes(s, config), most = kCacheShare * cache_sizes().l2;
  ConvConfig least = config;
  least.block = 1;
  least.channels = active_conv_direct().limits.lanes * active_conv_direct().limits.max_vectors;
  const int64_t usual = working_bytes(s, ConvConfig{config.algorithm});
  if (bytes <= std::max({most, usual, working_bytes(s, least)})) return false;
  std::snprintf(reason, size, "a block's working memory is %lld KB, more than %lld times the L2 cache's %lld KB",
                static_cast<long long>(bytes >> 10), static_cast<long long>(kCacheShare),
                static_cast<long long>(cache_sizes().l2 >> 10));
  return true;
}

void conv_forward(const ConvShape& s, const float* x, const float* w, bool keep, const ConvEpilogue& e,
                  const ConvConfig& config, float* y) {
  if (s.n == 0 || s.o == 0 || s.oh == 0 || s.ow == 0) return;
  const ConvAlgorithm algorithm = config.algorithm == ConvAlgorithm::automatic ? choose_algorithm(s) : config.algorithm;
  if (transforms(algorithm) && forward_winograd(algorithm, s, x, w, keep, e, config, y)) return;
  forward_direct(s, x, w, keep, e, config, y);
}

// Computes the gradient of the input, as one stride-1 convolution per phase of the stride.
void conv_grad_input(const ConvShape& s, const float* gy, const float* w, float* gx) {
  const int64_t size = s.n * s.c * s.h * s.w;
  if (size == 0) return;
  const bool all_reached = s.sh == 1 && s.sw == 1 && s.o > 0;
  if (!all_reached) std::memset(gx, 0, static_cast<std::size_t>(size) * sizeof(float));
  for (int64_t ty = 0; ty < s.sh; ++ty) {
    for (int64_t tx = 0; tx < s.sw; ++tx) {
      const Phase fy = phase_of(ty, s.sh, s.kh, s.ph, s.h), fx = phase_of(tx, s.sw, s.kw, s.pw, s.w);
      if (fy.taps * fx.taps * fy.outs * fx.outs > 0) grad_input_phase(s, gy, w, fy, fx, gx);
    }
  }
}

// Computes the gradient of the weights from partial sums, one per thread if memory allows.
void conv_grad_weight(const ConvShape& s, const float* gy, const float* x, float* gw) {
  const int64_t count = weight_count(s);
  if (count == 0) return;
  if (s.n * s.oh * s.ow == 0) {
    std::memset(gw, 0, static_cast<std::size_t>(count) * sizeof(float));
    return;
  }
  constexpr int64_t kMaxPartialFloats = int64_t{16} << 20;  // chosen: bounds the memory to 64 MiB
  const GradWeightKernels& kernels = active_conv_grad_weight();
  const int64_t size = kernels.partial_floats(s), room = std::max<int64_t>(1, kMaxPartialFloats / size);
  const int64_t partial_count = std::min({static_cast<int64_t>(num_threads()), kernels.max_parts(s), room});
  CallWeights partials(size * partial_count);
  check(kernels.run(s, gy, x, partials.data(), partial_count, gw));
}

}  // namespace tw
