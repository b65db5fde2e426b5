#include "kernels/sparse.h"

#include "kernels/conv_layout.h"
#include "kernels/sparse_vectors.h"

namespace tw {
namespace TW_ISA {
namespace {

// The Arithmetic (sparse_vectors.h) of floats: one slot per step.
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
  // The permutes use the low five bits of a column number; its sixth bit selects between their results.
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

constexpr int kTileFloats = kTileVectors * kLanes;

// Multiplies the slots of R rows of a quad, from its row I on, by V vectors. The kernel is bound by loads: of a weight
// into all lanes, of its input's offset, and of V vectors.
template <int I, int R, int V>
TW_INLINE void rows_times_tile(const float* value, const uint8_t* index, int length, const uint8_t* row_at,
                               const int32_t* offset, const float* x, float* work) {
  vf acc[R][V];
#pragma GCC unroll 4
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[i][v] = load(work + row_at[I + i] * kTileFloats + v * kLanes);
  }
  for (; length > 0; --length, value += kQuad, index += kQuad) {
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i) {
      const float* from = x + offset[index[I + i]];
#if defined(__x86_64__)
      asm("" : "+r"(from));  // one register: addresses of two make two operations of a multiply-add
#endif
      vf w = splat(value[I + i]);
      TW_KEEP(w);  // or the compiler loads it again for each vector
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[i][v] += w * load(from + v * kLanes);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(work + row_at[I + i] * kTileFloats + v * kLanes, acc[i][v]);
  }
}

// At least eight sums at a time hide the latency of the multiply-add; sixteen need the registers of AVX-512.
template <int V>
TW_INLINE void quad_times_tile(const float* value, const uint8_t* index, int length, const uint8_t* row_at,
                               const int32_t* offset, const float* x, float* work) {
  if constexpr (V <= 3 || kLanes == 16) {
    rows_times_tile<0, kQuad, V>(value, index, length, row_at, offset, x, work);
  } else {
    rows_times_tile<0, 2, V>(value, index, length, row_at, offset, x, work);
    rows_times_tile<2, 2, V>(value, index, length, row_at, offset, x, work);
  }
}

// Multiplies one block of rows by V vectors, cell by cell and quad by quad.
template <int V>
void cells_times_tile(const SparseCells<float>& a, int64_t block, const int32_t* offset, const float* x, float* work) {
  for (int64_t cell = block * a.across; cell < (block + 1) * a.across; ++cell, offset += kTileColumns) {
    const uint8_t* length = a.length + cell * kBlockQuads;
    const uint8_t* row_at = a.row_at + cell * kBlockRows;
    const float* value = a.value + a.start[cell] * kQuad;
    const uint8_t* index = a.index + a.start[cell] * kQuad;
    for (int quad = 0; quad < kBlockQuads && length[quad] > 0; ++quad, row_at += kQuad) {
      quad_times_tile<V>(value, index, length[quad], row_at, offset, x, work);
      value += length[quad] * kQuad;
      index += length[quad] * kQuad;
    }
  }
}

void block(const SparseCells<float>& a, int64_t block, const int32_t* offset, const float* x, int vectors,
           const float* bias, float* work) {
  const int rows = rows_of_block(a.rows, block);
  for (int row = 0; row < rows; ++row) {
    const vf first = splat(bias == nullptr ? 0.0f : bias[block * kBlockRows + row]);
    for (int v = 0; v < vectors; ++v) store(work + row * kTileFloats + v * kLanes, first);
  }
  switch (vectors) {
    case 1:
      return cells_times_tile<1>(a, block, offset, x, work);
    case 2:
      return cells_times_tile<2>(a, block, offset, x, work);
    case 3:
      return cells_times_tile<3>(a, block, offset, x, work);
    case 4:
      return cells_times_tile<4>(a, block, offset, x, work);
  }
}

// Loads four floats of the rows 0, 4, 8 ..., one row in every quarter of a vector.
template <class Row>
TW_INLINE vf load_quarters(Row&& row) {
#if defined(__AVX512F__)
  __m512 v = _mm512_castps128_ps512(_mm_loadu_ps(row(0)));
  v = _mm512_mask_broadcast_f32x4(v, 0x00f0, _mm_loadu_ps(row(4)));
  v = _mm512_mask_broadcast_f32x4(v, 0x0f00, _mm_loadu_ps(row(8)));
  return (vf)_mm512_mask_broadcast_f32x4(v, 0xf000, _mm_loadu_ps(row(12)));
#elif defined(__AVX2__)
  return (vf)_mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row(0))), _mm_loadu_ps(row(4)), 1);
#else
  return load(row(0));
#endif
}

// Transposes four columns of kLanes rows: row(i) is the address of the first of the four; calls store_column(v,
// column).
template <class Row, class Store>
TW_INLINE void transpose_quad(Row&& row, Store&& store_column) {
  const vf r0 = load_quarters([&](int i) { return row(i); }), r1 = load_quarters([&](int i) { return row(i + 1); });
  const vf r2 = load_quarters([&](int i) { return row(i + 2); }), r3 = load_quarters([&](int i) { return row(i + 3); });
  const vf a = pairs_low(r0, r1), b = pairs_high(r0, r1), c = pairs_low(r2, r3), d = pairs_high(r2, r3);
  store_column(halves_low(a, c), 0);
  store_column(halves_high(a, c), 1);
  store_column(halves_low(b, d), 2);
  store_column(halves_high(b, d), 3);
}

void gather(const float* const* lanes, int64_t channels, float* to, int64_t step) {
  int64_t c = 0;
  for (; c + 4 <= channels; c += 4) {
    transpose_quad([&](int i) { return lanes[i] + c; }, [&](vf v, int k) { store(to + (c + k) * step, v); });
  }
  for (; c < channels; ++c) {
    for (int i = 0; i < kLanes; ++i) to[c * step + i] = lanes[i][c];
  }
}

TW_INLINE vf get(const float* from, int count) { return count == kLanes ? load(from) : load_first(from, count); }
TW_INLINE void put(float* to, vf v, int count) { count == kLanes ? store(to, v) : store_first(to, v, count); }

// Stores rows [0, rows) of four pixels k at y[k], after adding residual[k]; null means none.
template <class Activation>
TW_INLINE void scatter_quad(const float* work, int rows, const float* const* residual, float* const* y,
                            Activation&& activation) {
  const auto store_rows = [&](int row, int count) __attribute__((always_inline)) {
    transpose_quad([&](int r) { return work + (row + r) * kTileFloats; },
                   [&](vf v, int k) {
                     if (y[k] == nullptr) return;
                     if (residual[k] != nullptr) v += get(residual[k] + row, count);
                     put(y[k] + row, activation(v), count);
                   });
  };
  int row = 0;
  for (; row + kLanes <= rows; row += kLanes) store_rows(row, kLanes);
  if (row < rows) store_rows(row, rows - row);
}

void scatter(const float* work, int rows, int vectors, const int64_t* pixel, const float* residual,
             int64_t residual_pitch, ConvActivation activation, float* y, int64_t y_pitch) {
  with_activation(activation, [&](auto kind) {
    for (int i = 0; i < vectors * kLanes; i += 4) {
      const float* residuals[4];
      float* results[4];
      for (int k = 0; k < 4; ++k) {
        const int64_t p = pixel[i + k];
        residuals[k] = residual == nullptr || p < 0 ? nullptr : residual + p * residual_pitch;
        results[k] = p < 0 ? nullptr : y + p * y_pitch;
      }
      scatter_quad(work + i, rows, residuals, results, [&](vf v) { return activate<kind.value>(v, activation.slope); });
    }
  });
}

// Returns whether all values are finite, from sums of x * 0, which are NaN otherwise.
bool finite(const float* x, int64_t pitch, int64_t rows, int64_t columns) {
  vf sums[4] = {};  // zero times infinity or NaN is NaN; several sums hide the latency of the additions
  for (int64_t row = 0; row < rows; ++row) {
    const float* at = x + row * pitch;
    int64_t i = 0;
    for (; i + 4 * kLanes <= columns; i += 4 * kLanes) {
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) sums[k] += load(at + i + k * kLanes) * 0.0f;
    }
    for (; i < columns; i += kLanes) sums[0] += get(at + i, static_cast<int>(smaller(kLanes, columns - i))) * 0.0f;
  }
  return sum_lanes(sums[0] + sums[1] + (sums[2] + sums[3])) == 0.0f;
}

}  // namespace

const SparseKernels sparse = {kLanes, vectors, gather, block, scatter, finite};

}  // namespace TW_ISA
}  // namespace tw
