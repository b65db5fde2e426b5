// The terms of the cost of a product's configuration: predicted time = sum of coefficient x count, in arbitrary units.
// Counts are those of one call on the busiest thread. `python -m tools.fit_products --write` fits the coefficients to
// the timings in tools/data and writes them into this file. Those of the tiled loops were fitted to 40,000 timings of
// 1,660 products, of which tools/data has a part; the others are fitted to them.
#pragma once

namespace tw {

// clang-format off
#define TW_COST_TERMS(X)                                                                                             \
  /* The tiled loops. */                                                                                             \
  X(tile_multiply, 0.2816)     /* cycles of a micro-tile's step: multipliers, loads or a multiply-add's latency */   \
  X(tile_load, 0.07973)        /* half a load of A or B */                                                           \
  X(tile_latency, 0.01031)     /* steps of a micro-tile with fewer accumulators than keep two multipliers busy */    \
  X(micro_tile, 0.2347)        /* starting and ending a micro-tile */                                                \
  X(result_row, 1.898)         /* rows of micro-tiles that are stored, once per block of k */                        \
  X(result_again, 0.3983)      /* vectors of C that a further block of k reads and adds to */                        \
  X(result_far, 0.3318)        /* rows of micro-tiles stored to a block of C that exceeds half of L2 */              \
  X(b_from_l2, 0.06521)        /* vectors of B read for a strip that exceeds three quarters of L1 */                 \
  X(b_from_l3, 0.08996)        /* vectors of B read for every block of rows, if a block of k exceeds half of L2 */   \
  X(pack_b, 1.061)             /* vectors of B packed */                                                             \
  X(pack_b_transposed, 2.912)                                                                                        \
  X(share_b, 1.08e+04)         /* a second round of tasks, in which all threads pack B */                            \
  X(b_page, 0.1527)            /* steps along an unpacked B whose rows are on different pages */                     \
  X(b_same_set, 0.6045)        /* ... whose rows fall into one set of L1 */                                          \
  X(b_two_sets, 0.1672)                                                                                              \
  X(a_across, 0.1239)          /* steps along an unpacked transposed A */                                            \
  X(a_same_set, 0.1926)        /* vectors of an unpacked A in one set of L1 */                                       \
  X(task, 3749)                /* a task of the busiest thread */                                                    \
  X(a_from_l3, 0.1398)         /* vectors of A read for every strip, if a block of rows exceeds half of L2 */        \
  /* Around the loops. */                                                                                            \
  X(tile_call, 71.91)          /* a call of the tiled path */                                                        \
  X(tile_l2, 0.2558)           /* vectors of A, B and C if together they exceed L1, L2, a share of L3 */             \
  X(tile_l3, 0.9249)                                                                                                 \
  X(tile_memory, 0.8526)                                                                                             \
  /* Copies before and after. */                                                                                     \
  X(copy_strided, 0.5)         /* elements copied one by one */                                                      \
  X(transpose_call, 13.71)     /* an operand or a result transposed */                                               \
  X(transpose_narrow, 0.2473)  /* elements of matrices with a few rows or half a vector of columns */                \
  X(transpose_block, 2.429)    /* vectors of square blocks */                                                        \
  /* Inner products. */                                                                                              \
  X(dot_call, 45)                                                                                                    \
  X(dot_multiply, 0.4211)      /* cycles: multiply-adds or loads of tiles of inner products */                       \
  X(dot_tile, 7.137)                                                                                                 \
  X(dot_sum, 0.6747)           /* results, whose lanes are added up */                                               \
  X(dot_short, 0.9056)         /* results of a few terms, added up for a vector of them at once */                   \
  X(dot_scalar, 0.2976)        /* terms of such results, one by one */                                               \
  X(dot_l2, 0.02676)           /* vectors of the long operand that exceeds L1, L2, a share of L3 */                  \
  X(dot_l3, 0.7847)                                                                                                  \
  X(dot_memory, 0.9507)                                                                                              \
  X(dot_again_l2, 2.764e-06)   /* vectors of the short operand read again for every tile, from L2, L3 */             \
  X(dot_again_l3, 0.08966)                                                                                           \
  X(dot_fetch, 0.1225)         /* vectors that the streamed variant prefetches, and reads from L3 or memory */       \
  X(dot_fetch_far, 1.045)                                                                                            \
  /* Rows of A times strips of columns of B. */                                                                      \
  X(strip_call, 33.47)                                                                                               \
  X(strip_vector, 0.3312)      /* vectors of B multiplied */                                                         \
  X(strip_step, 0.1986)        /* steps along k */                                                                   \
  X(strip_start, 3.862)                                                                                              \
  X(strip_l2, 0.2943)          /* vectors of B if it exceeds L1, L2, a share of L3 */                                \
  X(strip_l3, 1.063)                                                                                                 \
  X(strip_memory, 1.207)                                                                                             \
  X(strip_page, 0.1701)        /* steps along a B whose rows are on different pages, from L2 on */                   \
  /* A few rows of A kept in registers. */                                                                           \
  X(few_call, 33.67)                                                                                                 \
  X(few_multiply, 0.3976)      /* cycles of a strip's steps */                                                       \
  X(few_start, 0.9367)         /* rows of strips stored */                                                           \
  X(few_interleave, 2.015)     /* vectors of C interleaved as they are stored */                                     \
  X(few_l2, 0.1505)                                                                                                  \
  X(few_l3, 0.9517)                                                                                                  \
  X(few_memory, 0.9039)                                                                                              \
  X(few_page, 0.2295)                                                                                                \
  /* Whole rows of B. */                                                                                             \
  X(stream_call, 33.18)                                                                                              \
  X(stream_multiply, 0.5497)   /* cycles: multiply-adds or loads of vectors of B */                                  \
  X(stream_result, 1.743e-06)  /* vectors of C read and written for every block of rows of B */                      \
  X(stream_start, 14.31)       /* blocks of rows of B */                                                             \
  X(stream_l2, 0.2532)                                                                                               \
  X(stream_l3, 0.8713)                                                                                               \
  X(stream_memory, 0.9848)                                                                                           \
  /* Sums split over accumulators; sums of a few terms; up to four columns. */                                       \
  X(split_call, 30.97)                                                                                               \
  X(split_multiply, 0.4179)                                                                                          \
  X(split_l2, 0.276)           /* rows of B that exceed L1, L2 */                                                    \
  X(split_l3, 0.2)                                                                                                   \
  X(short_call, 38.88)                                                                                               \
  X(short_multiply, 0.1835)                                                                                          \
  X(short_store, 0.525)        /* vectors of C */                                                                    \
  X(short_row, 0.09543)        /* rows of strips */                                                                  \
  X(short_start, 0.7542)       /* strips, for which B is loaded into registers */                                    \
  X(short_far, 0.5306)         /* vectors of C if it exceeds L2 */                                                   \
  X(narrow_call, 34.3)                                                                                               \
  X(narrow_step, 0.4771)       /* steps of groups of rows */                                                         \
  X(narrow_group, 1.358)                                                                                             \
  X(narrow_copy, 3.495)        /* rows of B written side by side */
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

// What a counting function adds to: the predicted time, or for fitting the counts themselves. `share` is the part of
// the work that the busiest thread does.
struct CostSum {
  double total = 0, share = 1;
  void add(Term term, double count) { total += kCost[static_cast<int>(term)] * count * share; }
};
struct CostCounts {
  double* counts;
  double share = 1;
  void add(Term term, double count) { counts[static_cast<int>(term)] += count * share; }
};

}  // namespace tw
