// Runs every native kernel test on every instruction set this CPU has. No Python: the same program runs under the
// sanitizers and, cross-compiled, under qemu.
#include <cstdio>

#include "common/isa.h"
#include "tests/tests.h"

int main() {
  int failures = 0;
  for (tw::Isa isa : {tw::Isa::portable, tw::Isa::avx2, tw::Isa::avx512}) {
    if (!tw::isa_supported(isa)) continue;
    tw::set_active_isa(isa);
    for (const tw::test::Case& c : tw::test::cases()) {
      const int before = tw::test::failure_count();
      c.run();
      const bool ok = tw::test::failure_count() == before;
      std::printf("%-8s %-40s %s\n", tw::isa_name(isa), c.name, ok ? "ok" : "FAILED");
      failures += ok ? 0 : 1;
    }
  }
  std::printf("%s\n", failures == 0 ? "all native tests passed" : "native tests FAILED");
  return failures == 0 ? 0 : 1;
}
