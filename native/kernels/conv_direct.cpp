// Direct convolution as an implicit GEMM. A band of input rows is copied to NHWC. There, the inputs that an output
// pixel multiplies along one filter row are contiguous, and those of the next pixel start one stride further. So the
// product needs no im2col: rows of A are read at a stride, with one segment of k per filter row (per tap if columns are
// dilated). Narrow groups are computed over the same copy, in blocks that share a vector (conv_grouped.h).
#include "common/scratch.h"
#include "common/thread_pool.h"
#include "kernels/conv.h"
#include "kernels/conv_grouped.h"

namespace tw {
namespace TW_ISA {
namespace {

// The shape of a problem. A unit is the channels that a task computes together: one group, or a block of narrow groups.
struct Problem {
  ConvShape s;
  bool narrow;
  int64_t units;
  int64_t c, o, vectors;  // channels of a unit; output channels in vectors
  int64_t pitch;          // floats of a packed pixel
  int64_t columns;        // pixels of a packed row, padding included

  int64_t unit_c(int64_t unit) const { return smaller(c, s.c - unit * c); }  // the last block may have fewer groups
  int64_t unit_o(int64_t unit) const { return smaller(o, s.o - unit * o); }
};

// Derives the sizes of a direct convolution (channels, vectors and row pitch of a group) from its shape.
Problem make_problem(const ConvShape& s) {
  Problem p;
  p.s = s;
  p.narrow = shares_vectors(s);
  const GroupBlocks blocks = p.narrow ? group_blocks(s) : GroupBlocks{1, s.groups, s.group_c(), s.group_o()};
  p.units = blocks.blocks;
  p.c = blocks.c;
  p.o = blocks.o;
  p.vectors = ceil_div(p.o, kLanes);
  p.pitch = p.narrow ? kLanes : p.c;
  p.columns = larger((s.ow - 1) * s.sw + s.reach_w(), s.pw + s.w);
  return p;
}

int64_t packed_floats(const ConvShape& s) {
  const Problem p = make_problem(s);
  return p.narrow ? grouped_floats(s) : s.groups * p.vectors * kLanes * s.kh * s.kw * p.c;
}

// Packs the weights to [group][panel of two vectors][ky][kx][channel][lane].
void pack(const ConvShape& s, const WeightView& w, float* packed) {
  const Problem p = make_problem(s);
  if (p.narrow) return pack_grouped(s, w, packed);
  const int64_t k_total = s.kh * s.kw * p.c;
  parallel_for(static_cast<int>(s.groups * p.vectors), [&](int task) {
    const int64_t g = task / p.vectors, vector = task % p.vectors, lanes = smaller(kLanes, p.o - vector * kLanes);
    const int64_t panel = vector / kPanelVectors * kPanelVectors;
    const int64_t width = smaller(kPanelVectors, p.vectors - panel) * kLanes;
    float* to = packed + (g * p.vectors + panel) * k_total * kLanes + (vector - panel) * kLanes;
    const float* from = w.data + g * w.group + vector * kLanes * w.out;
    for (int64_t ky = 0; ky < s.kh; ++ky) {
      for (int64_t kx = 0; kx < s.kw; ++kx) {
        for (int64_t c = 0; c < p.c; ++c) {
          const float* f = from + c * w.in + ky * w.row + kx * w.col;
          vf v = {};
          for (int64_t i = 0; i < lanes; ++i) v[i] = f[i * w.out];
          store(to + ((ky * s.kw + kx) * p.c + c) * width, v);
        }
      }
    }
  });
}

// The output rows that a task takes through all stages.
int64_t rows_of_band(const ConvShape& s, const ConvTile& tile) { return smaller(s.oh, larger(1, tile.block / s.ow)); }

// The default tile: bands of about kBandPixels. Larger bands pack fewer rows twice, and a panel's products stay in L2.
// If that leaves threads idle, bands become shorter, then tasks share the output channels (benchmarks/conv.py --layers,
// "1x1 64-256 at 28" and "5x5 32-64 at 28").
ConvTile default_tile(const ConvShape& s, int64_t threads) {
  const Problem p = make_problem(s);
  const int64_t images = s.n * p.units, panels = ceil_div(p.vectors, kPanelVectors);
  ConvTile tile{ceil_div(s.ow, ceil_div(s.ow, kMaxRows)), kPanelVectors, kBandPixels, kPanelVectors, 1};
  int64_t bands = ceil_div(s.oh, rows_of_band(s, tile));
  const bool worth = images * s.oh * s.ow * s.kh * s.kw * s.group_c() * p.vectors * kLanes >= kTaskMultiplyAdds;
  if (!worth) threads = 1;
  if (images < threads) bands = smaller(s.oh, round_up(bands, ceil_div(threads, images)));
  tile.block = ceil_div(s.oh, bands) * s.ow;
  bands = ceil_div(s.oh, rows_of_band(s, tile));
  if (images * bands < threads) tile.split = smaller(panels, threads / (images * bands));
  return tile;
}

int64_t row_floats(const Problem& p, int64_t output_rows) {
  return round_up(((output_rows - 1) * p.s.sh + p.s.reach_h()) * p.columns * p.pitch, 16);
}

int64_t block_bytes(const ConvShape& s, const ConvTile& tile) {
  const Problem p = make_problem(s);
  const int64_t rows = rows_of_band(s, tile);
  return (row_floats(p, rows) + rows * s.ow * smaller(tile.channels, p.vectors) * kLanes) * 4;
}

// The part of a convolution that a task computes: output rows and vectors of output channels of one image and unit.
struct RowBand {
  int64_t n, unit, y0, y1, vector0, vector1;
};

// Computes one panel of output channels for every pixel of the band, into stage[pixel][pitch].
void multiply(const Problem& p, const RowBand& b, const ConvTile& tile, const float* panel, int64_t vectors,
              const RowBuffer& rows, float* stage, int64_t pitch) {
  const ConvShape& s = p.s;
  const int64_t chunks = ceil_div(s.ow, tile.mr);
  MicroArgs args;
  args.a_row = s.sw * p.c;
  args.a_segment = s.dh * rows.columns * p.c;
  args.b = panel;
  args.run = s.dw == 1 ? 1 : s.kw;  // the taps of a filter row are one segment, or one segment each
  args.a_step = s.dw * p.c;
  args.segments = s.kh * args.run;
  args.length = s.kw / args.run * p.c;
  args.b_segment = args.length * vectors * kLanes;
  args.c_row = pitch;
  args.accumulate = false;
  for (int64_t y = b.y0; y < b.y1; ++y) {
    const float* row = rows.row(y * s.sh - s.ph);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t x0 = cut(s.ow, chunks, chunk), x1 = cut(s.ow, chunks, chunk + 1);
      args.a = row + x0 * args.a_row;
      args.c = stage + ((y - b.y0) * s.ow + x0) * args.c_row;
      run_panel(args, x1 - x0, vectors, tile.vectors);
    }
  }
}

// Computes a block of narrow groups for every pixel of the band, into stage[pixel][kLanes], without an epilogue.
void multiply_narrow(const Problem& p, const RowBand& b, const float* packed, const RowBuffer& rows, float* stage) {
  const ConvShape& s = p.s;
  const TileEpilogue no_epilogue{nullptr, nullptr, 0, ConvActivation::none, kLanes};
  GroupedRow row{nullptr,
                 kLanes,
                 s.dh * rows.columns * kLanes,
                 rows.columns,
                 packed,
                 s.kh,
                 s.kw,
                 s.sw,
                 s.dw,
                 0,
                 s.group_c(),
                 s.group_o(),
                 &no_epilogue,
                 nullptr,
                 kLanes};
  const int64_t chunks = ceil_div(s.ow, pixels_at_once(s));
  for (int64_t y = b.y0; y < b.y1; ++y) {
    row.x = rows.row(y * s.sh - s.ph);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t x0 = cut(s.ow, chunks, chunk), x1 = cut(s.ow, chunks, chunk + 1);
      row.y = stage + ((y - b.y0) * s.ow + x0) * kLanes;
      grouped_pixels(row, x0, x1 - x0);
    }
  }
}

// Copies the staged pixels of one vector of channels to a strided grid of a larger plane.
void scatter(const float* stage, int64_t pitch, const RowBand& b, const Problem& p, int64_t lanes,
             const OutputGrid& grid, float* y) {
  for (int64_t row = b.y0; row < b.y1; ++row) {
    for (int64_t x = 0; x < p.s.ow; ++x, stage += pitch) {
      float* to = y + (grid.y0 + row * grid.step_y) * grid.plane_w + grid.x0 + x * grid.step_x;
      for (int64_t c = 0; c < lanes; ++c) to[c * grid.plane_h * grid.plane_w] = stage[c];
    }
  }
}

// Copies the input rows of a band to NHWC.
RowBuffer packed_rows(const Problem& p, const RowBand& b, const float* x, float* to) {
  const ConvShape& s = p.s;
  const int64_t first = b.y0 * s.sh - s.ph, input_rows = (b.y1 - b.y0 - 1) * s.sh + s.reach_h();
  const RowBuffer rows{to, p.pitch, p.columns, s.pw, first, input_rows};
  zero_margins(rows, s.w);
  Magnitude unused;
  const int64_t channels = p.unit_c(b.unit);
  const float* image = x + (b.n * s.c + b.unit * p.c) * s.h * s.w;
  if (s.reach_h() < s.sh) {
    for (int64_t row = b.y0; row < b.y1; ++row) {
      pack_rows(rows, image, channels, s.h, s.w, row * s.sh - s.ph, row * s.sh - s.ph + s.reach_h(), unused);
    }
  } else {
    pack_rows(rows, image, channels, s.h, s.w, first, first + input_rows, unused);
  }
  return rows;
}

// Converts staged vectors [from, to) to NCHW and applies the epilogue.
void write_back(const Problem& p, const RowBand& b, int64_t from, int64_t to, const float* stage, int64_t pitch,
                const ConvEpilogue& e, const OutputGrid& grid, float* y) {
  const ConvShape& s = p.s;
  const bool whole = grid.step_y == 1 && grid.step_x == 1;
  const int64_t plane = grid.plane_h * grid.plane_w, at = b.y0 * s.ow, pixels = (b.y1 - b.y0) * s.ow;
  for (int64_t vector = from; vector < to; ++vector, stage += kLanes) {
    const int64_t channel = b.unit * p.o + vector * kLanes, lanes = smaller(kLanes, p.unit_o(b.unit) - vector * kLanes);
    float* planes = y + (b.n * s.o + channel) * plane;
    if (whole) {
      const float* residual = e.residual == nullptr ? nullptr : e.residual + (b.n * s.o + channel) * plane + at;
      const PlaneEpilogue epilogue{e.bias == nullptr ? nullptr : e.bias + channel, residual, e.activation};
      unpack_pixels(stage, pitch, pixels, lanes, epilogue, planes + at, plane);
    } else {
      scatter(stage, pitch, b, p, lanes, grid, planes);
    }
  }
}

// Packs the input rows of a band, computes its output channels some vectors at a time and writes them. Returns false if
// memory is exhausted.
bool run_band(const Problem& p, const RowBand& b, const ConvTile& tile, const float* x, const float* packed,
              const ConvEpilogue& e, const OutputGrid& grid, float* y) {
  const int64_t floats = row_floats(p, b.y1 - b.y0), staged = smaller(tile.channels, b.vector1 - b.vector0);
  float* base = thread_scratch(floats + (b.y1 - b.y0) * p.s.ow * staged * kLanes);
  if (base == nullptr) return false;
  float* stage = base + floats;
  const RowBuffer rows = packed_rows(p, b, x, base);
  for (int64_t from = b.vector0; from < b.vector1; from += staged) {
    const int64_t to = smaller(from + staged, b.vector1), pitch = (to - from) * kLanes;
    for (int64_t vector = from; vector < to; vector += kPanelVectors) {
      if (p.narrow) {
        multiply_narrow(p, b, packed + b.unit * p.s.kh * p.s.kw * p.s.group_c() * kLanes, rows, stage);
        continue;
      }
      const float* panel = packed + (b.unit * p.vectors + vector) * p.s.kh * p.s.kw * p.c * kLanes;
      multiply(p, b, tile, panel, smaller(kPanelVectors, p.vectors - vector), rows, stage + (vector - from) * kLanes,
               pitch);
    }
    write_back(p, b, from, to, stage, pitch, e, grid, y);
  }
  trim_thread_scratch();
  return true;
}

// Computes a direct convolution of planes (N, C, H, W) in bands of rows. Returns false if no memory was available.
bool forward(const ConvShape& s, const float* x, const float* packed, const ConvEpilogue& e, const ConvTile& tile,
             const OutputGrid& grid, float* y) {
  const Problem p = make_problem(s);
  const int64_t images = s.n * p.units, panels = ceil_div(p.vectors, kPanelVectors);
  const int64_t bands = ceil_div(s.oh, rows_of_band(s, tile)), splits = smaller(panels, tile.split);
  bool failed = false;
  parallel_for(static_cast<int>(images * bands * splits), [&](int task) {
    const int64_t split = task % splits, band = task / splits % bands, image = task / (splits * bands);
    RowBand b;
    b.n = image / p.units;
    b.unit = image % p.units;
    b.y0 = cut(s.oh, bands, band);
    b.y1 = cut(s.oh, bands, band + 1);
    b.vector0 = cut(panels, splits, split) * kPanelVectors;
    b.vector1 = smaller(cut(panels, splits, split + 1) * kPanelVectors, p.vectors);
    if (!run_band(p, b, tile, x, packed, e, grid, y)) __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
  });
  return !failed;
}

}  // namespace

const DirectKernels conv_direct = {
    {kLanes, kMaxRows, kPanelVectors}, packed_floats, pack, default_tile, block_bytes, forward};

}  // namespace TW_ISA
}  // namespace tw
