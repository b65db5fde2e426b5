// The Python module tilewise._native: one bind_<family> function per kernel family, each in its own file.
#include "bindings/arrays.h"
#include "common/isa.h"

NB_MODULE(_native, m) {
  m.doc() = "Compiled kernels of tilewise; use tilewise.backend, which checks and routes.";
  if (!tw::any_isa()) {
    throw nanobind::import_error("the compiled kernels are for another CPU's instruction set; compile them again here");
  }
  tw::import_numpy();
  nanobind::set_leak_warnings(false);  // a model held until the interpreter ends is not a leak
  tw::bind_runtime(m);
  tw::bind_probe(m);
  tw::bind_rows(m);
  tw::bind_training(m);
  tw::bind_attention(m);
  tw::bind_gemm(m);
  tw::bind_memory(m);
  tw::bind_conv(m);
  tw::bind_tile_table(m);
  tw::bind_pool(m);
  tw::bind_int8(m);
  tw::bind_blocks(m);
  tw::bind_graph(m);
  tw::bind_decoder(m);
  tw::bind_sparse(m);
  tw::bind_ladder(m);
  tw::bind_sage(m);
  tw::bind_ranker_rows(m);
}
