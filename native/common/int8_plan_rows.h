// The rows of a plan's value, shared among the threads: for operations that go row by row.
#pragma once

#include <algorithm>

#include "common/int8_plan.h"
#include "common/thread_pool.h"

namespace tw {

// f(image, first row, rows) for all rows of all images, at most so many of an image at once, shared among the threads
// where there is much to do.
template <class F>
void each_rows(const PlanShape& shape, int64_t images, int64_t at_once, F&& f) {
  constexpr int64_t kWorthATask = 1 << 15;  // bytes
  const int64_t rows = images * shape.height;
  const int64_t tasks =
      std::min({rows, images * shape.floats() * shape.size / kWorthATask, int64_t{2} * num_threads()});
  const auto some = [&](int64_t first, int64_t last) {
    while (first < last) {
      const int64_t row = first % shape.height, count = std::min({at_once, shape.height - row, last - first});
      f(first / shape.height, row, count);
      first += count;
    }
  };
  if (tasks < 2 || num_threads() == 1) return some(0, rows);
  parallel_for(static_cast<int>(tasks), [&](int task) { some(rows * task / tasks, rows * (task + 1) / tasks); });
}

// f(image, row) for every row of all images.
template <class F>
void each_row(const PlanShape& shape, int64_t images, F&& f) {
  each_rows(shape, images, 1, [&](int64_t image, int64_t row, int64_t) { f(image, row); });
}

}  // namespace tw
