#include "kernels/sparse.h"

#include "kernels/sparse_vectors.h"

namespace tw {
namespace TW_ISA {
namespace {

struct FloatLanes {
  typedef float Input, Weight, Sum;
  typedef vf Vector;
  static constexpr int slots = 1;
#if defined(__AVX512F__)
  struct Inputs {
    __m512 x0, x1, x2, x3;
  };
  struct Step {
    vf value;
    __m512i index;
    __mmask16 upper;
  };
  static TW_INLINE Inputs inputs(const float* x) {
    return {_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16), _mm512_loadu_ps(x + 32), _mm512_loadu_ps(x + 48)};
  }
  // The permutes look at the low five bits of a column number; its sixth bit chooses between their results.
  static TW_INLINE Step step(const float* value, const uint8_t* index) {
    const __m512i i = _mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(index)));
    return {load(value), i, _mm512_test_epi32_mask(i, _mm512_set1_epi32(32))};
  }
  static TW_INLINE vf add(vf sums, const Step& s, const Inputs& in) {
    const __m512 low = _mm512_permutex2var_ps(in.x0, s.index, in.x1);
    return sums + s.value * (vf)_mm512_mask_blend_ps(s.upper, low, _mm512_permutex2var_ps(in.x2, s.index, in.x3));
  }
#elif defined(__AVX2__)
  typedef const float* Inputs;
  struct Step {
    vf value;
    __m256i index;
  };
  static TW_INLINE Inputs inputs(const float* x) { return x; }
  static TW_INLINE Step step(const float* value, const uint8_t* index) {
    return {load(value), _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(index)))};
  }
  static TW_INLINE vf add(vf sums, const Step& s, Inputs x) {
    return sums + s.value * (vf)_mm256_i32gather_ps(x, s.index, 4);
  }
#else
  typedef const float* Inputs;
  struct Step {
    vf value;
    const uint8_t* index;
  };
  static TW_INLINE Inputs inputs(const float* x) { return x; }
  static TW_INLINE Step step(const float* value, const uint8_t* index) { return {load(value), index}; }
  static TW_INLINE vf add(vf sums, const Step& s, Inputs x) {
    vf picked;
    for (int i = 0; i < kLanes; ++i) picked[i] = x[s.index[i]];
    return sums + s.value * picked;
  }
#endif
};

TW_INLINE float relu(float x) { return x < 0.0f ? 0.0f : x; }

void vectors(const SparseCells<float>& a, const float* x, int64_t x_step, int count, float* y, int64_t y_step,
             const SparseEpilogue& epilogue, int64_t first, int64_t last) {
  float total[kMaxVectors][kBlockRows];
  for (int64_t block = first; block < last; ++block) {
    block_times_vectors<FloatLanes>(a, block, x, x_step, count, total);
    const int rows = rows_of_block(a.rows, block);
    const float* bias = epilogue.bias == nullptr ? nullptr : epilogue.bias + block * kBlockRows;
    for (int b = 0; b < count; ++b) {
      float* to = y + b * y_step + block * kBlockRows;
      for (int row = 0; row < rows; ++row) {
        const float value = total[b][row] + (bias == nullptr ? 0.0f : bias[row]);
        to[row] = epilogue.relu ? relu(value) : value;
      }
    }
  }
}

// The weights of one slot of a quad, and one of them in all lanes. The batch kernel is bound by loads, so the four are
// loaded together and each is broadcast by a shuffle.
#if defined(__AVX512F__)
typedef vf QuadWeights;
TW_INLINE QuadWeights load_quad(const float* value) {
  vf four = (vf)_mm512_maskz_broadcast_f32x4(0xffff, _mm_loadu_ps(value));
  TW_KEEP(four);  // or the compiler makes four loads of it
  return four;
}
template <int I>
TW_INLINE vf broadcast(QuadWeights four) {
  return (vf)_mm512_maskz_permute_ps(0xffff, (__m512)four, I * 0x55);
}
#elif defined(__AVX2__)
typedef vf QuadWeights;
TW_INLINE QuadWeights load_quad(const float* value) {
  vf four = (vf)_mm256_broadcast_ps(reinterpret_cast<const __m128*>(value));
  TW_KEEP(four);
  return four;
}
template <int I>
TW_INLINE vf broadcast(QuadWeights four) {
  return (vf)_mm256_permute_ps((__m256)four, I * 0x55);
}
#else
typedef const float* QuadWeights;
TW_INLINE QuadWeights load_quad(const float* value) { return value; }
template <int I>
TW_INLINE vf broadcast(QuadWeights four) {
  return splat(four[I]);
}
#endif

// The offset of column I of four (one per byte, the first in the lowest) in x, whose columns hold B floats.
template <int I, int B>
TW_INLINE const float* column(uint32_t four, const float* x) {
  static_assert(B == 16 || B == 32, "the shifts are for these");
  constexpr int kShift = B == 16 ? 6 : 7, kDown = 8 * I - kShift;  // definition
  const uint32_t bytes = (kDown < 0 ? four << (-kDown & 31) : four >> (kDown & 31)) & (0xffu << kShift);
  return reinterpret_cast<const float*>(reinterpret_cast<const char*>(x) + bytes);
}

template <int I, int V, int B>
TW_INLINE void add_row(QuadWeights weights, uint32_t columns, const float* x, vf (&acc)[V]) {
  const float* from = column<I, B>(columns, x);
  const vf w = broadcast<I>(weights);
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) acc[v] += w * load(from + v * kLanes);
}

// Multiplies the slots of R rows of a quad, starting at its row I, by V vectors of the batch B, which is a template
// argument so that a column's address is a shift.
template <int I, int R, int V, int B>
TW_INLINE void rows_times_batch(const float* value, const uint8_t* index, int length, const uint8_t* row_at,
                                const float* x, float* work) {
  vf acc[R][V];
#pragma GCC unroll 4
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[i][v] = load(work + row_at[I + i] * B + v * kLanes);
  }
  for (; length > 0; --length, value += kBand, index += kBand) {
    const QuadWeights weights = load_quad(value);
    uint32_t columns;  // one load for all four
    std::memcpy(&columns, index, sizeof columns);
    add_row<I, V, B>(weights, columns, x, acc[0]);
    add_row<I + 1, V, B>(weights, columns, x, acc[1]);
    if constexpr (R == kQuad) {
      add_row<2, V, B>(weights, columns, x, acc[2]);
      add_row<3, V, B>(weights, columns, x, acc[3]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(work + row_at[I + i] * B + v * kLanes, acc[i][v]);
  }
}

// At least eight sums at a time, so that the latency of the multiply-add is hidden; as many as sixteen registers hold.
template <int V, int B>
TW_INLINE void quad_times_batch(const float* value, const uint8_t* index, int length, const uint8_t* row_at,
                                const float* x, float* work) {
  if constexpr (V <= 3) {
    rows_times_batch<0, kQuad, V, B>(value, index, length, row_at, x, work);
  } else {
    rows_times_batch<0, 2, V, B>(value, index, length, row_at, x, work);
    rows_times_batch<2, 2, V, B>(value, index, length, row_at, x, work);
  }
}

template <int V, int B>
TW_INLINE void cell_times_batch(const SparseCells<float>& a, int64_t cell, const float* x, float* work) {
  const uint8_t* length = a.length + cell * kBlockQuads;
  const uint8_t* row_at = a.row_at + cell * kBlockRows;
  int64_t slot = a.start[cell];
  for (int band = 0; band < kBlockBands; ++band, length += kBand / kQuad, row_at += kBand) {
    const float* value = a.value + slot * kBand;
    const uint8_t* index = a.index + slot * kBand;
    for (int quad = 0; quad < kBand / kQuad; ++quad) {
      if (length[quad] == 0) return;  // the remaining rows have no weights here
      const int at = quad * kQuad;
      quad_times_batch<V, B>(value + at, index + at, length[quad], row_at + at, x, work);
    }
    slot += length[0];
  }
}

template <int V, int B>
void cells_times_batch(const SparseCells<float>& a, int64_t block, const float* xt, float* work) {
  for (int64_t c = 0; c < a.across; ++c) {
    cell_times_batch<V, B>(a, block * a.across + c, xt + c * kCellColumns * B, work);
  }
}

// Computes the first `used` inputs of B in vectors: one pass over the weights takes as many as the registers hold.
template <int B>
void block_of(const SparseCells<float>& a, int64_t block, const float* xt, int used, const SparseEpilogue& epilogue,
              float* work) {
  constexpr int kMost = B / kLanes < 4 ? B / kLanes : kLanes == 8 ? 4 : 2;  // definition
  const int rows = rows_of_block(a.rows, block);
  for (int row = 0; row < rows; ++row) {
    const vf bias = splat(epilogue.bias == nullptr ? 0.0f : epilogue.bias[block * kBlockRows + row]);
    for (int b = 0; b < B; b += kLanes) store(work + row * B + b, bias);
  }
  for (int b = 0; b < used; b += kMost * kLanes) {
    const int vectors_left = (used - b + kLanes - 1) / kLanes;
    switch (vectors_left < kMost ? vectors_left : kMost) {
      case 1:
        cells_times_batch<1, B>(a, block, xt + b, work + b);
        break;
      case 2:
        cells_times_batch < kMost<2 ? kMost : 2, B>(a, block, xt + b, work + b);
        break;
      case 3:
        cells_times_batch < kMost<3 ? kMost : 3, B>(a, block, xt + b, work + b);
        break;
      case 4:
        cells_times_batch<kMost, B>(a, block, xt + b, work + b);
        break;
    }
  }
  if (epilogue.relu) {
    for (int i = 0; i < rows * B; ++i) work[i] = relu(work[i]);
  }
}

void block(const SparseCells<float>& a, int64_t block, const float* xt, int batch, int used,
           const SparseEpilogue& epilogue, float* work) {
  switch (batch) {
    case 16:
      block_of<16>(a, block, xt, used, epilogue, work);
      break;
    case 32:
      block_of<32>(a, block, xt, used, epilogue, work);
      break;
  }
}

typedef float v4 __attribute__((vector_size(16)));

TW_INLINE void transpose_4x4(v4 (&r)[4]) {
  const v4 a = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5), b = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
  const v4 c = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5), d = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
  r[0] = __builtin_shufflevector(a, c, 0, 1, 4, 5);
  r[1] = __builtin_shufflevector(a, c, 2, 3, 6, 7);
  r[2] = __builtin_shufflevector(b, d, 0, 1, 4, 5);
  r[3] = __builtin_shufflevector(b, d, 2, 3, 6, 7);
}

// to[j * to_step + i] = from[i * from_step + j] for four rows and a multiple of four columns.
TW_INLINE void transpose_rows(const float* from, int64_t from_step, int64_t columns, float* to, int64_t to_step) {
  for (int64_t j = 0; j < columns; j += 4) {
    v4 r[4];
    for (int i = 0; i < 4; ++i) std::memcpy(&r[i], from + i * from_step + j, sizeof(v4));
    transpose_4x4(r);
    for (int i = 0; i < 4; ++i) std::memcpy(to + (j + i) * to_step, &r[i], sizeof(v4));
  }
}

// Writes strips of columns, so that the lines stay in the L1 cache.
void transpose(const float* x, int64_t columns, int valid, int size, float* xt) {
  constexpr int64_t kStrip = 64;
  if (valid < size) std::memset(xt, 0, sizeof(float) * columns * size);
  const int64_t full_rows = valid / 4 * 4;
  for (int64_t c = 0; c < columns; c += kStrip) {
    const int64_t n = columns - c < kStrip ? columns - c : kStrip, full = n / 4 * 4;
    for (int64_t i = 0; i < full_rows; i += 4) {
      transpose_rows(x + i * columns + c, columns, full, xt + c * size + i, size);
    }
    for (int64_t i = 0; i < valid; ++i) {
      for (int64_t j = i < full_rows ? full : 0; j < n; ++j) xt[(c + j) * size + i] = x[i * columns + c + j];
    }
  }
}

void patches(const float* x, const int64_t* column_offset, int64_t columns, const PixelRun* runs, int count, int batch,
             float* xt) {
  for (int64_t c = 0; c < columns; ++c, xt += batch) {
    for (int k = 0; k < count; ++k) {
      const float* from = x + column_offset[c] + runs[k].from;
      float* to = xt + runs[k].to;
      int i = 0;
      for (; i + kLanes <= runs[k].count; i += kLanes) store(to + i, load(from + i));
      if (i < runs[k].count) store(to + i, load_first(from + i, runs[k].count - i));
    }
  }
}

void scatter_columns(const float* work, int rows, int batch, int valid, float* y, int64_t y_step) {
  const int full = valid / 4 * 4, full_rows = rows / 4 * 4;
  for (int b = 0; b < full; b += 4) {
    for (int i = 0; i < full_rows; i += 4) transpose_rows(work + i * batch + b, batch, 4, y + b * y_step + i, y_step);
  }
  for (int i = 0; i < rows; ++i) {
    for (int b = i < full_rows ? full : 0; b < valid; ++b) y[b * y_step + i] = work[i * batch + b];
  }
}

}  // namespace

const SparseKernels sparse = {vectors, transpose, patches, block, scatter_columns};

}  // namespace TW_ISA
}  // namespace tw
