// Integer matrix product and convolution: uint8 activations times int8 weights, summed in int32.
//
// One routine serves both. A convolution over NHWC data is a matrix product whose rows are pixels. The operand of a
// pixel is a few contiguous runs of bytes at a fixed distance, one per row of the filter, because the taps of a filter
// row are adjacent. A plain matrix product has one run. The padding holds the zero point, so no tap is ever skipped.
#pragma once

#include <cstdint>

#include "common/isa.h"
#include "kernels/int8_elementwise.h"

namespace tw {

constexpr int kInt8Panel = 16;  // definition: columns of a panel of packed weights, on every instruction set
constexpr int kInt8Group = 4;   // hardware: values of K per lane of a dot-product instruction

enum class Int8Out : int { int32 = 0, float32 = 1, uint8 = 2, int16 = 3 };

// A grid of rows (images x height x width pixels) inside a larger buffer; steps are in elements of the buffer.
struct PixelGrid {
  int64_t image_step = 0, row_step = 0, column_step = 0;
};

struct Int8Problem {
  // Activations: pixel (0, 0) of image 0 at the first tap; `in` steps already include the stride of the convolution.
  const uint8_t* in = nullptr;
  PixelGrid in_grid;
  int images = 1, height = 1, width = 1;  // of the output
  int runs = 1;                           // contiguous runs of a row's operand
  int64_t run_step = 0;                   // bytes from one run to the next
  int groups_per_run = 0;                 // bytes of a run / kInt8Group

  const int8_t* weights = nullptr;  // PackedPanels (common/integer_layer.h)
  int columns = 0;
  int max_pair_sum = 255;  // see int8_max_pair_sum; a smaller value is slower but correct
  bool quads_fit = false;  // see int8_quads_fit; false is slower but correct

  // sum = products + offset[column]; then the output stage of `kind`. All arrays are padded to whole panels.
  const int32_t* offset = nullptr;
  const float* scale = nullptr;

  Int8Out kind = Int8Out::int32;
  void* out = nullptr;
  PixelGrid out_grid;
  int out_columns = 0;  // columns written per pixel: `columns`, rounded up to 4 for uint8 buffers

  // float32: result = sum * scale * row_scale[row] + bias, then ReLU
  const float* row_scale = nullptr;
  const float* bias = nullptr;
  bool relu = false;

  // uint8: result = sum * scale + (residual - residual_zero) * residual_scale, then `uint8_stage`
  const uint8_t* residual = nullptr;
  PixelGrid residual_grid;
  float residual_scale = 0.0f;
  int residual_zero = 0;
  Uint8Stage uint8_stage;

  // int16: as uint8, with a residual of uint8 or int16, then `int16_stage`
  bool int16_residual = false;
  Int16Stage int16_stage;
};

// Loop blocking. mr x nr is the register tile (rows, columns in whole panels). Blocks of mc rows are multiplied by
// blocks of nc columns (whole panels), kc values of K (whole groups) at a time. threads_m x threads_n is the thread
// grid over the result. Only a plain product (one run) is blocked along K: a convolution ignores kc.
struct Int8Tile {
  int mr = 0, nr = 0;
  int64_t mc = 0, nc = 0, kc = 0;
  int threads_m = 1, threads_n = 1;
};

constexpr int kInt8MaxPanels = 4;          // definition: panels of the widest register tile
constexpr int64_t kInt8MaxRows = 512;      // chosen: rows of the largest block, whose offsets are on the stack
constexpr int64_t kInt8MaxSums = 1 << 20;  // chosen: sums of a block that are kept in memory between blocks of K

struct Int8Kernels {
  const int* max_rows;  // max_rows[p]: rows of the tallest register tile of p panels, p = 0 ... 4; 0 if there is none
  // Computes rows [first, last) for panels [first_panel, last_panel). `sums` holds mc x nc values and enables blocking
  // along K by the tile's kc; null disables it.
  void (*rows)(const Int8Problem& problem, const Int8Tile& tile, int64_t first, int64_t last, int first_panel,
               int last_panel, int32_t* sums);
  // Computes the same rows on AMX tiles, or on their emulation. Returns false, with nothing done, if memory is
  // exhausted. Null unless compiled for AVX-512.
  bool (*tiles)(const Int8Problem& problem, int64_t first, int64_t last, int first_panel, int last_panel,
                bool emulated);
};

TW_TABLE(Int8Kernels, int8)

// Whether products use AMX tiles: by default, if the CPU and the operating system support them. Emulated tiles are for
// tests: they produce the same integers, slowly, on any CPU with AVX-512.
enum class Amx : int { off = 0, hardware = 1, emulated = 2 };
bool has_amx();
Amx active_amx();
void set_amx(Amx use);  // hardware requires has_amx()

// The largest sum of two neighbouring activations such that the products with any pair of these packed weights add up
// to at most 16 bits: 255 to 510. At 510 no pair of weights can overflow: they are saturation-safe.
int int8_max_pair_sum(const int8_t* packed, int64_t bytes);

// Returns whether the products of any activations with two pairs of these packed weights, from neighbouring groups of
// one run, always fit 16 bits together. The weights have `panels` panels of `runs` runs of `groups` groups.
bool int8_quads_fit(const int8_t* packed, int64_t panels, int64_t runs, int64_t groups);

// AVX-VNNI: the byte dot product without AVX-512. AVX2 kernels use it by default if the CPU has it. Tests turn it off
// to check the fallback.
bool has_avx_vnni();
bool uses_avx_vnni();
void use_avx_vnni(bool use);  // true requires has_avx_vnni()

// Returns thread-local scratch memory of `numbers` 32-bit values, aligned to a cache line and valid until the thread's
// next call; null if memory is exhausted.
int32_t* int8_scratch(int64_t numbers);

// The default tile for a product of this shape on vector registers (docs/tiles.md explains the choice).
Int8Tile default_int8_tile(int64_t rows, int64_t columns, int64_t k);

// Why this tile cannot be used for a product of `k` values; null if it can.
const char* int8_tile_problem(const Int8Tile& tile, int64_t k);

// Computes rows [first, last) on the calling thread.
void int8_rows(const Int8Problem& problem, int64_t first, int64_t last);

// Computes the whole problem on the thread pool, with the default tile or with a tile that int8_tile_problem accepts.
void run_int8(const Int8Problem& problem);
void run_int8(const Int8Problem& problem, const Int8Tile& tile);

}  // namespace tw
