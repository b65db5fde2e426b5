#include "common/heap_watch.h"

#if defined(__linux__) && defined(__GLIBC__) && (defined(__x86_64__) || defined(__aarch64__)) && \
    !defined(__SANITIZE_ADDRESS__)
#define TW_CAN_WATCH 1
#endif

#if TW_CAN_WATCH

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace tw {
namespace heap_watch {
namespace {

// --- memory for our own tables: from the kernel, so that counting never counts itself ---

void* kernel_pages(std::size_t bytes) {
  void* p = reinterpret_cast<void*>(
      syscall(SYS_mmap, nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (p == MAP_FAILED) std::abort();
  return p;
}
void give_back(void* p, std::size_t bytes) { syscall(SYS_munmap, p, bytes); }

// --- a map from block to size: open addressing, linear probing, backward-shift deletion, in 64 locked shards ---

class SpinLock {
 public:
  explicit SpinLock(std::atomic_flag& flag) : flag_(flag) {
    while (flag_.test_and_set(std::memory_order_acquire)) {
    }
  }
  ~SpinLock() { flag_.clear(std::memory_order_release); }

 private:
  std::atomic_flag& flag_;
};

struct Entry {
  uintptr_t block;
  std::size_t bytes;
};

class Shard {
 public:
  // Returns the bytes the block had before (0 for a new one).
  std::size_t put(uintptr_t block, std::size_t bytes) {
    SpinLock lock(flag_);
    if ((used_ + 1) * 4 > capacity_ * 3) grow();
    const std::size_t i = find(block);
    const std::size_t before = entries_[i].block ? entries_[i].bytes : 0;
    if (!entries_[i].block) ++used_;
    entries_[i] = {block, bytes};
    return before;
  }

  // Removes a block and returns its bytes; false if it is not in the map. Entries behind the hole move up if their home
  // slot is not between hole and entry (backward-shift deletion).
  bool remove(uintptr_t block, std::size_t* bytes) {
    SpinLock lock(flag_);
    if (!capacity_) return false;
    std::size_t hole = find(block);
    if (!entries_[hole].block) return false;
    *bytes = entries_[hole].bytes;
    --used_;
    for (std::size_t i = next(hole); entries_[i].block; i = next(i)) {
      const std::size_t home = slot(entries_[i].block);
      const bool stays = hole <= i ? (hole < home && home <= i) : (hole < home || home <= i);
      if (stays) continue;
      entries_[hole] = entries_[i];
      hole = i;
    }
    entries_[hole] = {0, 0};
    return true;
  }

  void clear() {
    SpinLock lock(flag_);
    if (entries_) give_back(entries_, capacity_ * sizeof(Entry));
    entries_ = nullptr;
    capacity_ = used_ = 0;
  }

 private:
  std::size_t slot(uintptr_t block) const { return (block * 0x9E3779B97F4A7C15ull >> 20) & (capacity_ - 1); }
  std::size_t next(std::size_t i) const { return (i + 1) & (capacity_ - 1); }
  std::size_t find(uintptr_t block) const {
    std::size_t i = slot(block);
    while (entries_[i].block && entries_[i].block != block) i = next(i);
    return i;
  }
  void grow() {
    Entry* old = entries_;
    const std::size_t old_capacity = capacity_;
    capacity_ = old_capacity ? 2 * old_capacity : 1024;
    entries_ = static_cast<Entry*>(kernel_pages(capacity_ * sizeof(Entry)));
    for (std::size_t i = 0; i < old_capacity; ++i) {
      if (old[i].block) entries_[find(old[i].block)] = old[i];
    }
    if (old) give_back(old, old_capacity * sizeof(Entry));
  }

  std::atomic_flag flag_ = ATOMIC_FLAG_INIT;
  Entry* entries_ = nullptr;
  std::size_t capacity_ = 0, used_ = 0;
};

// One of the two sums, with its peak and the size of every block in it.
class Ledger {
 public:
  void add(void* block, std::size_t bytes) {
    const int64_t delta = static_cast<int64_t>(bytes) - static_cast<int64_t>(shard(block).put(key(block), bytes));
    const int64_t now = now_.fetch_add(delta, std::memory_order_relaxed) + delta;
    int64_t current_peak = peak_.load(std::memory_order_relaxed);
    while (now > current_peak && !peak_.compare_exchange_weak(current_peak, now, std::memory_order_relaxed)) {
    }
    blocks_.fetch_add(1, std::memory_order_relaxed);
  }
  void remove(void* block) {
    std::size_t bytes;
    if (shard(block).remove(key(block), &bytes)) now_.fetch_sub(static_cast<int64_t>(bytes), std::memory_order_relaxed);
  }
  // Counts the release of the first `by` bytes of a mapping.
  void shrink(void* block, std::size_t by) {
    std::size_t bytes;
    if (!shard(block).remove(key(block), &bytes)) return;
    now_.fetch_sub(static_cast<int64_t>(bytes), std::memory_order_relaxed);
    if (bytes > by) add(static_cast<char*>(block) + by, bytes - by);
  }
  void clear() {
    for (Shard& s : shards_) s.clear();
    now_ = peak_ = blocks_ = 0;
  }
  void reset_peak() { peak_.store(now()); }
  int64_t now() const { return now_.load(std::memory_order_relaxed); }
  int64_t peak() const { return peak_.load(std::memory_order_relaxed); }
  int64_t blocks() const { return blocks_.load(std::memory_order_relaxed); }

 private:
  static uintptr_t key(void* block) { return reinterpret_cast<uintptr_t>(block); }
  Shard& shard(void* block) { return shards_[(key(block) >> 4 ^ key(block) >> 12) & 63]; }
  Shard shards_[64];
  std::atomic<int64_t> now_{0}, peak_{0}, blocks_{0};
};

Ledger& system_ledger() {
  static Ledger ledger;
  return ledger;
}
Ledger& requested_ledger() {
  static Ledger ledger;
  return ledger;
}

std::atomic<bool> watching{false}, only_large{false};
std::atomic<int64_t> taken_large{0};
std::atomic<int64_t> alarm_level{0};
std::atomic<void (*)()> alarm_call{nullptr};

// How many `Inner` a thread is inside of. Not thread_local: the first use of such a variable in a thread makes the
// loader allocate, and if the loader's malloc is a counting one, that would never end.
pthread_key_t depth_key;
const bool have_depth_key = pthread_key_create(&depth_key, nullptr) == 0;
intptr_t inner_depth() { return reinterpret_cast<intptr_t>(pthread_getspecific(depth_key)); }
void set_inner_depth(intptr_t depth) { pthread_setspecific(depth_key, reinterpret_cast<void*>(depth)); }

void check_alarm() {
  int64_t level = alarm_level.load(std::memory_order_relaxed);
  if (level > 0 && requested_ledger().now() >= level && alarm_level.compare_exchange_strong(level, 0)) {
    alarm_call.load()();
  }
}

// Counts an allocation. errno is preserved for the caller of malloc.
void count_allocation(void* block, std::size_t bytes) {
  if (!block || !watching.load(std::memory_order_relaxed)) return;
  if (bytes >= kLarge) taken_large.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
  if (only_large.load(std::memory_order_relaxed)) return;
  const int saved = errno;
  system_ledger().add(block, bytes);
  if (inner_depth() == 0) {
    requested_ledger().add(block, bytes);
    check_alarm();
  }
  errno = saved;
}

void count_release(void* block) {
  if (!block || !watching.load(std::memory_order_relaxed)) return;
  if (only_large.load(std::memory_order_relaxed)) return;
  system_ledger().remove(block);
  if (inner_depth() == 0) requested_ledger().remove(block);
}

// --- the counting versions ---

decltype(&::malloc) real_malloc;
decltype(&::calloc) real_calloc;
decltype(&::realloc) real_realloc;
decltype(&::free) real_free;
decltype(&::posix_memalign) real_posix_memalign;
decltype(&::aligned_alloc) real_aligned_alloc;
decltype(&::memalign) real_memalign;
decltype(&::mmap) real_mmap;
decltype(&::munmap) real_munmap;

void* counted_malloc(std::size_t n) {
  void* p = real_malloc(n);
  count_allocation(p, n);
  return p;
}
void* counted_calloc(std::size_t n, std::size_t each) {
  void* p = real_calloc(n, each);
  count_allocation(p, n * each);
  return p;
}
// Replaces realloc: counts the release of the old block and the allocation of the new one.
void* counted_realloc(void* old, std::size_t n) {
  count_release(old);
  void* p = real_realloc(old, n);
  if (p)
    count_allocation(p, n);
  else if (old && n)
    count_allocation(old, malloc_usable_size(old));  // it failed: the old block still exists
  return p;
}
void counted_free(void* p) {
  count_release(p);
  real_free(p);
}
int counted_posix_memalign(void** out, std::size_t alignment, std::size_t n) {
  const int failed = real_posix_memalign(out, alignment, n);
  if (!failed) count_allocation(*out, n);
  return failed;
}
void* counted_aligned_alloc(std::size_t alignment, std::size_t n) {
  void* p = real_aligned_alloc(alignment, n);
  count_allocation(p, n);
  return p;
}
void* counted_memalign(std::size_t alignment, std::size_t n) {
  void* p = real_memalign(alignment, n);
  count_allocation(p, n);
  return p;
}
void* counted_mmap(void* at, std::size_t n, int protection, int flags, int fd, off_t offset) {
  void* p = real_mmap(at, n, protection, flags, fd, offset);
  if (p != MAP_FAILED) count_allocation(p, n);
  return p;
}
int counted_munmap(void* p, std::size_t n) {
  if (counting_blocks()) {
    system_ledger().shrink(p, n);
    if (inner_depth() == 0) requested_ledger().shrink(p, n);
  }
  return real_munmap(p, n);
}

struct Hook {
  const char* name;
  void* replacement;
  void** real;
};
#define TW_HOOK(name) {#name, reinterpret_cast<void*>(counted_##name), reinterpret_cast<void**>(&real_##name)}
const Hook kHooks[] = {
    TW_HOOK(malloc),         TW_HOOK(calloc),
    TW_HOOK(realloc),        TW_HOOK(free),
    TW_HOOK(posix_memalign), TW_HOOK(aligned_alloc),
    TW_HOOK(memalign),       TW_HOOK(mmap),
    TW_HOOK(munmap),         {"mmap64", reinterpret_cast<void*>(counted_mmap), reinterpret_cast<void**>(&real_mmap)},
};

// --- rewriting the import tables ---

// An entry of an import table that was redirected, and its original value.
struct Slot {
  void** address;
  void* original;
  bool read_only;
};
Slot* slots = nullptr;
std::size_t slot_count = 0;
constexpr std::size_t kMostSlots = 1 << 16;  // chosen

void write_slot(const Slot& slot, void* value) {
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  void* start = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(slot.address) / page * page);
  if (slot.read_only && mprotect(start, page, PROT_READ | PROT_WRITE) != 0) return;
  __atomic_store_n(slot.address, value, __ATOMIC_RELEASE);
  if (slot.read_only) mprotect(start, page, PROT_READ);
}

// The loader's tables of one loaded file: symbols, imports, and the segment that is read-only after relocation.
struct Image {
  uintptr_t base;
  const ElfW(Sym) * symbols = nullptr;
  const char* names = nullptr;
  const ElfW(Rela) * imports[2] = {nullptr, nullptr};
  std::size_t import_counts[2] = {0, 0};
  uintptr_t relro_start = 0, relro_end = 0;
};

// Returns whether a relocation is the address of an imported function (a GOT or PLT entry).
bool is_import(const ElfW(Rela) & r) {
#if defined(__x86_64__)
  const auto type = ELF64_R_TYPE(r.r_info);
  return type == R_X86_64_JUMP_SLOT || type == R_X86_64_GLOB_DAT;
#else
  const auto type = ELF64_R_TYPE(r.r_info);
  return type == R_AARCH64_JUMP_SLOT || type == R_AARCH64_GLOB_DAT;
#endif
}

// Reads the loader's tables of one loaded file.
Image read_image(const dl_phdr_info& info) {
  Image image{info.dlpi_addr};
  const ElfW(Dyn)* dynamic = nullptr;
  for (int i = 0; i < info.dlpi_phnum; ++i) {
    const ElfW(Phdr)& segment = info.dlpi_phdr[i];
    if (segment.p_type == PT_DYNAMIC) dynamic = reinterpret_cast<const ElfW(Dyn)*>(image.base + segment.p_vaddr);
    if (segment.p_type == PT_GNU_RELRO) {
      image.relro_start = image.base + segment.p_vaddr;
      image.relro_end = image.relro_start + segment.p_memsz;
    }
  }
  for (; dynamic && dynamic->d_tag != DT_NULL; ++dynamic) {
    const uintptr_t value = dynamic->d_un.d_ptr;
    const uintptr_t pointer = value < image.base ? image.base + value : value;
    switch (dynamic->d_tag) {
      case DT_SYMTAB:
        image.symbols = reinterpret_cast<const ElfW(Sym)*>(pointer);
        break;
      case DT_STRTAB:
        image.names = reinterpret_cast<const char*>(pointer);
        break;
      case DT_JMPREL:
        image.imports[0] = reinterpret_cast<const ElfW(Rela)*>(pointer);
        break;
      case DT_PLTRELSZ:
        image.import_counts[0] = value / sizeof(ElfW(Rela));
        break;
      case DT_RELA:
        image.imports[1] = reinterpret_cast<const ElfW(Rela)*>(pointer);
        break;
      case DT_RELASZ:
        image.import_counts[1] = value / sizeof(ElfW(Rela));
        break;
      default:
        break;
    }
  }
  return image;
}

// Redirects the imports of one relocation table that have a hook.
void redirect(const Image& image, const ElfW(Rela) * relocations, std::size_t count) {
  for (std::size_t i = 0; relocations && i < count; ++i) {
    const ElfW(Rela)& r = relocations[i];
    if (!is_import(r)) continue;
    const char* name = image.names + image.symbols[ELF64_R_SYM(r.r_info)].st_name;
    if (!std::strchr("mcrfpa", name[0])) continue;  // a quick test: most symbols have no hook
    for (const Hook& hook : kHooks) {
      if (std::strcmp(name, hook.name) != 0 || slot_count == kMostSlots) continue;
      void** address = reinterpret_cast<void**>(image.base + r.r_offset);
      const uintptr_t at = reinterpret_cast<uintptr_t>(address);
      if (*address == hook.replacement) break;
      slots[slot_count] = {address, *address, at >= image.relro_start && at < image.relro_end};
      write_slot(slots[slot_count++], hook.replacement);
      break;
    }
  }
}

int redirect_library(dl_phdr_info* info, std::size_t, void*) {
  const char* file = info->dlpi_name ? info->dlpi_name : "";
  if (std::strstr(file, "linux-vdso") || std::strstr(file, "/ld-linux")) return 0;
  const Image image = read_image(*info);
  if (!image.symbols || !image.names) return 0;
  for (int t = 0; t < 2; ++t) redirect(image, image.imports[t], image.import_counts[t]);
  return 0;
}

// An executable at a fixed address (Debian's and Ubuntu's python3) may contain a stub of a function whose address it
// takes: the loader then gives everybody the address of the stub, which jumps through the executable's import table.
// Used as the real function, it would lead straight back to the counting one, so the real one is searched in the
// libraries.
struct Stub {
  const char* name;
  void* address;
};

// Finds the executable's stub of a function: an undefined symbol with an address.
int find_stub(dl_phdr_info* info, std::size_t, void* context) {
  Stub& stub = *static_cast<Stub*>(context);
  const Image image = read_image(*info);
  for (int t = 0; t < 2 && image.symbols && image.names; ++t) {
    for (std::size_t i = 0; image.imports[t] && i < image.import_counts[t]; ++i) {
      const ElfW(Sym)& symbol = image.symbols[ELF64_R_SYM(image.imports[t][i].r_info)];
      if (symbol.st_shndx != SHN_UNDEF || symbol.st_value == 0) continue;
      if (std::strcmp(image.names + symbol.st_name, stub.name) == 0) {
        stub.address = reinterpret_cast<void*>(image.base + symbol.st_value);
      }
    }
  }
  return 1;  // the executable is the first
}

// Finds the function that libraries would call if the executable had no stub: the one of the first library that has it,
// preloaded ones included.
void* find_past_executable(const char* name) {
  void* everything = dlopen(nullptr, RTLD_LAZY);
  link_map* map = nullptr;
  void* symbol = nullptr;
  if (everything && dlinfo(everything, RTLD_DI_LINKMAP, &map) == 0) {
    for (map = map->l_next; map && !symbol; map = map->l_next) {
      void* library = map->l_name[0] == '/' ? dlopen(map->l_name, RTLD_LAZY | RTLD_NOLOAD) : nullptr;
      if (!library) continue;
      symbol = dlsym(library, name);
      dlclose(library);
    }
  }
  if (everything) dlclose(everything);
  return symbol;
}

// Finds the functions behind the hooks: the allocator's own malloc, free and so on. Returns false if one is missing.
bool find_real_functions() {
  for (const Hook& hook : kHooks) {
    Stub stub{hook.name, nullptr};
    dl_iterate_phdr(find_stub, &stub);
    void* real = dlsym(RTLD_DEFAULT, hook.name);
    if (real && real == stub.address) real = find_past_executable(hook.name);
    if (!real) return false;
    *hook.real = real;
  }
  return true;
}

}  // namespace

// Starts counting: clears the ledgers and redirects the allocation calls of all loaded libraries.
bool start(bool large_only) {
  static std::atomic_flag busy = ATOMIC_FLAG_INIT;
  SpinLock lock(busy);
  static const bool is_linked = find_real_functions();
  if (!is_linked || !have_depth_key || watching.load()) return false;
  if (!slots) slots = static_cast<Slot*>(kernel_pages(kMostSlots * sizeof(Slot)));
  system_ledger().clear();
  requested_ledger().clear();
  alarm_level = taken_large = 0;
  only_large = large_only;
  slot_count = 0;
  dl_iterate_phdr(redirect_library, nullptr);
  watching = true;
  return true;
}

void stop() {
  if (!watching.exchange(false)) return;
  for (std::size_t i = 0; i < slot_count; ++i) write_slot(slots[i], slots[i].original);
  slot_count = 0;
  alarm_level = 0;
}

bool active() { return watching.load(std::memory_order_relaxed); }
bool counting_blocks() { return active() && !only_large.load(std::memory_order_relaxed); }
void note_reused(std::size_t bytes) {
  if (active() && bytes >= kLarge) taken_large.fetch_add(static_cast<int64_t>(bytes), std::memory_order_relaxed);
}

Counts counts() {
  Ledger &system = system_ledger(), &requested = requested_ledger();
  return {system.now(), system.peak(), requested.now(), requested.peak(), requested.blocks()};
}

int64_t allocated() { return taken_large.load(std::memory_order_relaxed); }

void reset_peaks() {
  system_ledger().reset_peak();
  requested_ledger().reset_peak();
}

void set_alarm(int64_t level, void (*alarm)()) {
  alarm_call = alarm;
  alarm_level = level;
}

void note_requested(void* block, std::size_t bytes) {
  if (!block || !active()) return;
  requested_ledger().add(block, bytes);
  check_alarm();
}
void forget_requested(void* block) {
  if (block && active()) requested_ledger().remove(block);
}

Inner::Inner() { set_inner_depth(inner_depth() + 1); }
Inner::~Inner() { set_inner_depth(inner_depth() - 1); }
bool Inner::outermost() const { return inner_depth() == 1; }

}  // namespace heap_watch
}  // namespace tw

#else  // systems whose import tables we do not know

namespace tw {
namespace heap_watch {

bool start(bool) { return false; }
void stop() {}
bool active() { return false; }
bool counting_blocks() { return false; }
void note_reused(std::size_t) {}
Counts counts() { return {}; }
int64_t allocated() { return 0; }
void reset_peaks() {}
void set_alarm(int64_t, void (*)()) {}
void note_requested(void*, std::size_t) {}
void forget_requested(void*) {}
Inner::Inner() {}
Inner::~Inner() {}
bool Inner::outermost() const { return false; }

}  // namespace heap_watch
}  // namespace tw

#endif
