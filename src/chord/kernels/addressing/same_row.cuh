// For addressing types whose output rows are their input rows.
#pragma once

#include <chord/kernels/ptx/sync.cuh>

namespace chord {

// Returns `row`. Around a smaller body ptxas unrolls prefill's loop over the rows of a tile, and
// with block_m = 176 the loader then spills; it leaves a loop with a division alone. Indexed has a
// division there too, once a row and tile.
__forceinline__ int same_row(int row) { return row / ptx::opaque(1); }

}  // namespace chord
