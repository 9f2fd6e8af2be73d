/* Binds memory of its own by functions that came after CUDA 13.0; lives until its input ends. */
#include "driver_api.h"

#include <dlfcn.h>
#include <stdio.h>

typedef int bind_memory(unsigned long, int, size_t, CUhandle, size_t, size_t, unsigned long long);
typedef int bind_address(unsigned long, int, size_t, CUdeviceptr, size_t, unsigned long long);

int main(int argc, char **argv)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(library, "cuInit");
    cuMemCreate_type *create = (cuMemCreate_type *)dlsym(library, "cuMemCreate");
    CUmemAllocationProp prop = {.type = ALLOCATION_PINNED, .location = {LOCATION_DEVICE, 0}};
    CUhandle handle = 0;

    if (argc < 3 || init(0) || create(&handle, 2 << 20, &prop, 0))
        return 1;
    bind_memory *memory = (bind_memory *)dlsym(library, argv[1]);
    bind_address *address = (bind_address *)dlsym(library, argv[2]);
    printf("%d %d %d\n", handle == 77, memory(5, 1, 2, handle, 3, 4, 6), address(5, 1, 2, 3, 4, 6));
    fflush(stdout);
    getchar();
    return 0;
}
