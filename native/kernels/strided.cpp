#include "kernels/strided.h"

#include "kernels/row_loops.h"
#include "kernels/tanh.h"

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

// log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|)), which neither overflows nor cancels. With e = exp(-|x|) in [0, 1],
// log1p(e) = 2 atanh(s) for s = e / (2 + e), at most 1/3: eight terms of its series leave an error below 1e-9.
TW_INLINE vf vsoftplus(vf a) {
  const vf e = vexp(select(a < 0.0f, a, -a)), s = e / (e + 2.0f), square = s * s;
  vf p = splat(1.0f / 15.0f);
  p = p * square + 1.0f / 13.0f;
  p = p * square + 1.0f / 11.0f;
  p = p * square + 1.0f / 9.0f;
  p = p * square + 1.0f / 7.0f;
  p = p * square + 1.0f / 5.0f;
  p = p * square + 1.0f / 3.0f;
  p = p * square + 1.0f;
  return max_nan(a, vf{}) + s * (p + p);
}

// Returns row r.
TW_INLINE StridedRow at_row(const StridedRow& x, int64_t r) { return {x.data + r * x.row, x.step, x.row}; }

// Loaders of a row whose step is known at compile time, so that short rows need no branch.
struct Contiguous {
  const float* data;
  explicit TW_INLINE Contiguous(const StridedRow& row) : data(row.data) {}
  template <class Lanes>
  TW_INLINE vf operator()(int64_t i, const Lanes& lanes) const {
    return lanes.get(data + i);
  }
};

struct Broadcast {
  vf value;
  explicit TW_INLINE Broadcast(const StridedRow& row) : value(splat(*row.data)) {}
  template <class Lanes>
  TW_INLINE vf operator()(int64_t, const Lanes&) const {
    return value;
  }
};

struct AnyStep {
  StridedRow row;
  explicit TW_INLINE AnyStep(const StridedRow& r) : row(r) {}
  template <class Lanes>
  TW_INLINE vf operator()(int64_t i, const Lanes& lanes) const {
    return get(row, i, lanes, lane_count(lanes));
  }
};

template <class A, class F>
TW_INLINE void unary_rows(const StridedRow& x, float* y, int64_t y_row, int64_t rows, int64_t n, const F& f) {
  for (int64_t r = 0; r < rows; ++r, y += y_row) {
    const A a(at_row(x, r));
    each_vector(n, [&](int64_t i, auto lanes) { lanes.put(y + i, f(a(i, lanes))); });
  }
}

template <class F>
TW_INLINE void unary(const StridedRow* x, float* y, int64_t y_row, int64_t rows, int64_t n, const F& f) {
  if (x[0].step == 1) return unary_rows<Contiguous>(x[0], y, y_row, rows, n, f);
  unary_rows<AnyStep>(x[0], y, y_row, rows, n, f);
}

template <class A, class B, class F>
TW_INLINE void binary_rows(const StridedRow* x, float* y, int64_t y_row, int64_t rows, int64_t n, const F& f) {
  for (int64_t r = 0; r < rows; ++r, y += y_row) {
    const A a(at_row(x[0], r));
    const B b(at_row(x[1], r));
    each_vector(n, [&](int64_t i, auto lanes) { lanes.put(y + i, f(a(i, lanes), b(i, lanes))); });
  }
}

template <class F>
TW_INLINE void binary(const StridedRow* x, float* y, int64_t y_row, int64_t rows, int64_t n, const F& f) {
  const int64_t a = x[0].step, b = x[1].step;
  if (a == 1 && b == 1) return binary_rows<Contiguous, Contiguous>(x, y, y_row, rows, n, f);
  if (a == 1 && b == 0) return binary_rows<Contiguous, Broadcast>(x, y, y_row, rows, n, f);
  if (a == 0 && b == 1) return binary_rows<Broadcast, Contiguous>(x, y, y_row, rows, n, f);
  binary_rows<AnyStep, AnyStep>(x, y, y_row, rows, n, f);
}

// y = condition != 0 ? a : b.
void select_rows(const StridedRow* x, float* y, int64_t y_row, int64_t rows, int64_t n) {
  for (int64_t r = 0; r < rows; ++r, y += y_row) {
    const StridedRow condition = at_row(x[0], r), a = at_row(x[1], r), b = at_row(x[2], r);
    each_vector(n, [&](int64_t i, auto lanes) {
      const int count = lane_count(lanes);
      const vf result =
          select(get(condition, i, lanes, count) != 0.0f, get(a, i, lanes, count), get(b, i, lanes, count));
      lanes.put(y + i, result);
    });
  }
}

// Applies an elementwise function of one or two strided operands to `rows` rows of n values.
void map(MapKind kind, const StridedRow* x, float low, float high, float* y, int64_t y_row, int64_t rows, int64_t n) {
  switch (kind) {
#define TW_CASE(name, value) \
  case MapKind::name:        \
    return unary(x, y, y_row, rows, n, [=](vf a) { return value; });
    TW_UNARY_FUNCTIONS(TW_CASE)
#undef TW_CASE
#define TW_CASE(name, value) \
  case MapKind::name:        \
    return binary(x, y, y_row, rows, n, [](vf a, vf b) { return value; });
    TW_BINARY_FUNCTIONS(TW_CASE)
#undef TW_CASE
    case MapKind::select:
      return select_rows(x, y, y_row, rows, n);
  }
}

template <class F>
TW_INLINE void fold(StridedRow x, float* y, int64_t n, const F& f) {
  each_vector(
      n, [&](int64_t i, auto lanes) { lanes.put(y + i, f(lanes.get(y + i), get(x, i, lanes, lane_count(lanes)))); });
}

// Folds a strided row into y value by value: y[i] = y[i] op x[i].
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

float extremum(ReduceKind kind, StridedRow x, int64_t n) {
  float best = x.data[0];
  for (int64_t i = 1; i < n; ++i) {
    const float v = x.data[i * x.step];
    if (v != v || (kind == ReduceKind::max ? v > best : v < best)) best = v;
  }
  return best;
}

template <class A>
TW_INLINE void sum_rows(const StridedRow& x, float* y, int64_t y_row, int64_t rows, int64_t n) {
  for (int64_t r = 0; r < rows; ++r) {
    const A a(at_row(x, r));
    y[r * y_row] = static_cast<float>(sum_over(n, [&](int64_t i, auto lanes) { return a(i, lanes); }));
  }
}

void reduce(ReduceKind kind, StridedRow x, float* y, int64_t y_row, int64_t rows, int64_t n) {
  if (kind == ReduceKind::max || kind == ReduceKind::min) {
    for (int64_t r = 0; r < rows; ++r) y[r * y_row] = extremum(kind, at_row(x, r), n);
  } else if (x.step == 1) {
    sum_rows<Contiguous>(x, y, y_row, rows, n);
  } else {
    sum_rows<AnyStep>(x, y, y_row, rows, n);
  }
}

// Resamples pixels: each result is a weighted sum of `count` source pixels, given by taps (upsampling, downsampling).
void resample(const ResampleTap* taps, int count, int64_t x_step, float* y, int64_t y_step, int64_t pixels,
              int64_t channels) {
  const auto row_of = [&](const ResampleTap& tap, int64_t i) {
    return tap.base + (tap.positions == nullptr ? i : tap.positions[i]) * x_step;
  };
  for (int64_t i = 0; i < pixels; ++i, y += y_step) {
    const float* first = row_of(taps[0], i);
    const float first_weight = taps[0].weights[i * taps[0].weight_step];
    each_vector(channels, [&](int64_t c, auto lanes) { lanes.put(y + c, lanes.get(first + c) * first_weight); });
    for (int t = 1; t < count; ++t) {
      const float* row = row_of(taps[t], i);
      const float weight = taps[t].weights[i * taps[t].weight_step];
      each_vector(channels,
                  [&](int64_t c, auto lanes) { lanes.put(y + c, lanes.get(y + c) + lanes.get(row + c) * weight); });
    }
  }
}

}  // namespace

const StridedKernels strided = {map, accumulate, reduce, resample};

}  // namespace TW_ISA
}  // namespace tw
