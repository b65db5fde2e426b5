// Integer matrix product and convolution: unsigned 8-bit activations times signed 8-bit weights, summed in 32 bits.
//
// One routine serves both. A convolution over channels-last data is a matrix product whose row is a pixel: its operand
// is not contiguous but a few contiguous runs of bytes, one per row of the filter (the taps of a filter's row lie side
// by side), at a fixed distance. A plain matrix product has one run. Borders hold the zero point, so no tap is ever
// skipped.
#pragma once

#include <cstdint>

#include "common/isa.h"
#include "kernels/int8_elementwise.h"

namespace tw {

constexpr int kInt8Panel = 16;  // columns of a packed weight panel, on every instruction set
constexpr int kInt8Group = 4;   // values of K that one dot instruction takes

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
  int runs = 1;
  int64_t run_step = 0;    // bytes from one run to the next
  int groups_per_run = 0;  // bytes of a run / 4

  const int8_t* weights = nullptr;  // packed by pack_int8_weights
  int columns = 0;
  int pair_room = 255;     // see int8_pair_room; less than the truth is slower, never wrong
  bool quads_fit = false;  // see int8_quads_fit; the same

  // result = (sum + offset[column]) * scale[column] ..., all arrays padded to whole panels
  const int32_t* offset = nullptr;
  const float* scale = nullptr;

  Int8Out kind = Int8Out::int32;
  void* out = nullptr;
  PixelGrid out_grid;
  int out_columns = 0;  // columns written per pixel: `columns`, or rounded up to 4 for uint8 buffers

  // float32: result = sum * scale * row_scale[row] + bias, then ReLU
  const float* row_scale = nullptr;
  const float* bias = nullptr;
  bool relu = false;

  // uint8: result = sum * scale + (residual - residual_zero) * residual_scale, finished
  const uint8_t* residual = nullptr;
  PixelGrid residual_grid;
  float residual_scale = 0.0f;
  int residual_zero = 0;
  Uint8Stage finish;

  // int16: the same, with the residual in bytes or in 16 bits
  bool int16_residual = false;
  Int16Stage wide;
};

// Bytes of the packed weights of `columns` columns and `groups` groups of four values of K.
inline int64_t int8_packed_bytes(int64_t columns, int64_t groups) {
  return (columns + kInt8Panel - 1) / kInt8Panel * groups * kInt8Panel * kInt8Group;
}

// How the loops are cut. mr x nr is the register tile: rows, and columns in whole panels; mc rows are multiplied by a
// block of nc columns (whole panels) at a time, kc values of K (whole groups) at a time; threads_m x threads_n is the
// grid the result is split into. Only a plain product (one run) is cut along K: a convolution's kc is not looked at.
struct Int8Tile {
  int mr = 0, nr = 0;
  int64_t mc = 0, nc = 0, kc = 0;
  int threads_m = 1, threads_n = 1;
};

constexpr int kInt8MaxPanels = 4;          // of a register tile
constexpr int64_t kInt8MaxRows = 512;      // of a row block: the offsets of its rows are on the stack
constexpr int64_t kInt8MaxSums = 1 << 20;  // of a block whose K is cut: its sums wait in memory
constexpr int kInt8MaxThreads = 1024;

struct Int8Kernels {
  const int* max_rows;  // max_rows[p]: the tallest register tile of p panels, p = 0 ... 4; 0 where there is none
  // The rows [first, last) of the problem for the panels [first_panel, last_panel). With `sums`, room for mc x nc of
  // them, K is cut by the tile's kc; with null it is not.
  void (*rows)(const Int8Problem& problem, const Int8Tile& tile, int64_t first, int64_t last, int first_panel,
               int last_panel, int32_t* sums);
  // The same on AMX tiles, or on their emulation; false, with nothing done, when memory is out. Null but with AVX-512.
  bool (*tiles)(const Int8Problem& problem, int64_t first, int64_t last, int first_panel, int last_panel,
                bool emulated);
};

TW_TABLE(Int8Kernels, int8)

// Whether products take AMX tiles: where the CPU and the system have them, they do. Emulated tiles are for tests: they
// give the same integers, slowly, on any CPU with AVX-512.
enum class Amx : int { off = 0, hardware = 1, emulated = 2 };
bool has_amx();
Amx active_amx();
void set_amx(Amx use);  // hardware only where has_amx()

// weights[column * column_step + i] for i in [0, channels) of tap t at offset t * tap_step, to panels of 16 columns
// with groups of four channels, zero-padded. `column_sums` gets the sum over all taps and channels.
void pack_int8_weights(const int8_t* weights, int columns, int taps, int channels, int64_t column_step,
                       int64_t tap_step, int64_t channel_step, int8_t* packed, int32_t* column_sums);

// The largest sum of two neighbouring activations whose products with any pair of these packed weights add up to 16
// bits: 255 to 510; 510, which every pair of bytes keeps, where no pair of weights can overflow.
int int8_pair_room(const int8_t* packed, int64_t bytes);

// Whether the products of any bytes with two pairs of these packed weights, of neighbouring groups of one run, add up
// to 16 bits. `panels` of `runs` runs of `groups` groups.
bool int8_quads_fit(const int8_t* packed, int64_t panels, int64_t runs, int64_t groups);

// Whether the CPU has the dot product of bytes without AVX-512 (AVX-VNNI), and whether AVX2 kernels use it: where it is
// there they do. Tests switch it off for the integers of a CPU without it.
bool has_avx_vnni();
bool uses_avx_vnni();
void use_avx_vnni(bool use);  // true only where has_avx_vnni()

// Working memory of the kernels: so many numbers of 32 bits, aligned to a cache line, this thread's until it asks
// again. Null when the machine is out of memory.
int32_t* int8_scratch(int64_t numbers);

// The tile that a product of this shape takes when it is given none, and no AMX tiles take it (docs/tiles.md says how
// it is found).
Int8Tile default_int8_tile(int64_t rows, int64_t columns, int64_t k);

// Why this tile cannot be used for a product of `k` values, or null.
const char* int8_tile_problem(const Int8Tile& tile, int64_t k);

// The rows [first, last) of a problem whose results are independent of the rest, on this thread.
void int8_rows(const Int8Problem& problem, int64_t first, int64_t last);

// The whole problem, on the threads of the pool; with its default tile, or with one that has no int8_tile_problem.
void run_int8(const Int8Problem& problem);
void run_int8(const Int8Problem& problem, const Int8Tile& tile);

}  // namespace tw
