// Reads one value of a possibly unaligned array. Vector loads accept any alignment; scalar loads must not assume it.
// Always inlined, so that no copy compiled for one instruction set is used by another.
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
