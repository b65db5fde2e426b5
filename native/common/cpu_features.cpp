#include "common/cpu_features.h"

#include <algorithm>
#include <cmath>

namespace tw {
namespace {

constexpr int64_t kKernelBounds = 0, kOutputBounds = 8;  // TpuGraphs' columns

struct Product {
  double batch, m, n, k, window, row, convolution, bytes, a_transposed, b_transposed, extra, slow_end;
};

struct Machine {
  double lanes, registers, l1, l2, l3, flops, sizes[4], rates[4];
};

static_assert(sizeof(Product) == kCpuProduct * sizeof(double) && sizeof(Machine) == kCpuMachine * sizeof(double));

// A function's last argument and result: neighbours in a list of configurations differ in little.
struct Last {
  double x = std::nan(""), y = 0.0;
};

template <class F>
double once(Last& last, double x, F&& f) {
  if (x != last.x) last = {x, f(x)};
  return last.y;
}

double fill(double size, double step) { return size / (std::ceil(size / step) * step); }

// Features of one configuration after another, each scaled into its row of the result.
class Writer {
 public:
  Writer(const CpuFeatureInputs& in, float* out) : in_(in), out_(out) {}
  void next(int64_t config) {
    config_ = config;
    place_ = 0;
  }
  void put(double value) {
    const float x = (static_cast<float>(value) - in_.centre[place_]) * in_.scale[place_];
    out_[place_++ * in_.count + config_] = std::min(std::max(x, -in_.bound), in_.bound);
  }
  void log2(double x) {
    put(once(last_[place_], x, [](double v) { return std::log2(v); }));
  }
  void log1p(double x) {
    put(once(last_[place_], x, [](double v) { return std::log1p(v); }));
  }

 private:
  const CpuFeatureInputs& in_;
  float* out_;
  int64_t config_ = 0, place_ = 0;
  Last last_[kCpuFeatures];
};

class Features {
 public:
  Features(const CpuFeatureInputs& in, float* out)
      : in_(in),
        p_(*reinterpret_cast<const Product*>(in.product)),
        machine_(*reinterpret_cast<const Machine*>(in.machine)),
        to_(in, out) {
    for (int64_t i = 0; i < in.count && lead_ == 0; ++i)
      lead_ = p_.batch > 1 || bound(i, kOutputBounds + 2) != 0 ? 1 : 0;
  }

  void all() {
    for (int64_t i = 0; i < in_.count; ++i) {
      to_.next(i);
      read(i);
      of_kernel();
      of_registers();
      in_caches();
      moved();
      loose();
      shared();
      of_default();
    }
  }

 private:
  double bound(int64_t i, int64_t column) const { return in_.config[i * in_.row + column * in_.col]; }
  double own(int64_t i, int which) const { return in_.columns[which] < 0 ? 0.0 : bound(i, in_.columns[which]); }
  bool is_bytes() const { return p_.bytes == 1; }
  int64_t bytes_of(double elements) const { return static_cast<int64_t>(elements * p_.bytes); }

  // Winograd multiplies 36 transformed numbers for a tile of 16 results, or 16 for 4, over channels alone.
  void read(int64_t i) {
    mr = std::max(own(i, 0), 1.0), nr = std::max(own(i, 1), 1.0);
    pack_a = own(i, 2), pack_b = own(i, 3);
    tm = std::max(own(i, 4), 1.0), tn = std::max(own(i, 5), 1.0);
    const double kind = own(i, 6);
    threads = std::max(own(i, 7), 1.0), is_default = own(i, 8);
    if (p_.convolution != 0) {
      mc = std::max(bound(i, kOutputBounds + 2) * std::max(bound(i, kOutputBounds + 3), 1.0), 1.0);
      nc = std::max(bound(i, kOutputBounds + 1), 1.0), kc = p_.k;
    } else {
      mc = std::max(bound(i, kOutputBounds + lead_), 1.0), nc = std::max(bound(i, kOutputBounds + lead_ + 1), 1.0);
      kc = std::max(bound(i, kKernelBounds + lead_), 1.0);
    }
    const double results = kind == 1 ? 16 : kind == 2 ? 4 : 1;
    passes = kind == 1 ? 36 : kind == 2 ? 16 : 1;
    units = p_.m, depth = p_.k;
    if (kind > 0) {
      units = std::ceil(p_.m / results), depth = p_.k / p_.window;
      mc = std::ceil(mc / results), kc = depth;
    }
    winograd = std::min(kind, 1.0);
    mc = std::min(mc, units), nc = std::min(nc, p_.n), kc = std::min(kc, depth);
    down = std::ceil(units / mc), across = std::ceil(p_.n / nc), deep = std::ceil(depth / kc);
    a = units * depth * p_.bytes * passes, b = depth * p_.n * p_.bytes * passes, c = units * p_.n * 4.0 * passes;
    fill_m = fill(units, mr), fill_n = fill(p_.n, nr);
    const double multiplied = passes * units * p_.n * depth / (fill_m * fill_n);
    seconds = 2 * multiplied / (machine_.flops * (p_.bytes == 4 ? 1.0 : 4.0));
    copy_a = pack_a * over(0, 2 * a * across, a), copy_b = pack_b * over(1, 2 * b, b);
  }

  // Bytes a second from where a working set lies, with a soft passage between levels; `site` tells the callers apart.
  double rate(int site, double working_set) {
    return once(rates_[site], working_set, [&](double bytes) {
      const double *x = machine_.sizes, *y = machine_.rates, at = std::log2(std::max(bytes, 1.0));
      if (at <= x[0]) return std::exp2(y[0]);
      if (at >= x[3]) return std::exp2(y[3]);
      const int i = at < x[1] ? 0 : at < x[2] ? 1 : 2;
      return std::exp2((y[i + 1] - y[i]) / (x[i + 1] - x[i]) * (at - x[i]) + y[i]);
    });
  }
  double over(int site, double bytes, double working_set) { return bytes / (rate(site, working_set) * seconds); }

  void of_kernel() {
    for (double x : {p_.m, p_.n, p_.k, p_.m * p_.n * p_.k, p_.batch}) to_.log2(x);
    for (double x : {p_.m, p_.n, p_.k}) to_.log2(1 + 32 / x);
    for (double x : {p_.a_transposed, p_.b_transposed, p_.extra, p_.slow_end, p_.convolution}) to_.put(x);
    to_.put(is_bytes());
    to_.put(p_.window > 1);
    to_.put(winograd);
  }

  void of_registers() {
    const double lanes = p_.bytes == 4 ? machine_.lanes : 16.0, vectors = nr / lanes, held = mr * vectors;
    for (double x : {mr / 8, vectors / 2, held / machine_.registers, held >= 8 ? 1.0 : 0.0}) to_.put(x);
    for (double x : {1 / mr + 1 / vectors, held, fill_m, fill_n, fill(p_.n, lanes)}) to_.log2(x);
    to_.put(units < mr);
    to_.put(p_.n < nr);
  }

  void in_caches() {
    const double size = p_.bytes, strip = kc * nr * size, sliver = mr * kc * size;
    const double block_a = mc * kc * size, block_b = kc * nc * size, block_c = mc * nc * 4.0;
    for (double x : {down, across, deep}) to_.log2(x);
    for (bool x : {mc >= units, nc >= p_.n, kc >= depth}) to_.put(x);
    to_.log2(kc);
    for (double x : {strip, sliver, strip + sliver}) to_.log2(x / machine_.l1);
    for (double x : {block_a, block_b, block_c, strip, a, b}) to_.log2(x / machine_.l2);
    for (double x : {block_a, block_b, a, b}) to_.log2(x / machine_.l3);
  }

  void moved() {
    const double inner = passes * units * p_.n * depth * p_.bytes * (1 / mr + 1 / nr);
    to_.log1p(over(2, a * across, a));
    to_.log1p(over(3, b * down, kc * nc * p_.bytes));
    to_.log1p(over(4, 2 * c * deep, mc * nc * across * 4.0));
    to_.log1p(over(5, a + b + c * (1 + p_.extra), a + b + c));
    to_.log1p(over(6, inner, kc * nr * p_.bytes));
    for (double x : {copy_a, copy_b}) to_.log1p(x);
    for (double x : {pack_a, pack_b, pack_a * p_.a_transposed, pack_b * p_.b_transposed}) to_.put(x);
  }

  void loose() {
    const double free_a = 1 - pack_a, free_b = 1 - pack_b;
    const double far_b = stride_b_ >= 4096 ? free_b : 0.0;
    const double pages =
        once(pages_, kc * 4096 / machine_.l2, [](double x) { return std::log2(std::max(x, 0.015625)); });
    to_.put(stride_b_ % 4096 == 0 ? free_b : 0.0);
    to_.put(stride_b_ % 1024 == 0 ? free_b : 0.0);
    to_.put(far_b);
    to_.put(nr * p_.bytes < 128 ? free_b : 0.0);
    to_.put(far_b * pages);
    to_.put(stride_a_ % 4096 == 0 ? free_a : 0.0);
    to_.put(stride_a_ >= 4096 ? free_a : 0.0);
    to_.put(free_b * p_.b_transposed);
    to_.put(free_a * p_.a_transposed);
  }

  void shared() {
    double cell_m = mc, cell_n = std::ceil(p_.n / tn), tasks = p_.batch * down * tn, even;
    if (p_.convolution != 0) {
      even = tasks / (std::ceil(tasks / threads) * threads);
    } else {
      cell_m = std::min(std::ceil(std::ceil(units / tm) / mr) * mr, units);
      cell_n = std::min(std::ceil(cell_n / nr) * nr, p_.n);
      tasks = tm * tn * p_.batch;
      even = p_.batch * units * p_.n / (std::ceil(tasks / threads) * threads * cell_m * cell_n);
    }
    for (double x : {threads, tm, tn, std::max(even, 0.00390625), tasks / threads}) to_.log2(x);
    const bool several = threads > 1;
    for (double x : {cell_m / mr, cell_n / nr}) to_.log2(several ? x : 1.0);
    for (double x : {copy_a * tn, copy_b * tm}) to_.log1p(several ? x : 0.0);
  }

  void of_default() {
    const bool product = p_.convolution == 0 && !is_bytes();
    int site = 0;
    to_.put(is_default);
    for (double x : {p_.m, p_.n, p_.k}) {
      const double small = once(small_[site++], 1 + 32 / x, [](double v) { return std::log2(v); });
      to_.put(product ? is_default * small : 0.0);
    }
    for (double x : {p_.a_transposed, p_.b_transposed}) to_.put(product ? is_default * x : 0.0);
    to_.put(is_default * p_.convolution);
    to_.put(is_bytes() ? is_default : 0.0);
    to_.put(threads > 1 ? is_default : 0.0);
  }

  const CpuFeatureInputs& in_;
  const Product& p_;
  const Machine& machine_;
  Writer to_;
  int64_t lead_ = 0;                                                 // dimensions of a batch before a product's own
  int64_t stride_a_ = bytes_of(p_.a_transposed != 0 ? p_.m : p_.k);  // of a row where it lies
  int64_t stride_b_ = bytes_of(p_.b_transposed != 0 ? p_.k : p_.n);
  Last rates_[7], pages_, small_[3];
  double mr, nr, mc, nc, kc, pack_a, pack_b, tm, tn, winograd, threads, is_default;
  double units, depth, passes, down, across, deep, a, b, c, fill_m, fill_n, seconds, copy_a, copy_b;
};

}  // namespace

void cpu_features(const CpuFeatureInputs& in, float* out) { Features(in, out).all(); }

}  // namespace tw
