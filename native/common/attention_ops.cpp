#include "common/attention_ops.h"

#include "common/thread_blocks.h"
#include "common/thread_pool.h"

namespace tw {
namespace {

// Returns this thread's attention scratch memory, a few hundred kilobytes.
float* workspace(int64_t floats) { return thread_scratch<float>(Scratch::attention, floats); }

int64_t offset(HeadStrides s, int64_t b, int64_t h) { return b * s.batch + h * s.head; }

// Returns head h of example b.
AttentionHead head_of(const AttentionBatch& p, int64_t b, int64_t h) {
  AttentionHead head = p.first;
  head.q.data += offset(p.q, b, h);
  head.k.data += offset(p.k, b, h);
  head.v.data += offset(p.v, b, h);
  if (head.mask_kind == MaskKind::additive) {
    head.mask = static_cast<const float*>(head.mask) + offset(p.mask, b, h);
  } else if (head.mask_kind == MaskKind::boolean) {
    head.mask = static_cast<const unsigned char*>(head.mask) + offset(p.mask, b, h);
  }
  return head;
}

StridedRows at(BatchRows r, int64_t b, int64_t h) { return {r.rows.data + offset(r.strides, b, h), r.rows.stride}; }
RowsOut at(BatchRowsOut r, int64_t b, int64_t h) { return {r.rows.data + offset(r.strides, b, h), r.rows.stride}; }

}  // namespace

// Computes attention in one task per head and block of queries.
void attention_forward(const AttentionBatch& problem, BatchRowsOut out, float* logsumexp) {
  const AttentionKernels& kernels = active_attention();
  const AttentionHead& shape = problem.first;
  const int64_t blocks = (shape.queries + kernels.queries_per_block - 1) / kernels.queries_per_block;
  const int64_t floats = kernels.forward_workspace(shape.dim, shape.value_dim);
  parallel_near(static_cast<int>(problem.batch * problem.heads * blocks), [&](int task) {
    const int64_t pair = task / blocks, b = pair / problem.heads, h = pair % problem.heads;
    const int64_t at_block = task % blocks, first = shape.queries * at_block / blocks,
                  last = shape.queries * (at_block + 1) / blocks;
    kernels.forward(head_of(problem, b, h), first, last, at(out, b, h),
                    logsumexp == nullptr ? nullptr : logsumexp + pair * shape.queries, workspace(floats));
  });
}

// Computes the gradients of attention in one task per head, from the result and its logsumexp.
void attention_backward(const AttentionBatch& problem, BatchRows gout, BatchRows out, const float* logsumexp,
                        BatchRowsOut gq, BatchRowsOut gk, BatchRowsOut gv) {
  const AttentionKernels& kernels = active_attention();
  const AttentionHead& shape = problem.first;
  const int64_t floats = kernels.backward_workspace(shape.queries, shape.dim, shape.value_dim);
  parallel_for(static_cast<int>(problem.batch * problem.heads), [&](int task) {
    const int64_t b = task / problem.heads, h = task % problem.heads;
    kernels.backward(head_of(problem, b, h), at(gout, b, h), at(out, b, h), logsumexp + task * shape.queries,
                     at(gq, b, h), at(gk, b, h), at(gv, b, h), workspace(floats));
  });
}

}  // namespace tw
