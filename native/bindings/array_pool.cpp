#include "bindings/array_pool.h"

#include <cstdlib>
#include <cstring>
#include <mutex>

#include "bindings/arrays.h"
#include "common/convolution.h"
#include "common/heap_watch.h"

#if defined(__linux__)
#include <dlfcn.h>
#include <malloc.h>
#include <sys/mman.h>
#endif

namespace tw {
namespace {

std::size_t least_pooled = std::size_t{256} << 10;                      // guarded by the GIL
constexpr std::size_t kPage = 4096, kHugePages = std::size_t{2} << 20;  // hardware: bytes of a small and a large page
constexpr std::size_t kKeptBytes = std::size_t{128} << 20;              // chosen: most bytes in the pool
constexpr int kMaxBlocks = static_cast<int>(kKeptBytes / kHugePages);   // a search of more takes longer than it saves

struct Block {
  void* data;
  std::size_t bytes;
};

// Free blocks, the oldest first. They are few, so a linear search is enough.
struct Pool {
  std::mutex mutex;
  Block blocks[kMaxBlocks];
  int count = 0;
  std::size_t bytes = 0;

  Block remove(int i) {
    const Block block = blocks[i];
    std::memmove(blocks + i, blocks + i + 1, sizeof(Block) * static_cast<std::size_t>(count - i - 1));
    --count;
    bytes -= block.bytes;
    return block;
  }

  // Returns the newest block that fits and is at most a quarter too large; null if there is none.
  void* acquire(std::size_t size) {
    std::lock_guard<std::mutex> lock(mutex);
    for (int i = count - 1; i >= 0; --i) {
      if (blocks[i].bytes >= size && blocks[i].bytes - size <= size / 4) return remove(i).data;
    }
    return nullptr;
  }

  bool keep(void* data, std::size_t size) {
    if (size > kKeptBytes) return false;
    std::lock_guard<std::mutex> lock(mutex);
    while (count > 0 && (count == kMaxBlocks || bytes + size > kKeptBytes)) std::free(remove(0).data);
    blocks[count++] = {data, size};
    bytes += size;
    return true;
  }
};

Pool& pool() {
  static Pool* instance = new Pool;  // never destroyed: arrays may be freed at exit
  return *instance;
}

// Returns the usable bytes of a block; 0 if the system cannot tell, and then the pool stays unused.
std::size_t capacity(void* block) {
#if defined(__linux__)
  return malloc_usable_size(block);
#else
  (void)block;
  return 0;
#endif
}

// Returns whether a memory profiler counts allocations: tilewise's own, or one that redirects this library's calls
// (memray). It would not see arrays that come from the pool, so the pool is then not used. The time profiler only adds
// up sizes and must not change what it measures, so the pool stays in use there.
bool allocations_are_counted() {
  if (heap_watch::active()) return heap_watch::counting_blocks();
#if defined(__linux__)
  static void* const real = dlsym(RTLD_DEFAULT, "aligned_alloc");
  return reinterpret_cast<void*>(&::aligned_alloc) != real;
#else
  return false;
#endif
}

// Takes a block from the pool, or allocates one of whole pages, large ones with huge pages. While allocations are
// counted, nothing is reused.
void* pool_malloc(void*, std::size_t size) {
  if (!allocations_are_counted()) {
    if (void* block = pool().acquire(size)) {
      heap_watch::note_reused(size);
      return block;
    }
  }
  void* block = std::aligned_alloc(kPage, (size + kPage - 1) / kPage * kPage);
#if defined(__linux__)
  if (block != nullptr && size >= kHugePages) madvise(block, size, MADV_HUGEPAGE);
#endif
  return block;
}

void pool_free(void*, void* block, std::size_t) {
  if (block == nullptr) return;
  const std::size_t size = capacity(block);
  if (size < least_pooled || allocations_are_counted() || !pool().keep(block, size)) std::free(block);
}

void* pool_calloc(void*, std::size_t count, std::size_t size) { return std::calloc(count, size); }
void* pool_realloc(void*, void* block, std::size_t size) { return std::realloc(block, size); }

// NumPy finds an array's allocator through this capsule when it frees the array.
PyObject* handler() {
  static PyDataMem_Handler functions = {
      "tilewise pool", 1, {nullptr, pool_malloc, pool_calloc, pool_realloc, pool_free}};
  static PyObject* capsule = PyCapsule_New(&functions, "mem_handler", nullptr);
  return capsule;
}

}  // namespace

nb::object allocate_array(int ndim, const npy_intp* shape, int type) {
  const auto allocate = [&] { return nb::steal(PyArray_SimpleNew(ndim, const_cast<npy_intp*>(shape), type)); };
  std::size_t bytes = 4;
  for (int i = 0; i < ndim; ++i) bytes *= static_cast<std::size_t>(shape[i]);
  nb::object array;
  if (bytes < least_pooled) {
    array = allocate();
  } else if (PyObject* before = PyDataMem_SetHandler(handler())) {
    array = allocate();
    Py_XDECREF(PyDataMem_SetHandler(before));
    Py_DECREF(before);
  }
  if (!array.is_valid()) throw nb::python_error();
  return array;
}

int64_t array_pool_bytes() {
  std::lock_guard<std::mutex> lock(pool().mutex);
  return static_cast<int64_t>(pool().bytes);
}

int64_t set_least_pooled(int64_t bytes) {
  const int64_t before = static_cast<int64_t>(least_pooled);
  least_pooled = static_cast<std::size_t>(bytes < 1 ? 1 : bytes);
  return before;
}

void give_back_memory() {
  {
    std::lock_guard<std::mutex> lock(pool().mutex);
    while (pool().count > 0) std::free(pool().remove(0).data);
  }
  forget_call_weights();
#if defined(__GLIBC__)
  malloc_trim(0);
#endif
}

}  // namespace tw
