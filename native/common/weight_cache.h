// Packed weights, kept between calls. The caller's weights are a writable array that anyone may change, so an entry is
// never trusted by address alone: it holds a copy of the raw weights, and every use compares the two, byte for byte.
// Bounded in bytes and entries; the least recently used goes first. Safe to use from several threads.
#pragma once

#include <cstdint>
#include <memory>

#include "common/alloc.h"

namespace tw {

struct PackedWeights {
  Buffer<float> raw;
  Buffer<float> packed;
  bool usable = true;  // what the packing said
};

struct WeightKey {
  const float* data;
  int64_t numbers[8];  // shape and kind: whatever else the packed form depends on

  bool operator==(const WeightKey& other) const;
};

// The entry for this key if it still equals the `count` raw floats at key.data, else null.
std::shared_ptr<const PackedWeights> find_weights(const WeightKey& key, int64_t count);

// An entry with a copy of the raw weights and room for the packed form, to be filled from that copy (should another
// thread write the weights meanwhile, copy and packed form still agree) and then kept. Throws std::bad_alloc.
std::shared_ptr<PackedWeights> new_weights(const WeightKey& key, int64_t count, int64_t packed_count);
void keep_weights(const WeightKey& key, const std::shared_ptr<PackedWeights>& weights);

void clear_weight_cache();
int64_t weight_cache_bytes();

}  // namespace tw
