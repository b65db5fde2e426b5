#include "common/int8_plan.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "common/int8_plan_bands.h"
#include "common/machine.h"
#include "common/thread_pool.h"

namespace tw {
namespace {

constexpr std::size_t kKeptBatch = 8 << 20;       // more memory of a batch is given back
constexpr int64_t kArenaBytes = 512 << 10;       // of one chunk: half of a usual second-level cache, the rest for weights
constexpr int64_t kWorthAThread = 1 << 20;       // multiply-adds that take as long as waking a thread
constexpr int64_t kPastEnd = 64;                 // a slice's last group of four may reach past its buffer
constexpr std::size_t kSchedules = 4, kArenas = 16;  // kept for the next call

bool same_size(const PlanShape& a, const PlanShape& b) {
  return a.channels == b.channels && a.height == b.height && a.width == b.width;
}

}  // namespace

bool PlanShape::same_buffer(const PlanShape& other) const {
  return bytes && other.bytes && size == other.size && pixel() == other.pixel() && height == other.height &&
         width == other.width && border == other.border && zero == other.zero;
}

namespace {

// Memory for values one after the other: a new one takes the first place that is free, so that little memory, used a moment ago, is
// all there is. Sizes and places are bytes of one image.
class Pool {
 public:
  // The place of what is made by step `now` and last read by step `until`.
  int64_t take(int64_t bytes, std::size_t now, std::size_t until) {
    taken_.erase(std::remove_if(taken_.begin(), taken_.end(), [&](const Taken& t) { return t.until < now; }), taken_.end());
    int64_t begin = 0;
    auto next = taken_.begin();
    for (; next != taken_.end() && next->begin - begin < bytes; ++next) begin = std::max(begin, next->end);
    taken_.insert(next, {begin, begin + bytes, until});
    size = std::max(size, begin + bytes);
    return begin;
  }

  // What lies there is followed, in its place, by something that is read longer.
  void keep(int64_t begin, std::size_t until) {
    for (Taken& t : taken_) {
      if (t.begin == begin) t.until = std::max(t.until, until);
    }
  }

  int64_t size = 0;

 private:
  struct Taken {
    int64_t begin, end;
    std::size_t until;
  };
  std::vector<Taken> taken_;  // by their places
};

}  // namespace

// Where every value lies, for one size of input.
class Int8Plan::Schedule {
 public:
  static constexpr int kInput = -1, kOutput = -2;  // places that are no buffers of the arena
  struct Place {
    int kind;            // kInput, kOutput, or the buffer
    int index = 0;       // which input or output
    int64_t offset = 0;  // of its first channel
  };

  std::vector<PlanShape> shapes;  // per value
  std::vector<Place> places;
  std::vector<bool> skipped;      // per step: its result is its input's bytes
  std::vector<std::vector<int>> copied;  // per concatenation: the parts that lie elsewhere
  std::vector<int> outputs;
  std::vector<Chain> chains;
  std::vector<int> chain_of;      // per step: the chain that it is in, or -1
  int64_t band_bytes = 0;         // for the bands of any chain

  // Steps that a chunk of images goes through before the next one: all but the last, and the last, where an image is so small that many
  // are run at once.
  struct Cut {  // of a batch
    int64_t chunk, chunks, workers;
  };
  struct Part {
    std::size_t first = 0, last = 0;
    int64_t pool = 0, framed = 0;  // bytes of an image: of values without a frame, and of those with one
    int64_t max_chunk = 1, multiply_adds = 0;

    Cut cut(int64_t images) const {
      int64_t threads = std::min<int64_t>(num_threads(), std::max<int64_t>(1, images * multiply_adds / kWorthAThread));
      if (images < threads) threads = 1;  // too few images to share: the products of a layer are shared instead
      const int64_t chunks_wanted = round_up((images + max_chunk - 1) / max_chunk, threads);
      const int64_t chunk = (images + chunks_wanted - 1) / chunks_wanted, chunks = (images + chunk - 1) / chunk;
      return {chunk, chunks, std::min(threads, chunks)};
    }
  };
  Part parts[2];

  // A buffer lies in the arena of its part, `offset` for one image, times the arena's images; what one part leaves to the other lies in the
  // memory of a whole batch.
  static constexpr int kBatch = 2;
  struct Space {
    PlanShape shape;
    int64_t offset;
    int part;
  };
  std::vector<Space> buffers;
  int64_t batch_bytes = 0;  // of an image, of what lies in the memory of a batch

  // The buffers between the steps, for so many images of each part: as many as a chunk has, so a small batch takes little memory. The
  // parts have the memory of values without a frame in common, since a thread is in one of them.
  struct Arena {
    int64_t images[2], threads;  // as many threads may be in a chain
    Buffer<uint8_t> bytes;
    bool holds(const int64_t (&wanted)[2], int64_t in_chain) const {
      return images[0] >= wanted[0] && images[1] >= wanted[1] && threads >= in_chain;
    }
  };

  int64_t framed_at(const int64_t (&images)[2], int part) const {
    const int64_t begin = round_up(std::max(parts[0].pool * images[0], parts[1].pool * images[1]), 64);
    return part == 0 ? begin : begin + parts[0].framed * images[0];
  }
  int64_t bands_at(const int64_t (&images)[2]) const {
    return round_up(framed_at(images, 1) + parts[1].framed * images[1] + kPastEnd, 64);
  }
  int64_t at(const Space& b, const int64_t (&images)[2]) const {
    return (b.shape.border > 0 ? framed_at(images, b.part) : 0) + b.offset * images[b.part];
  }

  Arena take_arena(const int64_t (&images)[2], int64_t threads) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (!free_.empty()) {
        Arena arena = std::move(free_.back());
        free_.pop_back();
        if (arena.holds(images, threads)) return arena;  // a smaller one is let go, and a larger one takes its place
      }
    }
    Arena arena{{images[0], images[1]}, threads, Buffer<uint8_t>(bands_at(images) + band_bytes * threads)};
    for (const Space& b : buffers) {
      if (b.shape.bytes && b.part != kBatch) fill_border(b.shape.image(images[b.part]), b.shape.zero, arena.bytes.data() + at(b, images));
    }
    return arena;
  }

  // The memory of so many images or more.
  Buffer<uint8_t> take_batch(int64_t images) {
    if (batch_bytes == 0) return {};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!free_batches_.empty() && static_cast<int64_t>(free_batches_.back().size()) >= batch_bytes * images + kPastEnd) {
        Buffer<uint8_t> batch = std::move(free_batches_.back());
        free_batches_.pop_back();
        return batch;
      }
      free_batches_.clear();
    }
    Buffer<uint8_t> batch(batch_bytes * images + kPastEnd);
    for (const Space& b : buffers) {
      if (b.shape.bytes && b.part == kBatch) fill_border(b.shape.image(images), b.shape.zero, batch.data());
    }
    return batch;
  }

  void give_back(std::vector<Arena>& arenas, Buffer<uint8_t>& batch) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Arena& arena : arenas) {
      if (free_.size() < kArenas) free_.push_back(std::move(arena));
    }
    if (batch.size() > 0 && batch.size() <= kKeptBatch && free_batches_.size() < kArenas) free_batches_.push_back(std::move(batch));
  }

 private:
  std::mutex mutex_;
  std::vector<Arena> free_;
  std::vector<Buffer<uint8_t>> free_batches_;
};

int Int8Plan::add_input(const PlanShape& shape) {
  if (!steps_.empty()) throw std::invalid_argument("inputs come before operations");
  inputs_.push_back(shape);
  return static_cast<int>(inputs_.size()) - 1;
}

int Int8Plan::add(std::unique_ptr<Int8Op> op, std::vector<int> inputs) {
  for (int value : inputs) check_value(value);
  if (inputs.empty() || (inputs.size() > 2 && !op->is_concat())) throw std::invalid_argument("an operation reads one value or two");
  steps_.push_back({std::move(op), std::move(inputs)});
  return static_cast<int>(inputs_.size() + steps_.size()) - 1;
}

void Int8Plan::add_output(int value) {
  check_value(value);
  if (value < static_cast<int>(inputs_.size())) throw std::invalid_argument("an input cannot be an output");
  if (std::count(outputs_.begin(), outputs_.end(), value) != 0) throw std::invalid_argument("this is an output already");
  outputs_.push_back(value);
}

void Int8Plan::check_value(int value) const {
  if (value < 0 || value >= static_cast<int>(inputs_.size() + steps_.size())) {
    throw std::invalid_argument("there is no such value in this plan");
  }
}

const PlanShape& Int8Plan::output_shape(const Schedule& schedule, std::size_t index) {
  return schedule.shapes[schedule.outputs[index]];
}

// Every value lies in the buffer of its root, at a channel of it. All values of a buffer have its pitch and the widest frame
// that one of them wants.
struct Int8Plan::Families {
  std::vector<int> parent;          // the value in whose buffer it lies, or -1
  std::vector<int64_t> channel;     // where in it
  std::vector<bool> views;          // per step: nothing to do

  int root(int value) const {
    while (parent[value] >= 0) value = parent[value];
    return value;
  }
  int64_t first(int value) const {
    int64_t at = 0;
    for (; parent[value] >= 0; value = parent[value]) at += channel[value];
    return at;
  }
};

std::shared_ptr<Int8Plan::Schedule> Int8Plan::schedule(const std::vector<PlanShape>& inputs) const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (std::size_t i = 0; i < schedules_.size(); ++i) {
    if (std::equal(inputs.begin(), inputs.end(), schedules_[i]->shapes.begin(), same_size)) {
      std::rotate(schedules_.begin(), schedules_.begin() + i, schedules_.begin() + i + 1);
      return schedules_.front();
    }
  }
  auto made = std::make_shared<Schedule>();
  Schedule& s = *made;
  const std::size_t values = inputs_.size() + steps_.size();
  s.shapes = inputs;
  s.outputs = outputs_;
  s.places.resize(values, {Schedule::kInput});
  s.skipped.resize(steps_.size(), false);
  for (std::size_t i = 0; i < inputs_.size(); ++i) s.places[i].index = static_cast<int>(i);
  for (std::size_t i = 0; i < outputs_.size(); ++i) s.places[outputs_[i]] = {Schedule::kOutput, static_cast<int>(i)};

  s.copied.resize(steps_.size());
  for (const Step& step : steps_) {
    std::vector<PlanShape> in;
    for (int source : step.inputs) {
      in.push_back(s.shapes[source]);
      if (in.back().wide() && !step.op->reads_wide()) throw std::invalid_argument("this operation reads bytes");
    }
    s.shapes.push_back(step.op->result(in));
  }
  const Families found = families(s);
  find_chains(s, found);
  std::vector<std::size_t> last_use(values, 0);  // by the value whose buffer it is
  for (std::size_t step = 0; step < steps_.size(); ++step) {
    const std::size_t when = s.chain_of[step] < 0 ? step : s.chains[s.chain_of[step]].last;
    for (int value : steps_[step].inputs) last_use[found.root(value)] = when;
  }
  const Tail tail = find_tail(s, found);
  s.parts[0].last = s.parts[1].first = tail.first;
  s.parts[1].last = steps_.size();
  Pool pools[2];                        // of values without a frame
  std::vector<std::size_t> busy_until;  // per buffer: the last step that reads what it holds
  for (std::size_t step = 0; step < steps_.size(); ++step) {
    const int value = static_cast<int>(inputs_.size() + step), root = found.root(value);
    const int64_t offset = found.first(value) * s.shapes[value].size;
    s.skipped[step] = found.views[step];
    if (s.chain_of[step] >= 0 && s.chains[s.chain_of[step]].last != step) {  // its result is never whole
      s.skipped[step] = true;
      continue;
    }
    if (steps_[step].op->is_concat()) {
      int64_t channel = 0;
      for (std::size_t i = 0; i < steps_[step].inputs.size(); ++i) {
        const int part = steps_[step].inputs[i];
        if (found.parent[part] != value || found.channel[part] != channel) s.copied[step].push_back(static_cast<int>(i));
        channel += s.shapes[part].channels;
      }
    }
    if (s.places[root].kind == Schedule::kInput && root >= static_cast<int>(inputs_.size())) {  // not placed yet
      const PlanShape& whole = s.shapes[root];
      const std::size_t until = std::max(step, last_use[root]);
      const int64_t bytes = round_up(std::max<int64_t>(1, whole.storage()), 64);
      const int part = root == tail.value ? Schedule::kBatch : step >= tail.first;
      std::size_t buffer = s.buffers.size();
      if (part != Schedule::kBatch && whole.border > 0) {  // its frame is filled once: only what has the same one follows it
        const auto follows = [&](const Schedule::Space& b) { return b.part == part && b.shape.same_buffer(whole); };
        buffer = 0;
        while (buffer < s.buffers.size() && !(busy_until[buffer] < step && follows(s.buffers[buffer]))) ++buffer;
      }
      if (buffer == s.buffers.size()) {
        int64_t offset = 0;
        if (part == Schedule::kBatch) {
          s.batch_bytes = whole.storage();
        } else if (whole.border > 0) {
          offset = s.parts[part].framed;
          s.parts[part].framed += bytes;
        } else if (const int replaced = replaces(s, found, step, last_use); replaced >= 0) {
          offset = s.buffers[s.places[replaced].kind].offset;
          pools[part].keep(offset, until);
        } else {
          offset = pools[part].take(bytes, step, until);
        }
        s.buffers.push_back({whole, offset, part});
        busy_until.push_back(0);
      }
      busy_until[buffer] = until;
      s.places[root] = {static_cast<int>(buffer)};
    }
    s.places[value] = s.places[root];
    s.places[value].offset = offset;
  }
  for (int i = 0; i < 2; ++i) {
    Schedule::Part& part = s.parts[i];
    part.pool = pools[i].size;
    part.max_chunk = std::max<int64_t>(1, kArenaBytes / std::max<int64_t>(1, part.pool + part.framed));
    for (std::size_t step = part.first; step < part.last; ++step) {
      part.multiply_adds += steps_[step].op->multiply_adds(s.shapes[inputs_.size() + step]);
    }
  }
  schedules_.insert(schedules_.begin(), made);
  if (schedules_.size() > kSchedules) schedules_.pop_back();
  return made;
}

// Bytes of an image in the steps [first, last), about: two values without a frame, and one of each kind with one.
int64_t Int8Plan::image_bytes(const Schedule& s, std::size_t first, std::size_t last) const {
  int64_t largest = 0, framed = 0;
  std::vector<const PlanShape*> kinds;
  for (std::size_t step = first; step < last; ++step) {
    const PlanShape& shape = s.shapes[inputs_.size() + step];
    if (s.chain_of[step] >= 0 && s.chains[s.chain_of[step]].last != step) continue;
    if (shape.border == 0) {
      largest = std::max(largest, shape.storage());
    } else if (std::none_of(kinds.begin(), kinds.end(), [&](const PlanShape* k) { return k->same_buffer(shape); })) {
      kinds.push_back(&shape);
      framed += shape.storage();
    }
  }
  return 2 * largest + framed;
}

// The last steps, in which an image is small, and that all begin with one value: of such a cut that little must be read for an image,
// of weights, which many images can have in common where all these fit into the cache, and of the value between.
Int8Plan::Tail Int8Plan::find_tail(const Schedule& s, const Families& found) const {
  const int inputs = static_cast<int>(inputs_.size());
  const auto images = [&](std::size_t first, std::size_t last) {
    return std::max<int64_t>(1, kArenaBytes / std::max<int64_t>(1, image_bytes(s, first, last)));
  };
  int64_t weights = 0;
  for (const Step& step : steps_) weights += step.op->weight_bytes();
  Tail tail{steps_.size(), -1};
  int64_t least = weights / images(0, steps_.size()), behind = 0;
  for (std::size_t step = steps_.size(); step-- > 0;) {
    const int value = inputs + static_cast<int>(step);
    if (s.chain_of[step] >= 0) break;
    behind += steps_[step].op->weight_bytes();
    std::vector<int> before;  // that steps from this one on read
    for (std::size_t i = step; i < steps_.size(); ++i) {
      for (int source : steps_[i].inputs) {
        if (source < value && std::find(before.begin(), before.end(), source) == before.end()) before.push_back(source);
      }
    }
    if (before.size() != 1 || before[0] < inputs || s.places[before[0]].kind == Schedule::kOutput || !s.shapes[before[0]].bytes) continue;
    bool own = true;  // values of earlier steps and of these do not lie in each other, but for the one that both know
    for (int v = inputs; v < static_cast<int>(s.shapes.size()); ++v) {
      const int root = found.root(v);
      own = own && (v < value ? root == v || (root < value && root != before[0]) : root >= value || root == before[0]);
    }
    const int64_t read = (weights - behind) / images(0, step) + behind / images(step, steps_.size()) + 2 * s.shapes[before[0]].storage();
    if (own && read < least) {
      least = read;
      tail = {step, before[0]};
    }
  }
  return tail;
}

// The value whose place a step's result may take while it is made: its first input's, which nobody reads then and nothing else lies in.
int Int8Plan::replaces(const Schedule& s, const Families& found, std::size_t step, const std::vector<std::size_t>& last_use) const {
  const int value = static_cast<int>(inputs_.size() + step), source = steps_[step].inputs[0];
  const bool chained = s.chain_of[step] >= 0, alone = found.root(value) == value && found.root(source) == source;
  if (chained || !alone || s.places[source].kind < 0 || last_use[source] != step) return -1;
  if (s.buffers[s.places[source].kind].part != (step >= s.parts[1].first)) return -1;
  const PlanShape &in = s.shapes[source], &out = s.shapes[value];
  const bool same = in.bytes && out.bytes && in.storage() == out.storage() && in.border == 0 && out.border == 0;
  return same && steps_[step].op->in_place(in, out) ? source : -1;
}

std::vector<BandStep> Int8Plan::steps_of(const Schedule& s, std::size_t first, std::size_t last) const {
  std::vector<BandStep> found;
  for (std::size_t step = first; step <= last; ++step) {
    const std::vector<int>& in = steps_[step].inputs;
    const PlanShape* skip = in.size() > 1 ? &s.shapes[in[1]] : nullptr;
    found.push_back({steps_[step].op.get(), &s.shapes[in[0]], skip, nullptr, &s.shapes[inputs_.size() + step]});
  }
  return found;
}

// Steps that follow each other with more between them than the second-level cache holds beside other things, and weights that can be
// read again for every band.
void Int8Plan::find_chains(Schedule& s, const Families& found) const {
  const int64_t cache = cache_sizes().l2;
  std::vector<int> readers(s.shapes.size(), 0), kin(s.shapes.size(), 0);
  for (const Step& step : steps_) {
    for (int value : step.inputs) ++readers[value];
  }
  for (std::size_t value = 0; value < s.shapes.size(); ++value) ++kin[found.root(static_cast<int>(value))];
  const auto in_rows = [&](std::size_t step) {
    const PlanShape& out = s.shapes[inputs_.size() + step];
    const bool alone = !found.views[step] && out.bytes && !out.rows && s.shapes[steps_[step].inputs[0]].bytes;
    return alone && steps_[step].op->reach().rows > 0 && steps_[step].op->weight_bytes() <= cache / 8;
  };
  const auto goes_on = [&](std::size_t step) {  // into the next one
    const int value = static_cast<int>(inputs_.size() + step);
    if (step + 1 >= steps_.size() || !in_rows(step + 1) || steps_[step + 1].inputs[0] != value) return false;
    const bool own = readers[value] == 1 && kin[value] == 1 && found.parent[value] < 0 && s.places[value].kind != Schedule::kOutput;
    return own && s.shapes[value].storage() > cache / 2;
  };
  s.chain_of.assign(steps_.size(), -1);
  for (std::size_t step = 0; step < steps_.size(); ++step) {
    if (!in_rows(step) || !goes_on(step)) continue;
    std::size_t last = step + 1;
    while (goes_on(last)) ++last;
    Chain chain = cut_chain(steps_of(s, step, last), cache / 4);
    chain.first = step;
    chain.last = last;
    for (std::size_t i = step; i <= last; ++i) s.chain_of[i] = static_cast<int>(s.chains.size());
    s.band_bytes = std::max(s.band_bytes, round_up(chain.bytes, 64));
    s.chains.push_back(chain);
    step = last;
  }
}

Int8Plan::Families Int8Plan::families(Schedule& s) const {
  const std::size_t values = s.shapes.size();
  Families f{std::vector<int>(values, -1), std::vector<int64_t>(values, 0), std::vector<bool>(steps_.size(), false)};
  std::vector<bool> any_pitch(values, true);  // whoever reads it takes any pitch
  for (const Step& step : steps_) {
    if (!step.op->reads_any_pitch()) any_pitch[step.inputs[0]] = false;
  }
  const auto inside = [&](int value) { return s.places[value].kind != Schedule::kOutput; };
  for (std::size_t step = 0; step < steps_.size(); ++step) {
    const int value = static_cast<int>(inputs_.size() + step), source = steps_[step].inputs[0];
    const bool slice = steps_[step].op->slice_from() >= 0;
    if (!slice || !inside(value) || !any_pitch[value]) continue;
    if (source < static_cast<int>(inputs_.size()) || !inside(source)) continue;  // whose frames are as the caller has them
    f.parent[value] = source;
    f.channel[value] = steps_[step].op->slice_from();
    f.views[step] = true;
  }
  for (std::size_t step = steps_.size(); step-- > 0;) {  // the last first: earlier ones lie inside later ones
    if (!steps_[step].op->is_concat()) continue;
    const int value = static_cast<int>(inputs_.size() + step);
    int64_t channel = 0;
    for (int part : steps_[step].inputs) {
      const int maker = part - static_cast<int>(inputs_.size());
      const bool own = maker >= 0 && f.parent[part] < 0 && f.root(value) != part && steps_[maker].op->writes_any_pitch();
      if (own && any_pitch[part] && inside(part) && inside(f.root(value))) {
        f.parent[part] = value;
        f.channel[part] = channel;
      }
      channel += s.shapes[part].channels;
    }
  }
  std::vector<int> border(values, 0);
  for (std::size_t i = 0; i < values; ++i) {
    const int root = f.root(static_cast<int>(i));
    border[root] = std::max(border[root], s.shapes[i].border);
  }
  for (std::size_t i = inputs_.size(); i < values; ++i) {
    const int root = f.root(static_cast<int>(i));
    if (!s.shapes[i].bytes || root < static_cast<int>(inputs_.size())) continue;
    s.shapes[i].pitch = s.shapes[root].tight();
    s.shapes[i].border = border[root];
  }
  for (std::size_t step = 0; step < steps_.size(); ++step) {  // a view that has another shape, of a buffer known by now
    const int value = static_cast<int>(inputs_.size() + step), source = steps_[step].inputs[0];
    if (!inside(value) || !inside(source) || f.root(source) < static_cast<int>(inputs_.size())) continue;
    if (f.parent[source] >= 0 || !steps_[step].op->is_view(s.shapes[source])) continue;
    f.parent[value] = source;
    f.views[step] = true;
  }
  return f;
}

// A batch on its way through a plan.
struct Int8Plan::Run {
  const Int8Plan& plan;
  const Schedule& s;
  const std::vector<const void*>& in;
  const std::vector<void*>& out;
  uint8_t* batch;

  void chunk(const Schedule::Part& part, int64_t first, int64_t images, Schedule::Arena& arena, const Int8Tile* tiles) const;
};

void Int8Plan::Run::chunk(const Schedule::Part& part, int64_t first, int64_t images, Schedule::Arena& arena,
                          const Int8Tile* tiles) const {
  const std::vector<Step>& steps_ = plan.steps_;
  const std::vector<PlanShape>& inputs_ = plan.inputs_;
  const auto at = [&](int value) -> char* {
    const Schedule::Place place = s.places[value];
    const int64_t skip = first * s.shapes[value].storage();
    if (place.kind == Schedule::kInput) return const_cast<char*>(static_cast<const char*>(in[place.index])) + skip;
    if (place.kind == Schedule::kOutput) return static_cast<char*>(out[place.index]) + skip;
    const Schedule::Space& buffer = s.buffers[place.kind];
    if (buffer.part == Schedule::kBatch) return reinterpret_cast<char*>(batch) + first * s.batch_bytes + place.offset;
    return reinterpret_cast<char*>(arena.bytes.data()) + s.at(buffer, arena.images) + place.offset;
  };
  for (std::size_t step = part.first; step < part.last; ++step) {
    if (s.skipped[step]) continue;
    const Step& current = steps_[step];
    const int value = static_cast<int>(inputs_.size() + step);
    if (current.op->is_concat()) {
      for (int i : s.copied[step]) {
        int64_t channel = 0;
        for (int before = 0; before < i; ++before) channel += s.shapes[current.inputs[before]].channels * s.shapes[value].size;
        const PlanShape* shape = &s.shapes[current.inputs[i]];
        const void* source = at(current.inputs[i]);
        current.op->run(images, &shape, &source, s.shapes[value], at(value) + channel);
      }
      continue;
    }
    if (s.chain_of[step] >= 0) {
      const Chain& chain = s.chains[s.chain_of[step]];
      char* bands = reinterpret_cast<char*>(arena.bytes.data()) + s.bands_at(arena.images);
      std::vector<BandStep> steps = plan.steps_of(s, chain.first, chain.last);
      const int64_t rows = s.shapes[value].height, parts = std::max<int64_t>(1, std::min(arena.threads, rows / chain.rows));
      for (int64_t image = 0; image < images; ++image) {
        for (std::size_t i = 0; i < steps.size(); ++i) {
          const std::vector<int>& inputs = steps_[chain.first + i].inputs;
          if (inputs.size() > 1) steps[i].skipped = at(inputs[1]) + image * steps[i].skip->storage();
        }
        const char* from = at(steps_[chain.first].inputs[0]) + image * steps[0].in->storage();
        char* to = at(value) + image * s.shapes[value].storage();
        parallel_for(static_cast<int>(parts), [&](int part) {
          run_bands(chain, steps, from, to, rows * part / parts, rows * (part + 1) / parts, bands + part * s.band_bytes);
        });
      }
      continue;
    }
    const PlanShape* shapes[2] = {};
    const void* sources[2] = {};
    for (std::size_t i = 0; i < current.inputs.size(); ++i) {
      shapes[i] = &s.shapes[current.inputs[i]];
      sources[i] = at(current.inputs[i]);
    }
    if (tiles != nullptr && tiles[step].mr != 0) {
      current.op->run_tiled(images, sources[0], at(value), tiles[step]);
    } else {
      current.op->run(images, shapes, sources, s.shapes[value], at(value));
    }
  }
}

std::vector<PlanProduct> Int8Plan::products(const Schedule& s, int64_t images) const {
  std::vector<PlanProduct> found;
  if (images == 0) return found;
  found.reserve(slots());
  for (const Schedule::Part& part : s.parts) {
    const Schedule::Cut cut = part.cut(images);
    const int threads = cut.workers == 1 ? num_threads() : 1;  // a product inside a task has its thread alone
    const int64_t last = images - (cut.chunks - 1) * cut.chunk;
    for (std::size_t step = part.first; step < part.last; ++step) {
      const Int8Layer* layer = steps_[step].op->product();
      if (layer == nullptr) continue;
      const int64_t columns = layer->geometry().columns, k = layer->geometry().channels;
      if (cut.chunks > 1) found.push_back({step, step, cut.chunk, columns, k, threads});
      found.push_back({step, steps_.size() + step, last, columns, k, threads});
    }
  }
  return found;
}

void Int8Plan::run(Schedule& s, int64_t images, const std::vector<const void*>& in, const std::vector<void*>& out,
                   const std::vector<Int8Tile>& tiles) const {
  if (images == 0) return;
  const Schedule::Cut cuts[2] = {s.parts[0].cut(images), s.parts[1].cut(images)};
  const int64_t chunks[2] = {cuts[0].chunk, s.batch_bytes > 0 ? cuts[1].chunk : 0};
  // Slots: a step's tile in every chunk but the last, then a step's tile in the last.
  const Int8Tile* slots[2] = {tiles.empty() ? nullptr : tiles.data(), tiles.empty() ? nullptr : tiles.data() + steps_.size()};
  const int64_t workers = std::max(cuts[0].workers, s.batch_bytes > 0 ? cuts[1].workers : 1);
  std::vector<Schedule::Arena> arenas;
  const int64_t in_chain = cuts[0].workers == 1 ? num_threads() : 1;  // a chain inside a task has its thread alone
  for (int64_t i = 0; i < workers; ++i) arenas.push_back(s.take_arena(chunks, in_chain));
  Buffer<uint8_t> batch = s.take_batch(images);
  const Run run{*this, s, in, out, batch.data()};
  for (int i = 0; i < 2; ++i) {
    const Schedule::Part& part = s.parts[i];
    const Schedule::Cut cut = cuts[i];
    if (part.first == part.last) continue;
    std::atomic<int64_t> next{0};
    const auto work = [&](int arena) {
      for (int64_t c = next.fetch_add(1); c < cut.chunks; c = next.fetch_add(1)) {
        run.chunk(part, c * cut.chunk, std::min(cut.chunk, images - c * cut.chunk), arenas[arena], slots[c == cut.chunks - 1]);
      }
    };
    // One worker must not be a task of the pool: from inside a task a layer's product could not be shared.
    if (cut.workers == 1) {
      work(0);
    } else {
      parallel_for(static_cast<int>(cut.workers), [&](int arena) { work(arena); });
    }
  }
  s.give_back(arenas, batch);
}

}  // namespace tw
