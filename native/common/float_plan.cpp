#include "common/float_plan.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#include "common/attention_ops.h"
#include "common/thread_pool.h"
#include "kernels/norm.h"

namespace tw {
namespace {

constexpr int64_t kLine = 16;       // floats of a cache line, and of the widest vector
constexpr std::size_t kArenas = 4;  // kept for the next call

void require(bool right, const char* what) {
  if (!right) throw std::invalid_argument(what);
}

int64_t round_up(int64_t x) { return (x + kLine - 1) / kLine * kLine; }

// Pixels a multiple of 1 KiB apart would share few sets of the first-level cache.
int64_t pitch_of(int64_t channels) {
  const int64_t pitch = std::max(kLine, round_up(channels));
  return pitch % 256 == 0 ? pitch + kLine : pitch;
}

bool same_pixels(const FloatPlan::Size& a, const FloatPlan::Size& b) { return a.n == b.n && a.h == b.h && a.w == b.w; }

int64_t pooled(int64_t size, int64_t before, int64_t after, int64_t kernel, int64_t stride) {
  require(kernel > 0 && stride > 0 && before >= 0 && after >= 0 && before < kernel && after < kernel,
          "this window is not one");
  require(size + before + after >= kernel, "the window does not fit into the image");
  return (size + before + after - kernel) / stride + 1;
}

// Pixels from one pitch to another, and not a float past them: what a caller gives ends there.
void copy_pixels(const LastImage& x, const LastImage& y) {
  for (int64_t p = 0; p < x.pixels(); ++p)
    std::memcpy(y.data + p * y.pitch, x.data + p * x.pitch, static_cast<std::size_t>(x.c) * sizeof(float));
}

void norm_pixels(const LastImage& x, const float* weight, const float* bias, float eps, const LastImage& y) {
  constexpr int64_t kFloats = 8192;  // of a task
  const int64_t pixels = x.pixels(), tasks = std::min(pixels, 1 + pixels * x.c / kFloats);
  parallel_near(static_cast<int>(tasks), [&](int task) {
    float mean, rstd;
    for (int64_t p = pixels * task / tasks; p < pixels * (task + 1) / tasks; ++p) {
      active_norm_kernels().layer_norm(x.data + p * x.pitch, weight, bias, eps, y.data + p * y.pitch, &mean, &rstd, 1,
                                       x.c);
    }
  });
}

// Where the mask of an image lies; along an axis of size 1 it is the same everywhere.
struct MaskSteps {
  int64_t image, head, row, column;
};

MaskSteps mask_steps(const LastImage& m) {
  const bool planes = m.pitch == 0;
  const int64_t column = planes ? 1 : m.pitch, row = m.w * column, head = planes ? m.h * row : 1,
                image = planes ? m.c * head : m.h * row;
  return {m.n > 1 ? image : 0, m.c > 1 ? head : 0, m.h > 1 ? row : 0, m.w > 1 ? column : 0};
}

void attend(const LastImage* qkv, bool masked, const PlanHeads& h, const LastImage& out) {
  const auto rows = [&](int i) { return Rows{qkv[i].data + h.first[i], qkv[i].pitch}; };
  const auto strides = [&](int i) { return HeadStrides{qkv[i].w * qkv[i].pitch, h.step[i]}; };
  const MaskSteps by = masked ? mask_steps(qkv[3]) : MaskSteps{};
  const AttentionHead first{qkv[0].w,
                            qkv[1].w,
                            h.dim,
                            h.value_dim,
                            rows(0),
                            rows(1),
                            rows(2),
                            h.scale,
                            h.causal,
                            masked ? MaskKind::additive : MaskKind::none,
                            masked ? qkv[3].data : nullptr,
                            by.row,
                            by.column};
  const AttentionBatch batch{out.n, h.count, first, strides(0), strides(1), strides(2), {by.image, by.head}};
  attention_forward(batch, {{out.data, out.pitch}, {out.w * out.pitch, h.value_dim}}, nullptr);
}

}  // namespace

// --- building ---

const FloatPlan::Size& FloatPlan::size(int value) const {
  require(value >= 0 && value < static_cast<int>(values_.size()), "there is no such value in this plan");
  return values_[value].size;
}

int FloatPlan::add(const Size& size) {
  require(!finished_, "this plan is finished");
  require(size.n >= 0 && size.c > 0 && size.h > 0 && size.w > 0, "a value of a plan has channels and pixels");
  Value value;
  value.size = size;
  values_.push_back(value);
  return static_cast<int>(values_.size()) - 1;
}

int FloatPlan::add(const Size& size, std::vector<int> in, Run run) {
  const int value = add(size);
  steps_.push_back({std::move(in), value, std::move(run)});
  return value;
}

int FloatPlan::input(const Size& size, bool last) {
  const int value = add(size);
  values_[value].last = last;
  values_[value].input = static_cast<int>(input_sizes_.size());
  input_sizes_.push_back(size);
  converted_.push_back(-1);
  return value;
}

int FloatPlan::last(int value) {
  const int input = (size(value), values_[value].input);
  if (input < 0) return value;
  if (converted_[input] < 0) {
    converted_[input] = add(size(value), {value}, [](const LastImage* in, const LastImage& out) {
      in[0].pitch > 0 ? copy_pixels(in[0], out) : active_channels_last().from_planes(in[0], out);
    });
  }
  return converted_[input];
}

int FloatPlan::conv(std::shared_ptr<const PlanConv> layer, int x, int residual, ConvAlgorithm wanted) {
  const Size from = size(x);
  const ConvShape s = layer->shape(from.n, from.c, from.h, from.w);
  const Size to{s.n, s.o, s.oh, s.ow};
  if (from.c > kLine || layer->groups() > 1 || values_[x].last)
    x = last(x);  // few channels are read as planes, each once
  std::vector<int> reads{x};
  if (residual >= 0) {
    reads.push_back(last(residual));
    require(same_pixels(size(reads[1]), to) && size(reads[1]).c == to.c,
            "the residual has not the shape of the result");
  }
  const ConvAlgorithm algorithm = layer->prepare(s, wanted);
  const bool adds = residual >= 0;
  const int value = add(to, reads, [layer, algorithm, adds](const LastImage* in, const LastImage& out) {
    layer->run(algorithm, in[0], adds ? &in[1] : nullptr, out);
  });
  values_[value].algorithm = algorithm;
  steps_.back().layer = layer;
  return value;
}

ConvAlgorithm FloatPlan::algorithm(int value) const { return size(value), values_[value].algorithm; }

int FloatPlan::linear(std::shared_ptr<const PlanLinear> layer, int x) {
  const Size from = size(x);
  require(from.h * from.w == 1 && from.c == layer->inputs(), "a linear layer takes rows of its own length");
  return add({from.n, layer->outputs(), 1, 1}, {x},
             [layer](const LastImage* in, const LastImage& out) { layer->run(in[0], out); });
}

int FloatPlan::pool(const PoolShape& window, int64_t end_h, int64_t end_w, bool mean, bool count_padding, int x) {
  x = last(x);
  const Size from = size(x);
  PoolShape s = window;
  s.h = from.h;
  s.w = from.w;
  s.oh = pooled(s.h, s.ph, end_h, s.kh, s.sh);
  s.ow = pooled(s.w, s.pw, end_w, s.kw, s.sw);
  return add({from.n, from.c, s.oh, s.ow}, {x}, [s, mean, count_padding](const LastImage* in, const LastImage& out) {
    mean ? active_channels_last().avg_pool(s, count_padding, in[0], out)
         : active_channels_last().max_pool(s, in[0], out);
  });
}

int FloatPlan::global_mean(int x) {
  x = last(x);
  return add({size(x).n, size(x).c, 1, 1}, {x},
             [](const LastImage* in, const LastImage& out) { active_channels_last().global_mean(in[0], out); });
}

int FloatPlan::binary(BinaryKind kind, int a, int b, ConvActivation activation) {
  a = last(a), b = last(b);
  if (kind != BinaryKind::sub && size(a).h * size(a).w < size(b).h * size(b).w) std::swap(a, b);
  const Size p = size(a), q = size(b);
  require(p.n == q.n && p.c == q.c && (same_pixels(p, q) || q.h * q.w == 1), "these two do not have one shape");
  return add(p, {a, b}, [kind, activation](const LastImage* in, const LastImage& out) {
    active_channels_last().binary(kind, in[0], in[1], activation, out);
  });
}

int FloatPlan::affine(int x, const std::vector<float>& scale, const std::vector<float>& shift,
                      ConvActivation activation) {
  x = last(x);
  const Size from = size(x);
  require(scale.size() == shift.size() && (scale.empty() || static_cast<int64_t>(scale.size()) == from.c),
          "a scale and a shift a channel");
  std::vector<float> a = scale, b = shift;
  a.resize(a.size() + kLine);
  b.resize(b.size() + kLine);
  const bool plain = scale.empty();
  return add(from, {x}, [a, b, plain, activation](const LastImage* in, const LastImage& out) {
    active_channels_last().affine(in[0], plain ? nullptr : a.data(), plain ? nullptr : b.data(), activation, out);
  });
}

int FloatPlan::concat(const std::vector<int>& parts) {
  require(!parts.empty(), "nothing to concatenate");
  Concat concat;
  for (int part : parts) concat.parts.push_back(last(part));
  Size total = size(concat.parts[0]);
  total.c = 0;
  for (int part : concat.parts) {
    require(same_pixels(size(part), total), "only images of one size are concatenated");
    total.c += size(part).c;
  }
  concat.value = add(total);
  concat.step = steps_.size();
  concats_.push_back(concat);
  return concat.value;
}

int FloatPlan::slice(int x, int64_t first, int64_t count) {
  x = last(x);
  Size part = size(x);
  require(first >= 0 && count > 0 && first + count <= part.c, "the slice lies outside the channels");
  part.c = count;
  const int value = add(part);
  values_[value].parent = x;
  values_[value].first = first;
  return value;
}

int FloatPlan::take(int x, const std::vector<int>& channels) {
  x = last(x);
  Size to = size(x);
  std::vector<int32_t> from(channels.begin(), channels.end());
  for (int32_t c : from) require(c >= 0 && c < to.c, "there is no such channel");
  to.c = static_cast<int64_t>(from.size());
  return add(to, {x}, [from](const LastImage* in, const LastImage& out) {
    active_channels_last().take(in[0], from.data(), out);
  });
}

int FloatPlan::pixels(int x, const std::vector<int>& index, int64_t n, int64_t h, int64_t w) {
  x = last(x);
  const Size from = size(x), to{n, from.c, h, w};
  const int64_t each = index.empty() ? from.h * from.w : static_cast<int64_t>(index.size());
  require(n >= 0 && h > 0 && w > 0 && n * h * w == from.n * each, "another number of pixels");
  if (index.empty()) {
    const int value = add(to);
    values_[value].parent = x;
    return value;
  }
  for (int pixel : index) require(pixel >= 0 && pixel < from.h * from.w, "there is no such pixel");
  const std::vector<int32_t> list(index.begin(), index.end());
  return add(to, {x}, [list](const LastImage* in, const LastImage& out) {
    active_channels_last().gather(in[0], list.data(), static_cast<int64_t>(list.size()), out);
  });
}

int FloatPlan::transpose(int x) {
  x = last(x);
  const Size from = size(x);
  return add({from.n, from.h * from.w, 1, from.c}, {x},
             [](const LastImage* in, const LastImage& out) { active_channels_last().transpose(in[0], out); });
}

int FloatPlan::upsample(int x, int64_t by_h, int64_t by_w) {
  x = last(x);
  const Size from = size(x);
  require(by_h > 0 && by_w > 0, "an image grows by whole numbers");
  return add({from.n, from.c, from.h * by_h, from.w * by_w}, {x},
             [by_h, by_w](const LastImage* in, const LastImage& out) {
               active_channels_last().upsample(in[0], by_h, by_w, out);
             });
}

int FloatPlan::spread(int x, int64_t by_h, int64_t by_w) {
  x = last(x);
  const Size from = size(x);
  require(by_h > 0 && by_w > 0 && from.c % (by_h * by_w) == 0, "the channels are no whole number of pixels");
  return add({from.n, from.c / (by_h * by_w), from.h * by_h, from.w * by_w}, {x},
             [by_h, by_w](const LastImage* in, const LastImage& out) {
               active_channels_last().spread(in[0], by_h, by_w, out);
             });
}

int FloatPlan::flatten(int x) {
  const Size from = size(x);
  const Size row{from.n, from.c * from.h * from.w, 1, 1};
  x = last(x);
  if (from.h * from.w == 1) return slice(x, 0, from.c);
  return add(row, {x}, [](const LastImage* in, const LastImage& out) {
    for (int64_t i = 0; i < in[0].n; ++i) {  // one image at a time: rows of the result lie a pitch apart
      LastImage one = in[0], to = out;
      one.n = 1;
      one.data += i * one.h * one.w * one.pitch;
      to.data += i * out.pitch;
      active_channels_last().to_planes(one, to);
    }
  });
}

int FloatPlan::layer_norm(int x, const std::vector<float>& weight, const std::vector<float>& bias, float eps) {
  x = last(x);
  const auto channels = static_cast<std::size_t>(size(x).c);
  require(weight.size() == channels && bias.size() == channels, "a weight and a bias a channel");
  return add(size(x), {x}, [weight, bias, eps](const LastImage* in, const LastImage& out) {
    norm_pixels(in[0], weight.data(), bias.data(), eps, out);
  });
}

int FloatPlan::group_norm(int x, int64_t groups, const std::vector<float>& weight, const std::vector<float>& bias,
                          float eps) {
  x = last(x);
  const auto channels = static_cast<std::size_t>(size(x).c);
  require(groups > 0 && size(x).c % groups == 0, "the groups are no whole number of channels");
  require(weight.size() == channels && bias.size() == channels, "a weight and a bias a channel");
  std::vector<float> a = weight, b = bias;
  a.resize(a.size() + kLine);
  b.resize(b.size() + kLine);
  return add(size(x), {x}, [groups, a, b, eps](const LastImage* in, const LastImage& out) {
    active_channels_last().group_norm(in[0], groups, a.data(), b.data(), eps, out);
  });
}

int FloatPlan::attention(const int (&qkv)[3], const PlanHeads& heads, int mask) {
  std::vector<int> in;
  for (int i = 0; i < 3; ++i) {
    in.push_back(last(qkv[i]));
    const Size& s = size(in[i]);
    const int64_t width = i == 2 ? heads.value_dim : heads.dim,
                  end = heads.first[i] + (heads.count - 1) * heads.step[i] + width;
    require(heads.count > 0 && width > 0 && heads.first[i] >= 0 && heads.step[i] >= 0 && end <= s.c,
            "the heads lie outside the channels");
    require(s.h == 1 && s.n == size(in[0]).n && (i < 2 || s.w == size(in[1]).w),
            "queries, keys and values do not belong together");
  }
  const Size to{size(in[0]).n, heads.count * heads.value_dim, 1, size(in[0]).w};
  const bool masked = mask >= 0;
  if (masked) {
    const Size& m = size(mask);
    const bool fits = (m.n == 1 || m.n == to.n) && (m.c == 1 || m.c == heads.count) && (m.h == 1 || m.h == to.w) &&
                      m.w == size(in[1]).w;
    require(fits, "the mask has not the shape of the scores");
    in.push_back(mask);
  }
  return add(to, in,
             [heads, masked](const LastImage* from, const LastImage& out) { attend(from, masked, heads, out); });
}

void FloatPlan::output(int value, bool last) {
  value = this->last(value);
  outputs_.push_back({value, last});
}

std::vector<FloatPlan::Size> FloatPlan::outputs() const {
  std::vector<Size> sizes;
  for (const Output& output : outputs_) sizes.push_back(size(output.value));
  return sizes;
}

// --- placing ---

FloatPlan::Place FloatPlan::place(int value) const {
  Place found{value, 0};
  while (values_[found.root].parent >= 0) {
    found.channel += values_[found.root].first;
    found.root = values_[found.root].parent;
  }
  return found;
}

// Gives every part that has no place yet its place in the concatenation. Where all have one, side by side in one
// buffer, the concatenation lies there itself; what lies elsewhere is copied.
void FloatPlan::home_parts(std::size_t index) {
  Concat& concat = concats_[index];
  const Place first = place(concat.parts[0]);
  int64_t channel = first.channel;
  bool together = true;
  for (int part : concat.parts) {
    const Place p = place(part);
    together = together && p.root == first.root && p.channel == channel && p.root != part;
    channel += size(part).c;
  }
  if (together && values_[concat.value].parent < 0) {
    values_[concat.value].parent = first.root;
    values_[concat.value].first = first.channel;
    return;
  }
  channel = 0;
  std::vector<Step> copies;
  for (int part : concat.parts) {
    Value& value = values_[part];
    const bool free = value.parent < 0 && value.input < 0 && place(concat.value).root != part;
    if (free) {
      value.parent = concat.value;
      value.first = channel;
    } else {
      const int copy = slice(concat.value, channel, size(part).c);
      copies.push_back({{part}, copy, [](const LastImage* in, const LastImage& out) {
                          active_channels_last().affine(in[0], nullptr, nullptr, ConvActivation::none, out);
                        }});
    }
    channel += size(part).c;
  }
  steps_.insert(steps_.begin() + static_cast<std::ptrdiff_t>(concat.step), copies.begin(), copies.end());
  for (std::size_t later = index + 1; later < concats_.size(); ++later) concats_[later].step += copies.size();
}

// How often each value is read, by steps, as a part of another or as a result.
std::vector<int> FloatPlan::readers() const {
  std::vector<int> count(values_.size(), 0);
  for (const Step& step : steps_) {
    for (int value : step.in) ++count[value];
  }
  for (const Value& value : values_) {
    if (value.parent >= 0) ++count[value.parent];
  }
  for (const Concat& concat : concats_) {
    for (int part : concat.parts) ++count[part];
  }
  for (const Output& output : outputs_) ++count[output.value];
  return count;
}

// A 1x1 convolution that only a depthwise one reads becomes one step with it: what lies between has no buffer.
void FloatPlan::join_pairs() {
  const std::vector<int> count = readers();
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    const Step& first = steps_[i];
    const bool alone =
        first.layer != nullptr && count[first.out] == 1 && first.in.size() == 1 && values_[first.in[0]].input < 0;
    if (!alone) continue;
    const auto next =
        std::find_if(steps_.begin() + static_cast<std::ptrdiff_t>(i), steps_.end(), [&](const Step& step) {
          const bool reads =
              step.layer != nullptr && step.in[0] == first.out && values_[step.out].algorithm == ConvAlgorithm::direct;
          return reads && first.layer->pairs_with(*step.layer);
        });
    if (next == steps_.end()) continue;
    next->run = [layer = first.layer, then = next->layer, adds = next->in.size() > 1](const LastImage* in,
                                                                                      const LastImage& out) {
      layer->run_pair(*then, in[0], adds ? &in[1] : nullptr, out);
    };
    next->in[0] = first.in[0];
    next->layer = nullptr;
    steps_.erase(steps_.begin() + static_cast<std::ptrdiff_t>(i));
    for (Concat& concat : concats_) concat.step -= concat.step > i ? 1 : 0;
    --i;
  }
}

void FloatPlan::finish() {
  require(!finished_, "this plan is finished");
  require(!outputs_.empty(), "a plan has a result");
  join_pairs();
  for (std::size_t i = concats_.size(); i-- > 0;) home_parts(i);  // the last first: earlier ones lie inside later ones
  place_buffers();
  finished_ = true;
}

// The largest first, each at the lowest address where it overlaps nothing that lives at the same time.
void FloatPlan::place_buffers() {
  struct Life {
    int root;
    int64_t floats;
    int first, last;
  };
  std::vector<Life> lives(values_.size(), Life{-1, 0, -1, -1});
  const auto seen = [&](int value, int step) {
    const int root = place(value).root;
    Life& life = lives[root];
    if (life.root < 0) life = {root, 0, step, step};
    life.last = std::max(life.last, step);
  };
  for (std::size_t i = 0; i < steps_.size(); ++i) {
    seen(steps_[i].out, static_cast<int>(i));
    for (int value : steps_[i].in) {
      if (values_[value].input < 0) seen(value, static_cast<int>(i));
    }
  }
  for (const Output& output : outputs_) seen(output.value, static_cast<int>(steps_.size()));
  std::vector<Life> order;
  for (Life& life : lives) {
    if (life.root < 0) continue;
    const Size& s = size(life.root);
    life.floats = round_up(s.n * s.h * s.w * pitch(life.root) + kLine);
    order.push_back(life);
  }
  std::stable_sort(order.begin(), order.end(), [](const Life& a, const Life& b) { return a.floats > b.floats; });
  std::vector<Life> placed;
  for (const Life& life : order) {
    std::vector<std::pair<int64_t, int64_t>> taken;
    for (const Life& other : placed) {
      const int64_t at = values_[other.root].offset;
      if (other.first <= life.last && life.first <= other.last) taken.push_back({at, at + other.floats});
    }
    std::sort(taken.begin(), taken.end());
    int64_t at = 0;
    for (const auto& [begin, end] : taken) {
      if (begin >= at + life.floats) break;
      at = std::max(at, end);
    }
    values_[life.root].offset = at;
    arena_floats_ = std::max(arena_floats_, at + life.floats);
    placed.push_back(life);
  }
}

int64_t FloatPlan::pitch(int root) const { return pitch_of(values_[root].size.c); }

// --- running ---

LastImage FloatPlan::image(int value, const std::vector<const float*>& in, float* arena) const {
  const Size& s = values_[value].size;
  if (values_[value].input >= 0)
    return {const_cast<float*>(in[values_[value].input]), values_[value].last ? s.c : 0, s.n, s.c, s.h, s.w};
  const Place p = place(value);
  return {arena + values_[p.root].offset + p.channel, pitch(p.root), s.n, s.c, s.h, s.w};
}

void FloatPlan::run(const std::vector<const float*>& in, const std::vector<float*>& out, int64_t* step_ns) const {
  require(finished_, "this plan is not finished");
  Buffer<float> arena;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!free_.empty()) {
      arena = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (arena.size() == 0 && arena_floats_ > 0) {
    arena = Buffer<float>(static_cast<std::size_t>(arena_floats_));
    std::fill(arena.data(), arena.data() + arena_floats_, 0.0f);  // what lies past a pixel's channels is a number
  }
  for (const Step& step : steps_) {
    const auto start = step_ns == nullptr ? std::chrono::steady_clock::time_point() : std::chrono::steady_clock::now();
    LastImage from[4] = {};
    for (std::size_t i = 0; i < step.in.size(); ++i) from[i] = image(step.in[i], in, arena.data());
    step.run(from, image(step.out, in, arena.data()));
    if (step_ns != nullptr)
      step_ns[step.out] = std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
  }
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    const LastImage from = image(outputs_[i].value, in, arena.data());
    LastImage to = from;
    to.data = out[i], to.pitch = from.c;
    outputs_[i].last ? copy_pixels(from, to) : active_channels_last().to_planes(from, to);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (free_.size() < kArenas) free_.push_back(std::move(arena));
}

}  // namespace tw
