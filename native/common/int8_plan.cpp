#include "common/int8_plan.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "common/thread_pool.h"

namespace tw {
namespace {

constexpr int64_t kArenaBytes = 512 << 10;       // of one chunk: half of a usual second-level cache, the rest for weights
constexpr int64_t kWorthAThread = 1 << 20;       // multiply-adds that take as long as waking a thread
constexpr std::size_t kSchedules = 4, kArenas = 16;  // kept for the next call

bool same_size(const PlanShape& a, const PlanShape& b) {
  return a.channels == b.channels && a.height == b.height && a.width == b.width;
}

}  // namespace

bool PlanShape::same_buffer(const PlanShape& other) const {
  return bytes && other.bytes && image(1).pixel == other.image(1).pixel && height == other.height &&
         width == other.width && border == other.border && zero == other.zero;
}

// Where every value lies, for one size of input.
class Int8Plan::Schedule {
 public:
  static constexpr int kInput = -1, kOutput = -2;  // places that are no buffers of the arena
  struct Place {
    int kind;       // kInput, kOutput, or the buffer
    int index = 0;  // which input or output
  };

  std::vector<PlanShape> shapes;  // per value
  std::vector<Place> places;
  std::vector<bool> skipped;      // per step: its result is its input's bytes
  std::vector<int64_t> offsets;   // per buffer, for one image; times the arena's images in an arena
  std::vector<PlanShape> buffers;
  std::vector<int> outputs;
  int64_t image_bytes = 0, max_chunk = 1, multiply_adds = 0;

  // The buffers between the steps, for so many images: as many as a chunk has, so a small batch takes little memory.
  struct Arena {
    int64_t images;
    Buffer<uint8_t> bytes;
  };

  Arena take_arena(int64_t images) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (!free_.empty()) {
        Arena arena = std::move(free_.back());
        free_.pop_back();
        if (arena.images >= images) return arena;  // a smaller one is let go, and a larger one takes its place
      }
    }
    Arena arena{images, Buffer<uint8_t>(std::max<int64_t>(1, image_bytes * images))};
    for (std::size_t b = 0; b < buffers.size(); ++b) {
      if (buffers[b].bytes) fill_border(buffers[b].image(images), buffers[b].zero, arena.bytes.data() + offsets[b] * images);
    }
    return arena;
  }

  void give_back(std::vector<Arena>& arenas) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Arena& arena : arenas) {
      if (free_.size() < kArenas) free_.push_back(std::move(arena));
    }
  }

 private:
  std::mutex mutex_;
  std::vector<Arena> free_;
};

int Int8Plan::add_input(const PlanShape& shape) {
  if (!steps_.empty()) throw std::invalid_argument("inputs come before operations");
  inputs_.push_back(shape);
  return static_cast<int>(inputs_.size()) - 1;
}

int Int8Plan::add(std::unique_ptr<Int8Op> op, std::vector<int> inputs) {
  for (int value : inputs) check_value(value);
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

  std::vector<std::size_t> last_use(values, 0);
  for (std::size_t step = 0; step < steps_.size(); ++step) {
    for (int value : steps_[step].inputs) last_use[value] = step;
  }
  std::vector<std::size_t> busy_until;  // per buffer: the last step that reads what it holds
  for (std::size_t step = 0; step < steps_.size(); ++step) {
    const Step& current = steps_[step];
    const std::size_t value = inputs_.size() + step;
    std::vector<PlanShape> in;
    for (int source : current.inputs) in.push_back(s.shapes[source]);
    const PlanShape shape = current.op->result(in);
    s.shapes.push_back(shape);
    s.multiply_adds += current.op->multiply_adds(shape);
    if (s.places[value].kind == Schedule::kOutput) continue;
    const Schedule::Place source = s.places[current.inputs[0]];
    if (source.kind >= 0 && current.op->is_view(in[0])) {
      s.skipped[step] = true;
      s.places[value] = source;
      busy_until[source.kind] = std::max(busy_until[source.kind], last_use[value]);
      continue;
    }
    std::size_t buffer = 0;
    while (buffer < s.buffers.size() && !(busy_until[buffer] < step && s.buffers[buffer].same_buffer(shape))) ++buffer;
    if (buffer == s.buffers.size()) {
      s.buffers.push_back(shape);
      s.offsets.push_back(s.image_bytes);
      s.image_bytes += round_up(std::max<int64_t>(1, shape.storage()), 64);
      busy_until.push_back(0);
    }
    busy_until[buffer] = std::max(step, last_use[value]);
    s.places[value] = {static_cast<int>(buffer)};
  }
  s.max_chunk = std::max<int64_t>(1, kArenaBytes / std::max<int64_t>(1, s.image_bytes));
  schedules_.insert(schedules_.begin(), made);
  if (schedules_.size() > kSchedules) schedules_.pop_back();
  return made;
}

void Int8Plan::run_chunk(const Schedule& s, int64_t first, int64_t images, const std::vector<const void*>& in,
                         const std::vector<void*>& out, uint8_t* arena, int64_t arena_images, const Int8Tile* tiles) const {
  const auto at = [&](int value) -> char* {
    const Schedule::Place place = s.places[value];
    const int64_t skip = first * s.shapes[value].storage();
    if (place.kind == Schedule::kInput) return const_cast<char*>(static_cast<const char*>(in[place.index])) + skip;
    if (place.kind == Schedule::kOutput) return static_cast<char*>(out[place.index]) + skip;
    return reinterpret_cast<char*>(arena) + s.offsets[place.kind] * arena_images;
  };
  for (std::size_t step = 0; step < steps_.size(); ++step) {
    if (s.skipped[step]) continue;
    const PlanShape* shapes[2] = {};
    const void* sources[2] = {};
    for (std::size_t i = 0; i < steps_[step].inputs.size(); ++i) {
      shapes[i] = &s.shapes[steps_[step].inputs[i]];
      sources[i] = at(steps_[step].inputs[i]);
    }
    const int value = static_cast<int>(inputs_.size() + step);
    if (tiles != nullptr && tiles[step].mr != 0) {
      steps_[step].op->run_tiled(images, sources[0], at(value), tiles[step]);
    } else {
      steps_[step].op->run(images, shapes, sources, s.shapes[value], at(value));
    }
  }
}

struct Int8Plan::Cut {
  int64_t chunk, chunks, workers;
};

Int8Plan::Cut Int8Plan::cut(const Schedule& s, int64_t images) const {
  int64_t threads = std::min<int64_t>(num_threads(), std::max<int64_t>(1, images * s.multiply_adds / kWorthAThread));
  if (images < threads) threads = 1;  // too few images to share: the products of a layer are shared instead
  const int64_t chunks_wanted = round_up((images + s.max_chunk - 1) / s.max_chunk, threads);
  const int64_t chunk = (images + chunks_wanted - 1) / chunks_wanted, chunks = (images + chunk - 1) / chunk;
  return {chunk, chunks, std::min(threads, chunks)};
}

std::vector<PlanProduct> Int8Plan::products(const Schedule& s, int64_t images) const {
  std::vector<PlanProduct> found;
  if (images == 0) return found;
  found.reserve(slots());
  const Cut cut = this->cut(s, images);
  const int threads = cut.workers == 1 ? num_threads() : 1;  // a product inside a task has its thread alone
  const int64_t last = images - (cut.chunks - 1) * cut.chunk;
  for (std::size_t step = 0; step < steps_.size(); ++step) {
    const Int8Layer* layer = steps_[step].op->product();
    if (layer == nullptr) continue;
    const int64_t columns = layer->geometry().columns, k = layer->geometry().channels;
    if (cut.chunks > 1) found.push_back({step, step, cut.chunk, columns, k, threads});
    found.push_back({step, steps_.size() + step, last, columns, k, threads});
  }
  return found;
}

void Int8Plan::run(Schedule& s, int64_t images, const std::vector<const void*>& in, const std::vector<void*>& out,
                   const std::vector<Int8Tile>& tiles) const {
  if (images == 0) return;
  const auto [chunk, chunks, workers] = cut(s, images);
  // Slots: a step's tile in every chunk but the last, then a step's tile in the last.
  const Int8Tile* slots[2] = {tiles.empty() ? nullptr : tiles.data(), tiles.empty() ? nullptr : tiles.data() + steps_.size()};
  std::vector<Schedule::Arena> arenas;
  for (int64_t i = 0; i < workers; ++i) arenas.push_back(s.take_arena(chunk));
  std::atomic<int64_t> next{0};
  const auto work = [&, chunk = chunk, chunks = chunks](int arena) {
    for (int64_t i = next.fetch_add(1); i < chunks; i = next.fetch_add(1)) {
      run_chunk(s, i * chunk, std::min(chunk, images - i * chunk), in, out, arenas[arena].bytes.data(), arenas[arena].images,
                slots[i == chunks - 1]);
    }
  };
  // One worker must not be a task of the pool: from inside a task a layer's product could not be shared.
  if (arenas.size() == 1) {
    work(0);
  } else {
    parallel_for(static_cast<int>(arenas.size()), [&](int arena) { work(arena); });
  }
  s.give_back(arenas);
}

}  // namespace tw
