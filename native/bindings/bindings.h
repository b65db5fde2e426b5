// Shared by the binding files. Bindings guarantee that a kernel never touches memory outside its arguments. Shapes,
// dtypes, contiguity and writability are checked here, before the GIL is released; a violation raises ValueError or
// TypeError with one sentence.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

namespace tw {

namespace nb = nanobind;

// C-contiguous float32 on the CPU; nanobind refuses anything else without copying when the argument is .noconvert().
using FloatArray = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using FloatOut = nb::ndarray<float, nb::c_contig, nb::device::cpu>;

void bind_runtime(nb::module_& m);
void bind_probe(nb::module_& m);
void bind_rows(nb::module_& m);
void bind_training(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_gemm(nb::module_& m);
void bind_memory(nb::module_& m);
void bind_conv(nb::module_& m);
void bind_tile_table(nb::module_& m);
void bind_pool(nb::module_& m);
void bind_int8(nb::module_& m);
void bind_blocks(nb::module_& m);
void bind_graph(nb::module_& m);
void bind_decoder(nb::module_& m);
void bind_sparse(nb::module_& m);
void bind_ladder(nb::module_& m);
void bind_sage(nb::module_& m);
void bind_ranker_rows(nb::module_& m);

}  // namespace tw
