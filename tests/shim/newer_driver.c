/* A libcuda.so.1 that has what the shim needs, each of which does nothing, functions that are newer than CUDA 13.0 and
 * take handles, and two that nobody knows. */
#define cuMemCreate cuMemCreate_that_does_nothing
#include "driver_api.h"

#define F(name, arguments)                                                                                             \
    int name(void)                                                                                                     \
    {                                                                                                                  \
        return 0;                                                                                                      \
    }
DRIVER_FUNCTIONS(F)
#undef cuMemCreate

#define HANDLE 77 /* the one memory that there is */

int cuMemCreate(unsigned long long *handle, size_t bytes, const void *prop, unsigned long long flags)
{
    *handle = HANDLE;
    return 0;
}

int cuMulticastBindMem_v2(unsigned long long object, int device, size_t at, unsigned long long handle, size_t offset,
                          size_t bytes, unsigned long long flags)
{
    return object == 5 && device == 1 && at == 2 && handle == HANDLE && offset == 3 && bytes == 4 && flags == 6 ? 0
                                                                                                                : 400;
}

int cuMulticastBindAddr_v2(unsigned long long object, int device, size_t at, unsigned long long pointer, size_t bytes,
                           unsigned long long flags)
{
    return object == 5 && device == 1 && at == 2 && pointer == 3 && bytes == 4 && flags == 6 ? 0 : 400;
}

int cuLogicalEndpointBindMem(unsigned endpoint, int device, unsigned long long at, unsigned long long handle,
                             unsigned long long offset, unsigned long long bytes, unsigned long long flags)
{
    return endpoint == 5 && device == 1 && at == 2 && handle == HANDLE && offset == 3 && bytes == 4 && flags == 6 ? 0
                                                                                                                  : 400;
}

int cuLogicalEndpointBindAddr(unsigned endpoint, int device, unsigned long long at, void *pointer,
                              unsigned long long bytes, unsigned long long flags)
{
    return endpoint == 5 && device == 1 && at == 2 && pointer == (void *)3 && bytes == 4 && flags == 6 ? 0 : 400;
}

int cuMemAllocOfTheYearAfter(int n)
{
    return 2 * n;
}

int cuFetchOfTheYearAfter(int n)
{
    return n;
}
