/* The few declarations of cuda.h that the shim needs, in its own words: it is built without CUDA. tests/shim compares
 * them with NVIDIA's header. */
#ifndef LIMOSA_DRIVER_API_H
#define LIMOSA_DRIVER_API_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef void *CUcontext;
typedef uint64_t CUhandle; /* CUmemGenericAllocationHandle */

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
};

enum { LOCATION_DEVICE = 1 };
enum { ALLOCATION_PINNED = 1 };
enum { HANDLE_POSIX_FD = 1 };
enum { ACCESS_NONE = 0, ACCESS_READ = 1, ACCESS_READWRITE = 3 };
enum { CAPTURE_MODE_RELAXED = 2 };
enum { DEVICE_PCI_BUS = 33, DEVICE_PCI_SLOT = 34, DEVICE_PCI_DOMAIN = 50 };

typedef struct {
    int type, id;
} CUmemLocation;

typedef struct {
    int type, requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType, gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;

typedef struct {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;

/* Each real function that the shim calls itself. */
#define DRIVER_FUNCTIONS(F)                                                                                            \
    F(cuMemAlloc_v2, (CUdeviceptr *, size_t))                                                                          \
    F(cuMemAllocPitch_v2, (CUdeviceptr *, size_t *, size_t, size_t, unsigned))                                         \
    F(cuMemFree_v2, (CUdeviceptr))                                                                                     \
    F(cuMemGetAddressRange_v2, (CUdeviceptr *, size_t *, CUdeviceptr))                                                 \
    F(cuPointerGetAttribute, (void *, int, CUdeviceptr))                                                               \
    F(cuPointerGetAttributes, (unsigned, int *, void **, CUdeviceptr))                                                 \
    F(cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long))                           \
    F(cuMemAddressFree, (CUdeviceptr, size_t))                                                                         \
    F(cuMemCreate, (CUhandle *, size_t, const CUmemAllocationProp *, unsigned long long))                              \
    F(cuMemRelease, (CUhandle))                                                                                        \
    F(cuMemMap, (CUdeviceptr, size_t, size_t, CUhandle, unsigned long long))                                           \
    F(cuMemUnmap, (CUdeviceptr, size_t))                                                                               \
    F(cuMemSetAccess, (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t))                                          \
    F(cuMemExportToShareableHandle, (void *, CUhandle, int, unsigned long long))                                       \
    F(cuMemImportFromShareableHandle, (CUhandle *, void *, int))                                                       \
    F(cuMemGetAllocationPropertiesFromHandle, (CUmemAllocationProp *, CUhandle))                                       \
    F(cuMemGetAllocationGranularity, (size_t *, const CUmemAllocationProp *, int))                                     \
    F(cuMemRetainAllocationHandle, (CUhandle *, void *))                                                               \
    F(cuCtxGetCurrent, (CUcontext *))                                                                                  \
    F(cuCtxSetCurrent, (CUcontext))                                                                                    \
    F(cuCtxGetDevice, (CUdevice *))                                                                                    \
    F(cuCtxSynchronize, (void))                                                                                        \
    F(cuCtxGetLimit, (size_t *, int))                                                                                  \
    F(cuCtxSetLimit, (int, size_t))                                                                                    \
    F(cuCtxEnablePeerAccess, (CUcontext, unsigned))                                                                    \
    F(cuCtxDisablePeerAccess, (CUcontext))                                                                             \
    F(cuCtxCreate_v2, (CUcontext *, unsigned, CUdevice))                                                               \
    F(cuCtxCreate_v3, (CUcontext *, void *, int, unsigned, CUdevice))                                                  \
    F(cuCtxDestroy_v2, (CUcontext))                                                                                    \
    F(cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice))                                                               \
    F(cuDevicePrimaryCtxRelease_v2, (CUdevice))                                                                        \
    F(cuDevicePrimaryCtxReset_v2, (CUdevice))                                                                          \
    F(cuDevicePrimaryCtxGetState, (CUdevice, unsigned *, int *))                                                       \
    F(cuDeviceGetUuid_v2, (void *, CUdevice))                                                                          \
    F(cuDeviceGetCount, (int *))                                                                                       \
    F(cuThreadExchangeStreamCaptureMode, (int *))                                                                      \
    F(cuInit, (unsigned))
#define F(name, arguments) typedef CUresult name##_type arguments;
DRIVER_FUNCTIONS(F)
#undef F

#endif
