#include "graph/tiling.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>

namespace tw {
namespace {

struct RowRange {
  int64_t first = 0, last = 0;
  int64_t count() const { return std::max<int64_t>(0, last - first); }
};

// Returns the rows of its input (the receptive field) that an operator needs for these rows of its result.
RowRange rows_needed(const Op& op, const RowRange& results) {
  const ReceptiveField field = op.receptive_field();
  if (results.count() == 0) return {};
  return {results.first * field.step + field.first, (results.last - 1) * field.step + field.first + field.rows};
}

int64_t row_bytes(const TensorDesc& desc) { return desc.image(1).row_step(); }

// A sliding window of rows of an intermediate value, padding included. Rows of the padding have negative numbers, or
// numbers from the image's height on. Before the first row is room for the padding, because an operator counts from the
// padding of its image wherever the rows are that it reads.
struct LineBuffer {
  char* memory = nullptr;
  const TensorDesc* desc = nullptr;
  RowRange present, wanted;
  bool is_started = false;

  char* row(int64_t index) const { return memory + (desc->padding + index - present.first) * row_bytes(*desc); }
  // The address of a whole image of which row `index` would be the first.
  char* image_at(int64_t index) const { return row(index) - desc->padding * row_bytes(*desc); }

  // Moves the window to these rows and discards the rows before them.
  void slide(const RowRange& rows) {
    wanted = rows;
    if (rows.count() == 0) return;
    if (!is_started) present = {rows.first, rows.first};
    is_started = true;
    const RowRange remaining{wanted.first, std::max(wanted.first, present.last)};
    if (remaining.count() > 0 && remaining.first > present.first)
      std::memmove(row(present.first), row(remaining.first), remaining.count() * row_bytes(*desc));
    present = remaining;
  }

  // The rows inside the image that have to be computed.
  RowRange missing() const {
    if (wanted.count() == 0) return {};
    return {std::max<int64_t>({present.last, wanted.first, 0}), std::min(wanted.last, desc->height)};
  }

  void fill_missing_padding() const {
    for (int64_t r = std::max(present.last, wanted.first); r < wanted.last; ++r) {
      if (r < 0 || r >= desc->height) std::memset(row(r), desc->zero_point, row_bytes(*desc));
    }
  }
};

std::vector<int64_t> line_buffer_bytes(const std::vector<TiledOp>& ops, int64_t rows) {
  std::vector<int64_t> bytes(ops.size() - 1);
  for (std::size_t i = ops.size() - 1; i-- > 0;) {
    const ReceptiveField field = ops[i + 1].op->receptive_field();
    rows = (rows - 1) * field.step + std::max(field.rows, field.step);
    const TensorDesc& desc = *ops[i].out;
    bytes[i] = round_up((rows + desc.padding) * row_bytes(desc) + 64, 64);  // a last group of channels may exceed it
  }
  return bytes;
}

int64_t total(const std::vector<int64_t>& numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), int64_t{0});
}

// Computes some rows of a result by presenting them to the operator as an image of that height.
void run_rows(const TiledOp& tiled, const RowRange& rows, char* in, char* out) {
  TensorDesc some = *tiled.out;
  some.height = rows.count();
  OpCall call{1, {{tiled.in, in}, tiled.second}, {&some, out}};
  if (tiled.second.desc != nullptr) call.in[1].data = tiled.second.bytes() + rows.first * row_bytes(*tiled.second.desc);
  tiled.op->run(call);
}

}  // namespace

TileGroup choose_tile_rows(const std::vector<TiledOp>& ops, int64_t budget_bytes) {
  TileGroup group;
  const int64_t height = ops.back().out->height;
  while (group.rows < height && total(line_buffer_bytes(ops, group.rows + 1)) <= budget_bytes) ++group.rows;
  group.bytes = total(line_buffer_bytes(ops, group.rows));
  return group;
}

void run_tile_group(const TileGroup& group, const std::vector<TiledOp>& ops, char* in, char* out, int64_t first,
                    int64_t last, char* line_buffers, int64_t* times_ns) {
  using Clock = std::chrono::steady_clock;
  const auto run_op = [&](std::size_t i, const RowRange& rows, char* op_in, char* op_out) {
    const auto start = times_ns == nullptr ? Clock::time_point() : Clock::now();
    run_rows(ops[i], rows, op_in, op_out);
    if (times_ns != nullptr) times_ns[i] += std::chrono::nanoseconds(Clock::now() - start).count();
  };
  std::vector<LineBuffer> lines(ops.size() - 1);
  const std::vector<int64_t> bytes = line_buffer_bytes(ops, group.rows);
  for (std::size_t i = 0; i < lines.size(); ++i) {
    lines[i].desc = ops[i].out;
    lines[i].memory = line_buffers;
    std::memset(line_buffers, lines[i].desc->zero_point, bytes[i]);
    line_buffers += bytes[i];
  }
  const TiledOp& end = ops.back();
  for (RowRange results{first, 0}; results.first < last; results.first += group.rows) {
    results.last = std::min(results.first + group.rows, last);
    // Backwards: the rows of each intermediate value that the next operator needs.
    RowRange required = rows_needed(*end.op, results);
    for (std::size_t i = lines.size(); i-- > 0;) {
      lines[i].slide(required);
      required = rows_needed(*ops[i].op, lines[i].missing());
    }
    // Forwards: compute those that are not there yet.
    for (std::size_t i = 0; i < lines.size(); ++i) {
      LineBuffer& line = lines[i];
      if (line.wanted.count() == 0) continue;
      const RowRange rows = line.missing();
      line.fill_missing_padding();
      if (rows.count() > 0) {
        const int64_t from = rows.first * ops[i].op->receptive_field().step;
        run_op(i, rows, i == 0 ? in + from * row_bytes(*ops[0].in) : lines[i - 1].image_at(from),
               line.image_at(rows.first));
      }
      line.present.last = std::max(line.present.last, line.wanted.last);
    }
    const int64_t from = results.first * end.op->receptive_field().step;
    run_op(lines.size(), results, lines.back().image_at(from), out + results.first * row_bytes(*end.out));
  }
}

}  // namespace tw
