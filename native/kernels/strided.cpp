#include "kernels/strided.h"

#include "kernels/row_loops.h"

namespace tw {
namespace TW_ISA {
namespace {

// Loads lanes of a strided row: contiguous, broadcast, or gathered one by one.
template <class Lanes>
TW_INLINE vf get(const StridedRow& x, int64_t i, const Lanes& lanes, int count) {
  if (x.step == 1) return lanes.get(x.data + i);
  if (x.step == 0) return splat(*x.data);
  vf v{};
  for (int lane = 0; lane < count; ++lane) v[lane] = x.data[(i + lane) * x.step];
  return v;
}

TW_INLINE int lane_count(const Whole&) { return kLanes; }
TW_INLINE int lane_count(const Partial& lanes) { return lanes.n; }

// tanh: an odd polynomial (Cephes) near 0, where 1 - 2 / (exp(2x) + 1) would cancel.
TW_INLINE vf vtanh(vf x) {
  const vf size = select(x < 0.0f, -x, x), square = x * x;
  vf p = splat(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const vf near = x + x * square * p;
  const vf far = 1.0f - 2.0f / (vexp(size + size) + 1.0f);
  return select(size < 0.625f, near, select(x < 0.0f, -far, far));
}

TW_INLINE vf vsigmoid(vf x) { return 1.0f / (1.0f + vexp(-x)); }

// Applies a function of the C library lane by lane.
template <class F>
TW_INLINE vf each_lane(vf a, vf b, const F& f) {
  vf r{};
  for (int i = 0; i < kLanes; ++i) r[i] = f(a[i], b[i]);
  return r;
}

TW_INLINE vf vlog(vf a) {
  return each_lane(a, a, [](float v, float) { return __builtin_logf(v); });
}
TW_INLINE vf vsin(vf a) {
  return each_lane(a, a, [](float v, float) { return __builtin_sinf(v); });
}
TW_INLINE vf vcos(vf a) {
  return each_lane(a, a, [](float v, float) { return __builtin_cosf(v); });
}
TW_INLINE vf vpow(vf a, vf b) {
  return each_lane(a, b, [](float v, float e) { return __builtin_powf(v, e); });
}

// log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|)), which neither overflows nor cancels
TW_INLINE vf vsoftplus(vf a) {
  const vf decay = vexp(select(a < 0.0f, a, -a));
  return vmax(a, vf{}) + each_lane(decay, decay, [](float v, float) { return __builtin_log1pf(v); });
}

template <class F>
TW_INLINE void unary(const StridedRow* x, float* y, int64_t n, const F& f) {
  each_vector(n, [&](int64_t i, auto lanes) { lanes.put(y + i, f(get(x[0], i, lanes, lane_count(lanes)))); });
}

template <class F>
TW_INLINE void binary(const StridedRow* x, float* y, int64_t n, const F& f) {
  each_vector(n, [&](int64_t i, auto lanes) {
    const int count = lane_count(lanes);
    lanes.put(y + i, f(get(x[0], i, lanes, count), get(x[1], i, lanes, count)));
  });
}

void map(MapKind kind, const StridedRow* x, float low, float high, float* y, int64_t n) {
  switch (kind) {
#define TW_CASE(name, value) \
  case MapKind::name:        \
    return unary(x, y, n, [=](vf a) { return value; });
    TW_UNARY_FUNCTIONS(TW_CASE)
#undef TW_CASE
#define TW_CASE(name, value) \
  case MapKind::name:        \
    return binary(x, y, n, [](vf a, vf b) { return value; });
    TW_BINARY_FUNCTIONS(TW_CASE)
#undef TW_CASE
    case MapKind::select:
      return each_vector(n, [&](int64_t i, auto lanes) {
        const int count = lane_count(lanes);
        const vf selected =
            select(get(x[0], i, lanes, count) != 0.0f, get(x[1], i, lanes, count), get(x[2], i, lanes, count));
        lanes.put(y + i, selected);
      });
  }
}

template <class F>
TW_INLINE void fold(StridedRow x, float* y, int64_t n, const F& f) {
  each_vector(
      n, [&](int64_t i, auto lanes) { lanes.put(y + i, f(lanes.get(y + i), get(x, i, lanes, lane_count(lanes)))); });
}

void accumulate(ReduceKind kind, StridedRow x, float* y, int64_t n) {
  switch (kind) {
    case ReduceKind::sum:
    case ReduceKind::mean:
      return fold(x, y, n, [](vf a, vf b) { return a + b; });
    case ReduceKind::max:
      return fold(x, y, n, [](vf a, vf b) { return select((a > b) | (a != a), a, b); });
    case ReduceKind::min:
      return fold(x, y, n, [](vf a, vf b) { return select((a < b) | (a != a), a, b); });
  }
}

float reduce(ReduceKind kind, StridedRow x, int64_t n) {
  if (kind == ReduceKind::sum || kind == ReduceKind::mean) {
    return static_cast<float>(sum_over(n, [&](int64_t i, auto lanes) { return get(x, i, lanes, lane_count(lanes)); }));
  }
  float best = x.data[0];
  for (int64_t i = 1; i < n; ++i) {
    const float v = x.data[i * x.step];
    if (v != v || (kind == ReduceKind::max ? v > best : v < best)) best = v;
  }
  return best;
}

}  // namespace

const StridedKernels strided = {map, accumulate, reduce};

}  // namespace TW_ISA
}  // namespace tw
