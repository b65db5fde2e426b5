// Scheduling: shape inference, alias analysis, fused tile groups, batch stages, then an allocation for every value.
// Padded tensors get a dedicated buffer, or reuse one with the same padding; all others share memory by lifetime.
#include "graph/schedule.h"

#include <algorithm>
#include <stdexcept>

#include "common/machine.h"
#include "graph/memory_planner.h"

namespace tw {

class ScheduleBuilder {
 public:
  // Fills `schedule` for inputs of these sizes. Inputs and outputs of the graph are stored in the caller's memory.
  ScheduleBuilder(const Graph& graph, const std::vector<TensorDesc>& inputs, Graph::Schedule& schedule)
      : graph_(graph), nodes_(graph.nodes_), s_(schedule), values_(graph.values()) {
    s_.descs.resize(values_);
    s_.allocations.resize(values_);
    s_.skips.resize(nodes_.size(), false);
    s_.copies.resize(nodes_.size());
    external_.resize(values_, false);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      s_.descs[graph.inputs_[i]] = inputs[i];
      s_.allocations[graph.inputs_[i]] = {Memory::input, static_cast<int>(i)};
      external_[graph.inputs_[i]] = true;
    }
    for (std::size_t i = 0; i < graph.outputs_.size(); ++i) {
      s_.allocations[graph.outputs_[i]] = {Memory::output, static_cast<int>(i)};
      external_[graph.outputs_[i]] = true;
    }
  }

  // Fills the schedule: shapes, aliases, tile groups, lifetimes, stages, allocations; then the chunk of each stage.
  void build() {
    infer_shapes();
    aliases_ = analyze_aliases(nodes_, external_, s_.descs);
    find_tile_groups();
    find_last_uses();
    split_stages();
    allocate();
    for (Graph::Schedule::Stage& stage : s_.stages) {
      const int64_t element = std::max<int64_t>(1, stage.pooled + stage.padded);
      stage.max_chunk = std::max<int64_t>(1, Graph::Schedule::chunk_bytes() / element);
      for (std::size_t i = stage.first; i < stage.last; ++i)
        stage.multiply_adds += nodes_[i].op->multiply_adds(s_.descs[nodes_[i].output]);
    }
  }

 private:
  using Memory = Graph::Schedule::Memory;

  void infer_shapes() {
    for (const Graph::Node& node : nodes_) {
      std::vector<TensorDesc> in;
      for (int source : node.inputs) {
        in.push_back(s_.descs[source]);
        require(!in.back().is_int16() || node.op->reads_int16(), "this operator does not read int16");
      }
      s_.descs[node.output] = node.op->infer(in);
    }
  }

  // A node inside a tile group, but not its last one: its result is only stored in a line buffer.
  bool is_inside_group(std::size_t node) const {
    return s_.group_of[node] >= 0 && s_.groups[s_.group_of[node]].last != node;
  }

  // Groups consecutive integer operators between which there is a value larger than half the second-level cache, and
  // whose weights are small enough to be read again for every tile.
  void find_tile_groups() {
    const int64_t cache = cache_sizes().l2;
    std::vector<int> readers(values_, 0), set_size(values_, 0);
    for (const Graph::Node& node : nodes_) {
      for (int value : node.inputs) ++readers[value];
    }
    for (std::size_t v = 0; v < values_; ++v) ++set_size[aliases_.root(static_cast<int>(v))];
    const auto can_tile = [&](std::size_t i) {
      const TensorDesc& out = s_.descs[nodes_[i].output];
      const bool images = out.is_integer() && !out.rows && s_.descs[nodes_[i].inputs[0]].is_integer();
      return images && !aliases_.is_alias[i] && nodes_[i].op->receptive_field().rows > 0 &&
             nodes_[i].op->weight_bytes() <= cache / 8;
    };
    const auto continues = [&](std::size_t i) {  // the next node belongs to the group of this one
      const int value = nodes_[i].output;
      if (i + 1 >= nodes_.size() || !can_tile(i + 1) || nodes_[i + 1].inputs[0] != value) return false;
      const bool private_buffer = readers[value] == 1 && set_size[value] == 1 && aliases_.parent[value] < 0;
      return private_buffer && !external_[value] && s_.descs[value].storage() > cache / 2;
    };
    s_.group_of.assign(nodes_.size(), -1);
    for (std::size_t first = 0; first < nodes_.size(); ++first) {
      if (!can_tile(first) || !continues(first)) continue;
      std::size_t last = first + 1;
      while (continues(last)) ++last;
      std::vector<TiledOp> ops;
      for (std::size_t i = first; i <= last; ++i) {
        const Graph::Node& node = nodes_[i];
        ops.push_back({node.op.get(), &s_.descs[node.inputs[0]], {}, &s_.descs[node.output]});
        s_.group_of[i] = static_cast<int>(s_.groups.size());
      }
      TileGroup group = choose_tile_rows(ops, cache / 4);
      group.first = first;
      group.last = last;
      s_.line_buffer_bytes = std::max(s_.line_buffer_bytes, round_up(group.bytes, 64));
      s_.groups.push_back(group);
      first = last;
    }
  }

  // Liveness: the last node that reads each buffer. A node in a tile group reads until the whole group has run.
  void find_last_uses() {
    last_use_.resize(values_, 0);
    first_node_.resize(values_, 0);
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      first_node_[nodes_[i].output] = i;
      const std::size_t when = s_.group_of[i] < 0 ? i : s_.groups[s_.group_of[i]].last;
      for (int value : nodes_[i].inputs) last_use_[aliases_.root(value)] = when;
    }
  }

  // Estimates the bytes that one element needs in nodes [first, last): the largest value without padding twice (input
  // and result), and one buffer per kind of padded value.
  int64_t element_bytes(std::size_t first, std::size_t last) const {
    int64_t largest = 0, padded = 0;
    std::vector<const TensorDesc*> kinds;
    for (std::size_t i = first; i < last; ++i) {
      const TensorDesc& desc = s_.descs[nodes_[i].output];
      if (is_inside_group(i)) continue;
      if (desc.padding == 0) {
        largest = std::max(largest, desc.storage());
      } else if (std::none_of(kinds.begin(), kinds.end(), [&](auto* k) { return k->same_padded_buffer(desc); })) {
        kinds.push_back(&desc);
        padded += desc.storage();
      }
    }
    return 2 * largest + padded;
  }

  // Chooses the node where the second stage begins. The cost of a split is the bytes read per element: the weights of
  // each stage divided by its chunk, plus writing and reading the value between the stages. A split is possible only
  // where exactly one buffer is passed on.
  void split_stages() {
    s_.stages[0].last = s_.stages[1].first = s_.stages[1].last = nodes_.size();
    if (graph_.fixed_batch_) return;
    const auto elements = [&](std::size_t first, std::size_t last) {
      const int64_t bytes = std::max<int64_t>(1, element_bytes(first, last));
      return std::max<int64_t>(1, Graph::Schedule::chunk_bytes() / bytes);
    };
    int64_t weights = 0;
    for (const Graph::Node& node : nodes_) weights += node.op->weight_bytes();
    int64_t least = weights / elements(0, nodes_.size()), second_weights = 0;
    for (std::size_t split = nodes_.size(); split-- > 0;) {
      if (s_.group_of[split] >= 0) break;
      second_weights += nodes_[split].op->weight_bytes();
      const int stage_buffers = only_buffer_between(split);
      if (stage_buffers < 0) continue;
      const int64_t bytes = (weights - second_weights) / elements(0, split) +
                            second_weights / elements(split, nodes_.size()) + 2 * s_.descs[stage_buffers].storage();
      if (bytes >= least) continue;
      least = bytes;
      s_.stages[0].last = s_.stages[1].first = split;
      stage_buffer_ = stage_buffers;
    }
  }

  // Returns the root of the one buffer written before node `split` and read from there on. Returns -1 if there is not
  // exactly one, or if an alias set has values of both stages: their arenas are separate.
  int only_buffer_between(std::size_t split) const {
    const auto in_first_stage = [&](int value) { return external_input(value) || first_node_[value] < split; };
    std::vector<int> stage_buffers;
    for (std::size_t i = split; i < nodes_.size(); ++i) {
      for (int source : nodes_[i].inputs) {
        const int root = aliases_.root(source);
        if (in_first_stage(source) &&
            std::find(stage_buffers.begin(), stage_buffers.end(), root) == stage_buffers.end())
          stage_buffers.push_back(root);
      }
    }
    if (stage_buffers.size() != 1 || external_[stage_buffers[0]] || !s_.descs[stage_buffers[0]].is_integer()) return -1;
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      const int root = aliases_.root(nodes_[i].output);
      const bool separate = i < split ? in_first_stage(root) : !in_first_stage(root) || root == stage_buffers[0];
      if (!separate) return -1;
    }
    return stage_buffers[0];
  }

  bool external_input(int value) const { return external_[value] && s_.allocations[value].memory == Memory::input; }

  // Gives every value its place: an offset into the caller's memory or a buffer. Buffers without padding then get
  // offsets by lifetime, one arena layout per stage.
  void allocate() {
    std::vector<bool> done = external_;  // per root
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      const int value = nodes_[i].output, root = aliases_.root(value);
      s_.skips[i] = aliases_.is_alias[i] || is_inside_group(i);
      if (is_inside_group(i)) continue;
      if (nodes_[i].op->is_concat()) find_copies(i);
      if (!done[root]) s_.allocations[root] = {Memory::buffer, buffer_for(i, root)};
      done[root] = true;
      s_.allocations[value] = s_.allocations[root];
      s_.allocations[value].offset = aliases_.first_channel(value) * s_.descs[value].element_size();
    }
    for (int stage = 0; stage < 2; ++stage) {
      std::vector<Lifetime> pooled;
      for (std::size_t b = 0; b < s_.buffers.size(); ++b) {
        if (is_pooled(b, stage)) pooled.push_back(lifetimes_[b]);
      }
      s_.stages[stage].pooled = allocate_buffers(pooled);
      auto next = pooled.begin();
      for (std::size_t b = 0; b < s_.buffers.size(); ++b) {
        if (is_pooled(b, stage)) s_.buffers[b].offset = (next++)->offset;
      }
    }
  }

  // Returns whether a buffer of this stage has no padding, so that its memory may be shared by lifetime.
  bool is_pooled(std::size_t b, int stage) const {
    return s_.buffers[b].stage == stage && s_.buffers[b].desc.padding == 0;
  }

  // Lists the inputs of a concatenation that alias analysis could not store in its result.
  void find_copies(std::size_t node) {
    int64_t channel = 0;
    for (std::size_t i = 0; i < nodes_[node].inputs.size(); ++i) {
      const int part = nodes_[node].inputs[i];
      if (aliases_.parent[part] != nodes_[node].output || aliases_.channel[part] != channel)
        s_.copies[node].push_back(static_cast<int>(i));
      channel += s_.descs[part].channels;
    }
  }

  // Returns the number of a buffer, new or reused, for the alias set whose first value node `i` computes.
  int buffer_for(std::size_t i, int root) {
    const TensorDesc& desc = s_.descs[root];
    const std::size_t last = std::max(i, last_use_[root]);
    const int stage = root == stage_buffer_ ? Graph::Schedule::kWholeBatch : i >= s_.stages[1].first;
    if (const int reused = reused_buffer(i, root, stage); reused >= 0) {
      lifetimes_[reused].last = std::max(lifetimes_[reused].last, last);
      return reused;
    }
    const int64_t overread = desc.is_integer() ? 0 : Graph::Schedule::kOverread;
    const int64_t bytes = round_up(std::max<int64_t>(1, desc.storage() + overread), 64);
    s_.buffers.push_back({desc, stage});
    lifetimes_.push_back({i, last, bytes});
    if (stage == Graph::Schedule::kWholeBatch) {
      s_.whole_batch_bytes = desc.storage();
    } else if (desc.padding > 0) {
      s_.buffers.back().offset = s_.stages[stage].padded;
      s_.stages[stage].padded += bytes;
    }
    return static_cast<int>(s_.buffers.size()) - 1;
  }

  // Returns a buffer that can be reused, or -1. Padded values reuse an idle buffer with identical padding, which was
  // written once. An operator that can run in place takes the buffer of its first input, if nothing else is stored
  // there or reads it later.
  int reused_buffer(std::size_t i, int root, int stage) const {
    const TensorDesc& desc = s_.descs[root];
    if (stage == Graph::Schedule::kWholeBatch) return -1;
    if (desc.padding > 0) {
      for (std::size_t b = 0; b < s_.buffers.size(); ++b) {
        const bool idle = lifetimes_[b].last < i && s_.buffers[b].stage == stage;
        if (idle && s_.buffers[b].desc.same_padded_buffer(desc)) return static_cast<int>(b);
      }
      return -1;
    }
    const int source = nodes_[i].inputs[0], value = nodes_[i].output;
    const bool own = root == value && aliases_.root(source) == source && !external_[source];
    if (!own || s_.group_of[i] >= 0 || last_use_[source] != i) return -1;
    const int buffer = s_.allocations[source].index;
    const TensorDesc& in = s_.descs[source];
    const bool identical = in.padding == 0 && in.layout == desc.layout && in.storage() == desc.storage();
    return identical && s_.buffers[buffer].stage == stage && nodes_[i].op->runs_in_place(in, desc) ? buffer : -1;
  }

  const Graph& graph_;
  const std::vector<Graph::Node>& nodes_;
  Graph::Schedule& s_;
  std::size_t values_;
  std::vector<bool> external_;  // per value: an input or output of the graph
  AliasSets aliases_;
  std::vector<std::size_t> last_use_, first_node_;  // per root: the last node that reads it; per value: its own node
  int stage_buffer_ = -1;                           // the root that the first stage leaves to the second
  std::vector<Lifetime> lifetimes_;                 // per buffer
};

// Looks for a schedule for these sizes, the most recently used first, and builds one if there is none.
std::shared_ptr<Graph::Schedule> Graph::schedule(const std::vector<TensorDesc>& inputs) {
  constexpr std::size_t kMaxSchedules = 4;  // chosen: kept for later runs; arbitrary
  const auto same_size = [](const TensorDesc& a, const TensorDesc& b) {
    return a.same_pixels(b) && a.channels == b.channels;
  };
  std::lock_guard<std::mutex> lock(mutex_);
  for (std::size_t i = 0; i < schedules_.size(); ++i) {
    bool matches = true;
    for (std::size_t k = 0; k < inputs.size(); ++k)
      matches = matches && same_size(inputs[k], schedules_[i]->descs[inputs_[k]]);
    if (!matches) continue;
    std::rotate(schedules_.begin(), schedules_.begin() + i, schedules_.begin() + i + 1);
    return schedules_.front();
  }
  finish();
  auto schedule = std::make_shared<Schedule>();
  ScheduleBuilder(*this, inputs, *schedule).build();
  schedules_.insert(schedules_.begin(), schedule);
  if (schedules_.size() > kMaxSchedules) schedules_.pop_back();
  return schedule;
}

std::shared_ptr<Graph::Schedule> Graph::schedule() {
  std::vector<TensorDesc> inputs;
  for (int value : inputs_) inputs.push_back(desc(value));
  return schedule(inputs);
}

// Returns a free arena that holds these chunks, or a new one with its padding written.
Graph::Schedule::Arena Graph::Schedule::take_arena(const int64_t (&elements)[2], int64_t threads) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    while (!free_arenas_.empty()) {
      Arena arena = std::move(free_arenas_.back());
      free_arenas_.pop_back();
      if (arena.holds(elements, threads)) return arena;  // one that is too small is freed here
    }
  }
  const int64_t bytes = line_buffers_at(elements) + line_buffer_bytes * threads;
  Arena arena{{elements[0], elements[1]}, threads, Buffer<uint8_t>(bytes)};
  // Vector loads may read past a pixel's last channel, and must find finite numbers there.
  std::memset(arena.bytes.data(), 0, static_cast<std::size_t>(bytes));
  for (const BufferRecord& b : buffers) {
    if (b.desc.padding > 0 && b.stage != kWholeBatch)
      fill_padding(b.desc.image(elements[b.stage]), b.desc.zero_point, arena.bytes.data() + address(b, elements));
  }
  return arena;
}

// Returns memory for the value that is passed from the first stage to the second, for the whole batch.
Buffer<uint8_t> Graph::Schedule::take_batch_memory(int64_t batch) {
  if (whole_batch_bytes == 0) return {};
  const int64_t bytes = whole_batch_bytes * batch + kOverread;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!free_batches_.empty() && static_cast<int64_t>(free_batches_.back().size()) >= bytes) {
      Buffer<uint8_t> memory = std::move(free_batches_.back());
      free_batches_.pop_back();
      return memory;
    }
    free_batches_.clear();
  }
  Buffer<uint8_t> memory(bytes);
  for (const BufferRecord& b : buffers) {
    if (b.stage == kWholeBatch) fill_padding(b.desc.image(batch), b.desc.zero_point, memory.data());
  }
  return memory;
}

// Keeps the memory of a run for later runs, up to a limit of size and number.
void Graph::Schedule::give_back(std::vector<Arena>& arenas, Buffer<uint8_t>& batch_memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Arena& arena : arenas) {
    const std::size_t most = arena.bytes.size() <= kMaxFreeBytes ? kMaxFreeArenas : 4;
    if (free_arenas_.size() < most) free_arenas_.push_back(std::move(arena));
  }
  if (batch_memory.size() > 0 && batch_memory.size() <= kMaxFreeBytes && free_batches_.size() < kMaxFreeArenas)
    free_batches_.push_back(std::move(batch_memory));
}

}  // namespace tw
