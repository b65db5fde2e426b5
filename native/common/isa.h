// Instruction sets in one binary. Every file under native/kernels/ is compiled once per set with TW_ISA defined as
// `portable`, `avx2` or `avx512`, and puts everything it defines into namespace tw::TW_ISA. A kernel family exports one
// table of function pointers; `TW_TABLE` declares the table of each set and a picker for the one in force.
//
// Rule for kernel files: no standard-library templates. The linker keeps one copy of an inline function, and a copy
// compiled for AVX-512 must never be the one a plain x86 machine runs. tests/native checks the object files for this.
#pragma once

namespace tw {

enum class Isa { portable = 0, avx2 = 1, avx512 = 2 };

Isa best_isa();    // what this CPU (and operating system) can run
Isa active_isa();  // what the kernels use now
bool isa_supported(Isa isa);
void set_active_isa(Isa isa);  // the caller has checked isa_supported
const char* isa_name(Isa isa);
bool parse_isa(const char* name, Isa* out);

}  // namespace tw

#if defined(__x86_64__)
#define TW_TABLE(Type, name)           \
  namespace portable {                 \
  extern const Type name;              \
  }                                    \
  namespace avx2 {                     \
  extern const Type name;              \
  }                                    \
  namespace avx512 {                   \
  extern const Type name;              \
  }                                    \
  inline const Type& active_##name() { \
    switch (active_isa()) {            \
      case Isa::avx512:                \
        return avx512::name;           \
      case Isa::avx2:                  \
        return avx2::name;             \
      default:                         \
        return portable::name;         \
    }                                  \
  }
#else
#define TW_TABLE(Type, name) \
  namespace portable {       \
  extern const Type name;    \
  }                          \
  inline const Type& active_##name() { return portable::name; }
#endif
