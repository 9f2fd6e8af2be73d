/* Streams, events, copies, memsets and callbacks. */
#ifndef LIMOSA_API_STREAM_H
#define LIMOSA_API_STREAM_H

#define CU_STREAM_LEGACY ((CUstream)0x1)
#define CU_STREAM_PER_THREAD ((CUstream)0x2)

typedef enum CUstream_flags_enum { CU_STREAM_DEFAULT = 0, CU_STREAM_NON_BLOCKING = 1 } CUstream_flags;

typedef enum CUevent_flags_enum {
    CU_EVENT_DEFAULT = 0,
    CU_EVENT_BLOCKING_SYNC = 1,
    CU_EVENT_DISABLE_TIMING = 2,
    CU_EVENT_INTERPROCESS = 4
} CUevent_flags;

typedef enum CUstreamCaptureStatus_enum {
    CU_STREAM_CAPTURE_STATUS_NONE = 0,
    CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
    CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2
} CUstreamCaptureStatus;

typedef enum CUstreamCaptureMode_enum {
    CU_STREAM_CAPTURE_MODE_GLOBAL = 0,
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
    CU_STREAM_CAPTURE_MODE_RELAXED = 2
} CUstreamCaptureMode;

typedef void (*CUstreamCallback)(CUstream stream, CUresult status, void *data);
typedef void (*CUhostFn)(void *data);

typedef struct CUDA_MEMCPY2D_st {
    size_t srcXInBytes;
    size_t srcY;
    CUmemorytype srcMemoryType;
    const void *srcHost;
    CUdeviceptr srcDevice;
    CUarray srcArray;
    size_t srcPitch;
    size_t dstXInBytes;
    size_t dstY;
    CUmemorytype dstMemoryType;
    void *dstHost;
    CUdeviceptr dstDevice;
    CUarray dstArray;
    size_t dstPitch;
    size_t WidthInBytes;
    size_t Height;
} CUDA_MEMCPY2D;

typedef struct CUDA_MEMCPY3D_st {
    size_t srcXInBytes;
    size_t srcY;
    size_t srcZ;
    size_t srcLOD;
    CUmemorytype srcMemoryType;
    const void *srcHost;
    CUdeviceptr srcDevice;
    CUarray srcArray;
    void *reserved0;
    size_t srcPitch;
    size_t srcHeight;
    size_t dstXInBytes;
    size_t dstY;
    size_t dstZ;
    size_t dstLOD;
    CUmemorytype dstMemoryType;
    void *dstHost;
    CUdeviceptr dstDevice;
    CUarray dstArray;
    void *reserved1;
    size_t dstPitch;
    size_t dstHeight;
    size_t WidthInBytes;
    size_t Height;
    size_t Depth;
} CUDA_MEMCPY3D;

typedef struct CUDA_MEMCPY3D_PEER_st {
    size_t srcXInBytes;
    size_t srcY;
    size_t srcZ;
    size_t srcLOD;
    CUmemorytype srcMemoryType;
    const void *srcHost;
    CUdeviceptr srcDevice;
    CUarray srcArray;
    CUcontext srcContext;
    size_t srcPitch;
    size_t srcHeight;
    size_t dstXInBytes;
    size_t dstY;
    size_t dstZ;
    size_t dstLOD;
    CUmemorytype dstMemoryType;
    void *dstHost;
    CUdeviceptr dstDevice;
    CUarray dstArray;
    CUcontext dstContext;
    size_t dstPitch;
    size_t dstHeight;
    size_t WidthInBytes;
    size_t Height;
    size_t Depth;
} CUDA_MEMCPY3D_PEER;

/* --------------------------------------------------------------------------------------------------- streams --- */

CUresult CUDAAPI cuStreamCreate(CUstream *stream, unsigned int flags);
CUresult CUDAAPI cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority);
CUresult CUDAAPI cuStreamDestroy(CUstream stream);
CUresult CUDAAPI cuStreamDestroy_v2(CUstream stream);
CUresult CUDAAPI cuStreamSynchronize(CUstream stream);
CUresult CUDAAPI cuStreamSynchronize_ptsz(CUstream stream);
CUresult CUDAAPI cuStreamQuery(CUstream stream);
CUresult CUDAAPI cuStreamQuery_ptsz(CUstream stream);
CUresult CUDAAPI cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags);
CUresult CUDAAPI cuStreamWaitEvent_ptsz(CUstream stream, CUevent event, unsigned int flags);
CUresult CUDAAPI cuStreamGetCtx(CUstream stream, CUcontext *context);
CUresult CUDAAPI cuStreamGetCtx_ptsz(CUstream stream, CUcontext *context);
CUresult CUDAAPI cuStreamGetDevice(CUstream stream, CUdevice *device);
CUresult CUDAAPI cuStreamGetDevice_ptsz(CUstream stream, CUdevice *device);
CUresult CUDAAPI cuStreamGetFlags(CUstream stream, unsigned int *flags);
CUresult CUDAAPI cuStreamGetFlags_ptsz(CUstream stream, unsigned int *flags);
CUresult CUDAAPI cuStreamGetPriority(CUstream stream, int *priority);
CUresult CUDAAPI cuStreamGetPriority_ptsz(CUstream stream, int *priority);
CUresult CUDAAPI cuStreamGetId(CUstream stream, unsigned long long *id);
CUresult CUDAAPI cuStreamGetId_ptsz(CUstream stream, unsigned long long *id);
CUresult CUDAAPI cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status);
CUresult CUDAAPI cuStreamIsCapturing_ptsz(CUstream stream, CUstreamCaptureStatus *status);
CUresult CUDAAPI cuStreamAddCallback(CUstream stream, CUstreamCallback callback, void *data, unsigned int flags);
CUresult CUDAAPI cuStreamAddCallback_ptsz(CUstream stream, CUstreamCallback callback, void *data, unsigned int flags);
CUresult CUDAAPI cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data);
CUresult CUDAAPI cuLaunchHostFunc_ptsz(CUstream stream, CUhostFn function, void *data);

/* ---------------------------------------------------------------------------------------------------- events --- */

CUresult CUDAAPI cuEventCreate(CUevent *handle, unsigned int flags);
CUresult CUDAAPI cuEventRecord(CUevent event, CUstream stream);
CUresult CUDAAPI cuEventRecord_ptsz(CUevent event, CUstream stream);
CUresult CUDAAPI cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned int flags);
CUresult CUDAAPI cuEventRecordWithFlags_ptsz(CUevent event, CUstream stream, unsigned int flags);
CUresult CUDAAPI cuEventQuery(CUevent handle);
CUresult CUDAAPI cuEventSynchronize(CUevent handle);
CUresult CUDAAPI cuEventDestroy(CUevent event);
CUresult CUDAAPI cuEventDestroy_v2(CUevent event);
CUresult CUDAAPI cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end);
CUresult CUDAAPI cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end);

/* ---------------------------------------------------------------------------------------------------- copies --- */

CUresult CUDAAPI cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes);
CUresult CUDAAPI cuMemcpy_ptds(CUdeviceptr to, CUdeviceptr from, size_t bytes);
CUresult CUDAAPI cuMemcpyPeer(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
                              size_t bytes);
CUresult CUDAAPI cuMemcpyPeer_ptds(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
                                   size_t bytes);
CUresult CUDAAPI cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes);
CUresult CUDAAPI cuMemcpyHtoD_v2_ptds(CUdeviceptr to, const void *from, size_t bytes);
CUresult CUDAAPI cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes);
CUresult CUDAAPI cuMemcpyDtoH_v2_ptds(void *to, CUdeviceptr from, size_t bytes);
CUresult CUDAAPI cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes);
CUresult CUDAAPI cuMemcpyDtoD_v2_ptds(CUdeviceptr to, CUdeviceptr from, size_t bytes);
CUresult CUDAAPI cuMemcpy2D_v2(const CUDA_MEMCPY2D *copy);
CUresult CUDAAPI cuMemcpy2D_v2_ptds(const CUDA_MEMCPY2D *copy);
CUresult CUDAAPI cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *copy);
CUresult CUDAAPI cuMemcpy2DUnaligned_v2_ptds(const CUDA_MEMCPY2D *copy);
CUresult CUDAAPI cuMemcpy3D_v2(const CUDA_MEMCPY3D *copy);
CUresult CUDAAPI cuMemcpy3D_v2_ptds(const CUDA_MEMCPY3D *copy);
CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream);
CUresult CUDAAPI cuMemcpyAsync_ptsz(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream);
CUresult CUDAAPI cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
                                   size_t bytes, CUstream stream);
CUresult CUDAAPI cuMemcpyPeerAsync_ptsz(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
                                        size_t bytes, CUstream stream);
CUresult CUDAAPI cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream);
CUresult CUDAAPI cuMemcpyHtoDAsync_v2_ptsz(CUdeviceptr to, const void *from, size_t bytes, CUstream stream);
CUresult CUDAAPI cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream);
CUresult CUDAAPI cuMemcpyDtoHAsync_v2_ptsz(void *to, CUdeviceptr from, size_t bytes, CUstream stream);
CUresult CUDAAPI cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream);
CUresult CUDAAPI cuMemcpyDtoDAsync_v2_ptsz(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream);
CUresult CUDAAPI cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *copy, CUstream stream);
CUresult CUDAAPI cuMemcpy2DAsync_v2_ptsz(const CUDA_MEMCPY2D *copy, CUstream stream);
CUresult CUDAAPI cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *copy, CUstream stream);
CUresult CUDAAPI cuMemcpy3DAsync_v2_ptsz(const CUDA_MEMCPY3D *copy, CUstream stream);
CUresult CUDAAPI cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER *copy);
CUresult CUDAAPI cuMemcpy3DPeer_ptds(const CUDA_MEMCPY3D_PEER *copy);
CUresult CUDAAPI cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER *copy, CUstream stream);
CUresult CUDAAPI cuMemcpy3DPeerAsync_ptsz(const CUDA_MEMCPY3D_PEER *copy, CUstream stream);

/* --------------------------------------------------------------------------------------------------- memsets --- */

CUresult CUDAAPI cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t n);
CUresult CUDAAPI cuMemsetD8_v2_ptds(CUdeviceptr to, unsigned char value, size_t n);
CUresult CUDAAPI cuMemsetD16_v2(CUdeviceptr to, unsigned short value, size_t n);
CUresult CUDAAPI cuMemsetD16_v2_ptds(CUdeviceptr to, unsigned short value, size_t n);
CUresult CUDAAPI cuMemsetD32_v2(CUdeviceptr to, unsigned int value, size_t n);
CUresult CUDAAPI cuMemsetD32_v2_ptds(CUdeviceptr to, unsigned int value, size_t n);
CUresult CUDAAPI cuMemsetD2D8_v2(CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height);
CUresult CUDAAPI cuMemsetD2D8_v2_ptds(CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height);
CUresult CUDAAPI cuMemsetD2D16_v2(CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height);
CUresult CUDAAPI cuMemsetD2D16_v2_ptds(CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height);
CUresult CUDAAPI cuMemsetD2D32_v2(CUdeviceptr to, size_t pitch, unsigned int value, size_t width, size_t height);
CUresult CUDAAPI cuMemsetD2D32_v2_ptds(CUdeviceptr to, size_t pitch, unsigned int value, size_t width, size_t height);
CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t n, CUstream stream);
CUresult CUDAAPI cuMemsetD8Async_ptsz(CUdeviceptr to, unsigned char value, size_t n, CUstream stream);
CUresult CUDAAPI cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t n, CUstream stream);
CUresult CUDAAPI cuMemsetD16Async_ptsz(CUdeviceptr to, unsigned short value, size_t n, CUstream stream);
CUresult CUDAAPI cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t n, CUstream stream);
CUresult CUDAAPI cuMemsetD32Async_ptsz(CUdeviceptr to, unsigned int value, size_t n, CUstream stream);
CUresult CUDAAPI cuMemsetD2D8Async(CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height,
                                   CUstream stream);
CUresult CUDAAPI cuMemsetD2D8Async_ptsz(CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height,
                                        CUstream stream);
CUresult CUDAAPI cuMemsetD2D16Async(CUdeviceptr to, size_t pitch, unsigned short value, size_t width, size_t height,
                                    CUstream stream);
CUresult CUDAAPI cuMemsetD2D16Async_ptsz(CUdeviceptr to, size_t pitch, unsigned short value, size_t width,
                                         size_t height, CUstream stream);
CUresult CUDAAPI cuMemsetD2D32Async(CUdeviceptr to, size_t pitch, unsigned int value, size_t width, size_t height,
                                    CUstream stream);
CUresult CUDAAPI cuMemsetD2D32Async_ptsz(CUdeviceptr to, size_t pitch, unsigned int value, size_t width, size_t height,
                                         CUstream stream);

#endif
