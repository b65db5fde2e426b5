// Packs a matrix into the cells of native/kernels/sparse.h, for any type of weights, and unpacks it again.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "common/alloc.h"
#include "kernels/sparse.h"

namespace tw {

inline int64_t sparse_padded(int64_t columns, int64_t cell) {
  return std::max<int64_t>(1, (columns + cell - 1) / cell) * cell;
}

template <class T>
Buffer<T> to_buffer(const std::vector<T>& values) {
  Buffer<T> buffer(values.size());
  if (!values.empty()) std::memcpy(static_cast<void*>(buffer.data()), values.data(), values.size() * sizeof(T));
  return buffer;
}

// Step: slots that a kernel processes at once; the slots of a band are a multiple of it, and those of a lane are
// adjacent. Band: rows padded to equal length. Columns: columns of a cell.
template <class T, int Step, int Band = kBand, int Columns = kCellColumns>
class PackedCells {
 public:
  PackedCells(const T* dense, int64_t rows, int64_t columns)
      : rows_(rows), columns_(columns), padded_columns_(sparse_padded(columns, Columns)) {
    CellArrays out;
    for (int64_t row = 0; row < rows; row += kBlockRows) {
      for (int64_t column = 0; column < padded_columns_; column += Columns) pack_cell(dense, row, column, &out);
    }
    value_ = to_buffer(out.value);
    index_ = to_buffer(out.index);
    start_ = to_buffer(out.start);
    row_at_ = to_buffer(out.row_at);
    lane_of_ = to_buffer(out.lane_of);
    length_ = to_buffer(out.length);
  }

  SparseCells<T> cells() const {
    SparseCells<T> c;
    c.rows = rows_;
    c.columns = columns_;
    c.across = padded_columns_ / Columns;
    c.value = value_.data();
    c.index = index_.data();
    c.start = start_.data();
    c.row_at = row_at_.data();
    c.lane_of = lane_of_.data();
    c.length = length_.data();
    return c;
  }

  void to_dense(T* dense) const {
    std::fill(dense, dense + rows_ * columns_, T{0});
    std::size_t cell = 0;
    for (int64_t row = 0; row < rows_; row += kBlockRows) {
      for (int64_t column = 0; column < padded_columns_; column += Columns, ++cell) {
        unpack_cell(cell, dense, row, column);
      }
    }
  }

  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  int64_t padded_columns() const { return padded_columns_; }
  int64_t nonzeros() const { return nonzeros_; }
  int64_t nbytes() const {
    return static_cast<int64_t>(value_.size() * sizeof(T) + index_.size() + start_.size() * sizeof(int64_t) +
                                row_at_.size() + lane_of_.size() + length_.size());
  }

 private:
  struct CellArrays {
    std::vector<T> value;
    std::vector<uint8_t> index, row_at, lane_of, length;
    std::vector<int64_t> start;
  };
  struct Row {
    int count = 0;
    uint8_t column[Columns];
    T value[Columns];
  };

  static int slots_for(int length) { return (length + Step - 1) / Step * Step; }
  // The offset of the weight of a lane's slot, from the band's first weight.
  static std::size_t slot_offset(int slot, int lane) {
    return static_cast<std::size_t>((slot / Step * Band + lane) * Step + slot % Step);
  }

  // Collects the nonzeros of a cell, row by row, and counts them.
  void read_cell(const T* dense, int64_t row0, int64_t column0, Row* row) {
    const int64_t columns = std::min<int64_t>(Columns, columns_ - column0);
    for (int r = 0; r < kBlockRows; ++r) {
      row[r].count = 0;
      for (int64_t c = 0; row0 + r < rows_ && c < columns; ++c) {
        const T value = dense[(row0 + r) * columns_ + column0 + c];
        if (value == 0) continue;
        row[r].column[row[r].count] = static_cast<uint8_t>(c);
        row[r].value[row[r].count++] = value;
      }
      nonzeros_ += row[r].count;
    }
  }

  // Packs one cell: sorts its rows by their number of weights, then packs band after band.
  void pack_cell(const T* dense, int64_t row0, int64_t column0, CellArrays* out) {
    Row row[kBlockRows];
    read_cell(dense, row0, column0, row);
    uint8_t order[kBlockRows], lane_of[kBlockRows];
    for (int r = 0; r < kBlockRows; ++r) order[r] = static_cast<uint8_t>(r);
    std::stable_sort(order, order + kBlockRows, [&](uint8_t a, uint8_t b) { return row[a].count > row[b].count; });
    for (int lane = 0; lane < kBlockRows; ++lane) lane_of[order[lane]] = static_cast<uint8_t>(lane);
    out->start.push_back(static_cast<int64_t>(out->value.size() / Band));
    out->row_at.insert(out->row_at.end(), order, order + kBlockRows);
    out->lane_of.insert(out->lane_of.end(), lane_of, lane_of + kBlockRows);
    for (int lane = 0; lane < kBlockRows; lane += kQuad) {
      out->length.push_back(static_cast<uint8_t>(row[order[lane]].count));
    }
    for (int lane = 0; lane < kBlockRows; lane += Band) pack_band(row, order + lane, out);
  }

  // Packs one band. Padding is a weight of zero on the lane's last column, so that it reads no input that the row does
  // not need anyway.
  static void pack_band(const Row* row, const uint8_t* order, CellArrays* out) {
    const std::size_t first = out->value.size();
    const int slots = slots_for(row[order[0]].count);
    out->value.resize(first + static_cast<std::size_t>(slots * Band), T{0});
    out->index.resize(out->value.size(), 0);
    for (int lane = 0; lane < Band; ++lane) {
      const Row& from = row[order[lane]];
      for (int s = 0; s < slots && from.count > 0; ++s) {
        out->index[first + slot_offset(s, lane)] = from.column[std::min(s, from.count - 1)];
        if (s < from.count) out->value[first + slot_offset(s, lane)] = from.value[s];
      }
    }
  }

  // Writes the nonzeros of a cell back to their places; the inverse of pack_cell.
  void unpack_cell(std::size_t cell, T* dense, int64_t row0, int64_t column0) const {
    std::size_t first = static_cast<std::size_t>(start_[cell]) * Band;
    for (int lane0 = 0; lane0 < kBlockRows; lane0 += Band) {
      const int slots = slots_for(length_[cell * kBlockQuads + static_cast<std::size_t>(lane0 / kQuad)]);
      for (int lane = 0; lane < Band; ++lane) {
        const int64_t row = row0 + row_at_[cell * kBlockRows + static_cast<std::size_t>(lane0 + lane)];
        for (int s = 0; s < slots; ++s) {
          const std::size_t at = first + slot_offset(s, lane);
          if (value_[at] != 0) dense[row * columns_ + column0 + index_[at]] = value_[at];
        }
      }
      first += static_cast<std::size_t>(slots * Band);
    }
  }

  int64_t rows_, columns_, padded_columns_, nonzeros_ = 0;
  Buffer<T> value_;
  Buffer<uint8_t> index_, row_at_, lane_of_, length_;
  Buffer<int64_t> start_;
};

}  // namespace tw
