#include "kernels/sparse_strips.h"

#include "common/simd.h"

namespace tw {
namespace TW_ISA {
namespace {

#if defined(__AVX2__) && !defined(__AVX512F__)

// The position of the loop in a group's weights, entry after entry.
struct Cursor {
  const float* value;
  const uint16_t* index;
  const uint32_t* strip;
};

// Two sums per vector, used alternately, so that one multiply-add need not wait for the one before.
template <int B>
struct Sums {
  vf even[B] = {}, odd[B] = {};
};

// Multiplies one entry of S slots by B vectors.
template <int S, int B>
TW_INLINE void add_entry(Cursor& at, const float* x, int64_t x_step, Sums<B>& sums) {
  __m256i columns = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at.index)));
  __m256 inputs[B];
#pragma GCC unroll 4
  for (int b = 0; b < B; ++b) inputs[b] = _mm256_loadu_ps(x + b * x_step + *at.strip);
#pragma GCC unroll 5
  for (int s = 0; s < S; ++s) {
    const vf value = load(at.value + s * kStripRows);
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
      vf& sum = s % 2 == 0 ? sums.even[b] : sums.odd[b];
      sum += value * (vf)_mm256_permutevar8x32_ps(inputs[b], columns);  // uses the lowest three bits of a lane
    }
    columns = _mm256_srli_epi32(columns, 3);
  }
  at.value += S * kStripRows;
  at.index += kStripRows;
  at.strip += 1;
}

// Multiplies `count` entries of S slots. An odd S exchanges the two sums, so that they stay alternating.
template <int S, int B>
TW_INLINE void add_entries(uint32_t count, Cursor& at, const float* x, int64_t x_step, Sums<B>& sums) {
  for (; count > 0; --count) {
    add_entry<S, B>(at, x, x_step, sums);
    if constexpr (S % 2 == 1) {
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) {
        const vf even = sums.even[b];
        sums.even[b] = sums.odd[b];
        sums.odd[b] = even;
      }
    }
  }
}

// Multiplies groups [first, last) by B vectors.
template <int B>
void groups_times_vectors(const SparseStrips& a, const float* x, int64_t x_step, float* y, int64_t y_step,
                          const SparseEpilogue& epilogue, int64_t first, int64_t last) {
  static_assert(kStripSlots == 5, "one loop for each number of slots");
  for (int64_t group = first; group < last; ++group) {
    const int64_t entry = a.first_entry[group], row = group * kStripRows;
    const uint32_t* count = a.count + group * kStripSlots;
    Cursor at = {a.value + a.first_slot[group] * kStripRows, a.index + entry * kStripRows, a.strip + entry};
    Sums<B> sums;
    add_entries<1>(count[0], at, x, x_step, sums);
    add_entries<2>(count[1], at, x, x_step, sums);
    add_entries<3>(count[2], at, x, x_step, sums);
    add_entries<4>(count[3], at, x, x_step, sums);
    add_entries<5>(count[4], at, x, x_step, sums);
    const int rows = a.rows - row < kStripRows ? static_cast<int>(a.rows - row) : kStripRows;
    const vf bias = epilogue.bias == nullptr ? vf{} : load_first(epilogue.bias + row, rows);
    for (int b = 0; b < B; ++b) {
      const vf total = sums.even[b] + sums.odd[b] + bias;
      store_first(y + b * y_step + row, epilogue.relu ? select(total < vf{}, vf{}, total) : total, rows);
    }
  }
}

void vectors(const SparseStrips& a, const float* x, int64_t x_step, int count, float* y, int64_t y_step,
             const SparseEpilogue& epilogue, int64_t first, int64_t last) {
  switch (count) {
    case 1:
      groups_times_vectors<1>(a, x, x_step, y, y_step, epilogue, first, last);
      break;
    case 2:
      groups_times_vectors<2>(a, x, x_step, y, y_step, epilogue, first, last);
      break;
    case 3:
      groups_times_vectors<3>(a, x, x_step, y, y_step, epilogue, first, last);
      break;
    case 4:
      groups_times_vectors<4>(a, x, x_step, y, y_step, epilogue, first, last);
      break;
  }
}

#else

constexpr auto vectors = nullptr;

#endif

}  // namespace

const SparseStripKernels sparse_strips = {vectors};

}  // namespace TW_ISA
}  // namespace tw
