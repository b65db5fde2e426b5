// A dozen lines of test framework: TW_TEST registers a case, TW_CHECK counts a failure and says where.
#pragma once

#include <cstdio>
#include <vector>

namespace tw {
namespace test {

struct Case {
  const char* name;
  void (*run)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}
inline int& failure_count() {
  static int count = 0;
  return count;
}
struct Register {
  Register(const char* name, void (*run)()) { cases().push_back({name, run}); }
};

}  // namespace test
}  // namespace tw

#define TW_TEST(name)                                           \
  static void name();                                           \
  static const tw::test::Register register_##name(#name, name); \
  static void name()

#define TW_CHECK(condition)                                                \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::printf("%s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
      ++tw::test::failure_count();                                         \
    }                                                                      \
  } while (0)
