// Winograd convolution (Lavin and Gray 2016): F(4x4, 3x3) computes 4x4 outputs from 6x6 inputs with 36 multiplications
// per pair of channels, F(2x2, 3x3) computes 2x2 from 4x4 with 16. The larger one multiplies less; the smaller one's
// transformed filters have less than half as many bytes and are cheaper to transform. A task takes a block of tiles
// through all stages, so that its working set stays in the cache:
//   pack rows NHWC -> V = B' d B -> 36 or 16 matrix products M = V U -> Y = A' M A -> NCHW
#include "common/machine.h"
#include "common/scratch.h"
#include "common/thread_pool.h"
#include "kernels/conv.h"
#include "kernels/conv_layout.h"
#include "kernels/conv_micro.h"

namespace tw {
namespace TW_ISA {
namespace {

// Sums over channels restart after this many channels, which keeps their rounding error from growing with the number of
// channels.
constexpr int64_t kChannelBlock = 128;  // chosen
// Positions are padded by one cache line beyond a multiple of the group; otherwise all of them could share one cache
// set.
constexpr int64_t kSkew = 16;  // hardware: floats of a cache line

// The transforms, each in one dimension: input B' d, output A' m, weight G w (in double, because filters are
// transformed once and used often), and weight_back, the inverse of G. The costs are the vector instructions of a whole
// tile, loads and stores included.
typedef double vd __attribute__((vector_size(kLanes * 8)));

// F(4x4, 3x3) with the interpolation points 0, +-1/sqrt2, +-sqrt2 and infinity: with the usual 0, +-1, +-2 the rounding
// error in float32 is five times larger.
struct FourByFour {
  static constexpr int kTile = 4, kWindow = 6, kPositions = 36;  // definition: outputs and inputs per side, products
  static constexpr bool kLate = false;  // whether filters are transformed in the kernel instead of when they are packed
  static constexpr int64_t kInputCost = 220, kOutputCost = 200;                           // definition
  static constexpr float kHalfRoot = 0.70710678118654752f, kRoot = 1.41421356237309505f;  // definition

  template <class V>
  static TW_INLINE void input(const V (&d)[6], V (&t)[6]) {
    const V even_p = d[4] - 2.0f * d[2], odd_p = d[3] - 2.0f * d[1];
    const V even_q = d[4] - 0.5f * d[2], odd_q = d[3] - 0.5f * d[1];
    t[0] = d[0] + (d[4] - 2.5f * d[2]);
    t[1] = even_p + kHalfRoot * odd_p;
    t[2] = even_p - kHalfRoot * odd_p;
    t[3] = even_q + kRoot * odd_q;
    t[4] = even_q - kRoot * odd_q;
    t[5] = d[1] + (d[5] - 2.5f * d[3]);
  }
  static TW_INLINE void output(const vf (&m)[6], vf (&y)[4]) {
    const vf sum_p = m[1] + m[2], diff_p = m[1] - m[2], sum_q = m[3] + m[4], diff_q = m[3] - m[4];
    y[0] = m[0] + (sum_p + sum_q);
    y[1] = kHalfRoot * diff_p + kRoot * diff_q;
    y[2] = 0.5f * sum_p + 2.0f * sum_q;
    y[3] = m[5] + (0.5f * kHalfRoot * diff_p + 2.0f * kRoot * diff_q);
  }
  template <class T, class V>
  static TW_INLINE void weight(const V (&w)[3], V (&u)[6]) {
    constexpr T p = static_cast<T>(0.70710678118654752 * -2 / 3), q = static_cast<T>(1.41421356237309505 / 6);
    constexpr T third = static_cast<T>(1.0 / 3), sixth = static_cast<T>(1.0 / 6);
    const V even_p = w[0] * (-2 * third) - w[2] * third, odd_p = p * w[1];
    const V even_q = w[0] * sixth + w[2] * third, odd_q = q * w[1];
    u[0] = w[0];
    u[1] = even_p + odd_p;
    u[2] = even_p - odd_p;
    u[3] = even_q + odd_q;
    u[4] = even_q - odd_q;
    u[5] = w[2];
  }
  static void weight_back(const double (&u)[6], double (&w)[3]) {
    w[0] = u[0];
    w[1] = (u[3] - u[4]) * (3.0 / 1.41421356237309505);
    w[2] = u[5];
  }
};

// F(2x2, 3x3) with the interpolation points 0, +-1 and infinity.
struct TwoByTwo {
  static constexpr int kTile = 2, kWindow = 4, kPositions = 16;  // definition
  static constexpr bool kLate = false;
  static constexpr int64_t kInputCost = 72, kOutputCost = 60;  // definition

  template <class V>
  static TW_INLINE void input(const V (&d)[4], V (&t)[4]) {
    t[0] = d[0] - d[2];
    t[1] = d[1] + d[2];
    t[2] = d[2] - d[1];
    t[3] = d[1] - d[3];
  }
  static TW_INLINE void output(const vf (&m)[4], vf (&y)[2]) {
    y[0] = m[0] + (m[1] + m[2]);
    y[1] = (m[1] - m[2]) - m[3];
  }
  template <class T, class V>
  static TW_INLINE void weight(const V (&w)[3], V (&u)[4]) {
    const V even = static_cast<T>(0.5) * (w[0] + w[2]), odd = static_cast<T>(0.5) * w[1];
    u[0] = w[0];
    u[1] = even + odd;
    u[2] = even - odd;
    u[3] = w[2];
  }
  static void weight_back(const double (&u)[4], double (&w)[3]) {
    w[0] = u[0];
    w[1] = u[1] - u[2];
    w[2] = u[3];
  }
};

// F(4x4, 3x3) with filters that are stored untransformed, at a quarter of the size. Every task transforms the filters
// that it reads, some channels at a time, and uses them for many tiles.
struct LateFourByFour : FourByFour {
  static constexpr bool kLate = true;
  static constexpr float kThird = 1.0f / 3, kOdd = kRoot / 3, kSmallOdd = kRoot / 6;  // definition
  // The matrix G, row by row.
  static constexpr float kRows[6][3] = {{1, 0, 0},
                                        {-2 * kThird, -kOdd, -kThird},
                                        {-2 * kThird, kOdd, -kThird},
                                        {kThird / 2, kSmallOdd, kThird},
                                        {kThird / 2, -kSmallOdd, kThird},
                                        {0, 0, 1}};
};

// Layout of transformed tiles: [group of tiles][position][tile][channel]. The micro-kernel takes one group at once, so
// that it reads and writes one short run per position, and the values of a tile stay on few pages.
struct TileArray {
  float* data;
  int64_t group;  // tiles per group
  int64_t row;    // floats per tile and position
  int64_t positions;

  int64_t position_stride() const { return group * row + kSkew; }
  int64_t floats(int64_t tiles) const { return ceil_div(tiles, group) * positions * position_stride(); }
  float* tile(int64_t t) const { return data + t / group * positions * position_stride() + t % group * row; }
};

struct Problem {
  ConvShape s;
  int64_t c, o;              // input and output channels per group
  int64_t c_pitch, vectors;  // c rounded up to whole vectors; o in vectors
  int64_t tiles_x, tiles_y;  // tiles of an image
  int64_t strips;            // rows of tiles, of all images
  int64_t columns;           // pixels of a packed row, padding included
};

// Computes the sizes that the loops use from the shape of the convolution.
template <class F>
Problem make_problem(const ConvShape& s) {
  Problem p;
  p.s = s;
  p.c = s.group_c();
  p.o = s.group_o();
  p.c_pitch = round_up(p.c, kLanes);
  p.vectors = ceil_div(p.o, kLanes);
  p.tiles_x = ceil_div(s.ow, F::kTile);
  p.tiles_y = ceil_div(s.oh, F::kTile);
  p.strips = s.n * p.tiles_y;
  p.columns = larger(p.tiles_x * F::kTile + 2, s.pw + s.w);
  return p;
}

template <class F>
int64_t packed_floats(const ConvShape& s) {
  const Problem p = make_problem<F>(s);
  return s.groups * (F::kLate ? 9 : F::kPositions) * p.c * p.vectors * kLanes;
}

// The address of a panel of the transformed filters U: [group][position][panel of two vectors][channel][lane].
template <class F>
float* packed_panel(const Problem& p, float* packed, int64_t g, int64_t position, int64_t vector) {
  return packed + ((g * F::kPositions + position) * p.vectors + vector) * p.c * kLanes;
}

// The address of a panel of untransformed filters: [group][panel of two vectors][channel][tap][lane].
float* late_panel(const Problem& p, float* packed, int64_t g, int64_t vector) {
  return packed + (g * p.vectors + vector) * p.c * 9 * kLanes;
}

// Computes G w G' for one input channel and a vector of output channels; positions are stored `step` floats apart.
template <class F, class T, class V>
TW_INLINE void filter_tile(const V (&taps)[9], float* to, int64_t step) {
  V rows[F::kWindow][3];
  for (int kx = 0; kx < 3; ++kx) {
    const V column[3] = {taps[kx], taps[3 + kx], taps[6 + kx]};
    V u[F::kWindow];
    F::template weight<T>(column, u);
    for (int i = 0; i < F::kWindow; ++i) rows[i][kx] = u[i];
  }
  for (int i = 0; i < F::kWindow; ++i) {
    V u[F::kWindow];
    F::template weight<T>(rows[i], u);
    for (int j = 0; j < F::kWindow; ++j) store(to + (i * F::kWindow + j) * step, __builtin_convertvector(u[j], vf));
  }
}

// Transforms and packs all filters. Returns false if a weight is above kWinogradLimit.
template <class F>
bool pack(const ConvShape& s, const WeightView& w, float* packed) {
  const Problem p = make_problem<F>(s);
  bool fits[1024];
  const int64_t tasks = s.groups * p.vectors, parts = smaller(tasks, 1024);
  parallel_near(static_cast<int>(parts), [&](int part) {
    Magnitude magnitude;
    for (int64_t task = cut(tasks, parts, part); task < cut(tasks, parts, part + 1); ++task) {
      const int64_t g = task / p.vectors, vector = task % p.vectors, lanes = smaller(kLanes, p.o - vector * kLanes);
      const int64_t panel = vector / kPanelVectors * kPanelVectors;
      const int64_t width = smaller(kPanelVectors, p.vectors - panel) * kLanes;
      const float* from = w.data + g * w.group + vector * kLanes * w.out;
      for (int64_t c = 0; c < p.c; ++c) {
        vd taps[9];
        for (int tap = 0; tap < 9; ++tap) {
          vf v = {};
          for (int64_t i = 0; i < lanes; ++i) v[i] = from[i * w.out + c * w.in + tap / 3 * w.row + tap % 3 * w.col];
          magnitude.observe(v);
          taps[tap] = __builtin_convertvector(v, vd);
          if (F::kLate) store(late_panel(p, packed, g, panel) + (c * 9 + tap) * width + (vector - panel) * kLanes, v);
        }
        if (F::kLate) continue;
        float* to = packed_panel<F>(p, packed, g, 0, panel) + c * width + (vector - panel) * kLanes;
        filter_tile<F, double>(taps, to, p.vectors * p.c * kLanes);
      }
    }
    fits[part] = !magnitude.above(kWinogradLimit);
  });
  bool all = true;
  for (int64_t i = 0; i < parts; ++i) all = all && fits[i];
  return all;
}

// Recovers the filters (o, c of a group, 3, 3) from their transform, up to rounding.
template <class F>
void unpack(const ConvShape& s, const float* packed, float* raw) {
  const Problem p = make_problem<F>(s);
  for (int64_t o = 0; o < s.o; ++o) {
    const int64_t g = o / p.o, vector = o % p.o / kLanes, panel = vector / kPanelVectors * kPanelVectors;
    const int64_t width = smaller(kPanelVectors, p.vectors - panel) * kLanes, lane = o % p.o - panel * kLanes;
    for (int64_t c = 0; c < p.c; ++c, raw += 9) {
      if (F::kLate) {
        const float* from = late_panel(p, const_cast<float*>(packed), g, panel) + c * 9 * width + lane;
        for (int tap = 0; tap < 9; ++tap) raw[tap] = from[tap * width];
        continue;
      }
      double rows[F::kWindow][3];
      for (int i = 0; i < F::kWindow; ++i) {
        double u[F::kWindow];
        for (int j = 0; j < F::kWindow; ++j) {
          u[j] = packed_panel<F>(p, const_cast<float*>(packed), g, i * F::kWindow + j, panel)[c * width + lane];
        }
        F::weight_back(u, rows[i]);
      }
      for (int kx = 0; kx < 3; ++kx) {
        double u[F::kWindow], w[3];
        for (int i = 0; i < F::kWindow; ++i) u[i] = rows[i][kx];
        F::weight_back(u, w);
        for (int ky = 0; ky < 3; ++ky) raw[ky * 3 + kx] = static_cast<float>(w[ky]);
      }
    }
  }
}

// The strips that a task takes through all stages.
int64_t strips_of_block(const Problem& p, const ConvTile& tile) {
  return smaller(p.strips, larger(1, tile.block / p.tiles_x));
}

template <class F>
bool worth_threads(const Problem& p) {
  const int64_t per_tile =
      F::kPositions * p.c * p.vectors + F::kInputCost * ceil_div(p.c, kLanes) + F::kOutputCost * p.vectors;
  return p.strips * p.tiles_x * per_tile * kLanes >= kTaskMultiplyAdds;
}

// Filters transformed on the fly: the tiles that use each transformed filter, and the channels transformed at a time. A
// row of positions of one panel then fits the inner caches.
constexpr int64_t kLateTiles = 64, kLateChannels = 128, kLatePosition = kLateChannels * kPanelVectors * kLanes + kSkew;

// The default tile. V takes about half of the second-level cache and the products a quarter (benchmarks/conv.py
// --layers, "3x3 64-64 at 56"). A block has at least sixteen tiles, so that the transformed weights, which are read
// once per block, are used often enough ("3x3 256-256 at 14"). A cache size outside 256 KiB to 2 MiB is replaced by the
// nearer bound. Each thread gets an equal number of blocks. If one block would hold everything, tasks share the output
// channels (and so the weights), or else the rows.
template <class F>
ConvTile default_tile(const ConvShape& s, int64_t threads) {
  const Problem p = make_problem<F>(s);
  const int64_t l2 = larger(256 << 10, smaller(machine().caches.l2, 2 << 20));
  const int64_t by_cache = l2 * 9 / 16 / (F::kPositions * p.c_pitch * 4);
  const int64_t tiles =
      F::kLate ? smaller(kLateTiles, p.strips * p.tiles_x) : larger(16, smaller(by_cache, 96 * 36 / F::kPositions));
  const int64_t vectors = l2 * (F::kLate ? 12 : 5) / 16 / (F::kPositions * tiles * kLanes * 4);
  ConvTile tile{kMaxRows, kPanelVectors, tiles, larger(kPanelVectors, vectors / kPanelVectors * kPanelVectors), 1};
  int64_t blocks = ceil_div(p.strips, strips_of_block(p, tile));
  const bool shares_rows = blocks == 1 && ceil_div(p.vectors, kPanelVectors) < threads && worth_threads<F>(p);
  if (blocks > 1 || shares_rows) blocks = smaller(round_up(blocks, threads), p.strips);
  tile.block = ceil_div(p.strips, blocks) * p.tiles_x;
  tile.mr = ceil_div(tile.block, ceil_div(tile.block, kMaxRows));
  tile.split = smaller(larger(1, threads / (blocks * s.groups)), ceil_div(p.vectors, kPanelVectors));
  return tile;
}

// The memory of a task: packed rows, transformed inputs V, products M, one strip of outputs, transformed filters.
struct Workspace {
  float *rows, *stage, *u;
  TileArray v, m;
};

// The part of a convolution that a task computes: strips and vectors of output channels of one group.
struct Block {
  int64_t group, strip0, strip1, vector0, vector1;
};

// Lays out a workspace at `base` and returns its floats.
template <class F>
int64_t workspace_floats(const Problem& p, int64_t strips, int64_t block_vectors, int64_t mr, Workspace* w,
                         float* base) {
  const int64_t tiles = strips * p.tiles_x, group = ceil_div(tiles, ceil_div(tiles, mr));
  const int64_t rows = F::kWindow * p.columns * p.c_pitch;
  w->rows = base;
  w->v = {base + rows, group, p.c_pitch, F::kPositions};
  w->m = {w->v.data + w->v.floats(tiles), group, block_vectors * kLanes, F::kPositions};
  w->stage = w->m.data + w->m.floats(tiles);
  const int64_t stage = F::kTile * p.tiles_x * F::kTile * kLanes;
  w->u = w->stage + stage;
  const int64_t late = F::kLate ? F::kWindow * kLatePosition : 0;
  return rows + w->v.floats(tiles) + w->m.floats(tiles) + stage + late;
}

template <class F>
int64_t block_bytes(const ConvShape& s, const ConvTile& tile) {
  const Problem p = make_problem<F>(s);
  Workspace unused;
  return workspace_floats<F>(p, strips_of_block(p, tile), smaller(tile.channels, p.vectors), tile.mr, &unused,
                             nullptr) *
         4;
}

// V = B' d B for one tile and a vector of channels, columns first.
template <class F>
TW_INLINE void input_tile(const float* const (&rows)[F::kWindow], int64_t at, int64_t pitch, float* v,
                          int64_t v_position) {
  vf half[F::kWindow][F::kWindow];
  for (int j = 0; j < F::kWindow; ++j) {
    vf d[F::kWindow], t[F::kWindow];
    for (int i = 0; i < F::kWindow; ++i) d[i] = load(rows[i] + at + j * pitch);
    F::input(d, t);
    for (int i = 0; i < F::kWindow; ++i) half[i][j] = t[i];
  }
  for (int i = 0; i < F::kWindow; ++i) {
    vf t[F::kWindow];
    F::input(half[i], t);
    for (int j = 0; j < F::kWindow; ++j) store(v + (i * F::kWindow + j) * v_position, t[j]);
  }
}

// Y = A' M A for one tile and a vector of channels.
template <class F>
TW_INLINE void output_tile(const float* m, int64_t m_position, float* stage, int64_t stage_row) {
  vf half[F::kTile][F::kWindow];
  for (int j = 0; j < F::kWindow; ++j) {
    vf d[F::kWindow], t[F::kTile];
    for (int i = 0; i < F::kWindow; ++i) d[i] = load(m + (i * F::kWindow + j) * m_position);
    F::output(d, t);
    for (int i = 0; i < F::kTile; ++i) half[i][j] = t[i];
  }
  for (int i = 0; i < F::kTile; ++i) {
    vf t[F::kTile];
    F::output(half[i], t);
    for (int j = 0; j < F::kTile; ++j) store(stage + i * stage_row + j * kLanes, t[j]);
  }
}

// Copies rows as whole vectors with zeros past the last channel, and tracks the largest magnitude.
void copy_rows_and_magnitude(const RowBuffer& b, const float* x, int64_t pitch, int64_t channels, int64_t h, int64_t w,
                             int64_t y0, int64_t y1, Magnitude& magnitude) {
  for (int64_t y = y0; y < y1; ++y) {
    float* to = b.row(y) + b.left_padding * b.pitch;
    if (y < 0 || y >= h) {
      zero(to, w * b.pitch);
      continue;
    }
    const float* from = x + y * w * pitch;
    for (int64_t i = 0; i < w; ++i, from += pitch, to += b.pitch) {
      int64_t c = 0;
      for (; c + kLanes <= channels; c += kLanes) {
        const vf v = load(from + c);
        magnitude.observe(v);
        store(to + c, v);
      }
      if (c < channels) {
        const vf v = load_first(from + c, static_cast<int>(channels - c));
        magnitude.observe(v);
        store(to + c, v);
      }
    }
  }
}

// Transforms the inputs of all strips of the block: rows are packed to NHWC in a ring as high as a window, then
// transformed to V. Returns false if an input is above kWinogradLimit.
template <class F>
bool transform_inputs(const Problem& p, const Block& b, const float* x, int64_t x_pitch, const Workspace& w) {
  const ConvShape& s = p.s;
  const RowBuffer ring{w.rows, p.c_pitch, p.columns, s.pw, -s.ph, F::kWindow};
  zero_margins(ring, s.w);
  Magnitude magnitude;
  for (int64_t strip = b.strip0; strip < b.strip1; ++strip) {
    const int64_t n = strip / p.tiles_y, y = strip % p.tiles_y * F::kTile - s.ph;
    const bool follows = strip > b.strip0 && strip % p.tiles_y != 0;
    const int64_t first = follows ? y + 2 : y;
    if (x_pitch == 0) {
      pack_rows(ring, x + (n * s.c + b.group * p.c) * s.h * s.w, p.c, s.h, s.w, first, y + F::kWindow, magnitude);
    } else {
      copy_rows_and_magnitude(ring, x + n * s.h * s.w * x_pitch + b.group * p.c, x_pitch, p.c, s.h, s.w, first,
                              y + F::kWindow, magnitude);
    }
    const float* rows[F::kWindow];
    for (int i = 0; i < F::kWindow; ++i) rows[i] = ring.row(y + i);
    const int64_t stride = w.v.position_stride();
    for (int64_t tx = 0; tx < p.tiles_x; ++tx) {
      float* v = w.v.tile((strip - b.strip0) * p.tiles_x + tx);
      for (int64_t c = 0; c < p.c_pitch; c += kLanes) {
        input_tile<F>(rows, tx * F::kTile * p.c_pitch + c, p.c_pitch, v + c, stride);
      }
    }
  }
  return !magnitude.above(kWinogradLimit);
}

MicroArgs product_args(const Problem& p, const Workspace& w) {
  MicroArgs args;
  args.a_row = p.c_pitch;
  args.c_row = w.m.row;
  args.segments = 1;
  args.a_segment = args.b_segment = 0;
  return args;
}

// The matrix products M = V U, one per position, for output vectors [from, to).
template <class F>
void multiply(const Problem& p, const Block& b, const float* packed, int64_t from, int64_t to, int64_t tile_vectors,
              const Workspace& w) {
  const int64_t tiles = (b.strip1 - b.strip0) * p.tiles_x, group = w.v.group;
  MicroArgs args = product_args(p, w);
  // Several groups of tiles read the same filters: together they prefetch the next ones, each an equal share.
  const int64_t groups = ceil_div(tiles, group);
  const bool from_memory = groups > 1 && F::kPositions * p.c * p.vectors * kLanes * 4 > machine().caches.l2;
  args.ahead_step = kPanelVectors * kLanes * 4 / groups;
  for (int position = 0; position < F::kPositions; ++position) {
    for (int64_t vector = from; vector < to; vector += kPanelVectors) {
      const int64_t vectors = smaller(kPanelVectors, p.vectors - vector);
      const float* panel = packed_panel<F>(p, const_cast<float*>(packed), b.group, position, vector);
      for (int64_t k = 0; k < p.c; k += kChannelBlock) {
        args.b = panel + k * vectors * kLanes;
        args.length = smaller(kChannelBlock, p.c - k);
        args.accumulate = k > 0;
        for (int64_t t = 0; t < tiles; t += group) {
          const int64_t fetched = t / group * args.ahead_step * args.length;
          if (from_memory)
            args.ahead = reinterpret_cast<const char*>(args.b + args.length * vectors * kLanes) + fetched;
          args.a = w.v.tile(t) + position * w.v.position_stride() + k;
          args.c = w.m.tile(t) + position * w.m.position_stride() + (vector - from) * kLanes;
          run_panel(args, smaller(group, tiles - t), vectors, tile_vectors);
        }
      }
    }
  }
}

// Transforms a panel of filters of some channels to one row of positions; g is the row of G.
template <class F>
void late_filters(const float* filters, int64_t channels, int64_t width, const float (&g)[3], float* u) {
  for (int64_t c = 0; c < channels; ++c, filters += 9 * width, u += width) {
    for (int64_t lane = 0; lane < width; lane += kLanes) {
      vf row[3], positions[F::kWindow];
      for (int kx = 0; kx < 3; ++kx) {
        const float* tap = filters + kx * width + lane;
        row[kx] = g[0] * load(tap) + g[1] * load(tap + 3 * width) + g[2] * load(tap + 6 * width);
      }
      F::template weight<float>(row, positions);
      for (int j = 0; j < F::kWindow; ++j) store(u + j * kLatePosition + lane, positions[j]);
    }
  }
}

// The matrix products with filters that are transformed on the fly, for output vectors [from, to).
template <class F>
void multiply_late(const Problem& p, const Block& b, const float* packed, int64_t from, int64_t to,
                   int64_t tile_vectors, const Workspace& w) {
  const int64_t tiles = (b.strip1 - b.strip0) * p.tiles_x, group = w.v.group;
  MicroArgs args = product_args(p, w);
  for (int64_t k = 0; k < p.c; k += kLateChannels) {
    args.length = smaller(kLateChannels, p.c - k);
    args.accumulate = k > 0;
    for (int position = 0; position < F::kPositions; position += F::kWindow) {
      for (int64_t vector = from; vector < to; vector += kPanelVectors) {
        const int64_t vectors = smaller(kPanelVectors, p.vectors - vector), width = vectors * kLanes;
        const float* filters = late_panel(p, const_cast<float*>(packed), b.group, vector) + k * 9 * width;
        late_filters<F>(filters, args.length, width, F::kRows[position / F::kWindow], w.u);
        for (int j = 0; j < F::kWindow; ++j) {
          args.b = w.u + j * kLatePosition;
          for (int64_t t = 0; t < tiles; t += group) {
            args.a = w.v.tile(t) + (position + j) * w.v.position_stride() + k;
            args.c = w.m.tile(t) + (position + j) * w.m.position_stride() + (vector - from) * kLanes;
            run_panel(args, smaller(group, tiles - t), vectors, tile_vectors);
          }
        }
      }
    }
  }
}

// Applies the epilogue to the staged rows of a strip and stores them to an NHWC image.
void write_channels_last(const Problem& p, const float* stage, int64_t columns, int64_t n, int64_t y0, int64_t rows,
                         int64_t channel, int64_t lanes, const ConvEpilogue& e, const ConvLayout& l, float* y) {
  const ConvShape& s = p.s;
  TileEpilogue epilogue{e.bias == nullptr ? nullptr : e.bias + channel, nullptr, l.residual_pitch, e.activation, lanes};
  for (int64_t r = 0; r < rows; ++r, stage += columns * kLanes) {
    const int64_t pixel = (n * s.oh + y0 + r) * s.ow;
    if (e.residual != nullptr) epilogue.residual = e.residual + pixel * l.residual_pitch + channel;
    store_tile(stage, s.ow, 1, epilogue, y + pixel * l.y_pitch + channel, l.y_pitch);
  }
}

// Transforms the products of output vectors [from, to), strip by strip, and writes them with their epilogue.
template <class F>
void transform_outputs(const Problem& p, const Block& b, int64_t from, int64_t to, const ConvEpilogue& e,
                       const ConvLayout& l, float* y, const Workspace& w) {
  const ConvShape& s = p.s;
  const int64_t columns = p.tiles_x * F::kTile, plane = s.oh * s.ow;
  for (int64_t strip = b.strip0; strip < b.strip1; ++strip) {
    const int64_t n = strip / p.tiles_y, y0 = strip % p.tiles_y * F::kTile, rows = smaller(F::kTile, s.oh - y0);
    for (int64_t vector = from; vector < to; ++vector) {
      for (int64_t tx = 0; tx < p.tiles_x; ++tx) {
        const float* m = w.m.tile((strip - b.strip0) * p.tiles_x + tx) + (vector - from) * kLanes;
        output_tile<F>(m, w.m.position_stride(), w.stage + tx * F::kTile * kLanes, columns * kLanes);
      }
      const int64_t channel = b.group * p.o + vector * kLanes;
      const int64_t lanes = smaller(kLanes, p.o - vector * kLanes);
      if (l.y_pitch != 0) {
        write_channels_last(p, w.stage, columns, n, y0, rows, channel, lanes, e, l, y);
        continue;
      }
      const int64_t at = (n * s.o + channel) * plane + y0 * s.ow;
      PlaneEpilogue epilogue{e.bias == nullptr ? nullptr : e.bias + channel, nullptr, e.activation};
      const int64_t runs = columns == s.ow ? 1 : rows, pixels = columns == s.ow ? rows * s.ow : s.ow;
      for (int64_t r = 0; r < runs; ++r) {
        if (e.residual != nullptr) epilogue.residual = e.residual + at + r * s.ow;
        unpack_pixels(w.stage + r * columns * kLanes, kLanes, pixels, lanes, epilogue, y + at + r * s.ow, plane);
      }
    }
  }
}

// Takes a block through all stages. Returns false if an input is above the limit or memory is exhausted.
template <class F>
bool run_block(const Problem& p, const Block& b, const float* x, const float* packed, const ConvEpilogue& e,
               const ConvTile& tile, const ConvLayout& l, float* y) {
  Workspace w;
  const int64_t vectors = smaller(tile.channels, b.vector1 - b.vector0);
  float* base = thread_scratch(workspace_floats<F>(p, b.strip1 - b.strip0, vectors, tile.mr, &w, nullptr));
  if (base == nullptr) return false;
  workspace_floats<F>(p, b.strip1 - b.strip0, vectors, tile.mr, &w, base);
  if (!transform_inputs<F>(p, b, x, l.x_pitch, w)) return false;
  for (int64_t from = b.vector0; from < b.vector1; from += vectors) {
    const int64_t to = smaller(from + vectors, b.vector1);
    if constexpr (F::kLate) {
      multiply_late<F>(p, b, packed, from, to, tile.vectors, w);
    } else {
      multiply<F>(p, b, packed, from, to, tile.vectors, w);
    }
    transform_outputs<F>(p, b, from, to, e, l, y, w);
  }
  trim_thread_scratch();
  return true;
}

// Computes a Winograd convolution block by block: transforms the input, multiplies, transforms the result back.
template <class F>
bool forward(const ConvShape& s, const float* x, const float* packed, const ConvEpilogue& e, const ConvTile& tile,
             const ConvLayout& layout, float* y) {
  const Problem p = make_problem<F>(s);
  const int64_t blocks = ceil_div(p.strips, strips_of_block(p, tile)), panels = ceil_div(p.vectors, kPanelVectors);
  const int64_t splits = smaller(panels, tile.split), tasks = s.groups * blocks * splits;
  bool failed = false;  // only set to true, and read after all tasks are done
  parallel_near(static_cast<int>(tasks), [&](int task) {
    if (__atomic_load_n(&failed, __ATOMIC_RELAXED)) return;
    const int64_t split = task % splits, block = task / splits % blocks;
    Block b;
    b.group = task / (splits * blocks);
    b.strip0 = cut(p.strips, blocks, block);
    b.strip1 = cut(p.strips, blocks, block + 1);
    b.vector0 = cut(panels, splits, split) * kPanelVectors;
    b.vector1 = smaller(cut(panels, splits, split + 1) * kPanelVectors, p.vectors);
    if (!run_block<F>(p, b, x, packed, e, tile, layout, y)) __atomic_store_n(&failed, true, __ATOMIC_RELAXED);
  });
  return !failed;
}

}  // namespace

#define TW_WINOGRAD(F)                                                         \
  {F::kTile, F::kPositions, F::kInputCost,   F::kOutputCost, packed_floats<F>, \
   pack<F>,  unpack<F>,     default_tile<F>, block_bytes<F>, forward<F>}
const WinogradKernels winograd = TW_WINOGRAD(FourByFour);
const WinogradKernels winograd2 = TW_WINOGRAD(TwoByTwo);
const WinogradKernels winograd_late = TW_WINOGRAD(LateFourByFour);

}  // namespace TW_ISA
}  // namespace tw
