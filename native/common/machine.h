// The machine's caches and cores, read once from the system or emulated, so that any machine can behave like another
// (TILEWISE_MACHINE, which Python reads). Every threshold that depends on a cache or a number of cores asks here.
#pragma once

#include <cstdint>

namespace tw {

constexpr int64_t kSmallestL1 = 32 << 10;  // hardware: bytes of the smallest first-level data cache of the CPUs in use

// Bytes of data cache per core. `l3` is the reported size, which a virtual machine may copy from a host with hundreds
// of megabytes. `l3_share` is bounded: it sizes what must stay in cache while every core works.
struct CacheSizes {
  int64_t l1 = 32 << 10, l2 = 1 << 20, l3 = 8 << 20;  // defaults if the system does not say
  int64_t l3_share = 2 << 20;
};

struct Machine {
  CacheSizes caches;
  int cores = 1;       // real or emulated; the default number of threads
  int real_cores = 1;  // that this process may use
};

const Machine& machine();
inline const CacheSizes& cache_sizes() { return machine().caches; }

// Emulates another machine from now on. Bytes and cores of 0 keep the real value; an l3 of -1 means that no L3 is
// reported.
void pretend_machine(int64_t l1, int64_t l2, int64_t l3, int cores);

// One core's share of an L3 cache that `sharers` cores use, within plausible bounds; of one that is not reported (0), a
// modest guess.
int64_t share_of_l3(int64_t l3, int sharers);

}  // namespace tw
