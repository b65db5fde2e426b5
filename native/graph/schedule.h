// The schedule of a graph for one set of input sizes: shapes, allocations, fused tile groups and batch stages. Built by
// schedule.cpp, executed by executor.cpp.
#pragma once

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "common/machine.h"
#include "common/thread_pool.h"
#include "graph/alias.h"
#include "graph/tiling.h"

namespace tw {

class Graph::Schedule {
 public:
  static constexpr std::size_t kMaxFreeArenas = 16;      // chosen: kept for later runs; arbitrary
  static constexpr std::size_t kMaxFreeBytes = 8 << 20;  // chosen: of larger ones at most four are kept; arbitrary
  static constexpr int64_t kOverread =
      64;  // hardware: bytes of the widest vector, which may be read past a value's last channel

  // The bytes of a chunk: half of the second-level cache, at most 512 KiB; the other half is for weights.
  static int64_t chunk_bytes() { return std::min<int64_t>(512 << 10, cache_sizes().l2 / 2); }

  enum class Memory { input, output, buffer };
  struct Allocation {
    Memory memory = Memory::input;
    int index = 0;       // number of the input, output or buffer
    int64_t offset = 0;  // bytes to the value's first channel
  };

  std::vector<TensorDesc> descs;         // per value
  std::vector<Allocation> allocations;   // per value
  std::vector<bool> skips;               // per node: an alias, or computed by the last node of its tile group
  std::vector<std::vector<int>> copies;  // per concatenation: the inputs that must be copied
  std::vector<TileGroup> groups;
  std::vector<int> group_of;      // per node: its tile group, or -1
  int64_t line_buffer_bytes = 0;  // of the largest group

  struct BatchSplit {
    int64_t chunk, chunks, workers;
  };
  // A batch stage: nodes that one chunk passes through before the next chunk starts. Where late activations are small,
  // the last nodes are a second stage with larger chunks, so that more elements share each reading of the weights.
  struct Stage {
    std::size_t first = 0, last = 0;
    int64_t pooled = 0, padded = 0;  // bytes per element of buffers without padding (shared by lifetime) and with it
    int64_t max_chunk = 1, multiply_adds = 0;

    // Splits a batch into chunks of at most `max_chunk` elements, a multiple of the number of threads if it has enough.
    BatchSplit split(int64_t batch) const {
      int64_t threads =
          std::min<int64_t>(num_threads(), std::max<int64_t>(1, batch * multiply_adds / kWakeMultiplyAdds));
      if (batch < threads) threads = 1;  // the operators use the threads instead
      const int64_t chunks_wanted = round_up((batch + max_chunk - 1) / max_chunk, threads);
      const int64_t chunk = (batch + chunks_wanted - 1) / chunks_wanted, chunks = (batch + chunk - 1) / chunk;
      return {chunk, chunks, std::min(threads, chunks)};
    }
  };
  Stage stages[2];

  // A buffer is stored in its stage's arena at `offset` times the elements of a chunk. The value that the first stage
  // passes to the second one is stored for the whole batch instead.
  static constexpr int kWholeBatch = 2;  // definition: the `stage` of such a buffer
  struct BufferRecord {
    TensorDesc desc;
    int stage;
    int64_t offset = 0;  // per element
  };
  std::vector<BufferRecord> buffers;
  int64_t whole_batch_bytes = 0;  // per element

  // Memory for one chunk of each stage. A worker is in one stage at a time, so the stages share the memory of values
  // without padding. Padding is written once, when the arena is created.
  //
  // Layout: pooled buffers of either stage | padded buffers of stage 0 | of stage 1 | line buffers of each thread.
  struct Arena {
    int64_t elements[2], threads;  // elements of a chunk per stage; threads with line buffers
    Buffer<uint8_t> bytes;
    bool holds(const int64_t (&wanted)[2], int64_t group_threads) const {
      return elements[0] >= wanted[0] && elements[1] >= wanted[1] && threads >= group_threads;
    }
  };

  int64_t padded_at(const int64_t (&elements)[2], int stage) const {
    const int64_t begin = round_up(std::max(stages[0].pooled * elements[0], stages[1].pooled * elements[1]), 64);
    return stage == 0 ? begin : begin + stages[0].padded * elements[0];
  }
  int64_t line_buffers_at(const int64_t (&elements)[2]) const {
    return round_up(padded_at(elements, 1) + stages[1].padded * elements[1] + kOverread, 64);
  }
  int64_t address(const BufferRecord& b, const int64_t (&elements)[2]) const {
    return (b.desc.padding > 0 ? padded_at(elements, b.stage) : 0) + b.offset * elements[b.stage];
  }
  int64_t arena_bytes() const { return stages[0].pooled + stages[0].padded; }  // per element, in one stage

  Arena take_arena(const int64_t (&elements)[2], int64_t threads);
  Buffer<uint8_t> take_batch_memory(int64_t batch);
  void give_back(std::vector<Arena>& arenas, Buffer<uint8_t>& batch_memory);

 private:
  std::mutex mutex_;
  std::vector<Arena> free_arenas_;
  std::vector<Buffer<uint8_t>> free_batches_;
};

}  // namespace tw
