#include "kernels/sparse.h"

#include "common/simd.h"

namespace tw {
namespace TW_ISA {
namespace {

constexpr int kVectorsPerBand = kBand / kLanes;

// The inputs of a window, and those that one slot of a band's rows asks for.
#if defined(__AVX512F__)
struct Inputs {
  __m512 x0, x1, x2, x3;
};
TW_INLINE Inputs load_inputs(const float* x) {
  return {_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16), _mm512_loadu_ps(x + 32), _mm512_loadu_ps(x + 48)};
}
// The permutes look at the low five bits of a column number; its sixth bit chooses between their results.
template <int S>
TW_INLINE vf pick(const Inputs& in, const uint32_t* index) {
  const __m512i all = _mm512_load_si512(index);
  const __m512i i = S == 0 ? all : (__m512i)((__v16su)all >> (S * kIndexBits));
  const __mmask16 upper = _mm512_test_epi32_mask(all, _mm512_set1_epi32(32u << (S * kIndexBits)));
  const __m512 low = _mm512_permutex2var_ps(in.x0, i, in.x1);
  return (vf)_mm512_mask_blend_ps(upper, low, _mm512_permutex2var_ps(in.x2, i, in.x3));
}
#elif defined(__AVX2__)
struct Inputs {
  const float* x;
};
TW_INLINE Inputs load_inputs(const float* x) { return {x}; }
template <int S>
TW_INLINE vf pick(const Inputs& in, const uint32_t* index) {
  const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(index));
  const __m256i i = _mm256_and_si256(_mm256_srli_epi32(all, S * kIndexBits), _mm256_set1_epi32(kWindow - 1));
  return (vf)_mm256_i32gather_ps(in.x, i, 4);
}
#else
struct Inputs {
  const float* x;
};
TW_INLINE Inputs load_inputs(const float* x) { return {x}; }
template <int S>
TW_INLINE vf pick(const Inputs& in, const uint32_t* index) {
  vf v;
  for (int i = 0; i < kLanes; ++i) v[i] = in.x[index[i] >> (S * kIndexBits) & (kWindow - 1)];
  return v;
}
#endif

TW_INLINE float relu(float x) { return x < 0.0f ? 0.0f : x; }

// One slot of a band for B vectors; the sums rotate over U registers against the latency of the multiply-add.
template <int S, int B, int U>
TW_INLINE void add_slot(const SparseGroup& group, const Inputs* in, vf (&acc)[U][B][kVectorsPerBand]) {
#pragma GCC unroll 4
  for (int v = 0; v < kVectorsPerBand; ++v) {
    const vf w = load(group.value[S] + v * kLanes);
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) acc[S % U][b][v] += w * pick<S>(in[b], group.index + v * kLanes);
  }
}

template <int B>
TW_INLINE void band_times_vectors(const SparseMatrix& a, int64_t band, const float* x, int64_t x_step, float* sums) {
  constexpr int U = kLanes < 16 ? 1 : B == 1 ? 5 : B == 2 ? 2 : 1;
  vf acc[U][B][kVectorsPerBand] = {};
  const int64_t end = a.band_start[band + 1];
  for (int64_t g = a.band_start[band]; g < end; ++g) {
    const SparseGroup& group = a.groups[g];
    Inputs in[B];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) in[b] = load_inputs(x + b * x_step + a.window[g]);
    add_slot<0>(group, in, acc);
    add_slot<1>(group, in, acc);
    add_slot<2>(group, in, acc);
    add_slot<3>(group, in, acc);
    add_slot<4>(group, in, acc);
  }
#pragma GCC unroll 4
  for (int b = 0; b < B; ++b) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectorsPerBand; ++v) {
      vf total = acc[0][b][v];
#pragma GCC unroll 4
      for (int u = 1; u < U; ++u) total += acc[u][b][v];
      store(sums + b * kBand + v * kLanes, total);
    }
  }
}

void vectors(const SparseMatrix& a, const float* x, int64_t x_step, int count, float* y, int64_t y_step,
             const SparseEpilogue& epilogue, int64_t first, int64_t last) {
  float sums[kMaxVectors * kBand];
  for (int64_t band = first; band < last; ++band) {
    switch (count) {
      case 1: band_times_vectors<1>(a, band, x, x_step, sums); break;
      case 2: band_times_vectors<2>(a, band, x, x_step, sums); break;
      case 3: band_times_vectors<3>(a, band, x, x_step, sums); break;
      case 4: band_times_vectors<4>(a, band, x, x_step, sums); break;
    }
    for (int64_t e = a.overflow_start[band]; e < a.overflow_start[band + 1]; ++e) {
      const SparseOverflow& o = a.overflow[e];
      for (int b = 0; b < count; ++b) sums[b * kBand + o.lane] += o.value * x[b * x_step + o.column];
    }
    const int64_t row0 = band / kBlockBands * kBlockRows;
    for (int lane = 0; lane < kBand; ++lane) {
      const int64_t row = row0 + a.row_at[band * kBand + lane];
      if (row >= a.rows) continue;
      const float bias = epilogue.bias != nullptr ? epilogue.bias[row] : 0.0f;
      for (int b = 0; b < count; ++b) {
        const float value = sums[b * kBand + lane] + bias;
        y[b * y_step + row] = epilogue.relu ? relu(value) : value;
      }
    }
  }
}

// The weights of one slot of R rows, and one of them in all lanes. Loads are what the batch kernel is short of, so with
// AVX-512 they are loaded together and spread by a permute.
#if defined(__AVX512F__)
template <int R>
TW_INLINE __m512 load_weights(const float* w) {
  return R <= 8 ? _mm512_castps256_ps512(_mm256_loadu_ps(w)) : _mm512_loadu_ps(w);
}
TW_INLINE vf spread(__m512 w, int r) { return (vf)_mm512_maskz_permutexvar_ps(0xffff, _mm512_set1_epi32(r), w); }
#else
template <int R>
TW_INLINE const float* load_weights(const float* w) {
  return w;
}
TW_INLINE vf spread(const float* w, int r) { return splat(w[r]); }
#endif

// R rows of a band times V vectors of the batch B: R * V running sums, held in registers over a run of groups. The batch
// is a template argument so that a column's address is a shift.
template <int R, int V, int B>
TW_INLINE void groups_times_batch(const SparseMatrix& a, int64_t first, int64_t last, int lane, const float* xt,
                                  float* work) {
  vf acc[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) acc[r][v] = load(work + r * B + v * kLanes);
  }
  for (int64_t g = first; g < last; ++g) {
    const SparseGroup& group = a.groups[g];
    const float* x = xt + static_cast<int64_t>(a.window[g]) * B;
    decltype(load_weights<R>(nullptr)) weights[kSlots];
#pragma GCC unroll 5
    for (int s = 0; s < kSlots; ++s) weights[s] = load_weights<R>(group.value[s] + lane);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const uint32_t index = group.index[lane + r];
#pragma GCC unroll 5
      for (int s = 0; s < kSlots; ++s) {
        const float* from = x + (index >> (s * kIndexBits) & (kWindow - 1)) * B;
        const vf w = spread(weights[s], r);
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) acc[r][v] += w * load(from + v * kLanes);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) store(work + r * B + v * kLanes, acc[r][v]);
  }
}

template <int B>
TW_INLINE void overflow_times_batch(const SparseOverflow& o, const float* xt, float* work) {
  const float* x = xt + static_cast<int64_t>(o.column) * B;
  float* sums = work + o.lane * B;
  const vf w = splat(o.value);
#pragma GCC unroll 16
  for (int v = 0; v < B; v += kLanes) store(sums + v, load(sums + v) + w * load(x + v));
}

// The bands of a block take turns on a strip of the activations, so that it is read into the first-level cache once.
template <int B>
void bands_times_batch(const SparseMatrix& a, int64_t band0, const float* xt, float* work) {
  constexpr int V = B / kLanes < 4 ? B / kLanes : 4;
  constexpr int R = 16 / V;
  constexpr int64_t kStrip = 28 * 1024 / (4 * B) - kWindow;  // columns by which the windows of a strip advance
  int64_t group[kBlockBands], entry[kBlockBands];
  for (int i = 0; i < kBlockBands; ++i) {
    group[i] = a.band_start[band0 + i];
    entry[i] = a.overflow_start[band0 + i];
  }
  for (int64_t column = 0; column < a.padded_columns; column += kStrip) {
    const int64_t limit = column + kStrip;
    for (int i = 0; i < kBlockBands; ++i) {
      float* sums = work + i * kBand * B;
      const int64_t first = group[i], end = a.band_start[band0 + i + 1];
      int64_t last = first;
      while (last < end && a.window[last] < limit) ++last;
      group[i] = last;
      for (int r = 0; r < kBand; r += R) {
        for (int v = 0; v < B; v += V * kLanes) {
          groups_times_batch<R, V, B>(a, first, last, r, xt + v, sums + r * B + v);
        }
      }
      for (; entry[i] < a.overflow_start[band0 + i + 1] && a.overflow[entry[i]].column < limit; ++entry[i]) {
        overflow_times_batch<B>(a.overflow[entry[i]], xt, sums);
      }
    }
  }
}

template <int B>
void block_of(const SparseMatrix& a, int64_t block, const float* xt, const SparseEpilogue& epilogue, float* work) {
  const uint8_t* row_at = a.row_at + block * kBlockRows;
  for (int lane = 0; lane < kBlockRows; ++lane) {
    const int64_t row = block * kBlockRows + row_at[lane];
    const vf bias = splat(epilogue.bias != nullptr && row < a.rows ? epilogue.bias[row] : 0.0f);
    for (int b = 0; b < B; b += kLanes) store(work + lane * B + b, bias);
  }
  bands_times_batch<B>(a, block * kBlockBands, xt, work);
  if (epilogue.relu) {
    for (int i = 0; i < kBlockRows * B; ++i) work[i] = relu(work[i]);
  }
}

void block(const SparseMatrix& a, int64_t block, const float* xt, int batch, const SparseEpilogue& epilogue,
           float* work) {
  switch (batch) {
    case 16: block_of<16>(a, block, xt, epilogue, work); break;
    case 32: block_of<32>(a, block, xt, epilogue, work); break;
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

// to[j * to_step + i] = from[i][j] for four rows, which may lie anywhere, and a multiple of four columns.
TW_INLINE void transpose_rows(const float* const* from, int64_t columns, float* to, int64_t to_step) {
  for (int64_t j = 0; j < columns; j += 4) {
    v4 r[4];
    for (int i = 0; i < 4; ++i) std::memcpy(&r[i], from[i] + j, sizeof(v4));
    transpose_4x4(r);
    for (int i = 0; i < 4; ++i) std::memcpy(to + (j + i) * to_step, &r[i], sizeof(v4));
  }
}

// Strips of columns, so that the written lines stay in the first-level cache.
void transpose(const float* x, int64_t columns, int64_t padded_columns, int valid, int size, float* xt) {
  constexpr int64_t kStrip = 64;
  if (valid < size || columns < padded_columns) std::memset(xt, 0, sizeof(float) * padded_columns * size);
  const int64_t full_rows = valid / 4 * 4;
  for (int64_t c = 0; c < columns; c += kStrip) {
    const int64_t n = columns - c < kStrip ? columns - c : kStrip, full = n / 4 * 4;
    for (int64_t i = 0; i < full_rows; i += 4) {
      const float* rows[4];
      for (int k = 0; k < 4; ++k) rows[k] = x + (i + k) * columns + c;
      transpose_rows(rows, full, xt + c * size + i, size);
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

void scatter_columns(const SparseMatrix& a, int64_t block, const float* work, int batch, int valid, float* y,
                     int64_t y_step) {
  const float* row_of[kBlockRows];
  for (int lane = 0; lane < kBlockRows; ++lane) row_of[a.row_at[block * kBlockRows + lane]] = work + lane * batch;
  const int64_t row0 = block * kBlockRows;
  const int rows = a.rows - row0 < kBlockRows ? static_cast<int>(a.rows - row0) : kBlockRows;
  const int full_rows = rows / 4 * 4, full = valid / 4 * 4;
  // A few results at a time, so that the lines of y written for four rows are still there for the next four.
  for (int b = 0; b < full; b += 4) {
    for (int i = 0; i < full_rows; i += 4) {
      const float* from[4];
      for (int k = 0; k < 4; ++k) from[k] = row_of[i + k] + b;
      transpose_rows(from, 4, y + b * y_step + row0 + i, y_step);
    }
  }
  for (int i = 0; i < rows; ++i) {
    for (int b = i < full_rows ? full : 0; b < valid; ++b) y[b * y_step + row0 + i] = row_of[i][b];
  }
}

void scatter_rows(const SparseMatrix& a, int64_t block, const float* work, int batch, int valid, float* y,
                  int64_t y_step) {
  for (int lane = 0; lane < kBlockRows; ++lane) {
    const int64_t row = block * kBlockRows + a.row_at[block * kBlockRows + lane];
    if (row < a.rows) std::memcpy(y + row * y_step, work + lane * batch, sizeof(float) * valid);
  }
}

}  // namespace

const SparseKernels sparse = {vectors, transpose, patches, block, scatter_columns, scatter_rows};

}  // namespace TW_ISA
}  // namespace tw
