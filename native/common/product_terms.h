// The terms of the cost of a product's configuration: predicted time = sum of coefficient x count, in arbitrary units.
// Counts are those of one call on the busiest thread. `python -m tools.fit_products --write` fits the coefficients to
// the timings in tools/data and writes them into this file. Those of the tiled loops were fitted to 40,000 timings of
// 1,660 products, of which tools/data has a part; the others are fitted to them.
#pragma once

namespace tw {

// clang-format off
#define TW_COST_TERMS(X)                                                                                             \
  /* The tiled loops. */                                                                                             \
  X(tile_multiply, 0.5135)     /* cycles of a micro-tile's step: multipliers, loads or a multiply-add's latency */   \
  X(tile_load, 0.1454)         /* half a load of A or B */                                                           \
  X(tile_latency, 0.0188)      /* steps of a micro-tile with fewer accumulators than keep two multipliers busy */    \
  X(micro_tile, 0.4281)        /* starting and ending a micro-tile */                                                \
  X(result_row, 3.461)         /* rows of micro-tiles that are stored, once per block of k */                        \
  X(result_again, 0.7262)      /* vectors of C that a further block of k reads and adds to */                        \
  X(result_far, 0.6048)        /* rows of micro-tiles stored to a block of C that exceeds half of L2 */              \
  X(b_from_l2, 0.1189)         /* vectors of B read for a strip that exceeds three quarters of L1 */                 \
  X(b_from_l3, 0.164)          /* vectors of B read for every block of rows, if a block of k exceeds half of L2 */   \
  X(pack_b, 1.933)             /* vectors of B packed */                                                             \
  X(pack_b_transposed, 5.311)                                                                                        \
  X(share_b, 5027)             /* a second round of tasks, in which all threads pack B */                            \
  X(b_page, 0.2785)            /* steps along an unpacked B whose rows are on different pages */                     \
  X(b_same_set, 1.102)         /* ... whose rows fall into one set of L1 */                                          \
  X(b_two_sets, 0.3046)                                                                                              \
  X(a_across, 0.226)           /* steps along an unpacked transposed A */                                            \
  X(a_same_set, 0.3511)        /* vectors of an unpacked A in one set of L1 */                                       \
  X(task, 1.235e+04)           /* a task of the busiest thread */                                                    \
  X(a_from_l3, 0.2549)         /* vectors of A read for every strip, if a block of rows exceeds half of L2 */        \
  /* Around the loops. */                                                                                            \
  X(tile_call, 104)            /* a call of the tiled path */                                                        \
  X(tile_l2, 0.4308)           /* vectors of A, B and C if together they exceed L1, L2, a share of L3 */             \
  X(tile_l3, 0.9144)                                                                                                 \
  X(tile_memory, 0.3219)                                                                                             \
  /* Copies before and after. */                                                                                     \
  X(copy_strided, 0.5)         /* elements copied one by one */                                                      \
  X(transpose_call, 22.55)     /* an operand or a result transposed */                                               \
  X(transpose_narrow, 0.3908)  /* elements of matrices with a few rows or half a vector of columns */                \
  X(transpose_block, 4.122)    /* vectors of square blocks */                                                        \
  X(transposed_page, 0.8765)   /* steps of transposed tiles along a B whose rows are on different pages */           \
  X(transposed_set, 1.721)     /* ... whose rows fall into one or two sets of L1 */                                  \
  /* Inner products. */                                                                                              \
  X(dot_call, 110.3)                                                                                                 \
  X(dot_multiply, 0.705)       /* cycles: multiply-adds or loads of tiles of inner products */                       \
  X(dot_tile, 9.462)                                                                                                 \
  X(dot_sum, 1.145)            /* results, whose lanes are added up */                                               \
  X(dot_short, 1.312)          /* results of a few terms, added up for a vector of them at once */                   \
  X(dot_scalar, 0.5786)        /* terms of such results, one by one */                                               \
  X(dot_l2, 0.08157)           /* vectors of the long operand that exceeds L1, L2, a share of L3 */                  \
  X(dot_l3, 1.258)                                                                                                   \
  X(dot_memory, 1.564)                                                                                               \
  X(dot_again_l2, 2.594e-08)   /* vectors of the long operand read again for every tile of the short one */          \
  X(dot_again_l3, 3.376)       /* vectors of a short operand beyond L2, read for every block of the long one */      \
  X(dot_fetch, 0.2451)         /* vectors that the streamed variant prefetches, and reads from L3 or memory */       \
  X(dot_fetch_far, 1.681)                                                                                            \
  /* Rows of A times strips of columns of B. */                                                                      \
  X(strip_call, 51.17)                                                                                               \
  X(strip_vector, 0.5591)      /* vectors of B multiplied */                                                         \
  X(strip_step, 0.3331)        /* steps along k */                                                                   \
  X(strip_start, 6.946)                                                                                              \
  X(strip_l2, 0.5899)          /* vectors of B if it exceeds L1, L2, a share of L3 */                                \
  X(strip_l3, 1.154)                                                                                                 \
  X(strip_memory, 0.7981)                                                                                            \
  X(strip_page, 0.8191)        /* steps along a B whose rows are on different pages, from L2 on */                   \
  /* A few rows of A kept in registers. */                                                                           \
  X(small_m_call, 47.18)                                                                                             \
  X(small_m_multiply, 0.7083)  /* cycles of a strip's steps */                                                       \
  X(small_m_start, 2.024)      /* rows of strips stored */                                                           \
  X(small_m_interleave, 3.578) /* vectors of C interleaved as they are stored */                                     \
  X(small_m_l2, 0.265)                                                                                               \
  X(small_m_l3, 1.227)                                                                                               \
  X(small_m_memory, 0.8641)                                                                                          \
  X(small_m_page, 0.2347)                                                                                            \
  /* Whole rows of B. */                                                                                             \
  X(stream_call, 39.83)                                                                                              \
  X(stream_multiply, 0.9692)   /* cycles: multiply-adds or loads of vectors of B */                                  \
  X(stream_result, 1.69e-07)   /* vectors of C read and written for every block of rows of B */                      \
  X(stream_start, 25.79)       /* blocks of rows of B */                                                             \
  X(stream_l2, 0.5146)                                                                                               \
  X(stream_l3, 0.9084)                                                                                               \
  X(stream_memory, 0.7687)                                                                                           \
  /* Sums split over accumulators; sums of a few terms; up to four columns. */                                       \
  X(split_call, 45.7)                                                                                                \
  X(split_multiply, 0.7283)                                                                                          \
  X(split_l2, 0.5007)          /* rows of B that exceed L1, L2 */                                                    \
  X(split_l3, 0.2)                                                                                                   \
  X(short_call, 58.74)                                                                                               \
  X(short_multiply, 0.3433)                                                                                          \
  X(short_store, 0.9563)       /* vectors of C */                                                                    \
  X(short_row, 0.1701)         /* rows of strips */                                                                  \
  X(short_start, 1.081)        /* strips, for which B is loaded into registers */                                    \
  X(short_far, 0.2094)         /* vectors of C if it exceeds L2 */                                                   \
  X(narrow_call, 45.45)                                                                                              \
  X(narrow_step, 0.7819)       /* steps of groups of rows */                                                         \
  X(narrow_group, 2.507)                                                                                             \
  X(narrow_copy, 8.751)        /* rows of B written side by side */
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
