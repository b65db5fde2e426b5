#include "common/scratch.h"

#include <new>

#include "common/alloc.h"

namespace tw {
namespace {

constexpr std::size_t kKeptFloats = std::size_t{4} << 20;
thread_local Buffer<float> block;

}  // namespace

float* thread_scratch(int64_t floats) {
  try {
    return block.grow(static_cast<std::size_t>(floats));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void trim_thread_scratch() {
  if (block.size() > kKeptFloats) block = Buffer<float>();
}

}  // namespace tw
