// The parts of the integer product that do not depend on the instruction set: properties of weights, the choice of the
// tile, the split over threads.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

#include "common/thread_blocks.h"
#include "common/thread_pool.h"
#include "kernels/int8.h"

namespace tw {

int int8_max_pair_sum(const int8_t* packed, int64_t bytes) {
  int pair = 0, weight = 1;
  for (int64_t i = 0; i + 1 < bytes; i += 2) {
    const int a = packed[i], b = packed[i + 1];
    pair = std::max({pair, std::max(a, 0) + std::max(b, 0), std::max(-a, 0) + std::max(-b, 0)});
    weight = std::max({weight, std::abs(a), std::abs(b)});
  }
  return 255 * pair <= 32767 ? 510 : std::min(510, 32767 / weight);
}

bool int8_quads_fit(const int8_t* packed, int64_t panels, int64_t runs, int64_t groups) {
  constexpr int64_t kBytes = kInt8Panel * kInt8Group;  // bytes of a group of a panel
  for (int64_t run = 0; run < panels * runs; ++run) {
    for (int64_t group = 0; group < groups; group += 2) {
      const int8_t* first = packed + (run * groups + group) * kBytes;
      for (int64_t i = 0; i < kBytes; i += 2) {
        int up = 0, down = 0;
        for (int64_t at : {i, i + 1, kBytes + i, kBytes + i + 1}) {
          const int weight = at < kBytes || group + 1 < groups ? first[at] : 0;
          (weight > 0 ? up : down) += weight;
        }
        if (255 * std::max(up, -down) > 32767) return false;
      }
    }
  }
  return true;
}

namespace {

std::atomic<Amx>& amx() {
  static std::atomic<Amx> use{has_amx() ? Amx::hardware : Amx::off};
  return use;
}

}  // namespace

Amx active_amx() { return amx().load(std::memory_order_relaxed); }

void set_amx(Amx use) { amx().store(use, std::memory_order_relaxed); }

namespace {

std::atomic<bool>& avx_vnni() {
  static std::atomic<bool> use{has_avx_vnni()};
  return use;
}

}  // namespace

bool uses_avx_vnni() { return avx_vnni().load(std::memory_order_relaxed); }

void use_avx_vnni(bool use) { avx_vnni().store(use, std::memory_order_relaxed); }

namespace {

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Returns scratch memory for the int32 sums of a block whose K is cut into slices; null if it is not.
int32_t* sums_of(const Int8Problem& p, const Int8Tile& t, int64_t panels) {
  if (p.runs != 1 || t.kc >= static_cast<int64_t>(p.groups_per_run) * kInt8Group) return nullptr;
  return thread_scratch<int32_t>(Scratch::int8_sums, t.mc * std::min(t.nc, panels * kInt8Panel));
}

// Returns the first row of share `i` of `shares`; shares begin at multiples of 8 rows, a register tile.
int64_t row_cut(int64_t rows, int i, int shares) { return i == shares ? rows : rows * i / shares / 8 * 8; }

}  // namespace

Int8Tile default_int8_tile(int64_t rows, int64_t columns, int64_t k) {
  const int* tallest = active_int8().max_rows;
  const int panels = static_cast<int>(std::max<int64_t>(1, (columns + kInt8Panel - 1) / kInt8Panel));
  Int8Tile t;
  // A single row is bound by the stream of weights, which is fastest one panel at a time.
  const int tile_panels = tallest[2] > 0 && rows > 1 && panels > 1 ? 2 : 1;
  t.mr = rows == 1 ? 1 : tile_panels == 2 ? 8 : tallest[1];
  t.nr = tile_panels * kInt8Panel;
  t.mc = std::min<int64_t>(128, std::max<int64_t>(1, rows));
  t.nc = static_cast<int64_t>((panels + tile_panels - 1) / tile_panels) * t.nr;
  t.kc = std::max<int64_t>(kInt8Group, round_up(k, kInt8Group));
  // With fewer multiply-adds the work is done before a second thread wakes up. A few rows are bound by memory and
  // profit from a second thread earlier (benchmarks/decode.py, "gpt 6x384 int8" on two threads).
  const int64_t worth_a_thread = rows <= 4 ? 1 << 17 : 1 << 20;
  const int64_t work = rows * panels * kInt8Panel * k;
  const int threads = static_cast<int>(std::min<int64_t>(num_threads(), std::max<int64_t>(1, work / worth_a_thread)));
  (rows >= 16 * threads ? t.threads_m : t.threads_n) = rows >= 16 * threads ? threads : std::min(threads, panels);
  return t;
}

const char* int8_tile_problem(const Int8Tile& t, int64_t k) {
  if (t.nr < kInt8Panel || t.nr % kInt8Panel != 0) return "nr must be 16, 32 or 64 columns";
  const int panels = t.nr / kInt8Panel, most = panels <= kInt8MaxPanels ? active_int8().max_rows[panels] : 0;
  if (most == 0) return "this instruction set has no register tile of so many columns";
  if (t.mr < 1 || t.mr > most) return "this instruction set has no register tile of so many rows by so many columns";
  if (t.mc < 1 || t.mc > kInt8MaxRows) return "mc must be from 1 to 512 rows";
  if (t.nc < t.nr || t.nc % t.nr != 0) return "nc must be a whole number of register tiles";
  if (t.nc > 1 << 30) return "nc is too large";
  if (t.kc < kInt8Group || t.kc % kInt8Group != 0) return "kc must be a whole number of groups of 4";
  if (t.kc < k && t.mc * t.nc > kInt8MaxSums) return "the sums of an mc x nc block whose K is cut exceed 4 MiB";
  if (t.threads_m < 1 || t.threads_n < 1 || t.threads_m > kMaxThreads || t.threads_n > kMaxThreads) {
    return "threads_m and threads_n must be from 1 to 1024";
  }
  return nullptr;
}

namespace {

constexpr int64_t kMinTileRows = 16;   // hardware: rows of an AMX tile
constexpr int64_t kTileRunBytes = 64;  // hardware: bytes of a row of an AMX tile
constexpr int kMinTileColumns = 64;    // chosen: fewer columns do not repay gathering the rows

// Returns whether AMX tiles are worth it. Runs of whole tile rows are loaded in place. Other runs are gathered first,
// which only pays if many columns use them: for the few channels of a small network, gathering takes longer than
// multiplying.
bool fills_tiles(const Int8Problem& p, int64_t rows) {
  const int64_t run = static_cast<int64_t>(p.groups_per_run) * kInt8Group;
  const bool worth = run % kTileRunBytes == 0 || (run >= kTileRunBytes && p.columns >= kMinTileColumns);
  return rows >= kMinTileRows && run > 0 && (worth || active_amx() == Amx::emulated);
}

// Computes one thread's share: on AMX tiles if they are enabled and full, else with register tile `t`.
void share(const Int8Problem& p, const Int8Tile& t, int64_t first, int64_t last, int first_panel, int last_panel) {
  const auto& kernels = active_int8();
  const Amx use = active_amx();
  if (kernels.tiles != nullptr && use != Amx::off && fills_tiles(p, last - first) &&
      kernels.tiles(p, first, last, first_panel, last_panel, use == Amx::emulated)) {
    return;
  }
  kernels.rows(p, t, first, last, first_panel, last_panel, sums_of(p, t, last_panel - first_panel));
}

// Calls work(first, last, first_panel, last_panel) for each cell of the thread grid.
template <class Work>
void run_parts(const Int8Problem& p, const Int8Tile& t, const Work& work) {
  const int64_t rows = static_cast<int64_t>(p.images) * p.height * p.width;
  const int panels = (p.columns + kInt8Panel - 1) / kInt8Panel;
  if (rows == 0 || panels == 0) return;
  if (t.threads_m * t.threads_n == 1) return work(0, rows, 0, panels);
  parallel_for(t.threads_m * t.threads_n, [&](int task) {
    const int m = task / t.threads_n, n = task % t.threads_n;
    const int first = static_cast<int>(int64_t{panels} * n / t.threads_n);
    const int last = static_cast<int>(int64_t{panels} * (n + 1) / t.threads_n);
    work(row_cut(rows, m, t.threads_m), row_cut(rows, m + 1, t.threads_m), first, last);
  });
}

}  // namespace

void int8_rows(const Int8Problem& p, int64_t first, int64_t last) {
  const Int8Tile t =
      default_int8_tile(last - first, p.columns, static_cast<int64_t>(p.runs) * p.groups_per_run * kInt8Group);
  share(p, t, first, last, 0, (p.columns + kInt8Panel - 1) / kInt8Panel);
}

void run_int8(const Int8Problem& p) {
  const int64_t rows = static_cast<int64_t>(p.images) * p.height * p.width;
  const Int8Tile t = default_int8_tile(rows, p.columns, static_cast<int64_t>(p.runs) * p.groups_per_run * kInt8Group);
  run_parts(p, t, [&](int64_t first, int64_t last, int panel, int last_panel) {
    share(p, t, first, last, panel, last_panel);
  });
}

void run_int8(const Int8Problem& p, const Int8Tile& t) {
  run_parts(p, t, [&](int64_t first, int64_t last, int panel, int last_panel) {
    active_int8().rows(p, t, first, last, panel, last_panel, sums_of(p, t, last_panel - panel));
  });
}

}  // namespace tw
