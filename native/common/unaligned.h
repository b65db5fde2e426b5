// Reading one number of an array that may start anywhere: whoever calls a kernel may hold such arrays. The vectors'
// loads do not mind; a plain one must not. Always inlined, so that no copy made for one instruction set is taken by
// another.
#pragma once

#include <cstdint>
#include <cstring>

namespace tw {

template <typename T>
inline __attribute__((always_inline)) T at(const T* from, int64_t i) {
  T value;
  std::memcpy(&value, from + i, sizeof value);
  return value;
}

}  // namespace tw
