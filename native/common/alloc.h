// Counted memory of the native library. Workspaces, packed panels and converted weights are allocated here, so that a
// memory profile can say how much of a peak was ours. Blocks are aligned to 64 bytes (a cache line, a zmm register);
// large blocks ask the system for large pages.
//
//   Buffer<float> panel(rows * columns);   // frees itself; panel.data(), panel.size(), panel[i]
//   Buffer<float> work; work.grow(n);      // a workspace for several calls: growing it loses its contents
//
// Not for kernel files, which are compiled once per instruction set and use no templates: allocate in the binding or
// driver and pass a pointer to the kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace tw {

void* counted_alloc(std::size_t bytes);  // 64-byte aligned; throws std::bad_alloc; counted_alloc(0) is a null pointer
void counted_free(void* block, std::size_t bytes) noexcept;

// Asks the system to move memory that has been filled, and will be read many times, to pages of 2 MiB. (Advice given
// before the first touch does nothing for a block that the allocator had used before: its small pages stay.) Returns
// whether all of it is on large pages now.
bool settle_on_large_pages(const void* begin, std::size_t bytes) noexcept;

int64_t memory_in_use();   // bytes allocated now
int64_t memory_peak();     // most bytes allocated at once since reset_memory_peak
void reset_memory_peak();  // starts the peak again from memory_in_use()

template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t count) : data_(static_cast<T*>(counted_alloc(count * sizeof(T)))), size_(count) {}
  Buffer(Buffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { counted_free(data_, size_ * sizeof(T)); }

  T* data() { return data_; }
  const T* data() const { return data_; }
  std::size_t size() const { return size_; }
  T& operator[](std::size_t i) { return data_[i]; }
  const T& operator[](std::size_t i) const { return data_[i]; }

  // Makes room for at least `count` elements, whose contents are lost if the block has to grow. Returns data().
  T* grow(std::size_t count) {
    if (count > size_) {
      *this = Buffer();  // free first: the peak of a growing workspace is its new size, not old and new together
      *this = Buffer(count);
    }
    return data_;
  }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace tw
