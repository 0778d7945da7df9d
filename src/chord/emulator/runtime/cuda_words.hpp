// The words of CUDA C++ that kernels use and a host compiler does not know. Included before
// everything else.
#pragma once

#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
