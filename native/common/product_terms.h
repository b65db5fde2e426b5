// The terms of the cost of a product's configuration: predicted time = sum of coefficient x count, in arbitrary units.
// Counts are those of one call on the busiest thread. `python -m tools.fit_products --write` fits the coefficients to
// the timings in tools/data and writes them into this file. Those of the tiled loops were fitted to 40,000 timings of
// 1,660 products, of which tools/data has a part; the others are fitted to them.
#pragma once

namespace tw {

// clang-format off
#define TW_COST_TERMS(X)                                                                                             \
  /* The tiled loops. */                                                                                             \
  X(tile_multiply, 0.7698)     /* cycles of a micro-tile's step: multipliers, loads or a multiply-add's latency */   \
  X(tile_load, 0.2713)         /* half a load of A or B */                                                           \
  X(tile_latency, 0.0005736)   /* steps of a micro-tile with fewer accumulators than keep two multipliers busy */    \
  X(micro_tile, 13.25)         /* starting and ending a micro-tile */                                                \
  X(result_row, 6.066)         /* rows of micro-tiles that are stored, once per block of k */                        \
  X(result_again, 5.294)       /* vectors of C that a further block of k reads and adds to */                        \
  X(result_far, 0.006162)      /* rows of micro-tiles stored to a block of C that exceeds half of L2 */              \
  X(b_from_l2, 0.2352)         /* vectors of B read for a strip that exceeds three quarters of L1 */                 \
  X(b_from_l3, 0.8181)         /* vectors of B read for every block of rows, if a block of k exceeds half of L2 */   \
  X(pack_b, 4.525)             /* vectors of B packed */                                                             \
  X(pack_b_transposed, 4.507)                                                                                        \
  X(pack_a, 5.022)             /* vectors of A packed, where its rows are contiguous and where its columns are */    \
  X(pack_a_transposed, 6.449)                                                                                        \
  X(share_b, 2621)             /* a second round of tasks, in which all threads pack B */                            \
  X(b_page, 0.714)             /* steps along an unpacked B whose rows are on different pages */                     \
  X(b_same_set, 2.112)         /* ... whose rows fall into one set of L1 */                                          \
  X(b_two_sets, 0.01764)                                                                                             \
  X(a_lines, 0.8434)           /* cache lines read along an unpacked transposed A */                                 \
  X(a_across, 2.215)           /* steps along it whose columns are on different pages */                             \
  X(a_same_set, 1.652)         /* vectors of an unpacked A in one set of L1 */                                       \
  X(task, 1.304e+04)           /* a task of the busiest thread */                                                    \
  X(a_from_l3, 0.9105)         /* vectors of A read for every strip, if a block of rows exceeds half of L2 */        \
  /* Around the loops. */                                                                                            \
  X(tile_call, 307.4)          /* a call of the tiled path */                                                        \
  X(tile_l2, 0.6616)           /* vectors of A, B and C if together they exceed L1, L2, a share of L3 */             \
  X(tile_l3, 1.634)                                                                                                  \
  X(tile_memory, 0.4834)                                                                                             \
  /* Copies before and after. */                                                                                     \
  X(copy_strided, 0.9299)      /* elements copied one by one */                                                      \
  X(transpose_call, 39.64)     /* an operand or a result transposed */                                               \
  X(transpose_narrow, 0.5989)  /* elements of matrices with a few rows or half a vector of columns */                \
  X(transpose_block, 7.805)    /* vectors of square blocks */                                                        \
  X(transposed_page, 0.6108)   /* steps of transposed tiles along a B whose rows are on different pages */           \
  X(transposed_set, 1.605)     /* ... whose rows fall into one or two sets of L1 */                                  \
  /* Inner products. */                                                                                              \
  X(dot_call, 246)                                                                                                   \
  X(dot_multiply, 1.058)       /* cycles: multiply-adds or loads of tiles of inner products */                       \
  X(dot_tile, 13.16)                                                                                                 \
  X(dot_sum, 1.806)            /* results, whose lanes are added up */                                               \
  X(dot_short, 2.356)          /* results of a few terms, added up for a vector of them at once */                   \
  X(dot_scalar, 1.027)         /* terms of such results, one by one */                                               \
  X(dot_l2, 0.1292)            /* vectors of the long operand that exceeds L1, L2, a share of L3 */                  \
  X(dot_l3, 2.171)                                                                                                   \
  X(dot_memory, 2.693)                                                                                               \
  X(dot_again_l2, 4.299e-08)   /* vectors of the long operand read again for every tile of the short one */          \
  X(dot_again_l3, 6.146)       /* vectors of a short operand beyond L2, read for every block of the long one */      \
  X(dot_fetch, 0.3869)         /* vectors that the streamed variant prefetches, and reads from L3 or memory */       \
  X(dot_fetch_far, 2.752)                                                                                            \
  /* Rows of A times strips of columns of B. */                                                                      \
  X(strip_call, 205.5)                                                                                               \
  X(strip_vector, 1.008)       /* vectors of B multiplied */                                                         \
  X(strip_step, 0.3356)        /* steps along k */                                                                   \
  X(strip_start, 13.76)                                                                                              \
  X(strip_l2, 0.8474)          /* vectors of B if it exceeds L1, L2, a share of L3 */                                \
  X(strip_l3, 2.065)                                                                                                 \
  X(strip_memory, 1.678)                                                                                             \
  X(strip_page, 1.471)         /* steps along a B whose rows are on different pages, from L2 on */                   \
  /* A few rows of A kept in registers. */                                                                           \
  X(small_m_call, 190.7)                                                                                             \
  X(small_m_multiply, 1.11)    /* cycles of a strip's steps */                                                       \
  X(small_m_start, 5.302)      /* rows of strips stored */                                                           \
  X(small_m_interleave, 6.5)   /* vectors of C interleaved as they are stored */                                     \
  X(small_m_l2, 0.4404)                                                                                              \
  X(small_m_l3, 2.4)                                                                                                 \
  X(small_m_memory, 2.039)                                                                                           \
  X(small_m_page, 0.6916)                                                                                            \
  /* Whole rows of B. */                                                                                             \
  X(stream_call, 196.4)                                                                                              \
  X(stream_multiply, 1.696)    /* cycles: multiply-adds or loads of vectors of B */                                  \
  X(stream_result, 3.034e-07)  /* vectors of C read and written for every block of rows of B */                      \
  X(stream_start, 40.98)       /* blocks of rows of B */                                                             \
  X(stream_l2, 0.7563)                                                                                               \
  X(stream_l3, 1.643)                                                                                                \
  X(stream_memory, 1.566)                                                                                            \
  /* Sums split over accumulators; sums of a few terms; up to four columns. */                                       \
  X(split_call, 181.5)                                                                                               \
  X(split_multiply, 1.086)                                                                                           \
  X(split_l2, 0.8281)          /* rows of B that exceed L1, L2 */                                                    \
  X(split_l3, 0.372)                                                                                                 \
  X(short_call, 222.3)                                                                                               \
  X(short_multiply, 0.4645)                                                                                          \
  X(short_store, 2.107)        /* vectors of C */                                                                    \
  X(short_row, 0.3093)         /* rows of strips */                                                                  \
  X(short_start, 1.87)         /* strips, for which B is loaded into registers */                                    \
  X(short_far, 0.2444)         /* vectors of C if it exceeds L2 */                                                   \
  X(narrow_call, 216.1)                                                                                              \
  X(narrow_step, 1.165)        /* steps of groups of rows */                                                         \
  X(narrow_group, 5.836)                                                                                             \
  X(narrow_copy, 11.29)        /* rows of B written side by side */
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

// The sinks of counting functions: the predicted time, or for fitting the counts themselves.
struct CostSum {
  double total = 0;
  void add(Term term, double count) { total += kCost[static_cast<int>(term)] * count; }
};
struct CostCounts {
  double* counts;
  void add(Term term, double count) { counts[static_cast<int>(term)] += count; }
};

}  // namespace tw
