/* Memory that is the driver's whatever its size: stream-ordered, managed, arrays. It passes, and is counted, so that
 * whoever plans a move knows what the driver will have to copy. What is freed is not taken off again. */
#include "memory.h"
#include "shim.h"

/* A function of its own for each: what it takes, how much it asks for. */
#define COUNTED(kind, name, bytes, arguments, ...)                                                                     \
    EXPORT CUresult name arguments                                                                                     \
    {                                                                                                                  \
        typedef CUresult type arguments;                                                                               \
        static struct entry *_Atomic known;                                                                            \
        struct entry *entry = atomic_load_explicit(&known, memory_order_relaxed);                                      \
        if (UNLIKELY(!entry)) {                                                                                        \
            entry = entry_of(#name);                                                                                   \
            atomic_store_explicit(&known, entry, memory_order_relaxed);                                                \
        }                                                                                                              \
        type *function = (type *)entry_real(entry);                                                                    \
        if (!function)                                                                                                 \
            return CUDA_ERROR_NO_DEVICE;                                                                               \
        struct reader *reader = gate_enter();                                                                          \
        CUresult result = function(__VA_ARGS__);                                                                       \
        gate_leave(reader);                                                                                            \
        if (!result)                                                                                                   \
            left_add(kind, bytes);                                                                                     \
        return result;                                                                                                 \
    }

#define POOL_ARGUMENTS (CUdeviceptr * pointer, size_t bytes, void *stream)
COUNTED(LEFT_POOL, cuMemAllocAsync, bytes, POOL_ARGUMENTS, pointer, bytes, stream)
COUNTED(LEFT_POOL, cuMemAllocAsync_ptsz, bytes, POOL_ARGUMENTS, pointer, bytes, stream)
#define FROM_ARGUMENTS (CUdeviceptr * pointer, size_t bytes, void *pool, void *stream)
COUNTED(LEFT_POOL, cuMemAllocFromPoolAsync, bytes, FROM_ARGUMENTS, pointer, bytes, pool, stream)
COUNTED(LEFT_POOL, cuMemAllocFromPoolAsync_ptsz, bytes, FROM_ARGUMENTS, pointer, bytes, pool, stream)
#define MANAGED_ARGUMENTS (CUdeviceptr * pointer, size_t bytes, unsigned flags)
COUNTED(LEFT_MANAGED, cuMemAllocManaged, bytes, MANAGED_ARGUMENTS, pointer, bytes, flags)
/* How large an array is only the driver knows: calls are counted. */
#define ARRAY_ARGUMENTS (void **array, const void *descriptor)
COUNTED(LEFT_ARRAY, cuArrayCreate_v2, 0, ARRAY_ARGUMENTS, array, descriptor)
COUNTED(LEFT_ARRAY, cuArray3DCreate_v2, 0, ARRAY_ARGUMENTS, array, descriptor)
#define MIPMAPPED_ARGUMENTS (void **array, const void *descriptor, unsigned levels)
COUNTED(LEFT_ARRAY, cuMipmappedArrayCreate, 0, MIPMAPPED_ARGUMENTS, array, descriptor, levels)

/* The only three functions of the driver that take floating point numbers by value: a hook that hands on words would lose
 * them where it has to look for the real function first. */
EXPORT CUresult cuTexRefSetMipmapLevelBias(void *texture, float bias)
{
    typedef CUresult type(void *, float);
    type *function = (type *)entry_real(entry_of("cuTexRefSetMipmapLevelBias"));

    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    CUresult result = function(texture, bias);
    gate_leave(reader);
    return result;
}

EXPORT CUresult cuTexRefSetMipmapLevelClamp(void *texture, float least, float most)
{
    typedef CUresult type(void *, float, float);
    type *function = (type *)entry_real(entry_of("cuTexRefSetMipmapLevelClamp"));

    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    CUresult result = function(texture, least, most);
    gate_leave(reader);
    return result;
}

EXPORT CUresult cuParamSetf(void *function, int offset, float value)
{
    typedef CUresult type(void *, int, float);
    type *set = (type *)entry_real(entry_of("cuParamSetf"));

    if (!set)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    CUresult result = set(function, offset, value);
    gate_leave(reader);
    return result;
}
