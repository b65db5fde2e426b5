// Compiled with -ffp-contract=off, like int8.cpp: every instruction set produces the same bytes.
#include "kernels/int8_grouped.h"

#include "common/machine.h"

#include "kernels/int8_dot.h"

namespace tw {
namespace TW_ISA {
namespace {

constexpr int kPanel = kInt8Panel;

TW_INLINE vi load_sums(const int32_t* p) {
  vi v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// acc + x * w in each lane. Both factors fit 16 bits and x is not negative.
TW_INLINE vi multiply_add(vi acc, vi x, vi w) {
#if defined(__AVX512F__)
  asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(x), "v"(w));
  return acc;
#elif defined(__AVX2__)
  acc += (vi)_mm256_madd_epi16((__m256i)x, (__m256i)w);
  asm("" : "+x"(acc));  // stops the compiler from adding products to each other first and spilling them
  return acc;
#else
  return acc + x * w;
#endif
}

// Requantizes and stores one vector of channels of one output pixel.
template <Approximation C>
TW_INLINE void requantize(const GroupedRows& r, vi sum, const float* scale, int64_t y, int64_t x, int64_t c,
                          int lanes) {
  vf value = __builtin_convertvector(sum, vf) * load(scale + c);
  if (r.residual != nullptr) {
    const uint8_t* skip = r.residual + y * r.residual_row + x * r.residual_pixel + c;
    value = value + dequantize_lanes(load_bytes(skip, lanes), r.residual_zero, r.residual_scale);
  }
  requantize_store<C>(r.y + y * r.out_row + x * r.out_pixel + c, value, r.uint8_stage, lanes);
}

// --- depthwise ---

// Accumulates a row of taps for neighbouring pixels. Inputs that several windows share are loaded once.
template <int Taps, int Stride, int Pixels>
TW_INLINE void accumulate_row(const uint8_t* x, int64_t step, const int32_t* w, int64_t tap_step, int lanes,
                              vi (&acc)[Pixels]) {
  vi weight[Taps];
#pragma GCC unroll 7
  for (int k = 0; k < Taps; ++k) weight[k] = load_sums(w + k * tap_step);
#pragma GCC unroll 32
  for (int i = 0; i < (Pixels - 1) * Stride + Taps; ++i) {
    const vi v = load_bytes(x + i * step, lanes);
#pragma GCC unroll 7
    for (int k = 0; k < Taps; ++k) {
      if (i >= k && (i - k) % Stride == 0 && (i - k) / Stride < Pixels) {
        acc[(i - k) / Stride] = multiply_add(acc[(i - k) / Stride], v, weight[k]);
      }
    }
  }
}

// Accumulates a row of any number of taps, stride and dilation.
template <int Pixels>
TW_INLINE void accumulate_any_row(const GroupedTaps& t, const uint8_t* x, int64_t step, const int32_t* w,
                                  int64_t tap_step, int lanes, vi (&acc)[Pixels]) {
  for (int64_t k = 0; k < t.kernel_w; ++k) {
    const vi weight = load_sums(w + k * tap_step);
#pragma GCC unroll 8
    for (int p = 0; p < Pixels; ++p) {
      acc[p] = multiply_add(acc[p], load_bytes(x + (p * t.stride_w + k * t.dilation_w) * step, lanes), weight);
    }
  }
}

// Depthwise convolution, one vector of channels at a time. Taps = Stride = 0: any values.
template <int Taps, int Stride>
struct Depthwise {
  static constexpr int kPixels = kLanes == 16 ? 8 : 4;
  const GroupedTaps& t;
  const int32_t *weights, *offset;
  const float* scale;
  const GroupedRows& r;

  // Computes `Pixels` neighbouring outputs of one vector of channels.
  template <int Pixels, Approximation C>
  TW_INLINE void tile(int64_t y, int64_t x, int64_t c, int lanes) const {
    const int64_t tap_step = (r.channels + kPanel - 1) / kPanel * kPanel;
    const uint8_t* at = r.x + y * t.stride_h * r.row_step + x * t.stride_w * r.pixel_step + c;
    vi acc[Pixels];
#pragma GCC unroll 8
    for (int p = 0; p < Pixels; ++p) acc[p] = load_sums(offset + c);
    for (int64_t ky = 0; ky < t.kernel_h; ++ky, at += t.dilation_h * r.row_step) {
      const int32_t* w = weights + ky * t.kernel_w * tap_step + c;
      if constexpr (Taps > 0) {
        accumulate_row<Taps, Stride, Pixels>(at, r.pixel_step, w, tap_step, lanes, acc);
      } else {
        accumulate_any_row<Pixels>(t, at, r.pixel_step, w, tap_step, lanes, acc);
      }
    }
#pragma GCC unroll 8
    for (int p = 0; p < Pixels; ++p) requantize<C>(r, acc[p], scale, y, x + p, c, lanes);
  }

  template <Approximation C>
  TW_INLINE void row(int64_t y, int64_t c, int lanes) const {
    int64_t x = 0;
    for (; x + kPixels <= r.width; x += kPixels) tile<kPixels, C>(y, x, c, lanes);
    for (; x < r.width; ++x) tile<1, C>(y, x, c, lanes);
  }

  void run() const {
    dispatch_approximation(r.uint8_stage, [&](auto constant) {
      for (int64_t y = 0; y < r.rows; ++y) {
        int64_t c = 0;
        for (; c + kLanes <= r.channels; c += kLanes) row<constant.value>(y, c, kLanes);
        if (c < r.channels) row<constant.value>(y, c, static_cast<int>(r.channels - c));
      }
    });
  }
};

#if defined(__AVX2__) && !defined(__AVX512F__)
// Depthwise convolution with two rows of taps at a time: the bytes and the weights of both rows are interleaved as
// int16, so that one multiply-add handles both. A tile is 16 channels of four pixels; the last tile of a row or of the
// channels overlaps the one before it. Channels are processed in blocks whose weights stay in the L1 cache.
template <int Taps, int Stride>
class PairedDepthwise {
 public:
  PairedDepthwise(const GroupedTaps& t, const int32_t* offset, const float* scale, const GroupedRows& r)
      : t_(t), offset_(offset), scale_(scale), r_(r), row_pairs_((t.kernel_h + 1) / 2) {}

  static bool fits(const GroupedRows& r) { return r.channels >= kPanel && r.width >= kPixels; }

  // Returns false, with nothing done, if memory is exhausted.
  bool run(const int32_t* weights) {
    const int64_t panels = (r_.channels + kPanel - 1) / kPanel;
    packed_ = int8_scratch(panels * panel_numbers());
    if (packed_ == nullptr) return false;
    for (int64_t panel = 0; panel < panels; ++panel)
      pack(weights, first_channel(panel), packed_ + panel * panel_numbers());
    const int64_t block = kBlockBytes / (4 * panel_numbers()) + 1;
    for (int64_t panel = 0; panel < panels; panel += block) {
      const int64_t end = panel + block < panels ? panel + block : panels;
      for (int64_t y = 0; y < r_.rows; ++y) row(y, panel, end);
    }
    return true;
  }

 private:
  static constexpr int kPixels = 4;  // definition: pixels of a register tile
  static constexpr int64_t kBlockBytes = kSmallestL1 / 2;

  int64_t panel_numbers() const { return row_pairs_ * Taps * kPanel; }
  int64_t first_channel(int64_t panel) const {
    const int64_t c = panel * kPanel;
    return c + kPanel <= r_.channels ? c : r_.channels - kPanel;
  }

  // Layout [pair of rows][tap][channel]: a 32-bit value holds the weights of both rows.
  void pack(const int32_t* weights, int64_t c, int32_t* to) const {
    const int64_t tap_step = (r_.channels + kPanel - 1) / kPanel * kPanel;
    for (int64_t ky = 0; ky < 2 * row_pairs_; ky += 2) {
      for (int64_t k = 0; k < Taps; ++k, to += kPanel) {
        const int32_t* above = weights + (ky * Taps + k) * tap_step + c;
        const int32_t* below = above + Taps * tap_step;
        for (int i = 0; i < kPanel; ++i) to[i] = (above[i] & 0xffff) | (ky + 1 < t_.kernel_h ? below[i] * 65536 : 0);
      }
    }
  }

  // acc += pixels of two rows (kBoth) or of one row, times their weights.
  template <bool kBoth>
  TW_INLINE void add_rows(const uint8_t* above, const uint8_t* below, const int32_t* w, vi (&acc)[kPixels][2]) const {
#pragma GCC unroll 16
    for (int i = 0; i < (kPixels - 1) * Stride + Taps; ++i) {
      vi x[2];
      if constexpr (kBoth) {
        const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(above + i * r_.pixel_step));
        const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(below + i * r_.pixel_step));
        x[0] = (vi)_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, b));
        x[1] = (vi)_mm256_cvtepu8_epi16(_mm_unpackhi_epi8(a, b));
      } else {
        x[0] = widen_bytes(above + i * r_.pixel_step);
        x[1] = widen_bytes(above + i * r_.pixel_step + kLanes);
      }
#pragma GCC unroll 7
      for (int k = 0; k < Taps; ++k) {
        if (i < k || (i - k) % Stride != 0 || (i - k) / Stride >= kPixels) continue;
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          vi& sum = acc[(i - k) / Stride][v];
          sum = multiply_add(sum, x[v], load_sums(w + k * kPanel + v * kLanes));
        }
      }
    }
  }

  // Accumulates all rows of taps for four pixels by 16 channels.
  TW_INLINE void sums(const uint8_t* x, const int32_t* w, vi (&acc)[kPixels][2]) const {
    const int64_t next = t_.dilation_h * r_.row_step;
    int64_t ky = 0;
    for (; ky + 2 <= t_.kernel_h; ky += 2, x += 2 * next, w += Taps * kPanel) add_rows<true>(x, x + next, w, acc);
    if (ky < t_.kernel_h) add_rows<false>(x, nullptr, w, acc);
  }

  // Computes output row y of panels [panel, end): four pixels through all panels, then the next four.
  void row(int64_t y, int64_t panel, int64_t end) const {
    Int8Problem p;
    p.kind = Int8Out::uint8;
    p.columns = p.out_columns = kPanel;
    p.residual_scale = r_.residual_scale;
    p.residual_zero = r_.residual_zero;
    p.uint8_stage = r_.uint8_stage;
    RowOffsets at;
    for (int64_t first = 0; first < r_.width; first += kPixels) {
      const int64_t x = first + kPixels <= r_.width ? first : r_.width - kPixels;
      for (int i = 0; i < kPixels; ++i) {
        at.out[i] = y * r_.out_row + (x + i) * r_.out_pixel;
        at.residual[i] = y * r_.residual_row + (x + i) * r_.residual_pixel;
      }
      const uint8_t* from = r_.x + y * t_.stride_h * r_.row_step + x * Stride * r_.pixel_step;
      for (int64_t i = panel; i < end; ++i) {
        const int64_t c = first_channel(i);
        vi acc[kPixels][2];
#pragma GCC unroll 8
        for (int v = 0; v < 2 * kPixels; ++v) acc[v / 2][v % 2] = load_sums(offset_ + c + v % 2 * kLanes);
        sums(from + c, packed_ + i * panel_numbers(), acc);
        p.scale = scale_ + c;
        p.out = r_.y + c;
        p.residual = r_.residual == nullptr ? nullptr : r_.residual + c;
        requantize_tile<kPixels, 1>(p, acc, at, 0, 0, 0);
      }
    }
  }

  const GroupedTaps& t_;
  const int32_t* offset_;
  const float* scale_;
  const GroupedRows& r_;
  int64_t row_pairs_;
  int32_t* packed_ = nullptr;
};

template <int Taps, int Stride>
bool run_paired(const GroupedTaps& t, const int32_t* weights, const int32_t* offset, const float* scale,
                const GroupedRows& r) {
  using Kernel = PairedDepthwise<Taps, Stride>;
  return Kernel::fits(r) && Kernel(t, offset, scale, r).run(weights);
}
#else
template <int Taps, int Stride>
bool run_paired(const GroupedTaps&, const int32_t*, const int32_t*, const float*, const GroupedRows&) {
  return false;
}
#endif

template <int Taps, int Stride>
void run_depthwise(const GroupedTaps& t, const int32_t* weights, const int32_t* offset, const float* scale,
                   const GroupedRows& r) {
  if (!run_paired<Taps, Stride>(t, weights, offset, scale, r))
    Depthwise<Taps, Stride>{t, weights, offset, scale, r}.run();
}

// Computes rows of an INT8 depthwise convolution; widths 3 and 5 with stride 1 or 2 have specialized loops.
void depthwise(const GroupedTaps& t, const int32_t* weights, const int32_t* offset, const float* scale,
               const GroupedRows& r) {
  const bool is_specialized = t.dilation_w == 1 && (t.stride_w == 1 || t.stride_w == 2);
  if (is_specialized && t.kernel_w == 3)
    return (t.stride_w == 1 ? run_depthwise<3, 1> : run_depthwise<3, 2>)(t, weights, offset, scale, r);
  if (is_specialized && t.kernel_w == 5)
    return (t.stride_w == 1 ? run_depthwise<5, 1> : run_depthwise<5, 2>)(t, weights, offset, scale, r);
  Depthwise<0, 0>{t, weights, offset, scale, r}.run();
}

// --- groups ---

// Grouped convolution, 16 output channels at a time.
struct Grouped {
  const GroupedTaps& t;
  const PanelWindow* windows;
  const int8_t* weights;
  const int32_t* offset;
  const float* scale;
  const GroupedRows& r;

  // Computes `Pixels` neighbouring outputs of one panel of channels.
  template <Dot D, int Pixels, Approximation C>
  TW_INLINE void tile(int64_t y, int64_t x, int64_t panel) const {
    const PanelWindow& window = windows[panel];
    const uint8_t* at = r.x + y * t.stride_h * r.row_step + x * t.stride_w * r.pixel_step + window.first;
    const int8_t* w = weights + window.weights;
    vi acc[Pixels][kVectors];
#pragma GCC unroll 8
    for (int p = 0; p < Pixels; ++p) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[p][v] = load_sums(offset + panel * kPanel + v * kLanes);
    }
    for (int64_t ky = 0; ky < t.kernel_h; ++ky) {
      for (int64_t kx = 0; kx < t.kernel_w; ++kx) {
        const uint8_t* pixel[Pixels];
#pragma GCC unroll 8
        for (int p = 0; p < Pixels; ++p) {
          pixel[p] = at + ky * t.dilation_h * r.row_step + (kx * t.dilation_w + p * t.stride_w) * r.pixel_step;
        }
        multiply<D>(pixel, 0, int64_t{window.groups} * kInt8Group, w, 0, acc);
      }
    }
    vi sums[Pixels][kVectors];  // in memory, so that a loop can index them
#pragma GCC unroll 8
    for (int p = 0; p < Pixels; ++p) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[p][v] = acc[p][v];
    }
    for (int p = 0; p < Pixels; ++p) {
      for (int v = 0; v < kVectors; ++v) {
        const int64_t c = panel * kPanel + v * kLanes, remaining = r.channels - c;
        if (remaining > 0)
          requantize<C>(r, sums[p][v], scale, y, x + p, c, remaining < kLanes ? static_cast<int>(remaining) : kLanes);
      }
    }
  }

  template <Dot D, Approximation C>
  void row(int64_t y, int64_t panel) const {
    constexpr int kPixels = kLanes == 16 ? 8 : 4;
    int64_t x = 0;
    for (; x + kPixels <= r.width; x += kPixels) tile<D, kPixels, C>(y, x, panel);
    for (; x < r.width; ++x) tile<D, 1, C>(y, x, panel);
  }

  // Computes all rows and panels, each panel by the fastest dot product that its weights allow.
  void run() const {
    dispatch_approximation(r.uint8_stage, [&](auto constant) {
      for (int64_t y = 0; y < r.rows; ++y) {
        for (int64_t panel = 0; panel * kPanel < r.channels; ++panel) {
#if defined(__AVX2__) && !defined(__AVX512F__)
          const PanelFit fit = windows[panel].fit;
          if (fit == PanelFit::quads) {
            row<Dot::quads, constant.value>(y, panel);
            continue;
          }
          if (fit == PanelFit::pairs) {
            row<Dot::pairs, constant.value>(y, panel);
            continue;
          }
#endif
          row<Dot::int16, constant.value>(y, panel);
        }
      }
    });
  }
};

void grouped(const GroupedTaps& t, const PanelWindow* windows, const int8_t* weights, const int32_t* offset,
             const float* scale, const GroupedRows& r) {
  Grouped{t, windows, weights, offset, scale, r}.run();
}

}  // namespace

const Int8GroupedKernels int8_grouped = {depthwise, grouped};

}  // namespace TW_ISA
}  // namespace tw
