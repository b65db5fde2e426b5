#include "common/int8_plan.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "common/int8_plan_schedule.h"
#include "common/thread_pool.h"

namespace tw {

int Int8Plan::add_input(const PlanShape& shape) {
  if (!steps_.empty()) throw std::invalid_argument("inputs come before operations");
  inputs_.push_back(shape);
  return static_cast<int>(inputs_.size()) - 1;
}

int Int8Plan::add(std::unique_ptr<Int8Op> op, std::vector<int> inputs) {
  for (int value : inputs) check_value(value);
  if (inputs.empty() || (inputs.size() > 2 && !op->is_concat()))
    throw std::invalid_argument("an operation reads one value or two");
  steps_.push_back({std::move(op), std::move(inputs)});
  return static_cast<int>(inputs_.size() + steps_.size()) - 1;
}

void Int8Plan::add_output(int value) {
  check_value(value);
  if (value < static_cast<int>(inputs_.size())) throw std::invalid_argument("an input cannot be an output");
  if (std::count(outputs_.begin(), outputs_.end(), value) != 0)
    throw std::invalid_argument("this is an output already");
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

// A batch on its way through a plan.
struct Int8Plan::Run {
  const Int8Plan& plan;
  const Schedule& s;
  const std::vector<const void*>& in;
  const std::vector<void*>& out;
  uint8_t* batch;

  void chunk(const Schedule::Part& part, int64_t first, int64_t images, Schedule::Arena& arena,
             const Int8Tile* tiles) const;
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
        for (int before = 0; before < i; ++before)
          channel += s.shapes[current.inputs[before]].channels * s.shapes[value].size;
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
      const int64_t rows = s.shapes[value].height,
                    parts = std::max<int64_t>(1, std::min(arena.threads, rows / chain.rows));
      for (int64_t image = 0; image < images; ++image) {
        for (std::size_t i = 0; i < steps.size(); ++i) {
          const std::vector<int>& inputs = steps_[chain.first + i].inputs;
          if (inputs.size() > 1) steps[i].skipped = at(inputs[1]) + image * steps[i].skip->storage();
        }
        const char* from = at(steps_[chain.first].inputs[0]) + image * steps[0].in->storage();
        char* to = at(value) + image * s.shapes[value].storage();
        parallel_for(static_cast<int>(parts), [&](int part) {
          run_bands(chain, steps, from, to, rows * part / parts, rows * (part + 1) / parts,
                    bands + part * s.band_bytes);
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
  const Int8Tile* slots[2] = {tiles.empty() ? nullptr : tiles.data(),
                              tiles.empty() ? nullptr : tiles.data() + steps_.size()};
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
        run.chunk(part, c * cut.chunk, std::min(cut.chunk, images - c * cut.chunk), arenas[arena],
                  slots[c == cut.chunks - 1]);
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
