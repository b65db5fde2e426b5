// Fills the NumPy API table that the other binding files use (numpy_api.h).
#define TILEWISE_FILLS_NUMPY_API
#include "bindings/numpy_api.h"

namespace tw {

bool import_numpy() { return _import_array() >= 0; }

}  // namespace tw
