// The terms of the cost of a product's configuration: predicted time = sum of coefficient x count, in arbitrary units.
// Counts are those of one call on the busiest thread. `python -m tools.fit_products --write` fits the coefficients to
// the timings in tools/data and writes them into this file. Those of the tiled loops were fitted to 40,000 timings of
// 1,660 products, of which tools/data has a part; the others are fitted to them.
#pragma once

namespace tw {

// clang-format off
#define TW_COST_TERMS(X)                                                                                             \
  /* The tiled loops. */                                                                                             \
  X(tile_multiply, 0.2995)     /* cycles of a micro-tile's step: multipliers, loads or a multiply-add's latency */   \
  X(tile_load, 0.08479)        /* half a load of A or B */                                                           \
  X(tile_latency, 0.01096)     /* steps of a micro-tile with fewer accumulators than keep two multipliers busy */    \
  X(micro_tile, 0.2496)        /* starting and ending a micro-tile */                                                \
  X(result_row, 2.018)         /* rows of micro-tiles that are stored, once per block of k */                        \
  X(result_again, 0.4236)      /* vectors of C that a further block of k reads and adds to */                        \
  X(result_far, 0.3528)        /* rows of micro-tiles stored to a block of C that exceeds half of L2 */              \
  X(b_from_l2, 0.06934)        /* vectors of B read for a strip that exceeds three quarters of L1 */                 \
  X(b_from_l3, 0.09566)        /* vectors of B read for every block of rows, if a block of k exceeds half of L2 */   \
  X(pack_b, 1.128)             /* vectors of B packed */                                                             \
  X(pack_b_transposed, 3.097)                                                                                        \
  X(share_b, 1.148e+04)        /* a second round of tasks, in which all threads pack B */                            \
  X(b_page, 0.1624)            /* steps along an unpacked B whose rows are on different pages */                     \
  X(b_same_set, 0.6428)        /* ... whose rows fall into one set of L1 */                                          \
  X(b_two_sets, 0.1778)                                                                                              \
  X(a_across, 0.1318)          /* steps along an unpacked transposed A */                                            \
  X(a_same_set, 0.2048)        /* vectors of an unpacked A in one set of L1 */                                       \
  X(task, 3987)                /* a task of the busiest thread */                                                    \
  X(a_from_l3, 0.1487)         /* vectors of A read for every strip, if a block of rows exceeds half of L2 */        \
  /* Around the loops. */                                                                                            \
  X(tile_call, 67.62)          /* a call of the tiled path */                                                        \
  X(tile_l2, 0.2857)           /* vectors of A, B and C if together they exceed L1, L2, a share of L3 */             \
  X(tile_l3, 0.634)                                                                                                  \
  X(tile_memory, 0.3544)                                                                                             \
  /* Copies before and after. */                                                                                     \
  X(copy_strided, 0.5)         /* elements copied one by one */                                                      \
  X(transpose_call, 13.6)      /* an operand or a result transposed */                                               \
  X(transpose_narrow, 0.2481)  /* elements of matrices with a few rows or half a vector of columns */                \
  X(transpose_block, 2.498)    /* vectors of square blocks */                                                        \
  /* Inner products. */                                                                                              \
  X(dot_call, 55.31)                                                                                                 \
  X(dot_multiply, 0.4068)      /* cycles: multiply-adds or loads of tiles of inner products */                       \
  X(dot_tile, 7.341)                                                                                                 \
  X(dot_sum, 0.5892)           /* results, whose lanes are added up */                                               \
  X(dot_short, 0.8717)         /* results of a few terms, added up for a vector of them at once */                   \
  X(dot_scalar, 0.284)         /* terms of such results, one by one */                                               \
  X(dot_l2, 0.04389)           /* vectors of the long operand that exceeds L1, L2, a share of L3 */                  \
  X(dot_l3, 0.81)                                                                                                    \
  X(dot_memory, 0.9598)                                                                                              \
  X(dot_again_l2, 3.093e-07)   /* vectors of the long operand read again for every tile of the short one */          \
  X(dot_again_l3, 0.08966)     /* vectors of a short operand beyond L2, read for every block of the long one */      \
  X(dot_fetch, 0.1401)         /* vectors that the streamed variant prefetches, and reads from L3 or memory */       \
  X(dot_fetch_far, 1.007)                                                                                            \
  /* Rows of A times strips of columns of B. */                                                                      \
  X(strip_call, 32.65)                                                                                               \
  X(strip_vector, 0.3301)      /* vectors of B multiplied */                                                         \
  X(strip_step, 0.2177)        /* steps along k */                                                                   \
  X(strip_start, 4.339)                                                                                              \
  X(strip_l2, 0.3465)          /* vectors of B if it exceeds L1, L2, a share of L3 */                                \
  X(strip_l3, 0.7811)                                                                                                \
  X(strip_memory, 0.6586)                                                                                            \
  X(strip_page, 0.2159)        /* steps along a B whose rows are on different pages, from L2 on */                   \
  /* A few rows of A kept in registers. */                                                                           \
  X(few_call, 30.86)                                                                                                 \
  X(few_multiply, 0.4197)      /* cycles of a strip's steps */                                                       \
  X(few_start, 1.205)          /* rows of strips stored */                                                           \
  X(few_interleave, 2.127)     /* vectors of C interleaved as they are stored */                                     \
  X(few_l2, 0.1848)                                                                                                  \
  X(few_l3, 0.7864)                                                                                                  \
  X(few_memory, 0.6795)                                                                                              \
  X(few_page, 0.1481)                                                                                                \
  /* Whole rows of B. */                                                                                             \
  X(stream_call, 28.59)                                                                                              \
  X(stream_multiply, 0.5819)   /* cycles: multiply-adds or loads of vectors of B */                                  \
  X(stream_result, 6.876e-07)  /* vectors of C read and written for every block of rows of B */                      \
  X(stream_start, 14.96)       /* blocks of rows of B */                                                             \
  X(stream_l2, 0.2874)                                                                                               \
  X(stream_l3, 0.5862)                                                                                               \
  X(stream_memory, 0.5699)                                                                                           \
  /* Sums split over accumulators; sums of a few terms; up to four columns. */                                       \
  X(split_call, 30.11)                                                                                               \
  X(split_multiply, 0.4396)                                                                                          \
  X(split_l2, 0.3012)          /* rows of B that exceed L1, L2 */                                                    \
  X(split_l3, 0.2)                                                                                                   \
  X(short_call, 38.13)                                                                                               \
  X(short_multiply, 0.1943)                                                                                          \
  X(short_store, 0.5437)       /* vectors of C */                                                                    \
  X(short_row, 0.1061)         /* rows of strips */                                                                  \
  X(short_start, 0.6951)       /* strips, for which B is loaded into registers */                                    \
  X(short_far, 0.2148)         /* vectors of C if it exceeds L2 */                                                   \
  X(narrow_call, 28.63)                                                                                              \
  X(narrow_step, 0.4575)       /* steps of groups of rows */                                                         \
  X(narrow_group, 1.646)                                                                                             \
  X(narrow_copy, 4.142)        /* rows of B written side by side */
// clang-format on

enum class Term {
#define TW_NAME(name, coefficient) name,
  TW_COST_TERMS(TW_NAME)
#undef TW_NAME
      count
};
constexpr int kCostTerms = static_cast<int>(Term::count);

constexpr double kCost[kCostTerms] = {
#define TW_COEFFICIENT(name, coefficient) coefficient,
    TW_COST_TERMS(TW_COEFFICIENT)
#undef TW_COEFFICIENT
};

// What a counting function adds to: the predicted time, or for fitting the counts themselves.
struct CostSum {
  double total = 0;
  void add(Term term, double count) { total += kCost[static_cast<int>(term)] * count; }
};
struct CostCounts {
  double* counts;
  void add(Term term, double count) { counts[static_cast<int>(term)] += count; }
};

}  // namespace tw
