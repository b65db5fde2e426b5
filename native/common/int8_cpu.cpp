// CPU features of the integer kernels beyond the instruction set: AVX-VNNI, and AMX, whose registers a process must
// request from the operating system.
#include "kernels/int8.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tw {
namespace {

#if defined(__x86_64__)
struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf, unsigned part) {
  Registers r;
  if (__get_cpuid_count(leaf, part, &r.a, &r.b, &r.c, &r.d) == 0) return {};
  return r;
}

bool bit(unsigned value, int i) { return (value >> i & 1u) != 0; }
#endif

// Requests AMX from the kernel once per process; the answer holds for all its threads.
bool ask_for_amx() {
#if defined(__x86_64__) && defined(__linux__) && defined(TW_AMX)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // definition: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  const unsigned features = cpuid(7, 0).d;
  if (best_isa() != Isa::avx512 || !bit(features, 24) || !bit(features, 25)) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

bool has_avx_vnni() {
#if defined(__x86_64__)
  static const bool has = best_isa() >= Isa::avx2 && cpuid(7, 0).a >= 1 && bit(cpuid(7, 1).a, 4);
  return has;
#else
  return false;
#endif
}

bool has_amx() {
  static const bool has = ask_for_amx();
  return has;
}

}  // namespace tw
