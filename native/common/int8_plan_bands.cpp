#include "common/int8_plan_bands.h"

#include <algorithm>
#include <cstring>

namespace tw {
namespace {

struct Rows {
  int64_t first = 0, last = 0;
  int64_t count() const { return std::max<int64_t>(0, last - first); }
};

// The rows of its input that an operation makes these rows of.
Rows rows_read(const Int8Op& op, const Rows& made) {
  const RowReach reach = op.reach();
  if (made.count() == 0) return {};
  return {made.first * reach.step + reach.first, (made.last - 1) * reach.step + reach.first + reach.rows};
}

int64_t row_bytes(const PlanShape& shape) { return shape.image(1).row_step(); }

// Rows of what lies between two steps, frames included. Before the first one is room for a frame: an operation counts
// from the frame of its image, wherever the rows are that it reads.
struct Band {
  char* memory = nullptr;
  const PlanShape* shape = nullptr;
  Rows there, wanted;  // of the image; those of its frame have numbers below 0, and from its height on
  bool begun = false;

  char* row(int64_t index) const { return memory + (shape->border + index - there.first) * row_bytes(*shape); }
  // Where a whole image of which these are rows would begin, counted from a row of it.
  char* image_at(int64_t index) const { return row(index) - shape->border * row_bytes(*shape); }

  // Lets go of the rows that are read no more.
  void want(const Rows& rows) {
    wanted = rows;
    if (rows.count() == 0) return;
    if (!begun) there = {rows.first, rows.first};
    begun = true;
    const Rows kept{wanted.first, std::max(wanted.first, there.last)};
    if (kept.count() > 0 && kept.first > there.first)
      std::memmove(row(there.first), row(kept.first), kept.count() * row_bytes(*shape));
    there = kept;
  }

  // The rows that are missing, of those inside the image.
  Rows missing() const {
    if (wanted.count() == 0) return {};
    return {std::max<int64_t>({there.last, wanted.first, 0}), std::min(wanted.last, shape->height)};
  }

  // Rows of the frame among those that are missing.
  void fill_frame() const {
    for (int64_t r = std::max(there.last, wanted.first); r < wanted.last; ++r) {
      if (r < 0 || r >= shape->height) std::memset(row(r), shape->zero, row_bytes(*shape));
    }
  }
};

// How many rows a band has where `rows` of the next step's results are made at a time.
int64_t rows_between(const Int8Op& next, int64_t rows) {
  const RowReach reach = next.reach();
  return (rows - 1) * reach.step + std::max(reach.rows, reach.step);
}

std::vector<int64_t> band_bytes(const std::vector<BandStep>& steps, int64_t rows) {
  std::vector<int64_t> bytes(steps.size() - 1);
  for (std::size_t i = steps.size() - 1; i-- > 0;) {
    rows = rows_between(*steps[i + 1].op, rows);
    const PlanShape& shape = *steps[i].out;
    bytes[i] =
        round_up((rows + shape.border) * row_bytes(shape) + 64, 64);  // a last group of channels may reach past its end
  }
  return bytes;
}

int64_t total(const std::vector<int64_t>& numbers) {
  int64_t sum = 0;
  for (int64_t number : numbers) sum += number;
  return sum;
}

// An operation on some rows of its result, which it takes for an image of so few.
void run_rows(const BandStep& step, const Rows& rows, const char* in, char* out) {
  PlanShape part = *step.out;
  part.height = rows.count();
  const PlanShape* shapes[2] = {step.in, step.skip};
  const void* sources[2] = {in, step.skip == nullptr ? nullptr : step.skipped + rows.first * row_bytes(*step.skip)};
  step.op->run(1, shapes, sources, part, out);
}

}  // namespace

Chain cut_chain(const std::vector<BandStep>& steps, int64_t most) {
  Chain chain;
  const int64_t height = steps.back().out->height;
  while (chain.rows < height && total(band_bytes(steps, chain.rows + 1)) <= most) ++chain.rows;
  chain.bytes = total(band_bytes(steps, chain.rows));
  return chain;
}

void run_bands(const Chain& chain, const std::vector<BandStep>& steps, const char* in, char* out, int64_t first,
               int64_t last, char* memory) {
  std::vector<Band> bands(steps.size() - 1);
  const std::vector<int64_t> bytes = band_bytes(steps, chain.rows);
  for (std::size_t i = 0; i < bands.size(); ++i) {
    bands[i].shape = steps[i].out;
    bands[i].memory = memory;
    std::memset(memory, bands[i].shape->zero, bytes[i]);
    memory += bytes[i];
  }
  const BandStep& end = steps.back();
  for (Rows made{first, 0}; made.first < last; made.first += chain.rows) {
    made.last = std::min(made.first + chain.rows, last);
    Rows read = rows_read(*end.op, made);  // what the steps before it must give, the last one first
    for (std::size_t i = bands.size(); i-- > 0;) {
      bands[i].want(read);
      read = rows_read(*steps[i].op, bands[i].missing());
    }
    for (std::size_t i = 0; i < bands.size(); ++i) {
      Band& band = bands[i];
      if (band.wanted.count() == 0) continue;
      const Rows rows = band.missing();
      band.fill_frame();
      if (rows.count() > 0) {
        const int64_t from = rows.first * steps[i].op->reach().step;
        run_rows(steps[i], rows, i == 0 ? in + from * row_bytes(*steps[0].in) : bands[i - 1].image_at(from),
                 band.image_at(rows.first));
      }
      band.there.last = std::max(band.there.last, band.wanted.last);
    }
    const int64_t from = made.first * end.op->reach().step;
    run_rows(end, made, bands.back().image_at(from), out + made.first * row_bytes(*end.out));
  }
}

}  // namespace tw
