// The extension's thread pool. `parallel_for(tasks, f)` calls f(0) ... f(tasks - 1), each exactly once, on the workers
// and the caller. Tasks are claimed from a counter, so uneven ones balance. A second Python thread that arrives while
// the pool is busy, and a call from inside a task, run their tasks alone: so there are no deadlocks, and never more
// threads than requested.
#pragma once

#include <cstdint>

namespace tw {

// chosen: the least work of a task, some microseconds, which is long compared with handing it to a thread that is awake
constexpr int64_t kTaskElements = 1 << 14, kTaskMultiplyAdds = 1 << 17;
// The least work that repays waking a thread.
constexpr int64_t kWakeMultiplyAdds = 8 * kTaskMultiplyAdds;
constexpr int kMaxThreads = 1024;  // chosen: of the pool, and of either side of a tile's thread grid

bool in_shared_task();        // whether this thread runs a task of a job that several threads share
int num_threads();            // threads available to the calling thread
void set_num_threads(int n);  // n >= 1, checked by the caller

// Limits the calling thread's work to this many threads during its lifetime.
class ThreadLimit {
 public:
  explicit ThreadLimit(int threads);
  ~ThreadLimit();
  ThreadLimit(const ThreadLimit&) = delete;
  ThreadLimit& operator=(const ThreadLimit&) = delete;

 private:
  int before_;
};

using TaskFn = void (*)(void* context, int task);
// `near`: a thread always starts with the same share of the tasks, if their number is the same, and helps the others
// afterwards.
void run_tasks(int tasks, TaskFn fn, void* context, bool near = false);

template <class F>
void parallel_for(int tasks, F&& f) {
  auto call = [](void* context, int task) { (*static_cast<F*>(context))(task); };
  run_tasks(tasks, call, &f);
}

// For successive operators on one image: a thread's previous results are in its own caches, so it receives the same
// region of the image again.
template <class F>
void parallel_near(int tasks, F&& f) {
  auto call = [](void* context, int task) { (*static_cast<F*>(context))(task); };
  run_tasks(tasks, call, &f, true);
}

}  // namespace tw
