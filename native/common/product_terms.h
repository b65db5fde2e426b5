// The terms of the cost of a product's configuration: predicted time = sum of coefficient x count, in arbitrary units.
// Counts are those of one call on the busiest thread. `python -m tools.fit_products --write` fits the coefficients to
// the timings in tools/data and writes them into this file. Those of the tiled loops were fitted to 40,000 timings of
// 1,660 products, of which tools/data has a part; the others are fitted to them.
#pragma once

namespace tw {

// clang-format off
#define TW_COST_TERMS(X)                                                                                             \
  /* The tiled loops. */                                                                                             \
  X(tile_multiply, 0.6991)     /* cycles of a micro-tile's step: multipliers, loads or a multiply-add's latency */   \
  X(tile_load, 0.2464)         /* half a load of A or B */                                                           \
  X(tile_latency, 0.0005209)   /* steps of a micro-tile with fewer accumulators than keep two multipliers busy */    \
  X(micro_tile, 12.03)         /* starting and ending a micro-tile */                                                \
  X(result_row, 5.509)         /* rows of micro-tiles that are stored, once per block of k */                        \
  X(result_again, 4.808)       /* vectors of C that a further block of k reads and adds to */                        \
  X(result_far, 0.005596)      /* rows of micro-tiles stored to a block of C that exceeds half of L2 */              \
  X(b_from_l2, 0.2136)         /* vectors of B read for a strip that exceeds three quarters of L1 */                 \
  X(b_from_l3, 0.743)          /* vectors of B read for every block of rows, if a block of k exceeds half of L2 */   \
  X(pack_b, 4.11)              /* vectors of B packed */                                                             \
  X(pack_b_transposed, 4.093)                                                                                        \
  X(pack_a, 4.561)             /* vectors of A packed, where its rows are contiguous and where its columns are */    \
  X(pack_a_transposed, 5.857)                                                                                        \
  X(share_b, 2380)             /* a second round of tasks, in which all threads pack B */                            \
  X(b_page, 0.6485)            /* steps along an unpacked B whose rows are on different pages */                     \
  X(b_same_set, 1.918)         /* ... whose rows fall into one set of L1 */                                          \
  X(b_two_sets, 0.01602)                                                                                             \
  X(a_lines, 0.766)            /* cache lines read along an unpacked transposed A */                                 \
  X(a_across, 2.012)           /* steps along it whose columns are on different pages */                             \
  X(a_same_set, 1.5)           /* vectors of an unpacked A in one set of L1 */                                       \
  X(task, 1.252e+04)           /* a task of the busiest thread */                                                    \
  X(a_from_l3, 0.8269)         /* vectors of A read for every strip, if a block of rows exceeds half of L2 */        \
  /* Around the loops. */                                                                                            \
  X(tile_call, 369)            /* a call of the tiled path */                                                        \
  X(pack_b_part, 62.09)        /* blocks of a transposed B, packed by vectors, past the last whole vector of k */    \
  X(tile_l2, 0.586)            /* vectors of A, B and C if together they exceed L1, L2, a share of L3 */             \
  X(tile_l3, 1.9)                                                                                                    \
  X(tile_memory, 1.538)                                                                                              \
  /* Copies before and after. */                                                                                     \
  X(copy_strided, 0.9299)      /* elements copied one by one */                                                      \
  X(transpose_call, 47.86)     /* an operand or a result transposed */                                               \
  X(transpose_narrow, 0.529)   /* elements of matrices with a few rows or half a vector of columns */                \
  X(transpose_block, 7.678)    /* vectors of square blocks */                                                        \
  X(transposed_page, 0.1174)   /* steps of transposed tiles along a B whose rows are on different pages */           \
  X(transposed_set, 1.428)     /* ... whose rows fall into one or two sets of L1 */                                  \
  /* Inner products. */                                                                                              \
  X(dot_call, 336.3)                                                                                                 \
  X(dot_multiply, 0.9285)      /* cycles: multiply-adds or loads of tiles of inner products */                       \
  X(dot_tile, 8.577)                                                                                                 \
  X(dot_sum, 1.768)            /* results, whose lanes are added up */                                               \
  X(dot_short, 2.209)          /* results of a few terms, added up for a vector of them at once */                   \
  X(dot_scalar, 0.9286)        /* terms of such results, one by one */                                               \
  X(dot_l2, 0.1325)            /* vectors of the long operand that exceeds L1, L2, a share of L3 */                  \
  X(dot_l3, 2.226)                                                                                                   \
  X(dot_memory, 2.81)                                                                                                \
  X(dot_again_l2, 3.971e-08)   /* vectors of the long operand read again for every tile of the short one */          \
  X(dot_again_l3, 5.341)       /* vectors of a short operand beyond L2, read for every block of the long one */      \
  X(dot_fetch, 0.3845)         /* vectors that the streamed variant prefetches, and reads from L3 or memory */       \
  X(dot_fetch_far, 2.897)                                                                                            \
  /* Rows of A times strips of columns of B. */                                                                      \
  X(strip_call, 274.9)                                                                                               \
  X(strip_vector, 0.9487)      /* vectors of B multiplied */                                                         \
  X(strip_step, 0.3431)        /* steps along k */                                                                   \
  X(strip_start, 12.8)                                                                                               \
  X(strip_l2, 0.6448)          /* vectors of B if it exceeds L1, L2, a share of L3 */                                \
  X(strip_l3, 2.197)                                                                                                 \
  X(strip_memory, 2.504)                                                                                             \
  X(strip_page, 1.229)         /* steps along a B whose rows are on different pages, from L2 on */                   \
  /* A few rows of A kept in registers. */                                                                           \
  X(small_m_call, 272.6)                                                                                             \
  X(small_m_multiply, 0.988)   /* cycles of a strip's steps */                                                       \
  X(small_m_start, 6.676)      /* rows of strips stored */                                                           \
  X(small_m_interleave, 5.773) /* vectors of C interleaved as they are stored */                                     \
  X(small_m_l2, 0.3302)                                                                                              \
  X(small_m_l3, 1.776)                                                                                               \
  X(small_m_memory, 2.758)                                                                                           \
  X(small_m_page, 1.011)                                                                                             \
  X(small_m_set, 16.31)        /* steps along a B whose rows fall into one set of L1 */                              \
  /* Whole rows of B. */                                                                                             \
  X(stream_call, 284)                                                                                                \
  X(stream_multiply, 1.591)    /* cycles: multiply-adds or loads of vectors of B */                                  \
  X(stream_result, 2.994e-07)  /* vectors of C read and written for every block of rows of B */                      \
  X(stream_start, 36.13)       /* blocks of rows of B */                                                             \
  X(stream_l2, 0.5851)                                                                                               \
  X(stream_l3, 1.916)                                                                                                \
  X(stream_memory, 2.279)                                                                                            \
  /* Sums split over accumulators; sums of a few terms; up to four columns. */                                       \
  X(split_call, 265)                                                                                                 \
  X(split_multiply, 1.004)                                                                                           \
  X(split_l2, 0.6599)          /* rows of B that exceed L1, L2 */                                                    \
  X(split_l3, 0.372)                                                                                                 \
  X(short_call, 308.6)                                                                                               \
  X(short_multiply, 0.4339)                                                                                          \
  X(short_store, 1.829)        /* vectors of C */                                                                    \
  X(short_row, 0.2921)         /* rows of strips */                                                                  \
  X(short_start, 2.121)        /* strips, for which B is loaded into registers */                                    \
  X(short_far, 0.9599)         /* vectors of C if it exceeds L2 */                                                   \
  X(narrow_call, 310.2)                                                                                              \
  X(narrow_step, 1.175)        /* steps of groups of rows */                                                         \
  X(narrow_group, 5.032)                                                                                             \
  X(narrow_copy, 7.432)        /* rows of B written side by side */
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
