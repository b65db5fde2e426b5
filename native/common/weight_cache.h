// Packed weights, kept between calls. The caller's weights are a writable array that anyone may change, so an entry is
// never trusted by address alone: it holds a copy of the raw weights, and every use compares the two, byte for byte.
//
// Bounded in bytes and entries. An entry in use is never put out for another: networks use their layers in turns, and a
// cache that forgets the oldest would then make every entry anew at every call. Only entries that nobody asked for
// during many calls make room; where they do not, weights_fit says so and the caller does without. Safe to use from
// several threads.
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

// Whether weights whose packed form has `packed_count` floats can be kept, once idle entries are gone. Large forms that
// have a smaller alternative leave a quarter of the cache to others.
bool weights_fit(const WeightKey& key, int64_t count, int64_t packed_count, bool has_alternative);

// An entry with a copy of the raw weights and room for the packed form, to be filled from that copy (should another
// thread write the weights meanwhile, copy and packed form still agree) and then kept. Throws std::bad_alloc.
std::shared_ptr<PackedWeights> new_weights(const WeightKey& key, int64_t count, int64_t packed_count);
void keep_weights(const WeightKey& key, const std::shared_ptr<PackedWeights>& weights);

void clear_weight_cache();
int64_t weight_cache_bytes();
int64_t weight_cache_limit();
bool keep_weights_here(bool keep);           // whether calls of this thread may add entries; gives what held before
void set_weight_cache_limit(int64_t bytes);  // 0: a sixteenth of the machine's memory, from 96 MiB to 1 GiB

}  // namespace tw
