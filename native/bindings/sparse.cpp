// Sparse weights, seen from Python: packed from a dense float32 array, applied to float32 activations.
#include "kernels/sparse.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/numpy_api.h"
#include "common/alloc.h"
#include "common/thread_pool.h"

namespace tw {
namespace {

// An overflow entry costs 8 bytes and several times a slot's work, so it is weighed as if it were this many.
constexpr int kOverflowWeight = 12;

int best_slots(const int* counts) {
  int most = *std::max_element(counts, counts + kBand), best = 0;
  long best_cost = -1;
  for (int slots = 0; slots <= most; ++slots) {
    long cost = static_cast<long>(slots) * kSlotBytes;
    for (int r = 0; r < kBand; ++r) cost += static_cast<long>(std::max(0, counts[r] - slots)) * kOverflowWeight;
    if (best_cost < 0 || cost < best_cost) {
      best_cost = cost;
      best = slots;
    }
  }
  return best;
}

class SparseWeights {
 public:
  explicit SparseWeights(nb::handle dense) {
    PyArrayObject* array = as_float_array(dense.ptr());
    if (array == nullptr || PyArray_NDIM(array) != 2) throw nb::type_error("weights must be a C-contiguous float32 matrix");
    rows_ = PyArray_DIM(array, 0);
    columns_ = PyArray_DIM(array, 1);
    if (columns_ > (int64_t{1} << 31) || rows_ > (int64_t{1} << 31)) throw nb::value_error("the matrix is too large");
    pack(floats(array));
  }

  nb::object multiply(nb::handle x, nb::handle bias, bool relu) const {
    PyArrayObject* in = as_float_array(x.ptr());
    if (in == nullptr || PyArray_NDIM(in) != 2 || PyArray_DIM(in, 1) != columns_) {
      throw nb::type_error("x must be a C-contiguous float32 matrix with one column per column of the weights");
    }
    SparseEpilogue epilogue;
    epilogue.relu = relu;
    if (!bias.is_none()) {
      PyArrayObject* b = as_float_array(bias.ptr());
      if (b == nullptr || PyArray_NDIM(b) != 1 || PyArray_DIM(b, 0) != rows_) {
        throw nb::type_error("bias must be a C-contiguous float32 vector with one number per row of the weights");
      }
      epilogue.bias = floats(b);
    }
    const npy_intp shape[2] = {PyArray_DIM(in, 0), rows_};
    PyArrayObject* out = new_float_array(2, shape);
    if (out == nullptr) throw nb::python_error();
    nb::object result = nb::steal(reinterpret_cast<PyObject*>(out));
    GilRelease release(true);
    const int64_t batch = shape[0];
    if (batch < 16) {
      few(floats(in), batch, floats(out), epilogue);
    } else {
      many(floats(in), batch, floats(out), epilogue);
    }
    return result;
  }

  nb::object to_dense() const {
    const npy_intp shape[2] = {rows_, columns_};
    PyArrayObject* out = new_float_array(2, shape);
    if (out == nullptr) throw nb::python_error();
    float* dense = floats(out);
    std::memset(dense, 0, sizeof(float) * rows_ * columns_);
    const int64_t chunks = sparse_chunks(columns_);
    for (int64_t band = 0; band < sparse_bands(rows_); ++band) {
      const uint8_t* at = stream_.data() + band_start_[band];
      for (int64_t c = 0; c < chunks; ++c) {
        const int n = slots_[band * chunks + c];
        for (int i = 0; i < n * kBand; ++i) {
          float value;
          std::memcpy(&value, at + n * kBand + 4 * i, 4);
          const int64_t row = band * kBand + i % kBand, column = c * kChunk + at[i];
          if (value != 0.0f) dense[row * columns_ + column] = value;
        }
        at += n * kSlotBytes;
      }
    }
    for (int64_t row = 0; row < rows_; ++row) {
      for (int64_t e = overflow_start_[row]; e < overflow_start_[row + 1]; ++e) {
        dense[row * columns_ + overflow_column_[e]] = overflow_value_[e];
      }
    }
    return nb::steal(reinterpret_cast<PyObject*>(out));
  }

  int64_t nbytes() const {
    return static_cast<int64_t>(slots_.size() + stream_.size() + 8 * (band_start_.size() + overflow_start_.size()) +
                                4 * (overflow_column_.size() + overflow_value_.size()));
  }
  int64_t overflow() const { return static_cast<int64_t>(overflow_value_.size()); }
  int64_t nonzeros() const { return nonzeros_; }

 private:
  void pack(const float* dense) {
    const int64_t bands = sparse_bands(rows_), chunks = sparse_chunks(columns_);
    slots_ = Buffer<uint8_t>(bands * chunks);
    band_start_ = Buffer<int64_t>(bands + 1);
    overflow_start_ = Buffer<int64_t>(rows_ + 1);
    int64_t bytes = 0, extra = 0;
    for (int64_t band = 0; band < bands; ++band) {
      band_start_[band] = bytes;
      for (int64_t c = 0; c < chunks; ++c) {
        int counts[kBand];
        for (int r = 0; r < kBand; ++r) counts[r] = count(dense, band * kBand + r, c);
        const int n = best_slots(counts);
        slots_[band * chunks + c] = static_cast<uint8_t>(n);
        bytes += n * kSlotBytes;
        for (int r = 0; r < kBand; ++r) {
          extra += std::max(0, counts[r] - n);
          nonzeros_ += counts[r];
        }
      }
    }
    band_start_[bands] = bytes;
    stream_ = Buffer<uint8_t>(bytes);
    if (bytes > 0) std::memset(stream_.data(), 0, bytes);
    overflow_column_ = Buffer<uint32_t>(extra);
    overflow_value_ = Buffer<float>(extra);
    int64_t entry = 0;
    overflow_start_[0] = 0;
    for (int64_t row = 0; row < rows_; ++row) {
      entry = pack_row(dense, row, entry);
      overflow_start_[row + 1] = entry;
    }
  }

  int count(const float* dense, int64_t row, int64_t chunk) const {
    if (row >= rows_) return 0;
    int n = 0;
    const int64_t end = std::min(columns_, (chunk + 1) * kChunk);
    for (int64_t column = chunk * kChunk; column < end; ++column) n += dense[row * columns_ + column] != 0.0f;
    return n;
  }

  int64_t pack_row(const float* dense, int64_t row, int64_t entry) {
    const int64_t chunks = sparse_chunks(columns_), band = row / kBand, lane = row % kBand;
    uint8_t* at = stream_.data() + band_start_[band];
    for (int64_t c = 0; c < chunks; ++c) {
      const int n = slots_[band * chunks + c];
      int s = 0;
      const int64_t end = std::min(columns_, (c + 1) * kChunk);
      for (int64_t column = c * kChunk; column < end; ++column) {
        const float value = dense[row * columns_ + column];
        if (value == 0.0f) continue;
        if (s < n) {
          at[s * kBand + lane] = static_cast<uint8_t>(column % kChunk);
          std::memcpy(at + n * kBand + 4 * (s * kBand + lane), &value, 4);
          ++s;
        } else {
          overflow_column_[entry] = static_cast<uint32_t>(column);
          overflow_value_[entry++] = value;
        }
      }
      at += n * kSlotBytes;
    }
    return entry;
  }

  SparseMatrix matrix() const {
    SparseMatrix m;
    m.rows = rows_;
    m.columns = columns_;
    m.slots = slots_.data();
    m.stream = stream_.data();
    m.band_start = band_start_.data();
    m.overflow_start = overflow_start_.data();
    m.overflow_column = overflow_column_.data();
    m.overflow_value = overflow_value_.data();
    return m;
  }

  template <class F>
  void over_bands(int64_t work, F&& f) const {
    const int64_t bands = sparse_bands(rows_);
    constexpr int64_t kWorthAThread = 200000;
    const int64_t threads = std::min<int64_t>({num_threads(), bands, std::max<int64_t>(1, work / kWorthAThread)});
    parallel_for(static_cast<int>(threads), [&](int t) { f(bands * t / threads, bands * (t + 1) / threads); });
  }

  void few(const float* x, int64_t batch, float* y, const SparseEpilogue& epilogue) const {
    const int64_t padded = sparse_chunks(columns_) * kChunk;
    Buffer<float> copy;
    if (padded != columns_) {
      copy = Buffer<float>(batch * padded);
      for (int64_t b = 0; b < batch; ++b) {
        std::copy(x + b * columns_, x + (b + 1) * columns_, copy.data() + b * padded);
        std::fill(copy.data() + b * padded + columns_, copy.data() + (b + 1) * padded, 0.0f);
      }
      x = copy.data();
    }
    const SparseMatrix m = matrix();
    over_bands(nonzeros_ * batch, [&](int64_t first, int64_t last) {
      for (int64_t b = 0; b < batch; b += kMaxVectors) {
        const int n = static_cast<int>(std::min<int64_t>(kMaxVectors, batch - b));
        active_sparse().vectors(m, x + b * padded, padded, n, y + b * rows_, rows_, epilogue, first, last);
      }
    });
  }

  void many(const float* x, int64_t batch, float* y, const SparseEpilogue& epilogue) const {
    const int64_t padded = sparse_chunks(columns_) * kChunk;
    const SparseMatrix m = matrix();
    for (int64_t b = 0; b < batch; b += kBatchBlock) {
      const int valid = static_cast<int>(std::min<int64_t>(kBatchBlock, batch - b));
      const int block = valid <= 16 ? 16 : valid <= 32 ? 32 : 64;
      Buffer<float> xt(padded * block);
      active_sparse().transpose(x + b * columns_, columns_, padded, valid, block, xt.data());
      over_bands(nonzeros_ * valid, [&](int64_t first, int64_t last) {
        float work[kWorkFloats];
        active_sparse().batch(m, xt.data(), block, valid, work, y + b * rows_, rows_, epilogue, first, last);
      });
    }
  }

  int64_t rows_ = 0, columns_ = 0, nonzeros_ = 0;
  Buffer<uint8_t> slots_, stream_;
  Buffer<int64_t> band_start_, overflow_start_;
  Buffer<uint32_t> overflow_column_;
  Buffer<float> overflow_value_;
};

}  // namespace

void bind_sparse(nb::module_& m) {
  nb::class_<SparseWeights>(m, "SparseWeights")
      .def(nb::init<nb::handle>(), nb::arg("dense"))
      .def("multiply", &SparseWeights::multiply, nb::arg("x"), nb::arg("bias").none(), nb::arg("relu"))
      .def("to_dense", &SparseWeights::to_dense)
      .def_prop_ro("nbytes", &SparseWeights::nbytes)
      .def_prop_ro("overflow", &SparseWeights::overflow)
      .def_prop_ro("nonzeros", &SparseWeights::nonzeros);
}

}  // namespace tw
