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

// A sliding window of rows of an intermediate value. Rows of the padding are numbered below 0 and from the image's
// height on. Room for the top padding precedes the first row: an operator expects its input to start with the padding,
// whichever rows of the image the window holds.
struct LineBuffer {
  char* memory = nullptr;
  const TensorDesc* desc = nullptr;
  RowRange present, wanted;  // rows in memory; rows that the next operator reads
  bool is_started = false;

  char* row(int64_t index) const { return memory + (desc->padding + index - present.first) * row_bytes(*desc); }
  // The address that a whole image would have if row `index` were its first.
  char* image_at(int64_t index) const { return row(index) - desc->padding * row_bytes(*desc); }

  // Moves the window to `rows`; rows that stay in it are moved to the front of the memory.
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

  // The wanted rows inside the image that are not in memory yet.
  RowRange missing() const {
    if (wanted.count() == 0) return {};
    return {std::max<int64_t>({present.last, wanted.first, 0}), std::min(wanted.last, desc->height)};
  }

  // Writes the zero point into the wanted rows above and below the image.
  void fill_missing_padding() const {
    for (int64_t r = std::max(present.last, wanted.first); r < wanted.last; ++r) {
      if (r < 0 || r >= desc->height) std::memset(row(r), desc->zero_point, row_bytes(*desc));
    }
  }
};

// Returns the bytes of each line buffer if `rows` rows of the last result are computed at a time.
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
  TensorDesc strip = *tiled.out;
  strip.height = rows.count();
  OpCall call{1, {{tiled.in, in}, tiled.second}, {&strip, out}};
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

// Computes rows [first, last) of a fused tile group, passing rows from op to op through line buffers.
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
    // Backwards: which rows of each intermediate value does the next operator need?
    RowRange required = rows_needed(*end.op, results);
    for (std::size_t i = lines.size(); i-- > 0;) {
      lines[i].slide(required);
      required = rows_needed(*ops[i].op, lines[i].missing());
    }
    // Forwards: compute the rows that are missing, from the first operator to the last.
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
