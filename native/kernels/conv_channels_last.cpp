// The direct algorithm with an NHWC result. If all windows are inside an NHWC image, they are read in place; otherwise
// a band of rows is copied with its padding first. A 1x1 filter reads single pixels, so rows do not matter. Tiles are
// stored with their epilogue as soon as they are complete.
#include "common/machine.h"
#include "common/scratch.h"
#include "common/thread_pool.h"
#include "kernels/conv_grouped.h"

namespace tw {
namespace TW_ISA {
namespace {

struct Problem {
  ConvShape s;
  ConvLayout l;
  ConvEpilogue e;
  const float *x, *packed;
  float* y;
  int64_t c, o, vectors;   // per group: channels, output channels, those in vectors
  bool in_place;           // windows are read in place
  int64_t pitch, columns;  // floats per pixel and pixels per row of the input as it is read
};

// Treats the whole batch as one row of pixels if the convolution is pointwise.
void flatten_pixels(ConvShape* s) {
  const bool points = s->kh == 1 && s->kw == 1 && s->sh == 1 && s->sw == 1 && s->ph == 0 && s->pw == 0 &&
                      s->oh == s->h && s->ow == s->w;
  if (!points) return;
  s->w = s->ow = s->n * s->h * s->w;
  s->n = s->h = s->oh = 1;
}

// Returns whether no window reaches into the padding.
bool stays_inside(const ConvShape& s) {
  return s.ph == 0 && s.pw == 0 && (s.oh - 1) * s.sh + s.reach_h() <= s.h && (s.ow - 1) * s.sw + s.reach_w() <= s.w;
}

// The output rows, columns and channel panels of one task.
struct OutputTile {
  int64_t n, y0, y1, x0, x1, group, vector0, vector1;
};

struct Cuts {
  int64_t rows, columns, splits;  // number of tiles along each dimension
};

// The size of the L2 cache in bytes; a value outside 256 KiB to 2 MiB is replaced by the nearer bound.
int64_t most_l2() { return larger(256 << 10, smaller(machine().caches.l2, 2 << 20)); }

// Chooses the tiles. The input of a tile stays in half of the L2 cache while the panels of weights are streamed. If
// there are fewer tiles than threads, they are split further along rows, columns or channels.
Cuts cuts_of(const Problem& p) {
  const ConvShape& s = p.s;
  const int64_t pixel_bytes = 4 * s.sh * s.sw * p.c, by_cache = most_l2() / 2 / larger(1, pixel_bytes);
  const int64_t pixels = larger(4 * kMaxRows, smaller(kBandPixels, by_cache));
  Cuts cuts{1, 1, 1};
  if (s.oh == 1) {
    cuts.columns = ceil_div(s.ow, pixels);
  } else {
    cuts.rows = ceil_div(s.oh, larger(1, pixels / s.ow));
  }
  const int64_t images = s.n * s.groups, work = images * s.oh * s.ow * s.kh * s.kw * p.c * p.vectors;
  const int64_t threads = work * kLanes < kTaskMultiplyAdds ? 1 : num_threads();
  const int64_t tiles = images * cuts.rows * cuts.columns;
  if (threads == 1 || tiles % threads == 0 || tiles >= 4 * threads) return cuts;
  if (s.oh == 1) {
    const int64_t pieces_per_row = round_up(cuts.columns, threads);
    if (s.ow >= pieces_per_row * kMaxRows * 2) cuts.columns = pieces_per_row;
  } else {
    cuts.rows = smaller(s.oh, ceil_div(round_up(tiles, threads), images));
  }
  const int64_t now = images * cuts.rows * cuts.columns;
  if (now < threads) cuts.splits = smaller(ceil_div(p.vectors, kPanelVectors), ceil_div(threads, now));
  return cuts;
}

// Returns the input rows of a tile: in place, or copied to `to` with padding.
RowBuffer band_rows(const Problem& p, const OutputTile& b, float* to) {
  const ConvShape& s = p.s;
  const int64_t first = b.y0 * s.sh - s.ph, input_rows = (b.y1 - b.y0 - 1) * s.sh + s.reach_h();
  if (p.in_place)
    return {const_cast<float*>(p.x) + (b.n * s.h + first) * s.w * p.pitch + b.group * p.c,
            p.pitch,
            s.w,
            0,
            first,
            input_rows};
  const RowBuffer rows{to, p.c, p.columns, s.pw, first, input_rows};
  zero_margins(rows, s.w);
  if (p.l.x_pitch == 0) {
    Magnitude unused;
    pack_rows(rows, p.x + (b.n * s.c + b.group * p.c) * s.h * s.w, p.c, s.h, s.w, first, first + input_rows, unused);
  } else {
    copy_rows(rows, p.x + b.n * s.h * s.w * p.l.x_pitch + b.group * p.c, p.l.x_pitch, p.c, s.h, s.w, first,
              first + input_rows);
  }
  return rows;
}

int64_t scratch_floats(const Problem& p, const OutputTile& b) {
  if (p.in_place) return 0;
  return round_up(((b.y1 - b.y0 - 1) * p.s.sh + p.s.reach_h()) * p.columns * p.c, 16);
}

// Computes one panel of output channels of a tile. `ahead`: prefetches the next panel, a share with each register tile.
void multiply_panel(const Problem& p, const OutputTile& b, const RowBuffer& rows, int64_t vector, bool ahead) {
  const ConvShape& s = p.s;
  const int64_t width = b.x1 - b.x0, chunks = ceil_div(width, kMaxRows);
  const int64_t vectors = smaller(kPanelVectors, p.vectors - vector), channel = b.group * p.o + vector * kLanes;
  const bool whole_rows = s.dw == 1 && p.pitch == p.c;  // the taps of a filter row are one segment, or one segment each
  MicroArgs args;
  TileEpilogue epilogue{p.e.bias == nullptr ? nullptr : p.e.bias + channel, nullptr, p.l.residual_pitch, p.e.activation,
                        p.o - vector * kLanes};
  args.run = whole_rows ? 1 : s.kw;
  args.a_step = s.dw * p.pitch;
  args.a_row = s.sw * p.pitch;
  args.a_segment = s.dh * rows.columns * p.pitch;
  args.segments = s.kh * args.run;
  args.length = s.kw / args.run * p.c;
  args.b = p.packed + (b.group * p.vectors + vector) * s.kh * s.kw * p.c * kLanes;
  args.b_segment = args.length * vectors * kLanes;
  args.c_row = p.l.y_pitch;
  args.accumulate = false;
  args.epilogue = &epilogue;
  const int64_t passes = chunks * (b.y1 - b.y0), panel = s.kh * s.kw * p.c * kPanelVectors * kLanes;
  args.ahead_step = ceil_div(kPanelVectors * kLanes * 4, passes);
  int64_t pass = 0;
  for (int64_t y = b.y0; y < b.y1; ++y) {
    const float* row = rows.row(y * s.sh - s.ph);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t x = b.x0 + cut(width, chunks, chunk), count = b.x0 + cut(width, chunks, chunk + 1) - x;
      const int64_t pixel = (b.n * s.oh + y) * s.ow + x;
      args.a = row + x * args.a_row;
      args.c = p.y + pixel * p.l.y_pitch + channel;
      epilogue.residual = p.e.residual == nullptr ? nullptr : p.e.residual + pixel * p.l.residual_pitch + channel;
      if (ahead) {
        args.ahead = reinterpret_cast<const char*>(args.b + panel) + cut(panel * 4, passes, pass++);
        micro_rows<2, true, true>(count)(args);
      } else {
        pick_micro<true>(count, vectors)(args);
      }
    }
  }
}

// Returns whether the weights exceed the L2 cache, so that they are read from L3 or memory.
bool exceeds_l2(const Problem& p) { return p.c * p.o * p.s.kh * p.s.kw * 4 > most_l2(); }

void multiply(const Problem& p, const OutputTile& b, const RowBuffer& rows) {
  const bool prefetches = exceeds_l2(p);
  for (int64_t vector = b.vector0; vector < b.vector1; vector += kPanelVectors) {
    multiply_panel(p, b, rows, vector, prefetches && vector + kPanelVectors < b.vector1);
  }
}

// Computes one tile of the output; returns false if no workspace could be allocated.
bool run_part(const Problem& p, const OutputTile& b) {
  float* base = nullptr;
  if (!p.in_place) {
    base = thread_scratch(scratch_floats(p, b));
    if (base == nullptr) return false;
  }
  multiply(p, b, band_rows(p, b, base));
  return true;
}

// Computes groups at least as wide as a vector: one task per tile.
bool forward_wide(const Problem& p) {
  const ConvShape& s = p.s;
  const Cuts cuts = cuts_of(p);
  const int64_t panels = ceil_div(p.vectors, kPanelVectors);
  bool failed = false;
  parallel_near(static_cast<int>(s.n * s.groups * cuts.rows * cuts.columns * cuts.splits), [&](int task) {
    int64_t at = task;
    const auto next = [&](int64_t count) {
      const int64_t i = at % count;
      at /= count;
      return i;
    };
    const int64_t split = next(cuts.splits), column = next(cuts.columns), row = next(cuts.rows);
    OutputTile b;
    b.group = next(s.groups);
    b.n = at;
    b.y0 = cut(s.oh, cuts.rows, row);
    b.y1 = cut(s.oh, cuts.rows, row + 1);
    b.x0 = cut(s.ow, cuts.columns, column);
    b.x1 = cut(s.ow, cuts.columns, column + 1);
    b.vector0 = cut(panels, cuts.splits, split) * kPanelVectors;
    b.vector1 = smaller(cut(panels, cuts.splits, split + 1) * kPanelVectors, p.vectors);
    if (!run_part(p, b)) __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
  });
  return !failed;
}

// --- narrow groups ---

// Computes one row of outputs, chunk by chunk of pixels: each goes through all blocks of channels before the next,
// because neighbouring channels are adjacent in memory. `image` points to the first channel of the first pixel, with
// `pitch` floats per pixel.
void narrow_row(const Problem& p, const float* image, int64_t pitch, int64_t n, int64_t y, int64_t block0,
                int64_t block1) {
  const ConvShape& s = p.s;
  const GroupBlocks blocks = group_blocks(s);
  const int64_t top = y * s.sh - s.ph, taps = s.kw * s.group_c() * kLanes;
  const int64_t first = top >= 0 ? 0 : ceil_div(-top, s.dh);
  const int64_t end = s.h <= top ? 0 : smaller(s.kh, ceil_div(s.h - top, s.dh));
  const int64_t inside = larger(0, end - first), chunks = ceil_div(s.ow, pixels_at_once(s));
  if (inside > 0) image += (top + first * s.dh) * s.w * pitch;
  GroupedRow row{nullptr, pitch, s.dh * s.w * pitch, s.w,         nullptr, inside,  s.kw,       s.sw,
                 s.dw,    s.pw,  s.group_c(),        s.group_o(), nullptr, nullptr, p.l.y_pitch};
  TileEpilogue epilogue{nullptr, nullptr, p.l.residual_pitch, p.e.activation, 0};
  row.epilogue = &epilogue;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t x = cut(s.ow, chunks, chunk), count = cut(s.ow, chunks, chunk + 1) - x,
                  pixel = (n * s.oh + y) * s.ow + x;
    for (int64_t block = block0; block < block1; ++block) {
      const int64_t channel = block * blocks.o;
      row.x = image + block * blocks.c;
      row.w = p.packed + (block * s.kh + first) * taps;
      row.y = p.y + pixel * p.l.y_pitch + channel;
      epilogue.bias = p.e.bias == nullptr ? nullptr : p.e.bias + channel;
      epilogue.residual = p.e.residual == nullptr ? nullptr : p.e.residual + pixel * p.l.residual_pitch + channel;
      epilogue.channels = smaller(blocks.o, s.o - channel);
      grouped_pixels(row, x, count);
    }
  }
}

// Computes narrow groups; tasks share the rows, or the blocks of groups if there are few rows.
void forward_narrow(const Problem& p) {
  const ConvShape& s = p.s;
  const int64_t blocks = group_blocks(s).blocks, work = s.n * s.oh * s.ow * s.kh * s.kw * s.group_c() * blocks;
  const int64_t threads = work * kLanes < kTaskMultiplyAdds ? 1 : num_threads(), rows = s.n * s.oh;
  const int64_t bands = threads == 1 ? 1 : smaller(rows, 4 * threads);
  const int64_t splits = threads == 1 || bands >= threads ? 1 : smaller(blocks, ceil_div(threads, bands));
  parallel_near(static_cast<int>(bands * splits), [&](int task) {
    const int64_t band = task / splits, split = task % splits;
    for (int64_t row = cut(rows, bands, band); row < cut(rows, bands, band + 1); ++row) {
      const int64_t n = row / s.oh;
      narrow_row(p, p.x + n * s.h * s.w * p.l.x_pitch, p.l.x_pitch, n, row % s.oh, cut(blocks, splits, split),
                 cut(blocks, splits, split + 1));
    }
  });
}

// --- a 1x1 convolution fused with the depthwise convolution that reads it ---

// Rows of the first result, one panel of channels wide, are stored in scratch memory for the second convolution, so
// that the intermediate channels stay in the inner caches. Rows that two bands need (the halo) are computed twice.
constexpr int64_t kPairPitch = kPanelVectors * kLanes;

// The number of bands of the second convolution's rows: the input of a band and a panel of the intermediate result fit
// half of the L2 cache.
int64_t pair_bands(const Problem& a, const ConvShape& s) {
  const int64_t fit = larger(1, most_l2() / 2 / (s.w * (a.c + kPairPitch) * 4)), halo = larger(0, s.reach_h() - s.sh);
  const int64_t rows = larger(fit - halo, 4 * larger(1, halo)) / s.sh;
  return ceil_div(s.oh, larger(1, rows));
}

// Computes output rows [y0, y1) of image n for vectors [vector0, vector1) of channels, panel by panel: first the rows
// that `b` needs by `a`, then `b`.
bool run_pair(const Problem& a, const Problem& b, int64_t n, int64_t y0, int64_t y1, int64_t vector0, int64_t vector1) {
  const ConvShape& s = b.s;
  const int64_t first = smaller(s.h, larger(0, y0 * s.sh - s.ph)),
                end = larger(first, smaller(s.h, (y1 - 1) * s.sh - s.ph + s.reach_h()));
  const int64_t begin = (n * s.h + first) * s.w, pixels = (end - first) * s.w;
  float* rows = thread_scratch(round_up(pixels * kPairPitch + kLanes, 16));
  if (rows == nullptr) return false;
  Problem one = a;
  one.s.w = one.s.ow = pixels;
  one.l.y_pitch = kPairPitch;
  const RowBuffer from{const_cast<float*>(a.x) + begin * a.pitch, a.pitch, pixels, 0, 0, 1};
  const OutputTile whole{0, 0, 1, 0, pixels, 0, 0, 0};
  const bool prefetches = exceeds_l2(a);
  for (int64_t vector = vector0; vector < vector1; vector += kPanelVectors) {
    one.y = rows - vector * kLanes;
    if (pixels > 0) multiply_panel(one, whole, from, vector, prefetches && vector + kPanelVectors < vector1);
    const float* image = rows - first * s.w * kPairPitch - vector * kLanes;
    const int64_t past = smaller(vector + kPanelVectors, a.vectors);
    for (int64_t y = y0; y < y1; ++y) narrow_row(b, image, kPairPitch, n, y, vector, past);
  }
  return true;
}

// Computes a 1x1 convolution and a depthwise convolution of its result, band by band, without storing the value
// between.
bool forward_pair(const ConvShape& first, const float* x, int64_t x_pitch, const float* packed_first,
                  const ConvEpilogue& e_first, const ConvShape& second, const float* packed_second,
                  const ConvEpilogue& e_second, const ConvLayout& layout, float* y) {
  Problem a{first, {x_pitch, 0, 0}, e_first, x, packed_first, nullptr, first.c, first.o, ceil_div(first.o, kLanes),
            true,  x_pitch,         0};
  Problem b{second, layout, e_second, nullptr, packed_second, y, 1, 1, 0, false, 0, 0};
  flatten_pixels(&a.s);
  const int64_t bands = pair_bands(a, second), panels = ceil_div(a.vectors, kPanelVectors), tiles = second.n * bands,
                threads = num_threads();
  const int64_t splits = tiles % threads == 0 || tiles >= 4 * threads ? 1 : smaller(panels, threads);
  bool failed = false;
  parallel_near(static_cast<int>(tiles * splits), [&](int task) {
    const int64_t split = task % splits, band = task / splits % bands, n = task / splits / bands;
    const int64_t vector0 = cut(panels, splits, split) * kPanelVectors,
                  vector1 = smaller(cut(panels, splits, split + 1) * kPanelVectors, a.vectors);
    if (!run_pair(a, b, n, cut(second.oh, bands, band), cut(second.oh, bands, band + 1), vector0, vector1))
      __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
  });
  return !failed;
}

// Computes a direct convolution of channels-last images (N, H, W, C). Returns false if no memory was available.
bool forward(const ConvShape& shape, const float* x, const float* packed, const ConvEpilogue& e,
             const ConvLayout& layout, float* y) {
  Problem p{shape, layout, e, x, packed, y, shape.group_c(), shape.group_o(), 0, false, 0, 0};
  if (shares_vectors(shape)) {
    forward_narrow(p);
    return true;
  }
  if (layout.x_pitch != 0) flatten_pixels(&p.s);
  const ConvShape& s = p.s;
  p.vectors = ceil_div(p.o, kLanes);
  p.in_place = layout.x_pitch != 0 && stays_inside(s);
  p.pitch = p.in_place ? layout.x_pitch : p.c;
  p.columns = larger((s.ow - 1) * s.sw + s.reach_w(), s.pw + s.w);
  return forward_wide(p);
}

}  // namespace

const ChannelsLastKernels conv_channels_last = {forward, forward_pair};

}  // namespace TW_ISA
}  // namespace tw
