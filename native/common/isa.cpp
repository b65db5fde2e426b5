// CPU detection. __builtin_cpu_supports also asks the operating system whether it saves the wide registers.
#include "common/isa.h"

#include <atomic>
#include <cstring>
#include <initializer_list>

namespace tw {
namespace {

// Detects the best instruction set that both the CPU and these kernels support.
Isa detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni")) {
    return Isa::avx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::avx2;
#endif
  return Isa::portable;
}

std::atomic<Isa>& active() {
  static std::atomic<Isa> isa{best_isa()};
  return isa;
}

constexpr int kIsas = 3;  // definition: values of Isa
constexpr bool kBuilt[kIsas] = {
#if defined(TW_HAS_PORTABLE)
    true,
#else
    false,
#endif
#if defined(TW_HAS_AVX2)
    true,
#else
    false,
#endif
#if defined(TW_HAS_AVX512)
    true,
#else
    false,
#endif
};
const char* const kNames[] = {"portable", "avx2", "avx512"};

}  // namespace

bool isa_built(Isa isa) { return kBuilt[static_cast<int>(isa)]; }

bool isa_supported(Isa isa) {
  static const Isa cpu = detect();
  return isa_built(isa) && static_cast<int>(isa) <= static_cast<int>(cpu);
}

bool any_isa() { return isa_supported(best_isa()); }

Isa best_isa() {
  for (Isa isa : {Isa::avx512, Isa::avx2}) {
    if (isa_supported(isa)) return isa;
  }
  return Isa::portable;
}

Isa active_isa() { return active().load(std::memory_order_relaxed); }

void set_active_isa(Isa isa) { active().store(isa, std::memory_order_relaxed); }

const char* isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

bool parse_isa(const char* name, Isa* out) {
  for (int i = 0; i < kIsas; ++i) {
    if (std::strcmp(name, kNames[i]) == 0) {
      *out = static_cast<Isa>(i);
      return true;
    }
  }
  return false;
}

}  // namespace tw
