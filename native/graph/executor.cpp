// Executes a schedule: chunks of a batch, distributed over the threads, pass through the nodes of each batch stage.
#include <algorithm>
#include <atomic>
#include <chrono>

#include "graph/schedule.h"

namespace tw {

// One run of a graph on a batch.
class BatchRun {
 public:
  BatchRun(const Graph& graph, const Graph::Schedule& schedule, const std::vector<const void*>& in,
           const std::vector<void*>& out, uint8_t* batch_memory)
      : nodes_(graph.nodes_), s_(schedule), in_(in), out_(out), batch_memory_(batch_memory) {}

  // Takes elements [first, first + count) of the batch through a stage. `tiles` is null or has one tile per node;
  // `times_ns` is null or has one entry per value, to which the time of its operator is added.
  void run_chunk(const Graph::Schedule::Stage& stage, int64_t first, int64_t count, Graph::Schedule::Arena& arena,
                 const Int8Tile* tiles, int64_t* times_ns) const {
    for (std::size_t i = stage.first; i < stage.last; ++i) {
      if (s_.skips[i]) continue;
      const Chunk chunk{first, count, arena};
      if (s_.group_of[i] >= 0) {
        run_group(s_.groups[s_.group_of[i]], chunk, times_ns);
        continue;
      }
      const auto start = times_ns == nullptr ? Clock::time_point() : Clock::now();
      run_node(i, chunk, tiles != nullptr && tiles[i].mr != 0 ? &tiles[i] : nullptr);
      if (times_ns != nullptr) times_ns[nodes_[i].output] += std::chrono::nanoseconds(Clock::now() - start).count();
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  using Memory = Graph::Schedule::Memory;
  struct Chunk {
    int64_t first, count;
    Graph::Schedule::Arena& arena;
  };

  // The address of the first element of a chunk: in the caller's memory, the whole-batch buffer or the arena.
  char* address(int value, const Chunk& chunk) const {
    const Graph::Schedule::Allocation at = s_.allocations[value];
    const int64_t skip = chunk.first * s_.descs[value].storage();
    if (at.memory == Memory::input) return const_cast<char*>(static_cast<const char*>(in_[at.index])) + skip;
    if (at.memory == Memory::output) return static_cast<char*>(out_[at.index]) + skip;
    const Graph::Schedule::BufferRecord& buffer = s_.buffers[at.index];
    if (buffer.stage == Graph::Schedule::kWholeBatch)
      return reinterpret_cast<char*>(batch_memory_) + chunk.first * s_.whole_batch_bytes + at.offset;
    return reinterpret_cast<char*>(chunk.arena.bytes.data()) + s_.address(buffer, chunk.arena.elements) + at.offset;
  }

  Operand operand(int value, const Chunk& chunk) const { return {&s_.descs[value], address(value, chunk)}; }

  void run_node(std::size_t i, const Chunk& chunk, const Int8Tile* tile) const {
    const Graph::Node& node = nodes_[i];
    if (node.op->is_concat()) return copy_concat_inputs(i, chunk);
    OpCall call{chunk.count, {}, operand(node.output, chunk), tile};
    for (std::size_t k = 0; k < node.inputs.size(); ++k) call.in[k] = operand(node.inputs[k], chunk);
    node.op->run(call);
  }

  // Copies the inputs of a concatenation that were not computed in their place.
  void copy_concat_inputs(std::size_t i, const Chunk& chunk) const {
    const Graph::Node& node = nodes_[i];
    for (int part : s_.copies[i]) {
      int64_t channels = 0;
      for (int before = 0; before < part; ++before) channels += s_.descs[node.inputs[before]].channels;
      Operand out = operand(node.output, chunk);
      out.data = out.bytes() + channels * out->element_size();
      node.op->run({chunk.count, {operand(node.inputs[part], chunk)}, out});
    }
  }

  // Runs a fused tile group on each element of the chunk; the threads share the rows of its result. The time of an
  // operator is the mean of the threads' times.
  void run_group(const TileGroup& group, const Chunk& chunk, int64_t* times_ns) const {
    std::vector<TiledOp> ops;
    for (std::size_t i = group.first; i <= group.last; ++i) {
      const Graph::Node& node = nodes_[i];
      const Operand second = node.inputs.size() > 1 ? operand(node.inputs[1], chunk) : Operand{};
      ops.push_back({node.op.get(), &s_.descs[node.inputs[0]], second, &s_.descs[node.output]});
    }
    const TensorDesc &source = *ops[0].in, &result = *ops.back().out;
    char* const line_buffers =
        reinterpret_cast<char*>(chunk.arena.bytes.data()) + s_.line_buffers_at(chunk.arena.elements);
    char* in = address(nodes_[group.first].inputs[0], chunk);
    char* out = address(nodes_[group.last].output, chunk);
    const int64_t rows = result.height, tasks = std::max<int64_t>(1, std::min(chunk.arena.threads, rows / group.rows));
    std::vector<int64_t> task_times(times_ns == nullptr ? 0 : tasks * ops.size());
    for (int64_t element = 0; element < chunk.count; ++element) {
      parallel_for(static_cast<int>(tasks), [&](int task) {
        run_tile_group(group, ops, in, out, rows * task / tasks, rows * (task + 1) / tasks,
                       line_buffers + task * s_.line_buffer_bytes,
                       times_ns == nullptr ? nullptr : task_times.data() + task * ops.size());
      });
      in += source.storage();
      out += result.storage();
      for (TiledOp& op : ops) {
        if (op.second.desc != nullptr) op.second.data = op.second.bytes() + op.second->storage();
      }
    }
    for (std::size_t k = 0; k < task_times.size(); ++k)
      times_ns[nodes_[group.first + k % ops.size()].output] += task_times[k] / tasks;
  }

  const std::vector<Graph::Node>& nodes_;
  const Graph::Schedule& s_;
  const std::vector<const void*>& in_;
  const std::vector<void*>& out_;
  uint8_t* batch_memory_;
};

// Lists the matrix products of a run. A node has two slots: the last chunk of a batch may be smaller than the others
// and then has another best tile.
std::vector<GraphProduct> Graph::products(const Schedule& s, int64_t batch) const {
  std::vector<GraphProduct> products;
  if (batch == 0) return products;
  products.reserve(slots());
  for (const Schedule::Stage& stage : s.stages) {
    const Schedule::BatchSplit split = stage.split(batch);
    const int threads = split.workers == 1 ? num_threads() : 1;  // a product inside a task has one thread
    const int64_t last = batch - (split.chunks - 1) * split.chunk;
    for (std::size_t i = stage.first; i < stage.last; ++i) {
      const Int8Layer* layer = nodes_[i].op->product();
      if (layer == nullptr) continue;
      const int64_t columns = layer->geometry().columns, k = layer->geometry().channels();
      if (split.chunks > 1) products.push_back({nodes_[i].output, i, split.chunk, columns, k, threads});
      products.push_back({nodes_[i].output, nodes_.size() + i, last, columns, k, threads});
    }
  }
  return products;
}

// Takes the whole batch through the first stage, then through the second one. Workers take the next chunk as soon as
// they are free; each has an arena.
void Graph::run(Schedule& s, int64_t batch, const std::vector<const void*>& in, const std::vector<void*>& out,
                const std::vector<Int8Tile>& tiles, int64_t* times_ns) const {
  if (batch == 0) return;
  const bool two_stages = s.whole_batch_bytes > 0;
  const Schedule::BatchSplit splits[2] = {s.stages[0].split(batch), s.stages[1].split(batch)};
  const int64_t elements[2] = {splits[0].chunk, two_stages ? splits[1].chunk : 0};
  // Slots: a node's tile in every chunk but the last, then its tile in the last chunk.
  const Int8Tile* slots[2] = {tiles.empty() ? nullptr : tiles.data(),
                              tiles.empty() ? nullptr : tiles.data() + nodes_.size()};
  const int64_t workers = std::max(splits[0].workers, two_stages ? splits[1].workers : 1);
  const int64_t group_threads = splits[0].workers == 1 ? num_threads() : 1;  // a tile group inside a task has one
  std::vector<Schedule::Arena> arenas;
  for (int64_t i = 0; i < workers; ++i) arenas.push_back(s.take_arena(elements, group_threads));
  Buffer<uint8_t> batch_memory = s.take_batch_memory(batch);
  const BatchRun run(*this, s, in, out, batch_memory.data());
  for (int i = 0; i < 2; ++i) {
    const Schedule::Stage& stage = s.stages[i];
    const Schedule::BatchSplit split = splits[i];
    if (stage.first == stage.last) continue;
    std::atomic<int64_t> next{0};
    std::vector<int64_t> worker_times(times_ns == nullptr ? 0 : split.workers * values());
    const auto work = [&](int arena) {
      int64_t* const times = times_ns == nullptr ? nullptr : worker_times.data() + arena * values();
      for (int64_t c = next.fetch_add(1); c < split.chunks; c = next.fetch_add(1)) {
        run.run_chunk(stage, c * split.chunk, std::min(split.chunk, batch - c * split.chunk), arenas[arena],
                      slots[c == split.chunks - 1], times);
      }
    };
    // A single worker is not made a task of the thread pool: operators inside a task cannot use the threads.
    if (split.workers == 1) {
      work(0);
    } else {
      parallel_for(static_cast<int>(split.workers), [&](int arena) { work(arena); });
    }
    for (std::size_t k = 0; k < worker_times.size(); ++k) times_ns[k % values()] += worker_times[k] / split.workers;
  }
  s.give_back(arenas, batch_memory);
}

}  // namespace tw
