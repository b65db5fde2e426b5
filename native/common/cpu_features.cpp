#include "common/cpu_features.h"

#include <algorithm>
#include <cmath>

namespace tw {
namespace {

constexpr int64_t kKernelBounds = 0, kOutputBounds = 8;  // columns of TpuGraphs
constexpr int64_t kPageBytes = 4096;

// The fields of Python's MatrixProduct, in its order.
struct CpuProduct {
  double batch, m, n, k, window, row, convolution, element_bytes, a_transposed, b_transposed, epilogue_reads,
      slow_epilogue;
};

// Caches in bytes; log2 of four working-set sizes and of the bandwidth at each.
struct CpuMachine {
  double lanes, registers, l1, l2, l3, flops, log_sizes[4], log_rates[4];
};

static_assert(sizeof(CpuProduct) == kCpuProduct * sizeof(double) && sizeof(CpuMachine) == kCpuMachine * sizeof(double));

// Last argument and result of a function. Adjacent configurations of a list differ in few values, so a cache of one
// entry saves most of the logarithms.
struct CachedCall {
  double x = std::nan(""), y = 0.0;
};

template <class F>
double cached(CachedCall& call, double x, F&& f) {
  if (x != call.x) call = {x, f(x)};
  return call.y;
}

// Size over size rounded up to a multiple of step.
double fill_ratio(double size, double step) { return size / (std::ceil(size / step) * step); }

// Writes the features of one configuration after another, each scaled, clipped and put into its row of the result.
class FeatureWriter {
 public:
  FeatureWriter(const CpuFeatureInputs& in, float* out) : in_(in), out_(out) {}
  void next(int64_t config) {
    config_ = config;
    feature_ = 0;
  }
  void put(double value) {
    const float x = (static_cast<float>(value) - in_.centre[feature_]) * in_.scale[feature_];
    out_[feature_++ * in_.count + config_] = std::min(std::max(x, -in_.bound), in_.bound);
  }
  void log2(double x) {
    put(cached(last_[feature_], x, [](double v) { return std::log2(v); }));
  }
  void log1p(double x) {
    put(cached(last_[feature_], x, [](double v) { return std::log1p(v); }));
  }

 private:
  const CpuFeatureInputs& in_;
  float* out_;
  int64_t config_ = 0, feature_ = 0;
  CachedCall last_[kCpuFeatures];
};

// Names and order follow costmodel/features/cpu.py, which documents every group of features.
class CpuFeatureTable {
 public:
  CpuFeatureTable(const CpuFeatureInputs& in, float* out)
      : in_(in),
        p_(*reinterpret_cast<const CpuProduct*>(in.product)),
        machine_(*reinterpret_cast<const CpuMachine*>(in.machine)),
        out_(in, out) {
    for (int64_t i = 0; i < in.count && lead_ == 0; ++i)
      lead_ = p_.batch > 1 || bound(i, kOutputBounds + 2) != 0 ? 1 : 0;
  }

  void compute() {
    for (int64_t i = 0; i < in_.count; ++i) {
      out_.next(i);
      read_config(i);
      kernel_features();
      register_features();
      cache_features();
      traffic_features();
      unpacked_features();
      thread_features();
      default_features();
    }
  }

 private:
  double bound(int64_t i, int64_t column) const { return in_.config[i * in_.row + column * in_.col]; }
  double column(int64_t i, int which) const { return in_.columns[which] < 0 ? 0.0 : bound(i, in_.columns[which]); }
  bool is_int8() const { return p_.element_bytes == 1; }
  int64_t row_bytes(double elements) const { return static_cast<int64_t>(elements * p_.element_bytes); }

  // Reads tile, threads and packing of one configuration. Winograd convolution multiplies 36 transformed numbers for a
  // tile of 16 results, or 16 for 4, in a product over channels alone.
  void read_config(int64_t i) {
    mr = std::max(column(i, 0), 1.0), nr = std::max(column(i, 1), 1.0);
    pack_a = column(i, 2), pack_b = column(i, 3);
    tm = std::max(column(i, 4), 1.0), tn = std::max(column(i, 5), 1.0);
    const double kind = column(i, 6);
    threads = std::max(column(i, 7), 1.0), is_default = column(i, 8);
    if (p_.convolution != 0) {
      mc = std::max(bound(i, kOutputBounds + 2) * std::max(bound(i, kOutputBounds + 3), 1.0), 1.0);
      nc = std::max(bound(i, kOutputBounds + 1), 1.0), kc = p_.k;
    } else {
      mc = std::max(bound(i, kOutputBounds + lead_), 1.0), nc = std::max(bound(i, kOutputBounds + lead_ + 1), 1.0);
      kc = std::max(bound(i, kKernelBounds + lead_), 1.0);
    }
    const double results = kind == 1 ? 16 : kind == 2 ? 4 : 1;
    passes = kind == 1 ? 36 : kind == 2 ? 16 : 1;
    rows = p_.m, depth = p_.k;
    if (kind > 0) {
      rows = std::ceil(p_.m / results), depth = p_.k / p_.window;
      mc = std::ceil(mc / results), kc = depth;
    }
    winograd = std::min(kind, 1.0);
    mc = std::min(mc, rows), nc = std::min(nc, p_.n), kc = std::min(kc, depth);
    down = std::ceil(rows / mc), across = std::ceil(p_.n / nc), deep = std::ceil(depth / kc);
    a = rows * depth * p_.element_bytes * passes, b = depth * p_.n * p_.element_bytes * passes,
    c = rows * p_.n * 4.0 * passes;
    fill_m = fill_ratio(rows, mr), fill_n = fill_ratio(p_.n, nr);
    const double products = passes * rows * p_.n * depth / (fill_m * fill_n);
    seconds = 2 * products / (machine_.flops * (p_.element_bytes == 4 ? 1.0 : 4.0));
    packing_a = pack_a * relative_time(0, 2 * a * across, a), packing_b = pack_b * relative_time(1, 2 * b, b);
  }

  // Bytes per second when reading a working set, interpolated between cache levels; every caller has its own `site`.
  double bandwidth(int site, double working_set) {
    return cached(rates_[site], working_set, [&](double bytes) {
      const double *x = machine_.log_sizes, *y = machine_.log_rates, at = std::log2(std::max(bytes, 1.0));
      if (at <= x[0]) return std::exp2(y[0]);
      if (at >= x[3]) return std::exp2(y[3]);
      const int i = at < x[1] ? 0 : at < x[2] ? 1 : 2;
      return std::exp2((y[i + 1] - y[i]) / (x[i + 1] - x[i]) * (at - x[i]) + y[i]);
    });
  }
  // Time to move bytes of a working set, relative to the time to multiply.
  double relative_time(int site, double bytes, double working_set) {
    return bytes / (bandwidth(site, working_set) * seconds);
  }

  void kernel_features() {
    for (double x : {p_.m, p_.n, p_.k, p_.m * p_.n * p_.k, p_.batch}) out_.log2(x);
    for (double x : {p_.m, p_.n, p_.k}) out_.log2(1 + 32 / x);
    for (double x : {p_.a_transposed, p_.b_transposed, p_.epilogue_reads, p_.slow_epilogue, p_.convolution})
      out_.put(x);
    out_.put(is_int8());
    out_.put(p_.window > 1);
    out_.put(winograd);
  }

  void register_features() {
    const double lanes = p_.element_bytes == 4 ? machine_.lanes : 16.0, vectors = nr / lanes,
                 accumulators = mr * vectors;
    for (double x : {mr / 8, vectors / 2, accumulators / machine_.registers, accumulators >= 8 ? 1.0 : 0.0})
      out_.put(x);
    for (double x : {1 / mr + 1 / vectors, accumulators, fill_m, fill_n, fill_ratio(p_.n, lanes)}) out_.log2(x);
    out_.put(rows < mr);
    out_.put(p_.n < nr);
  }

  void cache_features() {
    const double size = p_.element_bytes, strip = kc * nr * size, sliver = mr * kc * size;
    const double block_a = mc * kc * size, block_b = kc * nc * size, block_c = mc * nc * 4.0;
    for (double x : {down, across, deep}) out_.log2(x);
    for (bool x : {mc >= rows, nc >= p_.n, kc >= depth}) out_.put(x);
    out_.log2(kc);
    for (double x : {strip, sliver, strip + sliver}) out_.log2(x / machine_.l1);
    for (double x : {block_a, block_b, block_c, strip, a, b}) out_.log2(x / machine_.l2);
    for (double x : {block_a, block_b, a, b}) out_.log2(x / machine_.l3);
  }

  void traffic_features() {
    const double inner = passes * rows * p_.n * depth * p_.element_bytes * (1 / mr + 1 / nr);
    out_.log1p(relative_time(2, a * across, a));
    out_.log1p(relative_time(3, b * down, kc * nc * p_.element_bytes));
    out_.log1p(relative_time(4, 2 * c * deep, mc * nc * across * 4.0));
    out_.log1p(relative_time(5, a + b + c * (1 + p_.epilogue_reads), a + b + c));
    out_.log1p(relative_time(6, inner, kc * nr * p_.element_bytes));
    for (double x : {packing_a, packing_b}) out_.log1p(x);
    for (double x : {pack_a, pack_b, pack_a * p_.a_transposed, pack_b * p_.b_transposed}) out_.put(x);
  }

  void unpacked_features() {
    const double unpacked_a = 1 - pack_a, unpacked_b = 1 - pack_b;
    const double far_b = stride_b_ >= kPageBytes ? unpacked_b : 0.0;
    const double pages =
        cached(pages_, kc * kPageBytes / machine_.l2, [](double x) { return std::log2(std::max(x, 0.015625)); });
    out_.put(stride_b_ % kPageBytes == 0 ? unpacked_b : 0.0);
    out_.put(stride_b_ % 1024 == 0 ? unpacked_b : 0.0);
    out_.put(far_b);
    out_.put(nr * p_.element_bytes < 128 ? unpacked_b : 0.0);
    out_.put(far_b * pages);
    out_.put(stride_a_ % kPageBytes == 0 ? unpacked_a : 0.0);
    out_.put(stride_a_ >= kPageBytes ? unpacked_a : 0.0);
    out_.put(unpacked_b * p_.b_transposed);
    out_.put(unpacked_a * p_.a_transposed);
  }

  void thread_features() {
    double cell_m = mc, cell_n = std::ceil(p_.n / tn), tasks = p_.batch * down * tn, balance;
    if (p_.convolution != 0) {
      balance = tasks / (std::ceil(tasks / threads) * threads);
    } else {
      cell_m = std::min(std::ceil(std::ceil(rows / tm) / mr) * mr, rows);
      cell_n = std::min(std::ceil(cell_n / nr) * nr, p_.n);
      tasks = tm * tn * p_.batch;
      balance = p_.batch * rows * p_.n / (std::ceil(tasks / threads) * threads * cell_m * cell_n);
    }
    for (double x : {threads, tm, tn, std::max(balance, 0.00390625), tasks / threads}) out_.log2(x);
    const bool several = threads > 1;
    for (double x : {cell_m / mr, cell_n / nr}) out_.log2(several ? x : 1.0);
    for (double x : {packing_a * tn, packing_b * tm}) out_.log1p(several ? x : 0.0);
  }

  void default_features() {
    const bool product = p_.convolution == 0 && !is_int8();
    int site = 0;
    out_.put(is_default);
    for (double x : {p_.m, p_.n, p_.k}) {
      const double smallness = cached(smallness_[site++], 1 + 32 / x, [](double v) { return std::log2(v); });
      out_.put(product ? is_default * smallness : 0.0);
    }
    for (double x : {p_.a_transposed, p_.b_transposed}) out_.put(product ? is_default * x : 0.0);
    out_.put(is_default * p_.convolution);
    out_.put(is_int8() ? is_default : 0.0);
    out_.put(threads > 1 ? is_default : 0.0);
  }

  const CpuFeatureInputs& in_;
  const CpuProduct& p_;
  const CpuMachine& machine_;
  FeatureWriter out_;
  int64_t lead_ = 0;  // dimensions before those of one product: 1 for a batch
  int64_t stride_a_ = row_bytes(p_.a_transposed != 0 ? p_.m : p_.k);  // bytes of a row in memory
  int64_t stride_b_ = row_bytes(p_.b_transposed != 0 ? p_.k : p_.n);
  CachedCall rates_[7], pages_, smallness_[3];
  double mr, nr, mc, nc, kc, pack_a, pack_b, tm, tn, winograd, threads, is_default;
  double rows, depth, passes, down, across, deep, a, b, c, fill_m, fill_n, seconds, packing_a, packing_b;
};

}  // namespace

void cpu_features(const CpuFeatureInputs& in, float* out) { CpuFeatureTable(in, out).compute(); }

}  // namespace tw
