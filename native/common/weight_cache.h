// A cache of packed weights. The caller's weights are a writable array that anyone may change, so an entry is never
// trusted by address alone: it has a copy of the raw weights, and every use compares the two, byte for byte.
//
// Bounded in bytes and entries. An entry in use is never evicted: networks cycle through their layers, and an LRU cache
// would then miss on every call. Only entries that were not used during many calls are evicted; if that does not free
// enough memory, weights_fit returns false and the caller does without. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>

#include "common/alloc.h"

namespace tw {

struct PackedWeights {
  Buffer<float> raw;
  Buffer<float> packed;
  bool usable = true;  // whether packing succeeded
};

struct WeightKey {
  const float* data;
  int64_t numbers[8];  // shape, kind and whatever else the packed form depends on

  bool operator==(const WeightKey& other) const;
};

// Returns the entry for this key if its copy still equals the `count` raw floats at key.data, else null.
std::shared_ptr<const PackedWeights> find_weights(const WeightKey& key, int64_t count);

// Returns whether weights whose packed form has `packed_count` floats fit the cache, after evicting idle entries. Large
// forms that have a smaller alternative leave a quarter of the cache to others.
bool weights_fit(const WeightKey& key, int64_t count, int64_t packed_count, bool has_alternative);

// Creates an entry with a copy of the raw weights and space for the packed form, to be filled from that copy (so that
// both agree even if another thread writes the weights) and then stored. Throws std::bad_alloc.
std::shared_ptr<PackedWeights> new_weights(const WeightKey& key, int64_t count, int64_t packed_count);
void keep_weights(const WeightKey& key, const std::shared_ptr<PackedWeights>& weights);

void clear_weight_cache();
int64_t weight_cache_bytes();
int64_t weight_cache_limit();
bool keep_weights_here(bool keep);           // whether calls of this thread may add entries; returns the old value
void set_weight_cache_limit(int64_t bytes);  // 0: a sixteenth of the machine's memory, from 96 MiB to 1 GiB

}  // namespace tw
