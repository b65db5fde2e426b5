// The end of an integer step: real numbers to bytes, with an activation taken along. For kernel files that are compiled with
// -ffp-contract=off: every byte is the same on every instruction set.
#pragma once

#include "kernels/activation.h"
#include "kernels/int8_between.h"
#include "kernels/rounding.h"

namespace tw {
namespace TW_ISA {
namespace {

// The first n bytes (n <= kLanes) as lanes; memory past them is not read.
TW_INLINE vi first_bytes(const uint8_t* p, int n) {
#if defined(__AVX512F__)
  return (vi)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_maskz_loadu_epi8(lane_mask(n), p));
#else
  if (n == kLanes) return widen_bytes(p);
  uint8_t bytes[kLanes] = {};
  std::memcpy(bytes, p, n);
  return widen_bytes(bytes);
#endif
}

TW_INLINE void store_first_bytes(uint8_t* p, vi v, int n) {
#if defined(__AVX512F__)
  _mm512_mask_cvtepi32_storeu_epi8(p, lane_mask(n), (__m512i)v);
#else
  if (n == kLanes) return store_low_bytes(p, v);
  uint8_t bytes[kLanes];
  store_low_bytes(bytes, v);
  std::memcpy(p, bytes, n);
#endif
}

// Bytes by their scale: (q - zero) * scale.
TW_INLINE vf real_of(vi bytes, int zero, float scale) { return __builtin_convertvector(bytes - zero, vf) * splat(scale); }

template <ConvActivation kind>
TW_INLINE vi to_bytes(vf value, const ByteFinish& f) {
  if (kind != ConvActivation::none) value = activate<kind>(value) * splat(f.inverse);
  const vf low = splat(static_cast<float>(f.low - f.zero)), high = splat(static_cast<float>(f.high - f.zero));
  value = select(value > low, value, low);
  value = select(value < high, value, high);
  return __builtin_convertvector(round_even(value), vi) + f.zero;
}

}  // namespace
}  // namespace TW_ISA
}  // namespace tw
