// Splits uint8 activations so that vpmaddubsw cannot saturate: a = base + low + above - below, where no pair of `low`
// can overflow.
//
// The instruction adds two byte products in 16 bits. A pair of activations whose sum is at most 32767 / (largest
// weight) is safe: 258 if weights reach 127. Larger sums are rare in typical data, whose scale is set by its largest
// values. Their excess is subtracted, listed for each group of four activations that has any, and multiplied
// separately. The base shifts the values towards 0, so that data around a zero point of 128 is split as rarely as data
// above 0.
//
// The result is exact for any input; the data only determines the length of the lists. If the lists would cost more
// than int16 products, int16 products are used instead. Saturation-safe weights need no splitting. Short runs (the
// filters of a network's first layer) are gathered first, so that a row is contiguous.
#pragma once

#include "common/simd.h"
#include "kernels/int8.h"
#include "kernels/int8_sums.h"

#if defined(__AVX2__) && !defined(__AVX512F__)

namespace tw {
namespace TW_ISA {

// The excess of one group of four activations: its position (first in the input, later as a group of the weights) and
// its four bytes.
struct Excess {
  int32_t at, bytes;
};

constexpr int kSplitRows = 4;    // definition: rows of a register tile, which share a list
constexpr int kSplitChunk = 64;  // hardware: bytes of a cache line; inputs per index entry

struct Split {
  const uint8_t* low = nullptr;  // replaces the problem's input: low + at.in[row]
  int base = 0;
  // The excess of each tile of four rows, interleaved by row and zero-padded to equal length. Tile t has entries
  // [first[2t], first[2t + 1]) above and [first[2t + 1], first[2t + 2]) below. Null if nothing was split.
  const Excess* excess = nullptr;
  const int32_t* first = nullptr;
};

// The excess of one kind (above or below) in input order, with the index of the first entry of each chunk of input.
struct ExcessList {
  Excess* entries;
  int32_t* index;
  int64_t count = 0, capacity;
  int64_t indexed = 0;  // chunks indexed so far

  void set_memory(int32_t* block, int64_t all) {
    entries = reinterpret_cast<Excess*>(block);
    index = block + 2 * all;
    capacity = all - 17;  // minus two vectors of groups and the end marker
  }
  // Indexes the chunks up to `position`.
  TW_INLINE void reach(int64_t position) {
    while (indexed * kSplitChunk <= position) index[indexed++] = static_cast<int32_t>(count);
  }
  // Indexes the remaining chunks and appends an end marker.
  void close(int64_t bytes) {
    reach(bytes);
    index[indexed] = static_cast<int32_t>(count);
    entries[count] = {INT32_MAX, 0};
  }
  // Appends the groups of 32 bytes that are not zero.
  void append(__m256i bytes, int64_t position) {
    const __m256i none = _mm256_cmpeq_epi32(bytes, _mm256_setzero_si256());
    unsigned nonzero = ~static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(none))) & 0xffu;
    alignas(32) int32_t groups[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(groups), bytes);
    for (; nonzero != 0; nonzero &= nonzero - 1) {
      const int i = __builtin_ctz(nonzero);
      entries[count++] = {static_cast<int32_t>(position + 4 * i), groups[i]};
    }
  }
};

class Splitter {
 public:
  // Replaces the input of these rows by one that cannot saturate. Returns false if the lists grow so long that int16
  // products are faster, or if memory is exhausted; the caller must then restore problem and offsets.
  bool split(Int8Problem& p, RowOffsets& at, int count, Split& out) {
    const int64_t run_bytes = static_cast<int64_t>(p.groups_per_run) * kInt8Group;
    const bool gathers = p.runs > 1 && run_bytes < kShortRun;
    start_ = gathers ? 0 : at.in[0];
    bytes_ = gathers ? count * p.runs * run_bytes : at.in[count - 1] - start_ + (p.runs - 1) * p.run_step + run_bytes;
    max_pair_sum_ = p.max_pair_sum;
    if (!allocate_scratch(p, count)) return false;
    if (gathers) gather(p, at, count);
    out.low = low_ - start_;
    choose_base(p.in + start_);
    out.base = base_;
    // Gaps between rows hold data of other columns.
    const bool gaps = p.runs == 1 && count > 1 && p.in_grid.column_step > run_bytes && !gathers;
    for (int r = 0; gaps && r < count; ++r) {
      if (!split_bytes(p.in, at.in[r] - start_, run_bytes)) return false;
    }
    if (!gaps && !split_bytes(p.in, 0, bytes_)) return false;
    return above_.count + below_.count == 0 || list_rows(p, at, count, out);
  }

 private:
  static constexpr int64_t kShortRun = 32;  // definition: bytes; copy_run copies fewer than this

  // Allocates all memory. The capacities bound the lists to the length at which int16 products become faster.
  bool allocate_scratch(const Int8Problem& p, int count) {
    const int64_t chunks = bytes_ / kSplitChunk + 2, capacity = bytes_ / 8 + 32;
    const int64_t rows_capacity = static_cast<int64_t>(count) * p.runs * p.groups_per_run / 2 + 64;
    // low (stored in whole vectors), two lists with their indices, the entries of the rows and their start
    const int64_t low = (bytes_ + 32 + 63) / 64 * 16;
    if (bytes_ > (int64_t{1} << 30)) return false;
    int32_t* block = int8_scratch(low + 2 * (chunks + 2 * capacity) + 2 * rows_capacity + count + 8);
    if (block == nullptr) return false;
    low_ = reinterpret_cast<uint8_t*>(block);
    block += low;
    above_.set_memory(block, capacity);
    below_.set_memory(block + chunks + 2 * capacity, capacity);
    block += 2 * (chunks + 2 * capacity);
    rows_ = reinterpret_cast<Excess*>(block);
    rows_capacity_ = rows_capacity;
    first_ = block + 2 * rows_capacity;
    return true;
  }

  // Copies the runs of each row next to each other: whole groups, fewer than kShortRun bytes each.
  void gather(Int8Problem& p, RowOffsets& at, int count) {
    const int64_t n = static_cast<int64_t>(p.groups_per_run) * kInt8Group;
    uint8_t* to = low_;
    for (int r = 0; r < count; ++r) {
      const uint8_t* from = p.in + at.in[r];
      at.in[r] = to - low_;
      for (int run = 0; run < p.runs; ++run, from += p.run_step, to += n) copy_run(from, to, n);
    }
    p.in = low_;
    p.groups_per_run *= p.runs;
    p.runs = 1;
  }

  TW_INLINE static void copy_run(const uint8_t* from, uint8_t* to, int64_t n) {
    if (n >= 16) {  // the second overlaps the first
      const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
      const __m128i last = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + n - 16));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to), first);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + n - 16), last);
    } else {
      for (int64_t i = 0; i < n; i += kInt8Group) std::memcpy(to + i, from + i, kInt8Group);
    }
  }

  // Chooses the base: the mean of up to 4096 bytes minus 75, at which both kinds of excess are equally rare for
  // normally distributed data.
  void choose_base(const uint8_t* x) {
    const int64_t n = bytes_ < 4096 ? bytes_ : 4096;
    __m256i sums = _mm256_setzero_si256();
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
      sums = _mm256_add_epi64(
          sums, _mm256_sad_epu8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i)), _mm256_setzero_si256()));
    }
    alignas(32) int64_t lanes[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sums);
    int64_t total = lanes[0] + lanes[1] + lanes[2] + lanes[3];
    for (; i < n; ++i) total += x[i];
    const int64_t below = total / n - 75;
    base_ = static_cast<int>(below < 0 ? 0 : below > 127 ? 127 : below);
  }

  // Splits 32 bytes. Almost always there is no excess, and `low` is stored as it is.
  TW_INLINE void split_vector(const uint8_t* from, uint8_t* to, int64_t position, __m256i base, __m256i max_pair_sum) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i low = _mm256_subs_epu8(v, base), below = _mm256_subs_epu8(base, v);
    const __m256i excess = _mm256_subs_epu16(_mm256_maddubs_epi16(low, _mm256_set1_epi8(1)), max_pair_sum);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), low);
    const __m256i nonzero = _mm256_or_si256(excess, below);
    if (__builtin_expect(!_mm256_testz_si256(nonzero, nonzero), 0)) {
      // Takes the excess of a pair from its first byte as far as possible, the remainder from its second.
      const __m256i first = _mm256_min_epi16(_mm256_and_si256(low, _mm256_set1_epi16(0xff)), excess);
      const __m256i above = _mm256_or_si256(first, _mm256_slli_epi16(_mm256_sub_epi16(excess, first), 8));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_sub_epi8(low, above));
      above_.append(above, position);
      if (base_ != 0) below_.append(below, position);
    }
  }

  // Splits n bytes (whole groups) starting at `position`.
  bool split_bytes(const uint8_t* in, int64_t position, int64_t n) {
    const __m256i base = _mm256_set1_epi8(static_cast<char>(base_)),
                  max_pair_sum = _mm256_set1_epi16(static_cast<int16_t>(max_pair_sum_));
    const uint8_t* x = in + start_;
    uint8_t* low = low_;
    const int64_t end = position + n;
    for (; position + 32 <= end; position += 32) {
      above_.reach(position);
      below_.reach(position);
      split_vector(x + position, low + position, position, base, max_pair_sum);
      if (above_.count > above_.capacity || below_.count > below_.capacity) return false;
    }
    if (position < end) {
      above_.reach(position);
      below_.reach(position);
      alignas(32) uint8_t last[32];
      _mm256_store_si256(reinterpret_cast<__m256i*>(last), base);
      std::memcpy(last, x + position, end - position);
      split_vector(last, last, position, base, max_pair_sum);
      std::memcpy(low + position, last, end - position);
    }
    return above_.count <= above_.capacity && below_.count <= below_.capacity;
  }

  // Writes a row's entries of one list as groups of the weights, to every fourth slot starting at `to`. Returns their
  // number, or -1 if they do not fit.
  int64_t list_row(const ExcessList& list, const Int8Problem& p, int64_t row, int64_t to) {
    const int64_t run_bytes = static_cast<int64_t>(p.groups_per_run) * kInt8Group;
    int64_t count = 0;
    for (int run = 0; run < p.runs; ++run) {
      const int64_t from = row + run * p.run_step;
      const int group = run * p.groups_per_run;
      const Excess* e = list.entries + list.index[from / kSplitChunk];
      while (e->at < from) ++e;
      for (; e->at < from + run_bytes; ++e, ++count) {
        if (to + kSplitRows * count >= rows_capacity_) return -1;
        rows_[to + kSplitRows * count] = {group + static_cast<int32_t>(e->at - from) / kInt8Group, e->bytes};
      }
    }
    return count;
  }

  // Returns whether the list is empty for the bytes of a tile's rows. Rows are in input order.
  bool none_in_tile(const ExcessList& list, const Int8Problem& p, const RowOffsets& at, int first, int rows) const {
    const int last = first + kSplitRows <= rows ? first + kSplitRows - 1 : rows - 1;
    const int64_t run_bytes = static_cast<int64_t>(p.groups_per_run) * kInt8Group;
    for (int run = 0; run < p.runs; ++run) {
      const int64_t from = at.in[first] - start_ + run * p.run_step,
                    to = at.in[last] - start_ + run * p.run_step + run_bytes;
      if (list.index[from / kSplitChunk] != list.index[to / kSplitChunk + 1]) return false;
    }
    return true;
  }

  // Sorts the lists by tile of rows, above and below in turn. Returns false if they do not fit.
  bool list_rows(const Int8Problem& p, const RowOffsets& at, int rows, Split& out) {
    above_.close(bytes_);
    below_.close(bytes_);
    int64_t entries = 0;
    const int tiles = (rows + kSplitRows - 1) / kSplitRows;
    for (int part = 0; part < 2 * tiles; ++part) {  // even: above, odd: below
      first_[part] = static_cast<int32_t>(entries);
      const ExcessList& list = part % 2 == 0 ? above_ : below_;
      if (list.count == 0) continue;
      if (none_in_tile(list, p, at, part / 2 * kSplitRows, rows)) continue;
      int64_t most = 0, counts[kSplitRows] = {};
      for (int i = 0; i < kSplitRows && part / 2 * kSplitRows + i < rows; ++i) {
        counts[i] = list_row(list, p, at.in[part / 2 * kSplitRows + i] - start_, entries + i);
        if (counts[i] < 0) return false;
        most = counts[i] > most ? counts[i] : most;
      }
      if (entries + kSplitRows * most > rows_capacity_) return false;
      for (int i = 0; i < kSplitRows; ++i) {
        for (int64_t j = counts[i]; j < most; ++j) rows_[entries + kSplitRows * j + i] = {0, 0};
      }
      entries += kSplitRows * most;
    }
    first_[2 * tiles] = static_cast<int32_t>(entries);
    out.excess = rows_;
    out.first = first_;
    return true;
  }

  int max_pair_sum_ = 0, base_ = 0;
  int64_t start_ = 0, bytes_ = 0, rows_capacity_ = 0;
  uint8_t* low_ = nullptr;
  ExcessList above_ = {}, below_ = {};
  Excess* rows_ = nullptr;
  int32_t* first_ = nullptr;
};

}  // namespace TW_ISA
}  // namespace tw

#endif
