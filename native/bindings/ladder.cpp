// Python bindings of the ladder's lower rungs: two C-contiguous float32 matrices in, a new one out.
#include "common/ladder.h"

#include "bindings/arrays.h"

namespace tw {
namespace {

template <class Run>
nb::object product(nb::handle a, nb::handle b, Run&& run) {
  const auto lhs = view_of<float>(a, 2, "a"), rhs = view_of<float>(b, 2, "b");
  check(lhs.dim(1) == rhs.dim(0), "the ladder takes two matrices that fit together");
  const NewArray<float> out = new_array({lhs.dim(0), rhs.dim(1)});
  without_gil(true, [&] { run(lhs.data, rhs.data, out.data, lhs.dim(0), rhs.dim(1), lhs.dim(1)); });
  return out.object;
}

nb::object blocked(nb::handle a, nb::handle b, int64_t block_m, int64_t block_n, int64_t block_k) {
  check(block_m >= 1 && block_n >= 1 && block_k >= 1, "a block has at least one row and column");
  return product(a, b, [&](const float* x, const float* y, float* z, int64_t m, int64_t n, int64_t k) {
    ladder_blocked(x, y, z, m, n, k, block_m, block_n, block_k);
  });
}

}  // namespace

void bind_ladder(nb::module_& m) {
  m.def("ladder_naive", [](nb::handle a, nb::handle b) { return product(a, b, ladder_naive); });
  m.def("ladder_reordered", [](nb::handle a, nb::handle b) { return product(a, b, ladder_reordered); });
  m.def("ladder_blocked", blocked, nb::arg("a"), nb::arg("b"), nb::arg("block_m"), nb::arg("block_n"),
        nb::arg("block_k"));
  m.def("ladder_packed", [](nb::handle a, nb::handle b) { return product(a, b, ladder_packed); });
}

}  // namespace tw
