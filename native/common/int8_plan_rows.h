// The rows of a plan's value, shared among the threads: for operations that go row by row.
#pragma once

#include <algorithm>

#include "common/int8_plan.h"
#include "common/thread_pool.h"

namespace tw {

// f(image, row) for every row of all images, shared among the threads where there is much to do.
template <class F>
void each_row(const PlanShape& shape, int64_t images, F&& f) {
  constexpr int64_t kWorthATask = 1 << 15;  // bytes
  const int64_t rows = images * shape.height;
  const int64_t tasks = std::min({rows, images * shape.floats() * shape.size / kWorthATask, int64_t{2} * num_threads()});
  const auto some = [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) f(i / shape.height, i % shape.height);
  };
  if (tasks < 2 || num_threads() == 1) return some(0, rows);
  parallel_for(static_cast<int>(tasks), [&](int task) { some(rows * task / tasks, rows * (task + 1) / tasks); });
}

}  // namespace tw
