// Chooses the number of threads of a repeated workload by measuring: operators that stream weights from memory gain
// from a second thread on one machine and lose on another, or on the same machine under load.
//
// Each number (1, 2, 4, ... and all) is tried, the fastest is used from then on, and occasionally another one is tried
// again. Fewer threads are preferred if more gain little. Only for work whose result does not depend on the number of
// threads. Thread-safe.
#pragma once

#include <mutex>
#include <vector>

namespace tw {

class ThreadTrial {
 public:
  int threads(int most);                   // threads for the next run, at most `most`
  void took(int threads, double seconds);  // records the duration of a run

 private:
  struct Count {
    int threads;
    double seconds;
  };
  void start(int most);
  void settle();

  std::mutex mutex_;
  std::vector<Count> counts_;
  std::size_t used_ = 0;   // index of the count in use
  std::size_t trial_ = 0;  // index of the count on trial; counts_.size() if there is none
  bool first_ = true;      // every count is being tried for the first time
  bool up_ = true;         // the next trial uses more threads
  int runs_ = 0;           // runs of the trial, or since the last one
};

}  // namespace tw
