// Convolution with sparse weights: tiles of output pixels take the place of a batch. The inputs of a tile are gathered
// column by column (channel and place in the filter) from images that are padded and, where the stride is not 1, sorted
// into one image per phase of the stride, so that neighbouring output pixels always read neighbouring numbers.
#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "common/scratch.h"
#include "common/sparse_matrix.h"
#include "common/thread_pool.h"

namespace tw {
namespace {

constexpr int64_t kSlack = 16;  // what the patches kernel may write past its end

// Padded images, one per channel and phase: element (y, x) of phase (i, j) is pixel (y * stride + i, x * stride + j).
struct PhasedImages {
  explicit PhasedImages(const SparseConvShape& shape) : s(shape) {
    phases_y = std::min(s.stride_y, s.kernel_height);
    phases_x = std::min(s.stride_x, s.kernel_width);
    height = (s.height + 2 * s.pad_y + s.stride_y - 1) / s.stride_y;
    width = (s.width + 2 * s.pad_x + s.stride_x - 1) / s.stride_x;
    as_given = s.stride_y == 1 && s.stride_x == 1 && s.pad_y == 0 && s.pad_x == 0;
  }

  int64_t image_floats() const { return s.channels * phases_y * phases_x * height * width; }

  int64_t offset(int64_t channel, int64_t ky, int64_t kx) const {
    const int64_t phase = (channel * phases_y + ky % s.stride_y) * phases_x + kx % s.stride_x;
    return phase * height * width + ky / s.stride_y * width + kx / s.stride_x;
  }

  void fill(const float* x, float* out) const {
    std::memset(out, 0, sizeof(float) * static_cast<std::size_t>(image_floats()));
    for (int64_t c = 0; c < s.channels; ++c) {
      for (int64_t y = 0; y < s.height; ++y) {
        const int64_t at = y + s.pad_y, phase_y = at % s.stride_y;
        if (phase_y >= phases_y) continue;
        const float* row = x + (c * s.height + y) * s.width;
        for (int64_t phase_x = 0; phase_x < phases_x; ++phase_x) {
          float* to = out + (((c * phases_y + phase_y) * phases_x + phase_x) * height + at / s.stride_y) * width;
          copy_row(row, phase_x, to);
        }
      }
    }
  }

  void copy_row(const float* row, int64_t phase, float* to) const {
    if (s.stride_x == 1) {
      std::memcpy(to + s.pad_x, row, sizeof(float) * static_cast<std::size_t>(s.width));
      return;
    }
    for (int64_t i = 0; i < width; ++i) {
      const int64_t x = i * s.stride_x + phase - s.pad_x;
      if (x >= 0 && x < s.width) to[i] = row[x];
    }
  }

  SparseConvShape s;
  int64_t phases_y, phases_x, height, width;
  bool as_given;  // the images can be read where they are
};

// Splits the pixels [first, first + count) of all images into runs within one output row; returns their number.
int runs_of(const PhasedImages& in, int64_t first, int count, PixelRun* runs) {
  const int64_t out_width = in.s.out_width(), pixels = in.s.out_height() * out_width;
  // Whole images are one run where nothing lies between their rows.
  const int64_t row = in.as_given && in.width == out_width ? pixels : out_width;
  int run_count = 0;
  for (int done = 0; done < count; ++run_count) {
    const int64_t image = (first + done) / pixels, pixel = (first + done) % pixels;
    const int64_t along = pixel % row;
    const int n = static_cast<int>(std::min<int64_t>(count - done, row - along));
    runs[run_count] = {image * in.image_floats() + pixel / row * in.width + along, done, n};
    done += n;
  }
  return run_count;
}

}  // namespace

void PackedSparse::convolve(const SparseConvShape& s, const float* x, float* y, const SparseEpilogue& epilogue) const {
  const PhasedImages in(s);
  const int64_t pixels = s.out_height() * s.out_width(), total = s.images * pixels;
  const int size = total <= 16 ? 16 : kMaxBatch;
  const int64_t tiles = (total + size - 1) / size;
  const int threads = threads_for(nonzeros() * total, std::max<int64_t>(1, tiles));
  const int64_t image_floats = in.as_given ? 0 : in.image_floats() * s.images;
  const int64_t images_space = (image_floats + kSlack - 1) / kSlack * kSlack;
  const int64_t tile_floats = columns() * size + kSlack;
  float* scratch = thread_scratch(images_space + tile_floats * threads);
  if (scratch == nullptr) throw std::bad_alloc();
  const float* images = in.as_given ? x : scratch;
  if (!in.as_given) {
    const int64_t plane = s.channels * s.height * s.width;
    const int sharing = static_cast<int>(std::min<int64_t>(threads, s.images));
    parallel_for(sharing, [&](int t) {
      for (int64_t n = s.images * t / sharing; n < s.images * (t + 1) / sharing; ++n) {
        in.fill(x + n * plane, scratch + n * in.image_floats());
      }
    });
  }
  std::vector<int64_t> offsets;
  for (int64_t c = 0; c < s.channels; ++c) {
    for (int64_t k = 0; k < s.kernel_height * s.kernel_width; ++k) {
      offsets.push_back(in.offset(c, k / s.kernel_width, k % s.kernel_width));
    }
  }
  const SparseCells<float> cells = packed_.cells();
  parallel_for(threads, [&](int t) {
    alignas(64) float work[kWorkFloats];
    float* xt = scratch + images_space + t * tile_floats;
    for (int64_t tile = tiles * t / threads; tile < tiles * (t + 1) / threads; ++tile) {
      const int64_t first = tile * size;
      const int valid = static_cast<int>(std::min<int64_t>(size, total - first));
      PixelRun runs[kMaxBatch];
      const int count = runs_of(in, first, valid, runs);
      active_sparse().patches(images, offsets.data(), columns(), runs, count, size, xt);
      for (int64_t block = 0; block < sparse_blocks(rows()); ++block) {
        active_sparse().block(cells, block, xt, size, valid, epilogue, work);
        const int64_t row0 = block * kBlockRows, row_end = std::min(row0 + kBlockRows, rows());
        for (int done = 0; done < valid;) {  // a tile may reach from one image into the next
          const int64_t image = (first + done) / pixels, pixel = (first + done) % pixels;
          const int n = static_cast<int>(std::min<int64_t>(valid - done, pixels - pixel));
          for (int64_t row = row0; row < row_end; ++row) {
            std::memcpy(y + (image * rows() + row) * pixels + pixel, work + (row - row0) * size + done,
                        sizeof(float) * static_cast<std::size_t>(n));
          }
          done += n;
        }
      }
    }
  });
}

}  // namespace tw
