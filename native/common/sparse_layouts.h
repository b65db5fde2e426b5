// The layouts of a PackedSparse. Each is packed at its first use, from one that exists.
#pragma once

#include "common/sparse_matrix.h"
#include "common/sparse_strip_pack.h"

namespace tw {

struct PackedSparse::Layouts {
  Lazy<Cells> cells;          // a few vectors
  Lazy<Tiles> tiles;          // batches
  Lazy<PackedStrips> strips;  // a few vectors without the permutes of AVX-512
  std::mutex plans_mutex;
  std::vector<std::shared_ptr<const ConvPlan>> plans;
};

// Returns a packed layout, which is created at its first use; safe to call from several threads.
template <class Layout>
const Layout& PackedSparse::packed(Lazy<Layout>& lazy) const {
  if (const Layout* layout = lazy.ready.load()) return *layout;
  std::lock_guard<std::mutex> lock(lazy.mutex);
  if (!lazy.layout) {
    Buffer<float> dense(static_cast<std::size_t>(rows_ * columns_));
    to_dense(dense.data());
    lazy.layout = std::make_unique<Layout>(dense.data(), rows_, columns_);
    lazy.ready.store(lazy.layout.get());
  }
  return *lazy.layout;
}

}  // namespace tw
