// Linux lists every cache of every CPU under /sys; other systems get defaults. Caches are found by level and type,
// because the order of the list is not guaranteed.
#include "common/machine.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif

namespace tw {
namespace {

// Bounds of one core's share of an L3.
constexpr int64_t kLeastShare = 1 << 20, kMostShare = 8 << 20;  // chosen
constexpr int64_t kLargestCache = int64_t{4} << 30;             // chosen: larger reported sizes are ignored

struct SystemInfo {
  int64_t l1 = 0, l2 = 0, l3 = 0;  // 0: not reported
  int l3_sharers = 0;
  int cores = 1;
};

bool read_text(const char* path, char* text, int size) {
  std::FILE* file = std::fopen(path, "r");
  if (file == nullptr) return false;
  const bool ok = std::fgets(text, size, file) != nullptr;
  std::fclose(file);
  return ok;
}

#if defined(__linux__)
// Returns the number of cores on which this process may run; 0 if unknown. `first` is the first of them.
int allowed_cores(int* first) {
  cpu_set_t allowed;
  *first = 0;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 0;
  while (*first < CPU_SETSIZE && !CPU_ISSET(*first, &allowed)) ++*first;
  return CPU_COUNT(&allowed);
}
#else
int allowed_cores(int* first) {
  *first = 0;
  return 0;
}
#endif

// Returns the CPU quota of a container (cgroup v2 or v1) in cores, rounded up; 0 if there is none.
int quota_cores() {
  char text[64];
  double quota = 0, period = 0;
  if (read_text("/sys/fs/cgroup/cpu.max", text, sizeof text)) {
    if (std::sscanf(text, "%lf %lf", &quota, &period) != 2) return 0;  // "max"
  } else if (read_text("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", text, sizeof text)) {
    quota = std::atof(text);
    if (read_text("/sys/fs/cgroup/cpu/cpu.cfs_period_us", text, sizeof text)) period = std::atof(text);
  }
  return quota > 0 && period > 0 ? static_cast<int>((quota + period - 1) / period) : 0;
}

bool read_cache_file(int cpu, int index, const char* name, char* text, int size) {
  char path[96];
  std::snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/cache/index%d/%s", cpu, index, name);
  return read_text(path, text, size);
}

int64_t bytes_of(const char* text) {
  char* unit = nullptr;
  const int64_t number = std::strtoll(text, &unit, 10);
  const int shift = *unit == 'K' ? 10 : *unit == 'M' ? 20 : *unit == 'G' ? 30 : 0;
  return number > 0 && number <= (kLargestCache >> shift) ? number << shift : 0;
}

// Counts the CPUs of a list such as "0-3,8".
int count_cpus(const char* list) {
  int count = 0;
  for (const char* at = list; at != nullptr && *at >= '0' && *at <= '9';) {
    char* end = nullptr;
    const long first = std::strtol(at, &end, 10);
    const long last = *end == '-' ? std::strtol(end + 1, &end, 10) : first;
    count += last >= first && last < (1 << 20) ? static_cast<int>(last - first + 1) : 0;
    at = *end == ',' ? end + 1 : nullptr;
  }
  return count;
}

// Reads the sizes of a CPU's data and unified caches, and how many CPUs share its L3.
void read_caches(int cpu, SystemInfo& info) {
  char level[16], type[32], size[32], sharers[1024];
  for (int index = 0; index < 16 && read_cache_file(cpu, index, "level", level, sizeof level); ++index) {
    if (!read_cache_file(cpu, index, "type", type, sizeof type) || std::strncmp(type, "Instruction", 11) == 0) continue;
    if (!read_cache_file(cpu, index, "size", size, sizeof size)) continue;
    const int64_t bytes = bytes_of(size);
    switch (std::atoi(level)) {
      case 1:
        info.l1 = bytes;
        break;
      case 2:
        info.l2 = bytes;
        break;
      case 3:
        info.l3 = bytes;
        if (read_cache_file(cpu, index, "shared_cpu_list", sharers, sizeof sharers))
          info.l3_sharers = count_cpus(sharers);
        break;
      default:
        break;
    }
  }
}

// Reads the usable cores (affinity and container quota) and the cache sizes from the system.
SystemInfo read_system() {
  SystemInfo info;
  int first = 0;
  const int allowed = allowed_cores(&first);
  const int there = allowed > 0 ? allowed : static_cast<int>(std::thread::hardware_concurrency());
  const int quota = quota_cores();
  info.cores = std::max(1, quota > 0 ? std::min(there, quota) : there);
  read_caches(first, info);
  return info;
}

const SystemInfo& real() {
  static const SystemInfo info = read_system();
  return info;
}

// Completes a machine by defaults and by its share of L3.
Machine described(const SystemInfo& info) {
  Machine m;
  m.cores = info.cores;
  m.real_cores = real().cores;
  if (info.l1 > 0) m.caches.l1 = info.l1;
  if (info.l2 > 0) m.caches.l2 = info.l2;
  m.caches.l3 = info.l3 > 0 ? info.l3 : std::max(m.caches.l2, CacheSizes().l3);
  m.caches.l3_share = share_of_l3(info.l3, std::min(info.l3_sharers, info.cores));
  return m;
}

Machine& current() {
  static Machine m = described(real());
  return m;
}

}  // namespace

const Machine& machine() { return current(); }

void pretend_machine(int64_t l1, int64_t l2, int64_t l3, int cores) {
  SystemInfo info = real();
  if (l1 > 0) info.l1 = l1;
  if (l2 > 0) info.l2 = l2;
  if (l3 != 0) info.l3 = std::max<int64_t>(l3, 0);
  if (cores > 0) info.cores = cores;
  if (l3 != 0 || cores > 0) info.l3_sharers = info.cores;  // all cores share an emulated L3
  current() = described(info);
}

int64_t share_of_l3(int64_t l3, int sharers) {
  if (l3 <= 0) return CacheSizes().l3_share;
  const int64_t even = l3 / std::max(sharers, 1);
  return std::min(l3, std::clamp(even, kLeastShare, kMostShare));
}

}  // namespace tw
