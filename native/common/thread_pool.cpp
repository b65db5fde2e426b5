// A job is open while tasks are left. A worker enters only an open job, and the caller returns when every worker that
// entered has left. A worker that wakes late finds the job closed and goes back to sleep: nobody waits for it.
// Entering, claiming and leaving are single atomic operations; the lock is for sleeping and waking only.
#include "common/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "common/machine.h"
#include "common/thread_blocks.h"

#if defined(__x86_64__)
#include <immintrin.h>
static inline void relax() { _mm_pause(); }
#else
static inline void relax() {}
#endif

namespace tw {
namespace {

thread_local bool inside_task = false;

// How long an idle thread spins before it sleeps: longer than the gap between two kernels of a model, shorter than a
// scheduler's time slice. Measured by the clock, because a pause takes 40 cycles on one CPU and 140 on another.
constexpr auto kSpinTime = std::chrono::microseconds(300);  // chosen

// Spins until `ready()` is true, for a bounded time; returns false if it never was.
template <class Ready>
bool spin(Ready&& ready) {
  const auto end = std::chrono::steady_clock::now() + kSpinTime;
  do {
    if (ready()) return true;
    relax();
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

struct Job {
  TaskFn fn = nullptr;
  void* context = nullptr;
  int tasks = 0;
  bool near = false;
};

// On a busy machine, the scheduler may repeatedly wake a worker on the core that its caller keeps busy. Forbidding that
// core for a moment moves the worker to another core; nothing stays pinned.
#if defined(__linux__)
int this_cpu() { return sched_getcpu(); }

void leave_cpu(int cpu) {
  cpu_set_t allowed, others;
  if (cpu < 0 || cpu >= CPU_SETSIZE || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  others = allowed;
  CPU_CLR(cpu, &others);
  if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0) return;
  sched_setaffinity(0, sizeof allowed, &allowed);
}
#else
int this_cpu() { return -1; }
void leave_cpu(int) {}
#endif

class Pool {
 public:
  explicit Pool(int threads)
      : threads_(threads),
        spins_(threads <= machine().real_cores),
        shares_(static_cast<std::size_t>(threads)),
        blocks_(shares_.size()) {
    forget_raises();
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
      generation_.fetch_add(1);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  int threads() const { return threads_; }

  // Runs the tasks of a job and returns when all are done. They run on this thread alone inside another task and while
  // another thread uses the pool.
  void run(const Job& job) {
    bool idle = false;
    if (inside_task || threads_ == 1 || job.tasks <= 1 || !busy_.compare_exchange_strong(idle, true)) {
      for (int task = 0; task < job.tasks; ++task) job.fn(job.context, task);
      return;
    }
    job_ = job;
    if (spins_) caller_cpu_.store(this_cpu(), std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    for (int i = 0; job.near && i < threads_; ++i)
      shares_[i].next.store(share_begin(job, i), std::memory_order_relaxed);
    inside_.store(0);
    generation_.fetch_add(1);
    wake_sleepers(job.tasks - 1);
    claim(job, 0);
    close();
    catch_up();
    busy_.store(false);
  }

 private:
  static constexpr int kClosed = -1;  // definition: value of `inside_` of a closed job

  // Grows the workers' scratch memory; safe because workers use none while the pool is closed. If memory is exhausted,
  // a worker allocates for itself later.
  void catch_up() noexcept {
    try {
      for (std::size_t i = 1; i < blocks_.size(); ++i) blocks_[i].catch_up();
    } catch (const std::bad_alloc&) {
    }
  }

  // Wakes at most `most` sleeping workers.
  void wake_sleepers(int most) {
    const int asleep = sleepers_.load();
    if (asleep == 0) return;
    { std::lock_guard<std::mutex> lock(mutex_); }  // one that is about to sleep sees the new job, or the notification
    if (most >= asleep) {
      wake_.notify_all();
    } else {
      for (int i = 0; i < most; ++i) wake_.notify_one();
    }
    sched_yield();  // a worker that wakes on this core can leave it at once
  }

  // Runs tasks until none are left.
  void claim(const Job& job, int thread) {
    inside_task = true;
    if (job.near) {
      for (int i = 0; i < threads_; ++i) claim_share(job, (thread + i) % threads_);
    } else {
      for (int task = next_.fetch_add(1); task < job.tasks; task = next_.fetch_add(1)) job.fn(job.context, task);
    }
    inside_task = false;
  }

  int share_begin(const Job& job, int thread) const {
    return static_cast<int>(static_cast<int64_t>(job.tasks) * thread / threads_);
  }

  void claim_share(const Job& job, int thread) {
    std::atomic<int>& next = shares_[thread].next;
    const int end = share_begin(job, thread + 1);
    while (next.load(std::memory_order_relaxed) < end) {  // a load is cheaper than a claim if nothing is left
      const int task = next.fetch_add(1);
      if (task < end) job.fn(job.context, task);
    }
  }

  bool close_if_empty() {
    int nobody = 0;
    return inside_.compare_exchange_strong(nobody, kClosed);
  }

  // Waits until all workers inside have left; then none can enter any more.
  void close() {
    if (close_if_empty() || (spins_ && spin([this] { return close_if_empty(); }))) return;
    std::unique_lock<std::mutex> lock(mutex_);
    caller_waits_.store(true);
    done_.wait(lock, [this] { return close_if_empty(); });
    caller_waits_.store(false);
  }

  bool enter() {
    int inside = inside_.load();
    while (inside != kClosed) {
      if (inside_.compare_exchange_weak(inside, inside + 1)) return true;
    }
    return false;
  }

  void leave() {
    if (inside_.fetch_sub(1) != 1 || !caller_waits_.load()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    done_.notify_one();
  }

  // The loop of a worker.
  void work(int thread) {
    use_blocks(&blocks_[thread]);
    unsigned version = 0;
    for (;;) {
      version = wait_for_change(version);
      if (stop_) return;
      const int caller_cpu = caller_cpu_.load(std::memory_order_relaxed);
      if (caller_cpu >= 0 && this_cpu() == caller_cpu) leave_cpu(caller_cpu);
      if (!enter()) continue;
      claim(job_, thread);
      leave();
    }
  }

  unsigned wait_for_change(unsigned version) {
    if (spins_ && spin([&] { return generation_.load() != version; })) return generation_.load();
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    wake_.wait(lock, [&] { return generation_.load() != version; });
    sleepers_.fetch_sub(1);
    return generation_.load();
  }

  struct alignas(64) Share {
    std::atomic<int> next{0};
  };

  const int threads_;
  const bool spins_;                   // false if there are more threads than cores, which would block each other
  std::vector<Share> shares_;          // of a `near` job
  std::vector<ScratchBlocks> blocks_;  // of the workers; the caller has its own
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::atomic<bool> stop_{false}, caller_waits_{false};
  Job job_;  // written while closed, read inside
  std::atomic<int> sleepers_{0}, caller_cpu_{-1};
  std::atomic<bool> busy_{false};
  // On separate cache lines: all threads read the first, and claim by the second, all the time.
  alignas(64) std::atomic<unsigned> generation_{0};
  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::atomic<int> inside_{kClosed};  // workers in the job, or kClosed
};

// The pool is created at first use. Callers share ownership, so that set_num_threads may replace it while another
// Python thread uses it. A forked child has no workers: it leaks the pool on purpose, because its threads cannot be
// joined.
std::mutex pool_mutex;
std::shared_ptr<Pool> shared_pool;
std::atomic<int> wanted_threads{0};

void forget_pool_in_child() {
  new (&pool_mutex) std::mutex();
  new std::shared_ptr<Pool>(std::move(shared_pool));
}

thread_local int thread_limit = 0;  // of this thread's calls; 0: no limit

int pool_threads() {
  const int n = wanted_threads.load();
  return n > 0 ? n : machine().cores;
}

std::shared_ptr<Pool> get_pool() {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_pool_in_child);
  (void)registered;
  std::lock_guard<std::mutex> lock(pool_mutex);
  if (!shared_pool) shared_pool = std::make_shared<Pool>(pool_threads());
  return shared_pool;
}

}  // namespace

bool in_shared_task() { return inside_task; }

int num_threads() { return thread_limit > 0 && thread_limit < pool_threads() ? thread_limit : pool_threads(); }

ThreadLimit::ThreadLimit(int threads) : before_(thread_limit) { thread_limit = threads; }
ThreadLimit::~ThreadLimit() { thread_limit = before_; }

void set_num_threads(int n) {
  std::shared_ptr<Pool> old;  // destroyed, and its workers joined, after the lock is released
  std::lock_guard<std::mutex> lock(pool_mutex);
  wanted_threads.store(n);
  if (shared_pool && shared_pool->threads() != n) old = std::move(shared_pool);
}

void run_tasks(int tasks, TaskFn fn, void* context, bool near) {
  if (tasks <= 1 || num_threads() == 1) {
    for (int task = 0; task < tasks; ++task) fn(context, task);
    return;
  }
  get_pool()->run(Job{fn, context, tasks, near});
}

}  // namespace tw
