// Direct convolution as an implicit matrix product. A band of input rows is copied channels-last; there, the kernel-row
// by channel run that an output pixel multiplies is contiguous, and the next pixel's starts one stride further. So the
// product needs no im2col: rows of A are read at a stride, one K segment a kernel row.
#include "common/scratch.h"
#include "common/thread_pool.h"
#include "kernels/conv.h"
#include "kernels/conv_layout.h"
#include "kernels/conv_micro.h"

namespace tw {
namespace TW_ISA {
namespace {

struct Problem {
  ConvShape s;
  int64_t c, o, vectors;
  int64_t columns;        // pixels of a packed row, padding included
  int64_t bands, splits;  // tasks of one image and group
};

Problem make_problem(const ConvShape& s) {
  Problem p;
  p.s = s;
  p.c = s.group_c();
  p.o = s.group_o();
  p.vectors = ceil_div(p.o, kLanes);
  p.columns = larger((s.ow - 1) * s.sw + s.kw, s.pw + s.w);
  p.bands = p.splits = 1;
  return p;
}

int64_t packed_floats(const ConvShape& s) {
  const Problem p = make_problem(s);
  return s.groups * p.vectors * kLanes * s.kh * s.kw * p.c;
}

// [group][panel of two vectors][ky][kx][channel][lane]
void pack(const ConvShape& s, const WeightView& w, float* packed) {
  const Problem p = make_problem(s);
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

DirectTile default_tile(const ConvShape&) { return {160, 1}; }

struct Band {
  int64_t n, group, y0, y1, vector0, vector1;
};

// One panel of output channels for every pixel of the band, into stage[pixel][vectors * kLanes].
void multiply(const Problem& p, const Band& b, const float* panel, int64_t vectors, const RowBuffer& rows, float* stage) {
  const ConvShape& s = p.s;
  const int64_t chunks = ceil_div(s.ow, kMaxRows);
  MicroArgs args;
  args.a_row = s.sw * p.c;
  args.a_segment = rows.columns * p.c;
  args.b = panel;
  args.b_segment = s.kw * p.c * vectors * kLanes;
  args.segments = s.kh;
  args.length = s.kw * p.c;
  args.c_row = vectors * kLanes;
  args.accumulate = false;
  for (int64_t y = b.y0; y < b.y1; ++y) {
    const float* row = rows.row(y * s.sh - s.ph);
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t x0 = cut(s.ow, chunks, chunk), x1 = cut(s.ow, chunks, chunk + 1);
      args.a = row + x0 * args.a_row;
      args.c = stage + ((y - b.y0) * s.ow + x0) * args.c_row;
      pick_micro<true>(x1 - x0, vectors)(args);
    }
  }
}

// The staged pixels of one vector of channels to a strided grid of a larger plane.
void scatter(const float* stage, int64_t pitch, const Band& b, const Problem& p, int64_t lanes, const OutputGrid& grid,
             float* y) {
  for (int64_t row = b.y0; row < b.y1; ++row) {
    for (int64_t x = 0; x < p.s.ow; ++x, stage += pitch) {
      float* to = y + (grid.y0 + row * grid.step_y) * grid.plane_w + grid.x0 + x * grid.step_x;
      for (int64_t c = 0; c < lanes; ++c) to[c * grid.plane_h * grid.plane_w] = stage[c];
    }
  }
}

bool run_band(const Problem& p, const Band& b, const float* x, const float* packed, const ConvEpilogue& e,
              const OutputGrid& grid, float* y) {
  const ConvShape& s = p.s;
  const int64_t first = b.y0 * s.sh - s.ph, input_rows = (b.y1 - b.y0 - 1) * s.sh + s.kh, pixels = (b.y1 - b.y0) * s.ow;
  const int64_t row_floats = round_up(input_rows * p.columns * p.c, 16);
  float* base = thread_scratch(row_floats + pixels * kPanelVectors * kLanes);
  if (base == nullptr) return false;
  float* stage = base + row_floats;
  const RowBuffer rows{base, p.c, p.columns, s.pw, first, input_rows};
  zero_margins(rows, s.w);
  Magnitude unused;
  const float* image = x + (b.n * s.c + b.group * p.c) * s.h * s.w;
  if (s.kh < s.sh) {
    for (int64_t row = b.y0; row < b.y1; ++row) {
      pack_rows(rows, image, p.c, s.h, s.w, row * s.sh - s.ph, row * s.sh - s.ph + s.kh, unused);
    }
  } else {
    pack_rows(rows, image, p.c, s.h, s.w, first, first + input_rows, unused);
  }
  const bool whole = grid.step_y == 1 && grid.step_x == 1;
  const int64_t plane = grid.plane_h * grid.plane_w;
  for (int64_t vector = b.vector0; vector < b.vector1; vector += kPanelVectors) {
    const int64_t vectors = smaller(kPanelVectors, p.vectors - vector), pitch = vectors * kLanes;
    multiply(p, b, packed + (b.group * p.vectors + vector) * s.kh * s.kw * p.c * kLanes, vectors, rows, stage);
    for (int64_t v = 0; v < vectors; ++v) {
      const int64_t channel = b.group * p.o + (vector + v) * kLanes, lanes = smaller(kLanes, p.o - (vector + v) * kLanes);
      float* planes = y + (b.n * s.o + channel) * plane;
      const int64_t at = b.y0 * s.ow;
      if (whole) {
        const float* residual = e.residual == nullptr ? nullptr : e.residual + (b.n * s.o + channel) * plane + at;
        const Finish finish{e.bias == nullptr ? nullptr : e.bias + channel, residual, e.activation};
        unpack_pixels(stage + v * kLanes, pitch, pixels, lanes, finish, planes + at, plane);
      } else {
        scatter(stage + v * kLanes, pitch, b, p, lanes, grid, planes);
      }
    }
  }
  trim_thread_scratch();
  return true;
}

bool forward(const ConvShape& s, const float* x, const float* packed, const ConvEpilogue& e, const DirectTile& tile,
             const OutputGrid& grid, float* y) {
  Problem p = make_problem(s);
  const int64_t threads = num_threads(), images = s.n * s.groups, panels = ceil_div(p.vectors, kPanelVectors);
  p.bands = ceil_div(s.oh, larger(1, tile.band_pixels / s.ow));
  if (images * p.bands < threads) p.bands = smaller(s.oh, ceil_div(threads, images));
  p.splits = smaller(panels, larger(tile.panels_split, images * p.bands < threads ? threads / (images * p.bands) : 1));
  bool failed = false;
  parallel_for(static_cast<int>(images * p.bands * p.splits), [&](int task) {
    const int64_t split = task % p.splits, band = task / p.splits % p.bands, image = task / (p.splits * p.bands);
    Band b;
    b.n = image / s.groups;
    b.group = image % s.groups;
    b.y0 = cut(s.oh, p.bands, band);
    b.y1 = cut(s.oh, p.bands, band + 1);
    b.vector0 = cut(panels, p.splits, split) * kPanelVectors;
    b.vector1 = smaller(cut(panels, p.splits, split + 1) * kPanelVectors, p.vectors);
    if (!run_band(p, b, x, packed, e, grid, y)) __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
  });
  return !failed;
}

}  // namespace

const DirectKernels conv_direct = {packed_floats, pack, default_tile, forward};

}  // namespace TW_ISA
}  // namespace tw
