#include "common/weight_cache.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace tw {
namespace {

constexpr std::size_t kMaxEntries = 4096;  // chosen
constexpr uint64_t kIdle = 1024;           // chosen: look-ups without a use, more than a network has layers

// The default size of the cache in bytes: a sixteenth of the memory, within bounds. ResNet-18's transformed filters
// take 200 MB (benchmarks/conv.py, "resnet18").
int64_t default_limit() {
  const int64_t pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
  const int64_t memory = pages > 0 && page > 0 ? pages * page : 0;
  return std::clamp<int64_t>(memory / 16, int64_t{96} << 20, int64_t{1} << 30);
}

struct Hash {
  std::size_t operator()(const WeightKey& key) const {
    std::size_t h = reinterpret_cast<std::uintptr_t>(key.data);
    for (int64_t number : key.numbers) h = (h ^ static_cast<std::size_t>(number)) * 0x9e3779b97f4a7c15u;
    return h ^ (h >> 29);
  }
};

struct Slot {
  std::shared_ptr<PackedWeights> weights;
  uint64_t used = 0;
};

int64_t bytes_of(const PackedWeights& w) {
  return static_cast<int64_t>((w.raw.size() + w.packed.size()) * sizeof(float));
}

struct Cache {
  std::mutex mutex;
  std::unordered_map<WeightKey, Slot, Hash> slots;
  uint64_t clock = 0;
  int64_t bytes = 0, limit = default_limit();

  std::shared_ptr<PackedWeights> find(const WeightKey& key) {
    std::lock_guard<std::mutex> lock(mutex);
    ++clock;
    auto it = slots.find(key);
    if (it == slots.end()) return nullptr;
    it->second.used = clock;
    return it->second.weights;
  }

  // Removes an entry and returns its memory if nobody else is using it.
  std::shared_ptr<PackedWeights> remove(const WeightKey& key) {
    std::lock_guard<std::mutex> lock(mutex);
    auto it = slots.find(key);
    if (it == slots.end()) return nullptr;
    std::shared_ptr<PackedWeights> weights = std::move(it->second.weights);
    bytes -= bytes_of(*weights);
    slots.erase(it);
    if (weights.use_count() > 1) return nullptr;
    std::atomic_thread_fence(std::memory_order_acquire);  // the reads of its last user are complete
    return weights;
  }

  // Makes room for `size` more bytes within `most`, by evicting idle entries if necessary.
  bool make_room(int64_t size, int64_t most) {
    const auto full = [&] { return bytes + size > most || slots.size() >= kMaxEntries; };
    if (!full()) return true;
    for (auto it = slots.begin(); it != slots.end();) {
      if (clock - it->second.used <= kIdle) {
        ++it;
        continue;
      }
      bytes -= bytes_of(*it->second.weights);
      it = slots.erase(it);
    }
    return !full();
  }

  bool fits(const WeightKey& key, int64_t size, int64_t most) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto it = slots.find(key);  // its memory will be reused
    return make_room(it == slots.end() ? size : size - bytes_of(*it->second.weights), most);
  }

  void put(const WeightKey& key, const std::shared_ptr<PackedWeights>& weights) {
    const int64_t size = bytes_of(*weights);
    std::lock_guard<std::mutex> lock(mutex);
    if (slots.find(key) != slots.end() || !make_room(size, limit)) return;  // another thread was faster, or no room
    slots[key] = Slot{weights, clock};
    bytes += size;
  }
};

thread_local bool adds_entries = true;

Cache& cache() {
  static Cache* instance = new Cache;  // never destroyed: a thread may still be inside at exit
  return *instance;
}

}  // namespace

bool WeightKey::operator==(const WeightKey& other) const {
  return data == other.data && std::memcmp(numbers, other.numbers, sizeof numbers) == 0;
}

std::shared_ptr<const PackedWeights> find_weights(const WeightKey& key, int64_t count) {
  std::shared_ptr<PackedWeights> entry = cache().find(key);
  if (!entry || static_cast<int64_t>(entry->raw.size()) != count) return nullptr;
  const bool equal = std::memcmp(entry->raw.data(), key.data, static_cast<std::size_t>(count) * sizeof(float)) == 0;
  return equal ? entry : nullptr;
}

bool weights_fit(const WeightKey& key, int64_t count, int64_t packed_count, bool has_alternative) {
  if (!adds_entries) return false;
  const int64_t limit = weight_cache_limit(), size = (count + packed_count) * static_cast<int64_t>(sizeof(float));
  return cache().fits(key, size, has_alternative ? limit - limit / 4 : limit);
}

std::shared_ptr<PackedWeights> new_weights(const WeightKey& key, int64_t count, int64_t packed_count) {
  const std::size_t raw_size = static_cast<std::size_t>(count), packed_size = static_cast<std::size_t>(packed_count);
  std::shared_ptr<PackedWeights> weights = cache().remove(key);
  if (!weights || weights->raw.size() != raw_size || weights->packed.size() != packed_size) {
    weights = std::make_shared<PackedWeights>();
    weights->raw = Buffer<float>(raw_size);
    weights->packed = Buffer<float>(packed_size);
  }
  std::memcpy(weights->raw.data(), key.data, raw_size * sizeof(float));
  return weights;
}

void keep_weights(const WeightKey& key, const std::shared_ptr<PackedWeights>& weights) { cache().put(key, weights); }

bool keep_weights_here(bool keep) { return std::exchange(adds_entries, keep); }

void clear_weight_cache() {
  std::lock_guard<std::mutex> lock(cache().mutex);
  cache().slots.clear();
  cache().bytes = 0;
}

int64_t weight_cache_bytes() {
  std::lock_guard<std::mutex> lock(cache().mutex);
  return cache().bytes;
}

int64_t weight_cache_limit() {
  std::lock_guard<std::mutex> lock(cache().mutex);
  return cache().limit;
}

void set_weight_cache_limit(int64_t bytes) {
  std::lock_guard<std::mutex> lock(cache().mutex);
  cache().limit = bytes > 0 ? bytes : default_limit();
}

}  // namespace tw
