// What the machine says of itself: caches as the kernels should believe them, and cores. Read once from the system, or
// pretended, so that any machine can play any other (TILEWISE_MACHINE, which Python reads). Every threshold that
// depends on a cache or a core count asks here.
#pragma once

#include <cstdint>

namespace tw {

// Bytes of data cache as one core sees them. `l3` is what is reported, which a virtual machine may copy from a host
// with hundreds of megabytes; what is to stay in cache while every core works is sized by `l3_share`, which is bounded.
struct CacheSizes {
  int64_t l1 = 32 << 10, l2 = 1 << 20, l3 = 8 << 20;  // where the system does not say
  int64_t l3_share = 2 << 20;
};

struct Machine {
  CacheSizes caches;
  int cores = 1;       // that this process may use, or pretends to have: the default number of threads
  int real_cores = 1;  // that it may use
};

const Machine& machine();
inline const CacheSizes& cache_sizes() { return machine().caches; }

// Another machine from now on. Bytes and cores of 0 keep what is real; an l3 of -1 is an L3 that is not reported.
void pretend_machine(int64_t l1, int64_t l2, int64_t l3, int cores);

// One core's believable part of an L3 cache that `sharers` cores use; of one that is not reported (0), a modest guess.
int64_t share_of_l3(int64_t l3, int sharers);

}  // namespace tw
