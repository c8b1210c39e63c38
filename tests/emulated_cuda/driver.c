/* Tells PyTorch's device guard and autograd engine that there is one CUDA device; no kernel and no copy gets here.
 *
 * Built as a shared library named libcuda.so.1 and loaded before PyTorch's own CUDA libraries (LD_PRELOAD). */
#include <stddef.h>

typedef void *Stream;

int cudaGetDeviceCount(int *number) { *number = 1; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaSetDevice(int device) { return 0; }
int cudaGetLastError(void) { return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = *greatest = 0; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 0; return 0; }
int cudaLaunchKernel(const void *kernel, ...) { return 98; } /* invalid device function */
int cudaMalloc(void **memory, size_t size) { return 2; }     /* out of memory */
