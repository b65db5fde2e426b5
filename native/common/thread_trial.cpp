#include "common/thread_trial.h"

#include <algorithm>

namespace tw {
namespace {

constexpr int kTrialRuns = 4;  // chosen: runs of one count; the first wakes threads and is ignored
constexpr int kBetween = 200;  // chosen: runs between two trials; a slow count then costs less than two percent
// chosen: relative time that a change to another count must reach (benchmarks/decode.py threads)
constexpr double kMaxRelativeSeconds = 0.97;
constexpr double kShare = 1.0 / 8;  // chosen: weight of a new run in the moving average
constexpr double kOutlier = 4.0;    // chosen: a run counts as at most this many times the average

}  // namespace

// Starts a trial of the thread counts 1, 2, 4, ... and `most`.
void ThreadTrial::start(int most) {
  counts_.clear();
  for (int n = 1; n < most; n *= 2) counts_.push_back({n, 0.0});
  counts_.push_back({most, 0.0});
  used_ = trial_ = 0;
  first_ = counts_.size() > 1;
  if (!first_) trial_ = counts_.size();
  runs_ = 0;
}

int ThreadTrial::threads(int most) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (counts_.empty() || counts_.back().threads != most) start(most);
  return counts_[trial_ < counts_.size() ? trial_ : used_].threads;
}

// Uses the fewest threads that no larger count beats by the required gain.
void ThreadTrial::settle() {
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    const double threshold = counts_[used_].seconds * (i == used_ ? 1.0 : kMaxRelativeSeconds);
    if (counts_[i].seconds < threshold) used_ = i;
  }
}

// Records a run: of the count on trial, or in the moving average of the count in use, after which a trial may start.
void ThreadTrial::took(int threads, double seconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  const bool trial = trial_ < counts_.size();
  if (counts_.empty() || counts_[trial ? trial_ : used_].threads != threads)
    return;  // a run of another thread intervened
  ++runs_;
  if (trial) {
    double& mean = counts_[trial_].seconds;
    if (runs_ > 1) mean = runs_ == 2 ? seconds : mean + (seconds - mean) / (runs_ - 1);
    if (runs_ < kTrialRuns) return;
    runs_ = 0;
    if (first_ && trial_ + 1 < counts_.size()) {
      ++trial_;
      return;
    }
    if (first_) used_ = 0;
    first_ = false;
    settle();
    trial_ = counts_.size();
    return;
  }
  double& mean = counts_[used_].seconds;
  mean += (std::min(seconds, kOutlier * mean) - mean) * kShare;
  settle();  // if this count has become slower than another was, that one is used from now on
  if (runs_ < kBetween || counts_.size() == 1) return;
  runs_ = 0;
  // Try the two neighbours alternately: a count far from the best is rarely the best later.
  trial_ = used_ + 1 < counts_.size() && (up_ || used_ == 0) ? used_ + 1 : used_ - 1;
  up_ = !up_;
}

}  // namespace tw
