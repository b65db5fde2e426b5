// Packs the rows of a sparse matrix into bands of groups, whatever a group stores (native/kernels/sparse.h says why and
// how). A Group type has a constant `slots`, `bits` of a column number it stores, and `put(lane, slot, index, value)`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/alloc.h"
#include "kernels/sparse.h"

namespace tw {

// A weight in the overflow list costs about as much time as this many slots of one row.
constexpr int kOverflowCost = 4;
// How many places packing considers for the next window.
constexpr int kWindowChoices = 4;

inline int64_t sparse_padded(int64_t columns) {
  return std::max<int64_t>(kWindow, (columns + kWindowStep - 1) / kWindowStep * kWindowStep);
}

template <class T>
Buffer<T> kept(const std::vector<T>& values) {
  Buffer<T> buffer(values.size());
  if (!values.empty()) std::memcpy(static_cast<void*>(buffer.data()), values.data(), values.size() * sizeof(T));
  return buffer;
}

template <class Group>
struct PackedBands {
  Buffer<Group> groups;
  Buffer<uint32_t> window;
  Buffer<int64_t> band_start, overflow_start;
  Buffer<uint8_t> row_at;
  Buffer<SparseOverflow> overflow;
  int64_t nonzeros = 0;

  int64_t nbytes() const {
    return static_cast<int64_t>(groups.size() * sizeof(Group) + window.size() * 4 + row_at.size() +
                                8 * (band_start.size() + overflow_start.size()) +
                                overflow.size() * sizeof(SparseOverflow));
  }

  void fill(SparseBands* out) const {
    out->window = window.data();
    out->band_start = band_start.data();
    out->row_at = row_at.data();
    out->overflow = overflow.data();
    out->overflow_start = overflow_start.data();
  }
};

template <class Group>
class BandPacker {
 public:
  explicit BandPacker(int64_t columns) : limit_(static_cast<uint32_t>(sparse_padded(columns) - kWindow)) {}

  template <class T>
  PackedBands<Group> pack(const T* dense, int64_t rows, int64_t columns) {
    PackedBands<Group> out;
    const std::size_t bands = static_cast<std::size_t>(sparse_bands(rows));
    out.band_start = Buffer<int64_t>(bands + 1);
    out.overflow_start = Buffer<int64_t>(bands + 1);
    out.row_at = Buffer<uint8_t>(bands * kBand);
    std::size_t band = 0;
    for (int64_t block = 0; block < sparse_blocks(rows); ++block) {
      out.nonzeros += read_block(dense, rows, columns, block, out.row_at.data() + block * kBlockRows);
      for (int i = 0; i < kBlockBands; ++i, ++band) {
        out.band_start[band] = static_cast<int64_t>(groups_.size());
        out.overflow_start[band] = static_cast<int64_t>(overflow_.size());
        pack_band(out.row_at.data() + block * kBlockRows + i * kBand);
      }
    }
    out.band_start[bands] = static_cast<int64_t>(groups_.size());
    out.overflow_start[bands] = static_cast<int64_t>(overflow_.size());
    out.groups = kept(groups_);
    out.window = kept(window_);
    out.overflow = kept(overflow_);
    return out;
  }

 private:
  struct Entry {
    uint32_t column;
    float value;
  };
  struct Lane {  // the weights of a row that are still to be packed
    const Entry* at;
    const Entry* end;
  };

  // The non-zero weights of a block, and its rows in the order of how many they have.
  template <class T>
  int64_t read_block(const T* dense, int64_t rows, int64_t columns, int64_t block, uint8_t* order) {
    entries_.clear();
    for (int r = 0; r < kBlockRows; ++r) {
      start_[r] = entries_.size();
      order[r] = static_cast<uint8_t>(r);
      const int64_t row = block * kBlockRows + r;
      for (int64_t c = 0; row < rows && c < columns; ++c) {
        const T value = dense[row * columns + c];
        if (value != 0) entries_.push_back({static_cast<uint32_t>(c), static_cast<float>(value)});
      }
    }
    start_[kBlockRows] = entries_.size();
    std::stable_sort(order, order + kBlockRows, [this](uint8_t a, uint8_t b) {
      return start_[a + 1] - start_[a] > start_[b + 1] - start_[b];
    });
    return static_cast<int64_t>(entries_.size());
  }

  void pack_band(const uint8_t* rows) {
    for (int lane = 0; lane < kBand; ++lane) {
      lanes_[lane] = {entries_.data() + start_[rows[lane]], entries_.data() + start_[rows[lane] + 1]};
    }
    const auto first = static_cast<std::ptrdiff_t>(overflow_.size());
    while (std::any_of(lanes_, lanes_ + kBand, [](const Lane& lane) { return lane.at != lane.end; })) pack_group();
    std::stable_sort(overflow_.begin() + first, overflow_.end(),
                     [](const SparseOverflow& a, const SparseOverflow& b) { return a.column < b.column; });
  }

  void pack_group() {
    const uint32_t start = best_window();
    Group group;
    std::memset(static_cast<void*>(&group), 0, sizeof group);
    for (int i = 0; i < kBand; ++i) {
      Lane& lane = lanes_[i];
      for (; lane.at != lane.end && lane.at->column < start; ++lane.at) {
        overflow_.push_back({lane.at->column, static_cast<uint32_t>(i), lane.at->value});
      }
      for (int s = 0; s < Group::slots && lane.at != lane.end && lane.at->column < start + kWindow; ++s, ++lane.at) {
        group.put(i, s, lane.at->column - start, lane.at->value);
      }
    }
    groups_.push_back(group);
    window_.push_back(start);
  }

  uint32_t best_window() const {
    uint32_t first = UINT32_MAX;
    for (const Lane& lane : lanes_) {
      if (lane.at != lane.end) first = std::min(first, lane.at->column);
    }
    uint32_t start = std::min(first / kWindowStep * kWindowStep, limit_), best = start;
    int best_worth = worth(start);
    for (int choice = 1; choice < kWindowChoices && start + kWindowStep <= limit_; ++choice) {
      start += kWindowStep;
      const int found = worth(start);
      if (found > best_worth) {
        best_worth = found;
        best = start;
      }
    }
    return best;
  }

  // Slots that a window from `start` would fill, less the price of the weights it would leave behind.
  int worth(uint32_t start) const {
    int total = 0;
    for (const Lane& lane : lanes_) {
      int taken = 0;
      for (const Entry* e = lane.at; e != lane.end && e->column < start + kWindow && taken < Group::slots; ++e) {
        if (e->column < start) {
          total -= kOverflowCost;
        } else {
          ++taken;
        }
      }
      total += taken;
    }
    return total;
  }

  uint32_t limit_;  // where the last window may start
  std::vector<Entry> entries_;
  std::size_t start_[kBlockRows + 1] = {};
  Lane lanes_[kBand] = {};
  std::vector<Group> groups_;
  std::vector<uint32_t> window_;
  std::vector<SparseOverflow> overflow_;
};

// visit(row, column, value) for every non-zero weight; `read(group, lane, slot, &index)` gives a slot's value.
template <class Group, class Read, class Visit>
void visit_weights(const PackedBands<Group>& packed, int64_t rows, Read&& read, Visit&& visit) {
  for (std::size_t band = 0; band < static_cast<std::size_t>(sparse_bands(rows)); ++band) {
    const auto row = [&](std::size_t lane) {
      return static_cast<int64_t>(band / kBlockBands * kBlockRows + packed.row_at[band * kBand + lane]);
    };
    for (int64_t g = packed.band_start[band]; g < packed.band_start[band + 1]; ++g) {
      for (int i = 0; i < Group::slots * kBand; ++i) {
        uint32_t index;
        const float value = read(packed.groups[static_cast<std::size_t>(g)], i % kBand, i / kBand, &index);
        if (value != 0.0f) {
          visit(row(static_cast<std::size_t>(i % kBand)), packed.window[static_cast<std::size_t>(g)] + index, value);
        }
      }
    }
    for (int64_t e = packed.overflow_start[band]; e < packed.overflow_start[band + 1]; ++e) {
      const SparseOverflow& o = packed.overflow[static_cast<std::size_t>(e)];
      visit(row(o.lane), o.column, o.value);
    }
  }
}

}  // namespace tw
