// Convolution with sparse weights. The image is cut into as many blocks as a vector has lanes, and a vector holds the
// same pixel of every block. So the neighbour of a pixel is another whole vector, and no vector is ever shifted. Blocks
// are stored with the halo that the filter reads, and if the stride is not 1, sorted into one image per phase of the
// stride. A 1x1 convolution, or a linear layer, has no halo; its blocks are up to four pixels.
#include <algorithm>
#include <atomic>
#include <climits>
#include <new>
#include <vector>

#include "common/machine.h"
#include "common/product_choice.h"
#include "common/scratch.h"
#include "common/sparse_layouts.h"
#include "common/thread_pool.h"
#include "kernels/channels_last.h"

namespace tw {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How images are cut into blocks. `lanes` blocks are a group, whose inputs are stored as (channel, phase, row, column,
// lane).
struct LaneBlocks {
  ConvShape s;
  int64_t lanes, down, across;  // blocks of a group; blocks of an image in each direction
  int64_t height, width;        // outputs of a block
  int64_t phases_y, phases_x;   // phases of the stride that the filter reads
  int64_t rows, columns;        // inputs of a block in one phase, halo included
  int64_t groups, channel_floats;
  int64_t vectors = 0;  // a single row of pixels: its vectors, which the groups share evenly; otherwise 0

  LaneBlocks(const ConvShape& shape, int64_t down, int64_t across)
      : s(shape), lanes(active_sparse().lanes), down(down), across(across) {
    height = ceil_div(s.oh, down), width = ceil_div(s.ow, across);
    phases_y = std::min(s.sh, s.reach_h()), phases_x = std::min(s.sw, s.reach_w());
    rows = height + (s.reach_h() - 1) / s.sh, columns = width + (s.reach_w() - 1) / s.sw;
    groups = ceil_div(s.n * down * across, lanes);
    // An odd number of cache lines, so that channels begin in different sets of the cache.
    channel_floats = (phases_y * phases_x * rows * columns | 1) * lanes;
  }

  int64_t group_floats() const { return s.c * channel_floats; }
  int64_t row_tiles() const { return ceil_div(width, kTileVectors); }
  int64_t tiles() const { return height * row_tiles(); }

  // The cost of the layout in loads of vectors, if each input is read by `weights` weights of its channel.
  double cost(double weights) const {
    const double steps = static_cast<double>(groups * height * (2 * width + row_tiles())) / 2;
    const double inputs = static_cast<double>(groups * phases_y * phases_x * rows * columns);
    const bool fits = 2 * group_floats() * static_cast<int64_t>(sizeof(float)) <= cache_sizes().l2;
    return static_cast<double>(s.c) * (weights * steps * (fits ? 1.0 : 1.5) + 3 * inputs);
  }
};

// Chooses the blocks: few lanes should be empty, few pixels stored twice, and a group should fit the L2 cache.
LaneBlocks choose_blocks(const ConvShape& s, int64_t nonzeros) {
  const int64_t lanes = active_sparse().lanes;
  if (s.kh == 1 && s.kw == 1 && s.sw == 1 && s.oh == 1 && s.n == 1) {
    LaneBlocks row(s, 1, ceil_div(s.ow, kTileVectors));
    row.vectors = ceil_div(s.ow, lanes);
    row.groups = ceil_div(row.vectors, kTileVectors);
    return row;
  }
  constexpr int64_t kCuts[] = {1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32};
  const double weights = static_cast<double>(nonzeros) / static_cast<double>(s.c);
  LaneBlocks best(s, 1, 1);
  double least = best.cost(weights);
  for (int64_t down : kCuts) {
    for (int64_t across : kCuts) {
      if (down > s.oh || across > s.ow) continue;
      const LaneBlocks blocks(s, down, across);
      const double cost = blocks.cost(weights);
      if (cost < least) least = cost, best = blocks;
    }
  }
  return best;
}

// The offset of the input of each column (channel, filter row, filter column), from a tile's first input on.
std::vector<int32_t> column_offsets(const LaneBlocks& b) {
  std::vector<int32_t> offsets;
  for (int64_t c = 0; c < b.s.c; ++c) {
    for (int64_t ky = 0; ky < b.s.kh; ++ky) {
      for (int64_t kx = 0; kx < b.s.kw; ++kx) {
        const int64_t y = ky * b.s.dh, x = kx * b.s.dw, phase = y % b.s.sh * b.phases_x + x % b.s.sw;
        const int64_t at = (phase * b.rows + y / b.s.sh) * b.columns + x / b.s.sw;
        offsets.push_back(static_cast<int32_t>(c * b.channel_floats + at * b.lanes));
      }
    }
  }
  offsets.resize(static_cast<std::size_t>(ceil_div(static_cast<int64_t>(offsets.size()), kTileColumns) * kTileColumns));
  return offsets;
}

// The blocks of a group: the image, first output row and first output column of each lane.
struct Group {
  Group(const LaneBlocks& b, int64_t group) : columns(b.columns) {
    const int64_t first = b.vectors * group / b.groups;
    if (b.vectors > 0) columns = b.vectors * (group + 1) / b.groups - first;
    for (int64_t lane = 0; lane < b.lanes; ++lane) {
      const int64_t block = group * b.lanes + lane, in_image = block % (b.down * b.across);
      image[lane] = block / (b.down * b.across);
      y[lane] = in_image / b.across * b.height;
      x[lane] = in_image % b.across * b.width;
      if (b.vectors > 0) image[lane] = y[lane] = 0, x[lane] = first * b.lanes + lane * columns;
    }
  }

  int64_t columns;  // input columns of a block
  int64_t image[kMaxLanes], y[kMaxLanes], x[kMaxLanes];
};

// Copies input row `row` of a group's blocks in one phase of rows. `zeros` is a pixel of zeros, for padding.
void fill_row(const LaneBlocks& b, const Group& group, const float* x, int64_t pitch, int64_t phase_y, int64_t row,
              const float* zeros, float* to) {
  const ConvShape& s = b.s;
  const float* line[kMaxLanes];
  for (int64_t lane = 0; lane < b.lanes; ++lane) {
    const int64_t y = (group.y[lane] + row) * s.sh + phase_y - s.ph;
    const bool inside = group.image[lane] < s.n && y >= 0 && y < s.h;
    const int64_t at =
        pitch > 0 ? (group.image[lane] * s.h + y) * s.w * pitch : group.image[lane] * s.c * s.h * s.w + y * s.w;
    line[lane] = inside ? x + at : nullptr;
  }
  for (int64_t phase_x = 0; phase_x < b.phases_x; ++phase_x) {
    float* out = to + ((phase_y * b.phases_x + phase_x) * b.rows + row) * b.columns * b.lanes;
    for (int64_t column = 0; column < group.columns; ++column, out += b.lanes) {
      const float* pixel[kMaxLanes];
      for (int64_t lane = 0; lane < b.lanes; ++lane) {
        const int64_t at = (group.x[lane] + column) * s.sw + phase_x - s.pw;
        const bool inside = line[lane] != nullptr && at >= 0 && at < s.w;
        pixel[lane] = inside ? line[lane] + at * std::max<int64_t>(1, pitch) : zeros;
      }
      if (pitch > 0) {
        active_sparse().gather(pixel, s.c, out, b.channel_floats);
        continue;
      }
      for (int64_t c = 0; c < s.c; ++c) {
        for (int64_t lane = 0; lane < b.lanes; ++lane)
          out[c * b.channel_floats + lane] = pixel[lane] == zeros ? 0.0f : pixel[lane][c * s.h * s.w];
      }
    }
  }
}

// A register tile: up to kTileVectors neighbouring columns of one row of a group's blocks.
struct Tile {
  Tile(const LaneBlocks& b, const Group& group, int64_t tile)
      : row(tile / b.row_tiles()), column(b.width * (tile % b.row_tiles()) / b.row_tiles()) {
    const int64_t end = b.vectors > 0 ? group.columns : b.width * (tile % b.row_tiles() + 1) / b.row_tiles();
    vectors = static_cast<int>(end - column);
  }

  int64_t input(const LaneBlocks& b) const { return (row * b.columns + column) * b.lanes; }

  // The number of the output pixel (through all images) of every lane of every vector; -1 past the end of a block or
  // image.
  void pixels(const LaneBlocks& b, const Group& group, int64_t* pixel) const {
    for (int v = 0; v < vectors; ++v) {
      for (int64_t lane = 0; lane < b.lanes; ++lane) {
        const int64_t y = group.y[lane] + row, x = group.x[lane] + column + v;
        const bool inside = group.image[lane] < b.s.n && y < b.s.oh && x < b.s.ow;
        *pixel++ = inside ? (group.image[lane] * b.s.oh + y) * b.s.ow + x : -1;
      }
    }
  }

  int64_t row, column;
  int vectors;
};

bool is_row_of_pixels(const ConvShape& s) {
  const bool point = s.kh == 1 && s.kw == 1 && s.sh == 1 && s.sw == 1 && s.ph == 0 && s.pw == 0;
  return point && s.n == 1 && s.h == 1 && s.oh == 1 && s.w == s.ow;
}

// Treats all pixels as one row if the convolution is pointwise.
ConvShape with_pixels_in_a_row(ConvShape s, int64_t pitch) {
  const bool whole = s.kh == 1 && s.kw == 1 && s.sh == 1 && s.sw == 1 && s.ph == 0 && s.pw == 0;
  if (!whole || pitch == 0 || s.oh != s.h || s.ow != s.w) return s;
  s.w = s.ow = s.n * s.h * s.w;
  s.n = s.h = s.oh = 1;
  return s;
}

// Estimates the cost of a sparse convolution in vector multiplications of a dense one. The coefficients were fitted to
// 8,754 layers of random shapes and 2,743 products of one to five rows, with AVX-512 and AVX2 together, on a Sapphire
// Rapids (benchmarks/pruned.py compares choices with times).
double cost_of(const LaneBlocks& b, double nonzeros) {
  const ConvShape& s = b.s;
  const double lanes = static_cast<double>(b.lanes), outputs = static_cast<double>(s.o);
  const double vectors = static_cast<double>(b.vectors > 0 ? b.vectors : b.groups * b.height * b.width);
  const double tiles = static_cast<double>(b.groups * b.tiles());
  const double across = static_cast<double>(ceil_div(s.c * s.kh * s.kw, kTileColumns));
  const int64_t positions = b.vectors > 0 ? b.vectors : b.groups * b.phases_y * b.phases_x * b.rows * b.columns;
  const double inputs = static_cast<double>(positions * s.c);
  const double gathered = s.c <= kMaxPlanarChannels ? 9 + 5 * lanes : 9;  // planes are gathered number by number
  return 1.1 * nonzeros * vectors + 1.7 * nonzeros * tiles + 3 * outputs * across * vectors + gathered * inputs +
         17 * outputs * vectors + 650 * tiles * across * static_cast<double>(sparse_blocks(s.o)) +
         8 * static_cast<double>(s.n * s.c * s.h * s.w) / lanes + 230;
}

std::atomic<bool> preferred{false};

}  // namespace

// The blocks and offsets for a convolution of one size.
struct PackedSparse::ConvPlan {
  ConvPlan(const ConvShape& s, int64_t nonzeros)
      : blocks(choose_blocks(s, nonzeros)), offsets(column_offsets(blocks)) {}

  bool serves(const ConvShape& s) const {
    const ConvShape& own = blocks.s;
    return own.n == s.n && own.h == s.h && own.w == s.w && blocks.lanes == active_sparse().lanes;
  }

  LaneBlocks blocks;
  std::vector<int32_t> offsets;
};

// Returns the plan for this image size, from a small cache that drops the oldest one.
std::shared_ptr<const PackedSparse::ConvPlan> PackedSparse::plan(const ConvShape& s) const {
  constexpr std::size_t kMostPlans = 8;  // chosen: sizes whose plans are stored; arbitrary
  std::lock_guard<std::mutex> lock(layouts_->plans_mutex);
  auto& plans = layouts_->plans;
  for (const auto& plan : plans) {
    if (plan->serves(s)) return plan;
  }
  if (plans.size() == kMostPlans) plans.erase(plans.begin());
  plans.push_back(std::make_shared<const ConvPlan>(s, nonzeros()));
  return plans.back();
}

namespace {

// One call: its plan, weights and arrays.
struct Convolution {
  const LaneBlocks& b;
  const std::vector<int32_t>& offsets;
  const SparseCells<float> cells;
  const float *x, *zeros;
  const ConvEpilogue& e;
  const ConvLayout& layout;
  float* y;

  // Both functions process share `t` of `shares` of groups [first, first + count), whose inputs are stored at `memory`.
  void fill(int64_t first, int64_t count, int t, int shares, float* memory) const {
    const int64_t lines = b.phases_y * b.rows, tasks = count * lines;
    for (int64_t i = tasks * t / shares; i < tasks * (t + 1) / shares; ++i) {
      const Group group(b, first + i / lines);
      float* to = memory + i / lines * b.group_floats();
      fill_row(b, group, x, layout.x_pitch, i % lines / b.rows, i % b.rows, zeros, to);
    }
  }

  // Prefetches the results of a pixel, so that their cache lines arrive during the product.
  void fetch_result(int64_t pixel, int64_t row, int count) const {
    const float* to = y + std::max<int64_t>(0, pixel) * layout.y_pitch + row;
    for (int i = 0; i < count; i += 16) __builtin_prefetch(to + i, 1, 2);
  }

  // A block of the matrix meets all tiles while its weights are in the cache.
  void multiply(int64_t first, int64_t count, int t, int shares, const float* memory) const {
    alignas(64) float work[kWorkFloats];
    int64_t pixel[kTileVectors * kMaxLanes];
    const int64_t tiles = b.tiles() * count, tasks = sparse_blocks(cells.rows) * tiles;
    for (int64_t i = tasks * t / shares; i < tasks * (t + 1) / shares; ++i) {
      const int64_t block = i / tiles, group = i % tiles / b.tiles(), row0 = block * kBlockRows;
      const Group lanes(b, first + group);
      const Tile tile(b, lanes, i % b.tiles());
      tile.pixels(b, lanes, pixel);
      const float* from = memory + group * b.group_floats() + tile.input(b);
      const int count = static_cast<int>(std::min<int64_t>(kBlockRows, cells.rows - row0));
      for (int k = 0; k < tile.vectors * b.lanes; ++k) fetch_result(pixel[k], row0, count);
      active_sparse().block(cells, block, offsets.data(), from, tile.vectors, e.bias, work);
      const float* residual = e.residual == nullptr ? nullptr : e.residual + row0;
      active_sparse().scatter(work, count, tile.vectors, pixel, residual, layout.residual_pitch, e.activation, y + row0,
                              layout.y_pitch);
    }
  }
};

}  // namespace

void prefer_sparse(bool prefer) { preferred.store(prefer, std::memory_order_relaxed); }

bool PackedSparse::pays(const ConvShape& shape, ConvAlgorithm dense, int64_t nonzeros) {
  constexpr double kMargin = 0.85;  // chosen: of the cost; if the two are closer, a sixth of the choices would be wrong
  const ConvShape s = with_pixels_in_a_row(shape, 1);
  const double weights = static_cast<double>(nonzeros), all = static_cast<double>(s.o * s.c * s.kh * s.kw);
  if (2 * weights > all) return false;  // rarely faster, and the estimate takes time
  if (batch_invariant()) return false;  // the kernels for few rows and for tiles add in different orders
  if (preferred.load(std::memory_order_relaxed)) return true;
  if (!is_row_of_pixels(s) || !is_small_batch(s.ow)) {
    // A multiplication takes longer in Winograd's products, which are small and alternate with transforms.
    const double dense_cost = static_cast<double>(algorithm_cost(shape, dense)) * (transforms(dense) ? 1.35 : 1.0);
    return cost_of(choose_blocks(s, nonzeros), weights) < kMargin * dense_cost;
  }
  // A few rows: a dense product is bound by reading its weights.
  const double lanes = static_cast<double>(active_sparse().lanes), rows = static_cast<double>(s.ow);
  const bool in_l2 = all * sizeof(float) <= static_cast<double>(cache_sizes().l2);
  const double dense_cost = all * std::max(in_l2 ? 0.25 : 0.75, 1.6 * rows / lanes);
  const double cells = static_cast<double>(ceil_div(s.c, kCellColumns) * sparse_blocks(s.o));
  const double passes = static_cast<double>(ceil_div(s.ow, kMaxVectors));
  return (3 * rows + 5.5 * passes) * weights / lanes + 150 * cells * rows + 750 < kMargin * dense_cost;
}

// A few pixels: the kernel for vectors, then the parts of the output stage that it lacks.
void PackedSparse::convolve_rows(const ConvShape& s, const float* x, const ConvEpilogue& e, const ConvLayout& layout,
                                 float* y) const {
  const bool relu = e.activation == ConvActivation::relu && e.residual == nullptr;
  times_rows(x, layout.x_pitch, s.ow, {e.bias, relu}, y, layout.y_pitch);
  const LastImage out{y, layout.y_pitch, 1, s.o, 1, s.ow};
  if (e.residual != nullptr) {
    const LastImage residual{const_cast<float*>(e.residual), layout.residual_pitch, 1, s.o, 1, s.ow};
    active_channels_last().binary(BinaryKind::add, out, residual, e.activation, out);
  } else if (!relu && e.activation != ConvActivation::none) {
    active_channels_last().affine(out, nullptr, nullptr, e.activation, out);
  }
}

// If there are many groups, each thread processes some of them, in waves that fit half of the L2 cache, or one by one
// if a single block of rows reads them. Otherwise the threads share every group.
void PackedSparse::convolve(const ConvShape& shape, const float* x, const ConvEpilogue& e, const ConvLayout& layout,
                            float* y) const {
  const ConvShape s = with_pixels_in_a_row(shape, layout.x_pitch);
  if (s.n * s.oh * s.ow == 0 || rows_ == 0) return;
  if (layout.x_pitch > 0 && is_row_of_pixels(s) && is_small_batch(s.ow)) return convolve_rows(s, x, e, layout, y);
  const std::shared_ptr<const ConvPlan> planned = plan(s);
  const LaneBlocks& b = planned->blocks;
  if (b.group_floats() > INT_MAX) throw std::bad_alloc();
  const int64_t row_blocks = sparse_blocks(rows());
  const int threads = threads_for(nonzeros() * s.n * s.oh * s.ow, row_blocks * b.tiles() * b.groups);
  const bool share = b.groups < 2 * threads;
  const int64_t half_l2 = cache_sizes().l2 / 2 / static_cast<int64_t>(sizeof(float));
  const int64_t fitting = row_blocks == 1 ? 1 : std::max<int64_t>(1, half_l2 / std::max<int64_t>(1, b.group_floats()));
  const int64_t wave = share ? b.groups : std::min(fitting, b.groups);
  const int64_t wave_floats = wave * b.group_floats();
  float* memory = thread_scratch(wave_floats * (share ? 1 : threads) + s.c);
  if (memory == nullptr) throw std::bad_alloc();
  float* zeros = memory + wave_floats * (share ? 1 : threads);
  std::fill(zeros, zeros + s.c, 0.0f);
  const Convolution conv{b, planned->offsets, packed(layouts_->tiles).cells(), x, zeros, e, layout, y};
  if (share) {
    parallel_for(threads, [&](int t) { conv.fill(0, b.groups, t, threads, memory); });
    parallel_for(threads, [&](int t) { conv.multiply(0, b.groups, t, threads, memory); });
    return;
  }
  parallel_for(threads, [&](int t) {
    const int64_t last = b.groups * (t + 1) / threads;
    for (int64_t first = b.groups * t / threads; first < last; first += wave) {
      const int64_t count = std::min(wave, last - first);
      conv.fill(first, count, 0, 1, memory + t * wave_floats);
      conv.multiply(first, count, 0, 1, memory + t * wave_floats);
    }
  });
}

}  // namespace tw
