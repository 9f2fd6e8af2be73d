/* The driver, found as NCCL finds it: dlopen, dlsym of cuGetProcAddress, and by that everything else. So a library that was
 * preloaded before the driver sees these calls. */
#include "comm.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef LIMOSA_OLD /* a release, for older C libraries; not for all sources of one, as the shim has a dlsym of its own */
LIMOSA_OLD(dlsym, LIMOSA_BASE);
#endif

#define FOR_CUDA 12000 /* the version whose functions are meant */

struct driver_calls cuda;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static bool loaded;

ncclResult_t driver_said(const char *name, CUresult result)
{
    if (result == CUDA_SUCCESS)
        return ncclSuccess;
    say("%s answered %d", name, (int)result);
    return ncclUnhandledCudaError;
}

static ncclResult_t load(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    __typeof__(&cuGetProcAddress_v2) find = library ? (__typeof__(find))dlsym(library, "cuGetProcAddress_v2") : NULL;
    CUdriverProcAddressQueryResult status;

    if (!find) {
        say("there is no libcuda.so.1 with cuGetProcAddress_v2");
        return ncclSystemError;
    }
#define FIND(name, declared)                                                                                           \
    if (find(#name, (void **)&cuda.name, FOR_CUDA, 0, &status) != CUDA_SUCCESS || !cuda.name) {                        \
        say("the driver has no " #name);                                                                               \
        return ncclSystemError;                                                                                        \
    }
    DRIVER_CALLS(FIND)
#undef FIND
    return ncclSuccess;
}

ncclResult_t driver_load(void)
{
    pthread_mutex_lock(&mutex);
    ncclResult_t result = loaded ? ncclSuccess : load();
    loaded = result == ncclSuccess;
    pthread_mutex_unlock(&mutex);
    return result == ncclSuccess ? CUDA_TRY(cuInit, 0) : result;
}

ncclResult_t driver_context(CUcontext *context, CUdevice *device)
{
    ncclResult_t result = driver_load();

    *context = NULL;
    if (result == ncclSuccess)
        result = CUDA_TRY(cuCtxGetCurrent, context);
    if (result == ncclSuccess && !*context) {
        result = CUDA_TRY(cuDeviceGet, device, 0);
        if (result == ncclSuccess)
            result = CUDA_TRY(cuDevicePrimaryCtxRetain, context, *device);
        if (result == ncclSuccess)
            result = CUDA_TRY(cuCtxSetCurrent, *context);
    }
    return result == ncclSuccess ? CUDA_TRY(cuCtxGetDevice, device) : result;
}

ncclResult_t driver_map(CUmemGenericAllocationHandle handle, CUdevice device, size_t bytes, CUdeviceptr *address)
{
    CUmemAccessDesc access = {.location = {CU_MEM_LOCATION_TYPE_DEVICE, device},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr at = 0;
    ncclResult_t result = CUDA_TRY(cuMemAddressReserve, &at, bytes, 0, 0, 0);

    if (result != ncclSuccess)
        return result;
    result = CUDA_TRY(cuMemMap, at, bytes, 0, handle, 0);
    if (result != ncclSuccess) {
        cuda.cuMemAddressFree(at, bytes);
        return result;
    }
    result = CUDA_TRY(cuMemSetAccess, at, bytes, &access, 1);
    if (result != ncclSuccess)
        driver_unmap(at, bytes);
    else
        *address = at;
    return result;
}

void driver_unmap(CUdeviceptr address, size_t bytes)
{
    cuda.cuMemUnmap(address, bytes);
    cuda.cuMemAddressFree(address, bytes);
}

ncclResult_t driver_memory(CUdevice device, size_t bytes, CUdeviceptr *address, CUmemGenericAllocationHandle *handle)
{
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
    CUmemGenericAllocationHandle made;
    ncclResult_t result = CUDA_TRY(cuMemCreate, &made, bytes, &prop, 0);

    if (result != ncclSuccess)
        return result;
    result = driver_map(made, device, bytes, address);
    if (result == ncclSuccess && handle)
        *handle = made;
    else
        cuda.cuMemRelease(made);
    return result;
}
