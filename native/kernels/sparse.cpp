#include "kernels/sparse.h"

#include "common/simd.h"

namespace tw {
namespace TW_ISA {
namespace {

constexpr int kVectorsPerBand = kBand / kLanes;

#if defined(__AVX512F__)
struct Inputs {  // the 64 inputs of a chunk
  __m512 x0, x1, x2, x3;
};
TW_INLINE Inputs load_inputs(const float* x) {
  return {_mm512_loadu_ps(x), _mm512_loadu_ps(x + 16), _mm512_loadu_ps(x + 32), _mm512_loadu_ps(x + 48)};
}
// The permutes look at the low five bits of a column number; bit 5 chooses between their results.
TW_INLINE vf pick(const Inputs& in, const uint8_t* index) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(index));
  const __m512i i = _mm512_maskz_cvtepu8_epi32(0xffff, bytes);
  const __mmask16 upper = _mm_movepi8_mask(_mm_slli_epi16(bytes, 2));
  const __m512 low = _mm512_permutex2var_ps(in.x0, i, in.x1);
  return (vf)_mm512_mask_blend_ps(upper, low, _mm512_permutex2var_ps(in.x2, i, in.x3));
}
#elif defined(__AVX2__)
struct Inputs {
  const float* x;
};
TW_INLINE Inputs load_inputs(const float* x) { return {x}; }
TW_INLINE vf pick(const Inputs& in, const uint8_t* index) {
  const __m256i i = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(index)));
  return (vf)_mm256_i32gather_ps(in.x, i, 4);
}
#else
struct Inputs {
  const float* x;
};
TW_INLINE Inputs load_inputs(const float* x) { return {x}; }
TW_INLINE vf pick(const Inputs& in, const uint8_t* index) {
  vf v;
  for (int i = 0; i < kLanes; ++i) v[i] = in.x[index[i]];
  return v;
}
#endif

TW_INLINE float relu(float x) { return x < 0.0f ? 0.0f : x; }

float overflow_sum(const SparseMatrix& a, const float* x, int64_t row) {
  float sum[4] = {};
  int64_t e = a.overflow_start[row];
  const int64_t end = a.overflow_start[row + 1];
  for (; e + 4 <= end; e += 4) {
    for (int i = 0; i < 4; ++i) sum[i] += a.overflow_value[e + i] * x[a.overflow_column[e + i]];
  }
  for (; e < end; ++e) sum[0] += a.overflow_value[e] * x[a.overflow_column[e]];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

template <int B>
TW_INLINE void band_times_vectors(const SparseMatrix& a, int64_t band, const float* x, int64_t x_step, float* sums) {
  constexpr int U = B == 1 ? 4 : B == 2 ? 2 : 1;  // independent sums per vector, against the latency of the multiply-add
  vf acc[U][B][kVectorsPerBand] = {};
  const int64_t chunks = sparse_chunks(a.columns);
  const uint8_t* stream = a.stream + a.band_start[band];
  const uint8_t* slots = a.slots + band * chunks;
  for (int64_t c = 0; c < chunks; ++c) {
    const int n = slots[c];
    const uint8_t* index = stream;
    const float* value = reinterpret_cast<const float*>(stream + n * kBand);
    stream += n * kSlotBytes;
    Inputs in[B];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) in[b] = load_inputs(x + b * x_step + c * kChunk);
    int s = 0;
    for (; s + U <= n; s += U) {
#pragma GCC unroll 4
      for (int u = 0; u < U; ++u) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectorsPerBand; ++v) {
          const vf w = load(value + (s + u) * kBand + v * kLanes);
#pragma GCC unroll 4
          for (int b = 0; b < B; ++b) acc[u][b][v] += w * pick(in[b], index + (s + u) * kBand + v * kLanes);
        }
      }
    }
    for (; s < n; ++s) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectorsPerBand; ++v) {
        const vf w = load(value + s * kBand + v * kLanes);
#pragma GCC unroll 4
        for (int b = 0; b < B; ++b) acc[0][b][v] += w * pick(in[b], index + s * kBand + v * kLanes);
      }
    }
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
    for (int64_t row = band * kBand; row < (band + 1) * kBand && row < a.rows; ++row) {
      const float bias = epilogue.bias != nullptr ? epilogue.bias[row] : 0.0f;
      for (int b = 0; b < count; ++b) {
        const float value = sums[b * kBand + row % kBand] + overflow_sum(a, x + b * x_step, row) + bias;
        y[b * y_step + row] = epilogue.relu ? relu(value) : value;
      }
    }
  }
}

// R rows of a band times V vectors of the batch: R * V running sums, held in registers over one chunk.
template <int R, int V, int B>
TW_INLINE void chunk_times_batch(const uint8_t* index, const float* value, int slots, const float* xt, float* work) {
  vf acc[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) acc[r][v] = load(work + r * B + v * kLanes);
  }
  for (int s = 0; s < slots; ++s, index += kBand, value += kBand) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const float* x = xt + static_cast<int64_t>(index[r]) * B;
      const vf w = splat(value[r]);
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) acc[r][v] += w * load(x + v * kLanes);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) store(work + r * B + v * kLanes, acc[r][v]);
  }
}

// A few bands chunk by chunk, so that a chunk of the activations is read from the second-level cache once for all of them.
// The batch B is a template argument so that a column's address is a shift.
template <int B>
void bands_times_batch(const SparseMatrix& a, int64_t first, int bands, const float* xt, float* work) {
  constexpr int V = B / kLanes < 8 ? B / kLanes : 8;
  constexpr int R = 16 / V;
  const int64_t chunks = sparse_chunks(a.columns);
  const uint8_t* stream[kBandBlock];
  for (int i = 0; i < bands; ++i) stream[i] = a.stream + a.band_start[first + i];
  for (int64_t c = 0; c < chunks; ++c) {
    const float* x = xt + c * kChunk * B;
    for (int i = 0; i < bands; ++i) {
      const int n = a.slots[(first + i) * chunks + c];
      const float* value = reinterpret_cast<const float*>(stream[i] + n * kBand);
      float* sums = work + i * kBand * B;
      for (int r = 0; r < kBand; r += R) {
        for (int v = 0; v < B; v += V * kLanes) {
          chunk_times_batch<R, V, B>(stream[i] + r, value + r, n, x + v, sums + r * B + v);
        }
      }
      stream[i] += n * kSlotBytes;
    }
  }
}

template <int B>
void overflow_times_batch(const SparseMatrix& a, int64_t row, const float* xt, float* work) {
  constexpr int V = B / kLanes < 8 ? B / kLanes : 8;
  for (int at = 0; at < B; at += V * kLanes) {
    vf acc[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) acc[v] = load(work + at + v * kLanes);
    for (int64_t e = a.overflow_start[row]; e < a.overflow_start[row + 1]; ++e) {
      const float* x = xt + static_cast<int64_t>(a.overflow_column[e]) * B + at;
      const vf w = splat(a.overflow_value[e]);
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) acc[v] += w * load(x + v * kLanes);
    }
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) store(work + at + v * kLanes, acc[v]);
  }
}

typedef float v4 __attribute__((vector_size(16)));

// to[j * to_step + i] = from[i * from_step + j] for a 4 x 4 block.
TW_INLINE void transpose_4x4(const float* from, int64_t from_step, float* to, int64_t to_step) {
  v4 r[4];
  for (int i = 0; i < 4; ++i) std::memcpy(&r[i], from + i * from_step, sizeof(v4));
  const v4 a = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5), b = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
  const v4 c = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5), d = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
  r[0] = __builtin_shufflevector(a, c, 0, 1, 4, 5);
  r[1] = __builtin_shufflevector(a, c, 2, 3, 6, 7);
  r[2] = __builtin_shufflevector(b, d, 0, 1, 4, 5);
  r[3] = __builtin_shufflevector(b, d, 2, 3, 6, 7);
  for (int i = 0; i < 4; ++i) std::memcpy(to + i * to_step, &r[i], sizeof(v4));
}

// to (columns, rows) = from (rows, columns), both inside larger arrays whose rows may all fall into the same cache set:
// a line must be used up before the next is touched. `by_rows` reads whole lines, otherwise whole lines are written.
void transpose_block(const float* from, int64_t from_step, int64_t rows, int64_t columns, float* to, int64_t to_step,
                     bool by_rows) {
  const int64_t full_rows = rows / 4 * 4, full_columns = columns / 4 * 4;
  if (by_rows) {
    for (int64_t i = 0; i < full_rows; i += 4) {
      for (int64_t j = 0; j < full_columns; j += 4) {
        transpose_4x4(from + i * from_step + j, from_step, to + j * to_step + i, to_step);
      }
    }
  } else {
    for (int64_t j = 0; j < full_columns; j += 4) {
      for (int64_t i = 0; i < full_rows; i += 4) {
        transpose_4x4(from + i * from_step + j, from_step, to + j * to_step + i, to_step);
      }
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = i < full_rows ? full_columns : 0; j < columns; ++j) to[j * to_step + i] = from[i * from_step + j];
  }
}

template <int B>
void finish_band(const SparseMatrix& a, int64_t band, const float* xt, int valid, float* work, float* y, int64_t y_step,
                 bool with_relu) {
  const int64_t row0 = band * kBand;
  const int rows = a.rows - row0 < kBand ? static_cast<int>(a.rows - row0) : kBand;
  for (int r = 0; r < rows; ++r) overflow_times_batch<B>(a, row0 + r, xt, work + r * B);
  if (with_relu) {
    for (int i = 0; i < rows * B; ++i) work[i] = relu(work[i]);
  }
  transpose_block(work, B, rows, valid, y + row0, y_step, false);
}

template <int B>
void batch_of(const SparseMatrix& a, const float* xt, int valid, float* work, float* y, int64_t y_step,
              const SparseEpilogue& epilogue, int64_t first, int64_t last) {
  for (int64_t band = first; band < last; band += kBandBlock) {
    const int bands = last - band < kBandBlock ? static_cast<int>(last - band) : kBandBlock;
    for (int r = 0; r < bands * kBand; ++r) {
      const int64_t row = band * kBand + r;
      const vf bias = splat(epilogue.bias != nullptr && row < a.rows ? epilogue.bias[row] : 0.0f);
      for (int b = 0; b < B; b += kLanes) store(work + r * B + b, bias);
    }
    bands_times_batch<B>(a, band, bands, xt, work);
    for (int i = 0; i < bands; ++i) {
      finish_band<B>(a, band + i, xt, valid, work + i * kBand * B, y, y_step, epilogue.relu);
    }
  }
}

void batch(const SparseMatrix& a, const float* xt, int size, int valid, float* work, float* y, int64_t y_step,
           const SparseEpilogue& epilogue, int64_t first, int64_t last) {
  switch (size) {
    case 16: batch_of<16>(a, xt, valid, work, y, y_step, epilogue, first, last); break;
    case 32: batch_of<32>(a, xt, valid, work, y, y_step, epilogue, first, last); break;
    case 64: batch_of<64>(a, xt, valid, work, y, y_step, epilogue, first, last); break;
  }
}

void transpose(const float* x, int64_t columns, int64_t padded_columns, int valid, int size, float* xt) {
  constexpr int64_t kStrip = 64;  // columns at a time, so that the written lines stay in the first-level cache
  if (valid < size || columns < padded_columns) std::memset(xt, 0, sizeof(float) * padded_columns * size);
  for (int64_t c = 0; c < columns; c += kStrip) {
    const int64_t n = columns - c < kStrip ? columns - c : kStrip;
    transpose_block(x + c, columns, valid, n, xt + c * size, size, true);
  }
}

}  // namespace

const SparseKernels sparse = {vectors, transpose, batch};

}  // namespace TW_ISA
}  // namespace tw
