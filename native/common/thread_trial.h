// How many threads a piece of work that comes again and again is worth, by trying: steps that read their weights from
// memory gain from a second thread on one machine and lose on another, or on the same one while something else runs
// there.
//
// Each count (1, 2, 4, ... and all) is tried in turn, the fastest is used from then on, and now and then another one is
// tried again. Fewer threads are preferred where more gain next to nothing. Only for work whose result does not depend
// on the number of threads. Safe to use from several threads.
#pragma once

#include <mutex>
#include <vector>

namespace tw {

class ThreadTrial {
 public:
  int threads(int most);                   // for the next run; `most` threads are there
  void took(int threads, double seconds);  // what a run with so many took

 private:
  struct Count {
    int threads;
    double seconds;
  };
  void start(int most);
  void settle();

  std::mutex mutex_;
  std::vector<Count> counts_;
  std::size_t used_ = 0;   // the count in use
  std::size_t tried_ = 0;  // the count on trial; counts_.size() when there is none
  bool first_ = true;      // every count is being tried for the first time
  bool up_ = true;         // the next trial is of more threads
  int runs_ = 0;           // of the trial, or since the last one
};

}  // namespace tw
