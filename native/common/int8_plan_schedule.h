// Where the values of an Int8Plan lie while it runs, and how a batch is cut, for one size of input: made by
// int8_plan_schedule.cpp, gone through by int8_plan.cpp.
#pragma once

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "common/int8_plan.h"
#include "common/int8_plan_bands.h"
#include "common/thread_pool.h"

namespace tw {

// Where every value lies, for one size of input.
class Int8Plan::Schedule {
 public:
  static constexpr std::size_t kKeptBatch = 8 << 20, kArenas = 16;  // kept for the next call, of the one no more bytes
  static constexpr int64_t kArenaBytes =
      512 << 10;  // of one chunk: half of a usual second-level cache, the rest for weights
  static constexpr int64_t kWorthAThread = 1 << 20;  // multiply-adds that take as long as waking a thread
  static constexpr int64_t kPastEnd = 64;            // a slice's last group of four may reach past its buffer
  static constexpr int kInput = -1, kOutput = -2;    // places that are no buffers of the arena
  struct Place {
    int kind;            // kInput, kOutput, or the buffer
    int index = 0;       // which input or output
    int64_t offset = 0;  // of its first channel
  };

  std::vector<PlanShape> shapes;  // per value
  std::vector<Place> places;
  std::vector<bool> skipped;             // per step: its result is its input's bytes
  std::vector<std::vector<int>> copied;  // per concatenation: the parts that lie elsewhere
  std::vector<int> outputs;
  std::vector<Chain> chains;
  std::vector<int> chain_of;  // per step: the chain that it is in, or -1
  int64_t band_bytes = 0;     // for the bands of any chain

  struct Cut {  // of a batch
    int64_t chunk, chunks, workers;
  };
  // Steps that a chunk of images goes through before the next one: all but the last, and the last, where an image is so
  // small that many are run at once.
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

  // A buffer lies in the arena of its part, `offset` for one image, times the arena's images; what one part leaves to
  // the other lies in the memory of a whole batch.
  static constexpr int kBatch = 2;
  struct Space {
    PlanShape shape;
    int64_t offset;
    int part;
  };
  std::vector<Space> buffers;
  int64_t batch_bytes = 0;  // of an image, of what lies in the memory of a batch

  // The buffers between the steps, for so many images of each part: as many as a chunk has, so a small batch takes
  // little memory. The parts have the memory of values without a frame in common, since a thread is in one of them.
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
      if (b.shape.bytes && b.part != kBatch)
        fill_border(b.shape.image(images[b.part]), b.shape.zero, arena.bytes.data() + at(b, images));
    }
    return arena;
  }

  // The memory of so many images or more.
  Buffer<uint8_t> take_batch(int64_t images) {
    if (batch_bytes == 0) return {};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!free_batches_.empty() &&
          static_cast<int64_t>(free_batches_.back().size()) >= batch_bytes * images + kPastEnd) {
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
    if (batch.size() > 0 && batch.size() <= kKeptBatch && free_batches_.size() < kArenas)
      free_batches_.push_back(std::move(batch));
  }

 private:
  std::mutex mutex_;
  std::vector<Arena> free_;
  std::vector<Buffer<uint8_t>> free_batches_;
};

}  // namespace tw
