// Packs a dense matrix into the strips of native/kernels/sparse_strips.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/sparse_pack.h"
#include "kernels/sparse_strips.h"

namespace tw {

class PackedStrips {
 public:
  PackedStrips(const float* dense, int64_t rows, int64_t columns) : rows_(rows) {
    StripArrays out;
    for (int64_t row = 0; row < rows; row += kStripRows) {
      pack_group(dense + row * columns, std::min<int64_t>(kStripRows, rows - row), columns, &out);
    }
    value_ = to_buffer(out.value);
    index_ = to_buffer(out.index);
    strip_ = to_buffer(out.strip);
    first_slot_ = to_buffer(out.first_slot);
    first_entry_ = to_buffer(out.first_entry);
    count_ = to_buffer(out.count);
  }

  SparseStrips strips() const {
    SparseStrips s;
    s.rows = rows_;
    s.value = value_.data();
    s.index = index_.data();
    s.strip = strip_.data();
    s.first_slot = first_slot_.data();
    s.first_entry = first_entry_.data();
    s.count = count_.data();
    return s;
  }

  int64_t nbytes() const {
    return static_cast<int64_t>(value_.size() * sizeof(float) + index_.size() * sizeof(uint16_t) +
                                (strip_.size() + count_.size()) * sizeof(uint32_t) +
                                (first_slot_.size() + first_entry_.size()) * sizeof(int64_t));
  }

 private:
  struct StripArrays {
    std::vector<float> value;
    std::vector<uint16_t> index;
    std::vector<uint32_t> strip, count;
    std::vector<int64_t> first_slot, first_entry;
  };
  struct Entry {
    uint32_t strip = 0;
    int slots = 0;
    uint16_t index[kStripRows] = {};
    float value[kStripSlots][kStripRows] = {};
  };

  // Reads the weights of a group in a strip: one entry, or two if a row has more than an entry holds.
  static void read_strip(const float* rows, int64_t count, int64_t columns, int64_t strip,
                         std::vector<Entry>* entries) {
    constexpr int kEntries = (kStripColumns + kStripSlots - 1) / kStripSlots;
    const int64_t width = std::min<int64_t>(kStripColumns, columns - strip);
    Entry row_entries[kEntries];
    for (int64_t r = 0; r < count; ++r) {
      int used = 0;
      for (int64_t c = 0; c < width; ++c) {
        const float value = rows[r * columns + strip + c];
        if (value == 0) continue;
        Entry& to = row_entries[used / kStripSlots];
        const int slot = used++ % kStripSlots;
        to.value[slot][r] = value;
        to.index[r] = static_cast<uint16_t>(to.index[r] | c << (3 * slot));
        to.slots = std::max(to.slots, slot + 1);
      }
    }
    for (Entry& part : row_entries) {
      part.strip = static_cast<uint32_t>(strip);
      if (part.slots > 0) entries->push_back(part);
    }
  }

  // Packs one group: its entries are sorted by their number of slots.
  static void pack_group(const float* rows, int64_t count, int64_t columns, StripArrays* out) {
    std::vector<Entry> entries;
    for (int64_t strip = 0; strip < columns; strip += kStripColumns) read_strip(rows, count, columns, strip, &entries);
    std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.slots < b.slots; });
    out->first_slot.push_back(static_cast<int64_t>(out->value.size()) / kStripRows);
    out->first_entry.push_back(static_cast<int64_t>(out->strip.size()));
    uint32_t of_slots[kStripSlots] = {};
    for (const Entry& e : entries) {
      ++of_slots[e.slots - 1];
      out->strip.push_back(e.strip);
      out->index.insert(out->index.end(), e.index, e.index + kStripRows);
      out->value.insert(out->value.end(), e.value[0], e.value[0] + e.slots * kStripRows);
    }
    out->count.insert(out->count.end(), of_slots, of_slots + kStripSlots);
  }

  int64_t rows_;
  Buffer<float> value_;
  Buffer<uint16_t> index_;
  Buffer<uint32_t> strip_, count_;
  Buffer<int64_t> first_slot_, first_entry_;
};

}  // namespace tw
