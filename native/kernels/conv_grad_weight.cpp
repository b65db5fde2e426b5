// The gradient of a convolution's weights: for every filter row, the matrix product of the shifted input with gy over
// all pixels. Both are copied to NHWC, a band of rows at a time. There the kw * c inputs that meet a pixel of gy are
// contiguous: they are the rows of the product, and pixels are its k (split-K over bands). Each partial result sums its
// own bands. Partial results are added in order, so the result depends on their number only.
#include "common/machine.h"
#include "common/scratch.h"
#include "common/thread_pool.h"
#include "kernels/conv.h"
#include "kernels/conv_layout.h"
#include "kernels/conv_micro.h"

namespace tw {
namespace TW_ISA {
namespace {

// The pixels of a band: two cache lines of gy for each of them fill half of L1.
constexpr int64_t kBandPixels = kSmallestL1 / 2 / (2 * 64);

struct Problem {
  ConvShape s;
  int64_t c, o, vectors, pitch;  // per group: channels, output channels, those in vectors and in floats
  int64_t columns, bands;        // pixels of a packed row with padding; bands of an image
};

// Derives the sizes of the weight gradient (channels of a group, row pitch, bands of rows) from the shape.
Problem make_problem(const ConvShape& s) {
  Problem p;
  p.s = s;
  p.c = s.group_c();
  p.o = s.group_o();
  p.vectors = ceil_div(p.o, kLanes);
  p.pitch = p.vectors * kLanes;
  p.columns = larger((s.ow - 1) * s.sw + s.kw, s.pw + s.w);
  p.bands = ceil_div(s.oh, larger(1, kBandPixels / s.ow));
  return p;
}

int64_t partial_floats(const ConvShape& s) {
  const Problem p = make_problem(s);
  return s.groups * s.kh * s.kw * p.c * p.pitch;
}

int64_t max_parts(const ConvShape& s) { return s.n * make_problem(s).bands; }

// Adds the products of a band's inputs with one panel of gy to a partial result [group][ky][kx][c][o].
void multiply_panel(const Problem& p, int64_t group, int64_t vector, int64_t vectors, const RowBuffer& rows,
                    int64_t first, const float* gy, int64_t gy_rows, float* partial) {
  const ConvShape& s = p.s;
  const int64_t height = s.kw * p.c, chunks = ceil_div(height, kMaxRows);
  MicroArgs args;
  args.a_row = 1;
  args.a_k = s.sw * p.c;
  args.a_segment = s.sh * rows.columns * p.c;
  args.b = gy;
  args.b_k = vectors * kLanes;
  args.b_segment = s.ow * args.b_k;
  args.segments = gy_rows;
  args.length = s.ow;
  args.c_row = p.pitch;
  args.accumulate = true;
  for (int64_t ky = 0; ky < s.kh; ++ky) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const int64_t m0 = cut(height, chunks, chunk), m1 = cut(height, chunks, chunk + 1);
      args.a = rows.row(first + ky) + m0;
      args.c = partial + ((group * s.kh + ky) * height + m0) * p.pitch + vector * kLanes;
      pick_micro<false>(m1 - m0, vectors)(args);
    }
  }
}

// Adds output rows [y0, y1) of image n to a partial result. Returns false if memory is exhausted.
bool add_band(const Problem& p, int64_t n, int64_t y0, int64_t y1, const float* gy, const float* x, float* partial) {
  const ConvShape& s = p.s;
  const int64_t first = y0 * s.sh - s.ph, input_rows = (y1 - y0 - 1) * s.sh + s.kh, pixels = (y1 - y0) * s.ow;
  const int64_t row_floats = round_up(input_rows * p.columns * p.c, 16);
  float* base = thread_scratch(row_floats + pixels * kPanelVectors * kLanes);
  if (base == nullptr) return false;
  const RowBuffer rows{base, p.c, p.columns, s.pw, first, input_rows};
  zero_margins(rows, s.w);
  Magnitude unused;
  for (int64_t group = 0; group < s.groups; ++group) {
    pack_rows(rows, x + (n * s.c + group * p.c) * s.h * s.w, p.c, s.h, s.w, first, first + input_rows, unused);
    for (int64_t vector = 0; vector < p.vectors; vector += kPanelVectors) {
      const int64_t vectors = smaller(kPanelVectors, p.vectors - vector), channel = vector * kLanes;
      const int64_t channels = smaller(vectors * kLanes, p.o - channel);
      float* panel = base + row_floats;
      if (channels < vectors * kLanes) zero(panel, pixels * vectors * kLanes);
      const RowBuffer gy_rows{panel, vectors * kLanes, s.ow, 0, y0, y1 - y0};
      pack_rows(gy_rows, gy + (n * s.o + group * p.o + channel) * s.oh * s.ow, channels, s.oh, s.ow, y0, y1, unused);
      multiply_panel(p, group, vector, vectors, rows, first, panel, y1 - y0, partial);
    }
  }
  trim_thread_scratch();
  return true;
}

// Adds up the partial results [group][ky][kx][c][o] and stores the sum as (o, c, ky, kx).
void add_partials(const Problem& p, const float* partials, int64_t partial_count, float* gw) {
  const ConvShape& s = p.s;
  const int64_t size = partial_floats(s), taps = s.kh * s.kw;
  parallel_for(static_cast<int>(s.groups * p.vectors), [&](int task) {
    const int64_t group = task / p.vectors, vector = task % p.vectors, lanes = smaller(kLanes, p.o - vector * kLanes);
    const float* from = partials + group * taps * p.c * p.pitch + vector * kLanes;
    float* to = gw + (group * p.o + vector * kLanes) * p.c * taps;
    for (int64_t c = 0; c < p.c; ++c) {
      for (int64_t tap = 0; tap < taps; ++tap) {
        const float* f = from + (tap * p.c + c) * p.pitch;
        vf sum = load(f);
        for (int64_t part = 1; part < partial_count; ++part) sum += load(f + part * size);
        for (int64_t i = 0; i < lanes; ++i) to[(i * p.c + c) * taps + tap] = sum[i];
      }
    }
  });
}

// Computes the gradient of the weights: each task sums its bands into a partial result, and the results are added.
bool run(const ConvShape& s, const float* gy, const float* x, float* partials, int64_t partial_count, float* gw) {
  const Problem p = make_problem(s);
  const int64_t units = s.n * p.bands, size = partial_floats(s);
  bool failed = false;
  parallel_for(static_cast<int>(partial_count), [&](int part) {
    float* partial = partials + part * size;
    zero(partial, size);
    for (int64_t unit = cut(units, partial_count, part); unit < cut(units, partial_count, part + 1); ++unit) {
      const int64_t band = unit % p.bands;
      if (!add_band(p, unit / p.bands, cut(s.oh, p.bands, band), cut(s.oh, p.bands, band + 1), gy, x, partial)) {
        __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
      }
    }
  });
  add_partials(p, partials, partial_count, gw);
  return !failed;
}

}  // namespace

const GradWeightKernels conv_grad_weight = {partial_floats, max_parts, run};

}  // namespace TW_ISA
}  // namespace tw
