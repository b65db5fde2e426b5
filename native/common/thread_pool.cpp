// A job is open while tasks are left; a worker enters only an open job, and the caller leaves when every worker that
// entered has left. A worker that wakes late finds the job closed and goes back to sleep: nobody waits for it.
#include "common/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "common/machine.h"

#if defined(__x86_64__)
#include <immintrin.h>
static inline void relax() { _mm_pause(); }
#else
static inline void relax() {}
#endif

namespace tw {
namespace {

thread_local bool inside_task = false;

// Some hundred microseconds: longer than the gap between two kernels of a model, less than a scheduler's time slice.
constexpr int kSpins = 20000;

struct Job {
  TaskFn fn = nullptr;
  void* context = nullptr;
  int tasks = 0;
};

// On a machine with other work to do, the scheduler may wake a worker on the very core its caller keeps busy, time and again.
// Forbidding that core for a moment moves the worker to another; nothing stays pinned.
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
  explicit Pool(int threads) : threads_(threads) {
    spins_ = threads <= machine().real_cores ? kSpins : 0;
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
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

  void run(const Job& job) {
    bool idle = false;
    if (inside_task || threads_ == 1 || job.tasks <= 1 || !busy_.compare_exchange_strong(idle, true)) {
      for (int task = 0; task < job.tasks; ++task) job.fn(job.context, task);
      return;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = job;
      if (spins_ > 0) caller_cpu_.store(this_cpu(), std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      open_ = true;
      generation_.fetch_add(1);
    }
    if (sleepers_.load() > 0) {
      wake_.notify_all();
      sched_yield();  // a worker that wakes on this core can leave it at once
    }
    claim(job);
    close();
    busy_.store(false);
  }

 private:
  void claim(const Job& job) {
    inside_task = true;
    for (int task = next_.fetch_add(1); task < job.tasks; task = next_.fetch_add(1)) job.fn(job.context, task);
    inside_task = false;
  }

  // No worker may enter the job any more; wait for those inside to leave.
  void close() {
    for (int i = 0; i < spins_ && active_.load() > 0; ++i) relax();
    std::unique_lock<std::mutex> lock(mutex_);
    open_ = false;
    done_.wait(lock, [this] { return active_.load() == 0; });
  }

  void work() {
    unsigned seen = 0;
    for (;;) {
      wait_for_change(seen);
      const int caller_cpu = caller_cpu_.load(std::memory_order_relaxed);
      if (caller_cpu >= 0 && this_cpu() == caller_cpu) leave_cpu(caller_cpu);
      Job job;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        seen = generation_.load();
        if (stop_) return;
        if (!open_) continue;
        active_.fetch_add(1);
        job = job_;
      }
      claim(job);
      std::lock_guard<std::mutex> lock(mutex_);
      if (active_.fetch_sub(1) == 1) done_.notify_one();
    }
  }

  void wait_for_change(unsigned seen) {
    for (int i = 0; i < spins_; ++i) {
      if (generation_.load() != seen) return;
      relax();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    wake_.wait(lock, [&] { return generation_.load() != seen; });
    sleepers_.fetch_sub(1);
  }

  int threads_;
  int spins_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job job_;
  bool open_ = false;
  bool stop_ = false;
  std::atomic<bool> busy_{false};
  std::atomic<unsigned> generation_{0};
  std::atomic<int> next_{0}, active_{0}, sleepers_{0}, caller_cpu_{-1};
};

// The pool is made at first use. Callers share ownership, so that set_num_threads may replace it while another Python
// thread is inside. A forked child has no workers: it forgets the pool, leaked on purpose (its threads cannot be joined).
std::mutex pool_mutex;
std::shared_ptr<Pool> shared_pool;
std::atomic<int> wanted_threads{0};

void forget_pool_in_child() {
  new (&pool_mutex) std::mutex();
  new std::shared_ptr<Pool>(std::move(shared_pool));
}

std::shared_ptr<Pool> get_pool() {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_pool_in_child);
  (void)registered;
  std::lock_guard<std::mutex> lock(pool_mutex);
  if (!shared_pool) shared_pool = std::make_shared<Pool>(num_threads());
  return shared_pool;
}

}  // namespace

int num_threads() {
  int n = wanted_threads.load();
  return n > 0 ? n : machine().cores;
}

void set_num_threads(int n) {
  std::shared_ptr<Pool> old;  // destroyed, and its workers joined, after the lock is gone
  std::lock_guard<std::mutex> lock(pool_mutex);
  wanted_threads.store(n);
  if (shared_pool && shared_pool->threads() != n) old = std::move(shared_pool);
}

void run_tasks(int tasks, TaskFn fn, void* context) {
  if (tasks <= 1 || num_threads() == 1) {
    for (int task = 0; task < tasks; ++task) fn(context, task);
    return;
  }
  get_pool()->run(Job{fn, context, tasks});
}

}  // namespace tw
