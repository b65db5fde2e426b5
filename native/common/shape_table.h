// What was decided for the shapes a program meets: a table of fixed size, looked up in some ten nanoseconds. Eight
// places share one hash; their tags lie in one cache line. A new shape takes the place of the one least worth keeping:
// one that nothing was decided for yet, else the one that was met longest ago; what was pinned stays. So a program
// whose shapes never repeat neither grows the table nor pushes out what was decided for those that do. The caller
// serialises access (the bindings hold Python's lock).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

namespace tw {

template <int kWords, class Tile>
class ShapeTable {
 public:
  static constexpr int kWays = 8, kSets = 512;

  struct Key {
    int64_t word[kWords] = {};
  };

  enum class State : uint8_t { empty, counting, keep_default, use_tile };

  struct Entry {
    Key key;
    int64_t work = 0;   // multiplications done in this shape while nothing is decided
    uint64_t used = 0;  // the table's clock when it was last met
    State state = State::empty;
    bool pinned = false;
    Tile tile;
  };

  // The entry of a shape, or null.
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

  // The same, made where there was none; null where every place it could take is pinned.
  Entry* find_or_make(const Key& key) {
    if (Entry* entry = find(key)) return entry;
    const uint64_t hash = hash_of(key);
    const int64_t at = least_worth(set_of(hash));
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
  static uint32_t tag_of(uint64_t hash) { return static_cast<uint32_t>(hash >> 32) | 1u; }  // 0 is an empty place

  int64_t least_worth(int64_t set) const {
    int64_t least = set * kWays;
    for (int64_t at = least; at < (set + 1) * kWays; ++at) {
      if (worth(entries_[at]) < worth(entries_[least])) least = at;
    }
    return least;
  }
  static uint64_t worth(const Entry& entry) {
    constexpr uint64_t kDecided = uint64_t{1} << 62, kPinned = uint64_t{1} << 63;  // definition
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
