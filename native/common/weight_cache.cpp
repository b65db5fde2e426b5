#include "common/weight_cache.h"

#include <atomic>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace tw {
namespace {

constexpr int64_t kMaxBytes = int64_t{96} << 20;
constexpr std::size_t kMaxEntries = 512;

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

int64_t bytes_of(const PackedWeights& w) { return static_cast<int64_t>((w.raw.size() + w.packed.size()) * sizeof(float)); }

struct Cache {
  std::mutex mutex;
  std::unordered_map<WeightKey, Slot, Hash> slots;
  uint64_t clock = 0;
  int64_t bytes = 0;

  std::shared_ptr<PackedWeights> find(const WeightKey& key) {
    std::lock_guard<std::mutex> lock(mutex);
    auto it = slots.find(key);
    if (it == slots.end()) return nullptr;
    it->second.used = ++clock;
    return it->second.weights;
  }

  // Takes the entry out, and hands its memory over when nobody else is using it.
  std::shared_ptr<PackedWeights> take(const WeightKey& key) {
    std::lock_guard<std::mutex> lock(mutex);
    auto it = slots.find(key);
    if (it == slots.end()) return nullptr;
    std::shared_ptr<PackedWeights> weights = std::move(it->second.weights);
    bytes -= bytes_of(*weights);
    slots.erase(it);
    if (weights.use_count() > 1) return nullptr;
    std::atomic_thread_fence(std::memory_order_acquire);  // what its last user read is behind us
    return weights;
  }

  void put(const WeightKey& key, const std::shared_ptr<PackedWeights>& weights) {
    const int64_t size = bytes_of(*weights);
    if (size > kMaxBytes / 2) return;
    std::lock_guard<std::mutex> lock(mutex);
    if (slots.find(key) != slots.end()) return;  // another thread was faster
    while (!slots.empty() && (bytes + size > kMaxBytes || slots.size() >= kMaxEntries)) evict_oldest();
    slots[key] = Slot{weights, ++clock};
    bytes += size;
  }

  void evict_oldest() {
    auto oldest = slots.begin();
    for (auto it = slots.begin(); it != slots.end(); ++it) {
      if (it->second.used < oldest->second.used) oldest = it;
    }
    bytes -= bytes_of(*oldest->second.weights);
    slots.erase(oldest);
  }
};

Cache& cache() {
  static Cache* instance = new Cache;  // never destroyed: a thread may still be inside at exit
  return *instance;
}

}  // namespace

bool WeightKey::operator==(const WeightKey& other) const {
  return data == other.data && std::memcmp(numbers, other.numbers, sizeof numbers) == 0;
}

std::shared_ptr<const PackedWeights> find_weights(const WeightKey& key, int64_t count) {
  std::shared_ptr<PackedWeights> found = cache().find(key);
  if (!found || static_cast<int64_t>(found->raw.size()) != count) return nullptr;
  const bool same = std::memcmp(found->raw.data(), key.data, static_cast<std::size_t>(count) * sizeof(float)) == 0;
  return same ? found : nullptr;
}

std::shared_ptr<PackedWeights> new_weights(const WeightKey& key, int64_t count, int64_t packed_count) {
  const std::size_t raw_size = static_cast<std::size_t>(count), packed_size = static_cast<std::size_t>(packed_count);
  std::shared_ptr<PackedWeights> weights = cache().take(key);
  if (!weights || weights->raw.size() != raw_size || weights->packed.size() != packed_size) {
    weights = std::make_shared<PackedWeights>();
    weights->raw = Buffer<float>(raw_size);
    weights->packed = Buffer<float>(packed_size);
  }
  std::memcpy(weights->raw.data(), key.data, raw_size * sizeof(float));
  return weights;
}

void keep_weights(const WeightKey& key, const std::shared_ptr<PackedWeights>& weights) { cache().put(key, weights); }

void clear_weight_cache() {
  std::lock_guard<std::mutex> lock(cache().mutex);
  cache().slots.clear();
  cache().bytes = 0;
}

int64_t weight_cache_bytes() {
  std::lock_guard<std::mutex> lock(cache().mutex);
  return cache().bytes;
}

}  // namespace tw
