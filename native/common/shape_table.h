// The tiles that were decided for the shapes that a program meets: a set-associative table of fixed size, looked up in
// some ten nanoseconds. Eight ways share one set; their tags are in one cache line. A new shape replaces the least
// valuable entry: one without a decision yet, else the least recently used one; pinned entries stay. So a program whose
// shapes never repeat neither grows the table nor evicts the decisions for shapes that do. The caller serializes access
// (the bindings hold the GIL).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

namespace tw {

template <int kWords, class Tile>
class ShapeTable {
 public:
  static constexpr int kWays = 8, kSets = 512;  // chosen

  struct Key {
    int64_t word[kWords] = {};
  };

  enum class State : uint8_t { empty, counting, keep_default, use_tile };

  struct Entry {
    Key key;
    int64_t work = 0;   // multiplications in this shape before a decision
    uint64_t used = 0;  // the table's clock at the last use
    State state = State::empty;
    bool pinned = false;
    Tile tile;
  };

  // Returns the entry of a shape, or null.
  Entry* find(const Key& key) {
    const uint64_t hash = hash_of(key);
    const int64_t set = set_of(hash);
    for (int way = 0; way < kWays; ++way) {
      Entry& entry = entries_[set * kWays + way];
      if (tags_[set * kWays + way] == tag_of(hash) && std::memcmp(&entry.key, &key, sizeof key) == 0) {
        entry.used = ++clock_;
        return &entry;
      }
    }
    return nullptr;
  }

  // Returns the entry of a shape, added if there is none; null if every way of its set is pinned.
  Entry* find_or_make(const Key& key) {
    if (Entry* entry = find(key)) return entry;
    const uint64_t hash = hash_of(key);
    const int64_t at = least_valuable(set_of(hash));
    if (entries_[at].pinned) return nullptr;
    if (entries_[at].state == State::empty) ++size_;
    tags_[at] = tag_of(hash);
    entries_[at] = Entry();
    entries_[at].key = key;
    entries_[at].state = State::counting;
    entries_[at].used = ++clock_;
    return &entries_[at];
  }

  int64_t size() const { return size_; }

 private:
  static uint64_t hash_of(const Key& key) {
    uint64_t hash = 0x9e3779b97f4a7c15u;
    for (int i = 0; i < kWords; ++i) {
      hash = (hash ^ static_cast<uint64_t>(key.word[i])) * 0xd6e8feb86659fd93u;
      hash ^= hash >> 32;
    }
    return hash;
  }
  static int64_t set_of(uint64_t hash) { return static_cast<int64_t>(hash % kSets); }
  static uint32_t tag_of(uint64_t hash) { return static_cast<uint32_t>(hash >> 32) | 1u; }  // 0: empty

  int64_t least_valuable(int64_t set) const {
    int64_t least = set * kWays;
    for (int64_t at = least; at < (set + 1) * kWays; ++at) {
      if (value(entries_[at]) < value(entries_[least])) least = at;
    }
    return least;
  }
  static uint64_t value(const Entry& entry) {
    constexpr uint64_t kDecided = uint64_t{1} << 62, kPinned = uint64_t{1} << 63;  // definition: bits above every clock
    if (entry.pinned) return kPinned;
    if (entry.state == State::empty) return 0;
    return entry.state == State::counting ? entry.used : entry.used | kDecided;
  }

  std::unique_ptr<uint32_t[]> tags_{new uint32_t[kSets * kWays]()};
  std::unique_ptr<Entry[]> entries_{new Entry[kSets * kWays]()};
  uint64_t clock_ = 0;
  int64_t size_ = 0;
};

}  // namespace tw
