// Instruction sets in one binary. Every file under native/kernels/ is compiled once per set, with TW_ISA defined as
// `portable`, `avx2` or `avx512`, and puts everything it defines into namespace tw::TW_ISA. A kernel family exports one
// table of function pointers. `TW_TABLE` declares the table of each set, and a function that returns the table of the
// active set.
//
// Rule for kernel files: no standard-library templates. The linker keeps one copy of an inline function, and a copy
// compiled for AVX-512 must never be the one that a plain x86 machine runs. tests/native checks the object files for
// this.
#pragma once

namespace tw {

enum class Isa { portable = 0, avx2 = 1, avx512 = 2 };

bool any_isa();    // whether this build contains a set that this CPU (and operating system) can run
Isa best_isa();    // the best such set
Isa active_isa();  // what the kernels use now
bool isa_built(Isa isa);
bool isa_supported(Isa isa);   // built, and this CPU can run it
void set_active_isa(Isa isa);  // the caller has checked isa_supported
const char* isa_name(Isa isa);
bool parse_isa(const char* name, Isa* out);

}  // namespace tw

// The build defines TW_HAS_PORTABLE, TW_HAS_AVX2 and TW_HAS_AVX512 for the sets it contains (TILEWISE_ISAS in CMake).
#if defined(TW_HAS_PORTABLE)
#define TW_DECLARE_PORTABLE(Type, name) \
  namespace portable {                  \
  extern const Type name;               \
  }
#define TW_CASE_PORTABLE(name) \
  case Isa::portable:          \
    return portable::name;
#else
#define TW_DECLARE_PORTABLE(Type, name)
#define TW_CASE_PORTABLE(name)
#endif
#if defined(TW_HAS_AVX2)
#define TW_DECLARE_AVX2(Type, name) \
  namespace avx2 {                  \
  extern const Type name;           \
  }
#define TW_CASE_AVX2(name) \
  case Isa::avx2:          \
    return avx2::name;
#else
#define TW_DECLARE_AVX2(Type, name)
#define TW_CASE_AVX2(name)
#endif
#if defined(TW_HAS_AVX512)
#define TW_DECLARE_AVX512(Type, name) \
  namespace avx512 {                  \
  extern const Type name;             \
  }
#define TW_CASE_AVX512(name) \
  case Isa::avx512:          \
    return avx512::name;
#else
#define TW_DECLARE_AVX512(Type, name)
#define TW_CASE_AVX512(name)
#endif

#define TW_TABLE(Type, name)                                                            \
  TW_DECLARE_PORTABLE(Type, name)                                                       \
  TW_DECLARE_AVX2(Type, name)                                                           \
  TW_DECLARE_AVX512(Type, name)                                                         \
  inline const Type& active_##name() {                                                  \
    switch (active_isa()) {                                                             \
      TW_CASE_PORTABLE(name)                                                            \
      TW_CASE_AVX2(name)                                                                \
      TW_CASE_AVX512(name)                                                              \
      default:                                                                          \
        __builtin_unreachable(); /* set_active_isa() takes only sets that were built */ \
    }                                                                                   \
  }
