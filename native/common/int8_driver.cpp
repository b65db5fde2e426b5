// What does not depend on the instruction set: the packed layout of integer weights, and the split over threads.
#include <algorithm>
#include <cstring>

#include "common/thread_pool.h"
#include "kernels/int8.h"

namespace tw {

void pack_int8_weights(const int8_t* weights, int columns, int taps, int channels, int64_t column_step, int64_t tap_step,
                       int64_t channel_step, int8_t* packed, int32_t* column_sums) {
  const int groups_per_tap = (channels + kInt8Group - 1) / kInt8Group;
  const int64_t step = kInt8Panel * kInt8Group;
  std::fill(packed, packed + int8_packed_bytes(columns, static_cast<int64_t>(taps) * groups_per_tap), int8_t{0});
  for (int column = 0; column < columns; ++column) {
    const int64_t panel = column / kInt8Panel * static_cast<int64_t>(taps) * groups_per_tap;
    int32_t sum = 0;
    for (int t = 0; t < taps; ++t) {
      int8_t* to = packed + (panel + static_cast<int64_t>(t) * groups_per_tap) * step + column % kInt8Panel * kInt8Group;
      const int8_t* from = weights + column * column_step + t * tap_step;
      const int whole = channel_step == 1 ? channels / kInt8Group * kInt8Group : 0;
      for (int c = 0; c < whole; c += kInt8Group) std::memcpy(to + c / kInt8Group * step, from + c, kInt8Group);
      for (int c = 0; c < whole; ++c) sum += from[c];
      for (int c = whole; c < channels; ++c) {
        const int8_t w = from[c * channel_step];
        to[c / kInt8Group * step + c % kInt8Group] = w;
        sum += w;
      }
    }
    column_sums[column] = sum;
  }
}

void run_int8(const Int8Problem& problem) {
  const int64_t rows = static_cast<int64_t>(problem.images) * problem.height * problem.width;
  const int panels = (problem.columns + kInt8Panel - 1) / kInt8Panel;
  if (rows == 0 || panels == 0) return;
  // Work below this many multiply-adds is done before a second thread would have woken.
  constexpr int64_t kWorthAThread = 1 << 20;
  const int64_t work = rows * panels * kInt8Panel * problem.runs * problem.groups_per_run * kInt8Group;
  const int threads = static_cast<int>(std::min<int64_t>(num_threads(), std::max<int64_t>(1, work / kWorthAThread)));
  const auto& kernels = active_int8();
  if (threads == 1) return kernels.rows(problem, 0, rows, 0, panels);
  const bool by_rows = rows >= 16 * threads;
  const int tasks = by_rows ? threads : std::min(threads, panels);
  parallel_for(tasks, [&](int task) {
    if (by_rows) {
      const int64_t first = rows * task / tasks / 8 * 8, last = task + 1 == tasks ? rows : rows * (task + 1) / tasks / 8 * 8;
      kernels.rows(problem, first, last, 0, panels);
    } else {
      kernels.rows(problem, 0, rows, panels * task / tasks, panels * (task + 1) / tasks);
    }
  });
}

}  // namespace tw
