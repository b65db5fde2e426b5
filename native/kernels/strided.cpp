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
    case MapKind::copy:
      return unary(x, y, n, [](vf a) { return a; });
    case MapKind::neg:
      return unary(x, y, n, [](vf a) { return -a; });
    case MapKind::abs:
      return unary(x, y, n, [](vf a) { return select(a < 0.0f, -a, a); });
    case MapKind::exp:
      return unary(x, y, n, [](vf a) { return vexp(a); });
    case MapKind::log:
      return unary(x, y, n, [](vf a) { return each_lane(a, a, [](float v, float) { return __builtin_logf(v); }); });
    case MapKind::sqrt:
      return unary(x, y, n, [](vf a) { return vsqrt(a); });
    case MapKind::square:
      return unary(x, y, n, [](vf a) { return a * a; });
    case MapKind::tanh:
      return unary(x, y, n, [](vf a) { return vtanh(a); });
    case MapKind::erf:
      return unary(x, y, n, [](vf a) { return verf(a); });
    case MapKind::sigmoid:
      return unary(x, y, n, [](vf a) { return vsigmoid(a); });
    case MapKind::silu:
      return unary(x, y, n, [](vf a) { return a * vsigmoid(a); });
    case MapKind::gelu:
      return unary(x, y, n, [](vf a) { return vgelu(a); });
    case MapKind::gelu_tanh:
      return unary(x, y, n, [](vf a) { return vgelu_tanh(a); });
    // log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|)), which neither overflows nor cancels
    case MapKind::softplus:
      return unary(x, y, n, [](vf a) {
        const vf decay = vexp(select(a < 0.0f, a, -a));
        return vmax(a, vf{}) + each_lane(decay, decay, [](float v, float) { return __builtin_log1pf(v); });
      });
    case MapKind::sin:
      return unary(x, y, n, [](vf a) { return each_lane(a, a, [](float v, float) { return __builtin_sinf(v); }); });
    case MapKind::cos:
      return unary(x, y, n, [](vf a) { return each_lane(a, a, [](float v, float) { return __builtin_cosf(v); }); });
    case MapKind::relu:
      return unary(x, y, n, [](vf a) { return max_nan(a, vf{}); });
    case MapKind::clip:
      return unary(x, y, n, [=](vf a) { return vmin(splat(high), vmax(splat(low), a)); });
    case MapKind::add:
      return binary(x, y, n, [](vf a, vf b) { return a + b; });
    case MapKind::sub:
      return binary(x, y, n, [](vf a, vf b) { return a - b; });
    case MapKind::mul:
      return binary(x, y, n, [](vf a, vf b) { return a * b; });
    case MapKind::div:
      return binary(x, y, n, [](vf a, vf b) { return a / b; });
    case MapKind::pow:
      return binary(x, y, n,
                    [](vf a, vf b) { return each_lane(a, b, [](float v, float e) { return __builtin_powf(v, e); }); });
    case MapKind::maximum:
      return binary(x, y, n, [](vf a, vf b) { return select((a > b) | (a != a), a, b); });
    case MapKind::minimum:
      return binary(x, y, n, [](vf a, vf b) { return select((a < b) | (a != a), a, b); });
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
