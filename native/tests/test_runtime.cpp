// Tests of the runtime: the thread pool, scratch memory, the choice of a thread count, and the bandwidth probes.
#include <atomic>
#include <cmath>
#include <thread>
#include <vector>

#include "common/alloc.h"
#include "common/scratch.h"
#include "common/thread_pool.h"
#include "common/thread_trial.h"
#include "kernels/int8.h"
#include "kernels/probe.h"
#include "tests/tests.h"

TW_TEST(parallel_for_runs_every_task_once) {
  for (int threads : {1, 2, 7}) {
    tw::set_num_threads(threads);
    for (int tasks : {0, 1, 2, 3, 100}) {
      std::vector<std::atomic<int>> hits(tasks);
      tw::parallel_for(tasks, [&](int t) { hits[t]++; });
      for (auto& h : hits) TW_CHECK(h == 1);
      tw::parallel_near(tasks, [&](int t) { hits[t]++; });
      for (auto& h : hits) TW_CHECK(h == 2);
    }
  }
}

TW_TEST(parallel_for_nests_and_runs_from_several_threads) {
  tw::set_num_threads(2);
  std::atomic<int> total{0};
  std::vector<std::thread> callers;
  // Four callers nest both kinds of loop while the number of threads changes.
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int r = 0; r < 200; ++r) {
        tw::parallel_near(3, [&](int) { tw::parallel_for(5, [&](int) { total++; }); });
        tw::parallel_for(3, [&](int) { tw::parallel_near(5, [&](int) { total++; }); });
        if (r % 50 == 0) tw::set_num_threads(1 + (r / 50) % 3);
      }
    });
  }
  for (std::thread& t : callers) t.join();
  TW_CHECK(total == 4 * 200 * 30);
}

// Runs `f` exactly once on every thread: a thread that starts its task waits until all the others have started theirs.
template <class F>
static void on_every_thread(int threads, F&& f) {
  std::atomic<int> here{0};
  tw::parallel_for(threads, [&](int) {
    for (++here; here < threads;) std::this_thread::yield();
    f();
  });
}

TW_TEST(workers_have_the_scratch_of_a_task_that_another_thread_got) {
  // The largest request of any thread decides: later passes must not allocate, whichever thread runs which task.
  for (const int threads : {2, 5}) {
    tw::set_num_threads(threads);
    std::atomic<int> first{0};
    on_every_thread(threads, [&] { tw::thread_scratch(first++ == 0 ? 100000 : 10); });
    on_every_thread(threads, [] { tw::int8_scratch(1000); });
    on_every_thread(threads, [] { tw::thread_scratch(5); });  // the caller's own block grows when it asks
    const int64_t bytes = tw::memory_in_use();
    for (int pass = 0; pass < 3; ++pass) {
      on_every_thread(threads, [] {
        tw::thread_scratch(100000)[99999] = 1.0f;
        tw::int8_scratch(1000)[999] = 1;
      });
    }
    TW_CHECK(tw::memory_in_use() == bytes);
  }
  tw::set_num_threads(1);
}

TW_TEST(scratch_that_only_the_caller_needs_is_not_given_to_workers) {
  tw::set_num_threads(3);
  on_every_thread(3, [] { tw::thread_scratch(10); });
  tw::thread_scratch(500000);
  const int64_t bytes = tw::memory_in_use();
  on_every_thread(3, [] { tw::thread_scratch(10); });
  TW_CHECK(tw::memory_in_use() == bytes);
  tw::set_num_threads(1);
}

TW_TEST(a_limit_of_threads_ends_with_its_scope) {
  tw::set_num_threads(3);
  {
    const tw::ThreadLimit one(1);
    TW_CHECK(tw::num_threads() == 1);
    const tw::ThreadLimit many(9);
    TW_CHECK(tw::num_threads() == 3);
  }
  TW_CHECK(tw::num_threads() == 3);
  tw::set_num_threads(1);
}

TW_TEST(a_trial_settles_on_the_fastest_number_of_threads_and_notices_changes) {
  for (const int most : {1, 2, 6, 16}) {
    for (const int best : {1, 2, most}) {
      if (best > most) continue;
      tw::ThreadTrial trial;
      // Reports times that grow with the distance from `fastest` threads; returns how often the trial used `fastest`.
      const auto run = [&](int runs, int fastest) {
        int used = 0;
        for (int i = 0; i < runs; ++i) {
          const int threads = trial.threads(most);
          const double distance =
              threads > fastest ? threads / static_cast<double>(fastest) : fastest / static_cast<double>(threads);
          trial.took(threads, 1e-3 * distance);
          used += threads == fastest ? 1 : 0;
        }
        return used;
      };
      // After 40 runs the trial may explore in at most 3 % of its runs, also after the fastest count has changed.
      run(40, best);
      TW_CHECK(run(1000, best) >= 970);
      run(20000, 1);
      TW_CHECK(run(1000, 1) >= 970);
    }
  }
}

TW_TEST(probe_read_sums_every_element) {
  for (int n : {0, 1, 7, 127, 128, 129, 1000}) {
    std::vector<float> x(n, 1.0f);
    TW_CHECK(tw::active_probe().read(x.data(), n) == static_cast<float>(n));
  }
}

TW_TEST(probe_copy_copies_every_element_and_no_more) {
  for (int n : {0, 1, 7, 63, 64, 65, 1000}) {
    std::vector<float> from(n, 2.0f), to(n + 1, -1.0f);
    tw::active_probe().copy(to.data(), from.data(), n);
    for (int i = 0; i < n; ++i) TW_CHECK(to[i] == 2.0f);
    TW_CHECK(to[n] == -1.0f);
  }
}

TW_TEST(probe_multiply_adds_keeps_its_accumulators_in_range) {
  float sink = 0.0f;
  TW_CHECK(tw::active_probe().multiply_adds(1000, &sink) > 0.0);
  TW_CHECK(std::isfinite(sink));
}
