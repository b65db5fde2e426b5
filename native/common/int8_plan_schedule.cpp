// A place for every value of a plan. Those with a frame keep a buffer of their own, or follow one that has the same
// frame; all others follow each other in one pool. Steps with much between them become chains, and the last ones, on
// little, a part of their own.
#include "common/int8_plan_schedule.h"

#include <algorithm>
#include <stdexcept>

#include "common/machine.h"

namespace tw {
namespace {

constexpr std::size_t kSchedules = 4;  // kept for the next call

bool same_size(const PlanShape& a, const PlanShape& b) {
  return a.channels == b.channels && a.height == b.height && a.width == b.width;
}

// Memory for values one after the other: a new one takes the first place that is free, so that little memory, used a
// moment ago, is all there is. Sizes and places are bytes of one image.
class Pool {
 public:
  // The place of what is made by step `now` and last read by step `until`.
  int64_t take(int64_t bytes, std::size_t now, std::size_t until) {
    taken_.erase(std::remove_if(taken_.begin(), taken_.end(), [&](const Taken& t) { return t.until < now; }),
                 taken_.end());
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

bool PlanShape::same_buffer(const PlanShape& other) const {
  return bytes && other.bytes && size == other.size && pixel() == other.pixel() && height == other.height &&
         width == other.width && border == other.border && zero == other.zero;
}

// Every value lies in the buffer of its root, at a channel of it. All values of a buffer have its pitch and the widest
// frame that one of them wants.
struct Int8Plan::Families {
  std::vector<int> parent;       // the value in whose buffer it lies, or -1
  std::vector<int64_t> channel;  // where in it
  std::vector<bool> views;       // per step: nothing to do

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

// What is taken while places are given.
struct Int8Plan::Spaces {
  std::vector<std::size_t> last_use;    // by the value whose buffer it is: the step
  int between = -1;                     // the root value that one part leaves to the other
  Pool pools[2];                        // of values without a frame
  std::vector<std::size_t> busy_until;  // per buffer: the last step that reads what it holds
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
  Spaces spaces;
  spaces.last_use.resize(values, 0);
  for (std::size_t step = 0; step < steps_.size(); ++step) {
    const std::size_t when = s.chain_of[step] < 0 ? step : s.chains[s.chain_of[step]].last;
    for (int value : steps_[step].inputs) spaces.last_use[found.root(value)] = when;
  }
  const Tail tail = find_tail(s, found);
  s.parts[0].last = s.parts[1].first = tail.first;
  s.parts[1].last = steps_.size();
  spaces.between = tail.value;
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
        if (found.parent[part] != value || found.channel[part] != channel)
          s.copied[step].push_back(static_cast<int>(i));
        channel += s.shapes[part].channels;
      }
    }
    if (s.places[root].kind == Schedule::kInput && root >= static_cast<int>(inputs_.size())) {  // not placed yet
      s.places[root] = {space_for(s, found, spaces, step, root)};
    }
    s.places[value] = s.places[root];
    s.places[value].offset = offset;
  }
  for (int i = 0; i < 2; ++i) {
    Schedule::Part& part = s.parts[i];
    part.pool = spaces.pools[i].size;
    part.max_chunk = std::max<int64_t>(1, Schedule::kArenaBytes / std::max<int64_t>(1, part.pool + part.framed));
    for (std::size_t step = part.first; step < part.last; ++step) {
      part.multiply_adds += steps_[step].op->multiply_adds(s.shapes[inputs_.size() + step]);
    }
  }
  schedules_.insert(schedules_.begin(), made);
  if (schedules_.size() > kSchedules) schedules_.pop_back();
  return made;
}

// The buffer, new or left by others, of a value that the step makes a part of.
int Int8Plan::space_for(Schedule& s, const Families& found, Spaces& spaces, std::size_t step, int root) const {
  const PlanShape& whole = s.shapes[root];
  const std::size_t until = std::max(step, spaces.last_use[root]);
  const int64_t bytes = round_up(std::max<int64_t>(1, whole.storage()), 64);
  const int part = root == spaces.between ? Schedule::kBatch : step >= s.parts[1].first;
  int64_t offset = 0;
  if (part == Schedule::kBatch) {
    s.batch_bytes = whole.storage();
  } else if (whole.border > 0) {  // its frame is filled once: only what has the same one follows it
    for (std::size_t b = 0; b < s.buffers.size(); ++b) {
      if (spaces.busy_until[b] >= step || s.buffers[b].part != part || !s.buffers[b].shape.same_buffer(whole)) continue;
      spaces.busy_until[b] = until;
      return static_cast<int>(b);
    }
    offset = s.parts[part].framed;
    s.parts[part].framed += bytes;
  } else if (const int replaced = replaces(s, found, spaces, step); replaced >= 0) {
    offset = s.buffers[s.places[replaced].kind].offset;
    spaces.pools[part].keep(offset, until);
  } else {
    offset = spaces.pools[part].take(bytes, step, until);
  }
  s.buffers.push_back({whole, offset, part});
  spaces.busy_until.push_back(until);
  return static_cast<int>(s.buffers.size()) - 1;
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

// The last steps, in which an image is small, and that all begin with one value: of such a cut that little must be read
// for an image, of weights, which many images can have in common where all these fit into the cache, and of the value
// between.
Int8Plan::Tail Int8Plan::find_tail(const Schedule& s, const Families& found) const {
  const int inputs = static_cast<int>(inputs_.size());
  const auto images = [&](std::size_t first, std::size_t last) {
    return std::max<int64_t>(1, Schedule::kArenaBytes / std::max<int64_t>(1, image_bytes(s, first, last)));
  };
  int64_t weights = 0;
  for (const Step& step : steps_) weights += step.op->weight_bytes();
  Tail tail{steps_.size(), -1};
  int64_t least = weights / images(0, steps_.size()), behind = 0;
  for (std::size_t step = steps_.size(); step-- > 0;) {
    const int value = inputs + static_cast<int>(step);
    if (s.chain_of[step] >= 0) break;
    behind += steps_[step].op->weight_bytes();
    // Buffers, by their root value, that these steps read and earlier steps wrote. A view or slice is stored in the
    // buffer of its root, so the root is the value that must outlive the first stage, whichever of its views is read.
    std::vector<int> crossing;
    for (std::size_t i = step; i < steps_.size(); ++i) {
      for (int source : steps_[i].inputs) {
        const int root = found.root(source);
        if (source < value && std::find(crossing.begin(), crossing.end(), root) == crossing.end())
          crossing.push_back(root);
      }
    }
    if (crossing.size() != 1 || crossing[0] < inputs || s.places[crossing[0]].kind == Schedule::kOutput ||
        !s.shapes[crossing[0]].bytes)
      continue;
    // No other buffer may hold values of both stages: each stage has an arena of its own.
    bool separate = true;
    for (int v = inputs; v < static_cast<int>(s.shapes.size()); ++v) {
      const int root = found.root(v);
      separate = separate && (v < value ? root < value : root >= value || root == crossing[0]);
    }
    const int64_t read = (weights - behind) / images(0, step) + behind / images(step, steps_.size()) +
                         2 * s.shapes[crossing[0]].storage();
    if (separate && read < least) {
      least = read;
      tail = {step, crossing[0]};
    }
  }
  return tail;
}

// The value whose place a step's result may take while it is made: its first input's, which nobody reads then and
// nothing else lies in.
int Int8Plan::replaces(const Schedule& s, const Families& found, const Spaces& spaces, std::size_t step) const {
  const int value = static_cast<int>(inputs_.size() + step), source = steps_[step].inputs[0];
  const bool chained = s.chain_of[step] >= 0, alone = found.root(value) == value && found.root(source) == source;
  if (chained || !alone || s.places[source].kind < 0 || spaces.last_use[source] != step) return -1;
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

// Steps that follow each other with more between them than the second-level cache holds beside other things, and
// weights that can be read again for every band.
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
    const bool own =
        readers[value] == 1 && kin[value] == 1 && found.parent[value] < 0 && s.places[value].kind != Schedule::kOutput;
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
    if (source < static_cast<int>(inputs_.size()) || !inside(source))
      continue;  // whose frames are as the caller has them
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
      // A layer writes whole groups of four channels where the pitch is its own, and so would overwrite other parts.
      const bool fills_pixel = s.shapes[part].tight() == s.shapes[f.root(value)].tight();
      const bool own = maker >= 0 && f.parent[part] < 0 && f.root(value) != part && !fills_pixel &&
                       steps_[maker].op->writes_any_pitch();
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

}  // namespace tw
