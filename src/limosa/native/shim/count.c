/* Memory that is the driver's whatever its size: stream-ordered, managed, arrays, small pieces. It passes, and is counted
 * while it is there, so that whoever plans a move knows what the driver will have to copy. */
#include "late.h"
#include "memory.h"
#include "reach.h"
#include "shim.h"

#include <stdlib.h>
#include <string.h>

struct left_piece {
    struct left_piece *next;
    uint64_t key;
    size_t bytes;
    CUcontext context; /* goes with it; NULL: with none */
    enum left kind;
};

/* Many threads allocate at once: a lock for each part of the table, held for a few instructions. */
#define PARTS 64
#define ROWS 256
static struct part {
    pthread_mutex_t lock;
    struct left_piece *rows[ROWS];
} parts[PARTS];
static pthread_once_t once = PTHREAD_ONCE_INIT;
static uint64_t pieces[LEFT_KINDS], bytes_of[LEFT_KINDS];

static void unlocked(void)
{
    for (struct part *part = parts; part < parts + PARTS; part++)
        pthread_mutex_init(&part->lock, NULL);
}

static uint64_t mixed(uint64_t key)
{
    return key * 0x9e3779b97f4a7c15ull >> 40;
}

static void count(enum left kind, uint64_t n, uint64_t bytes)
{
    __atomic_fetch_add(&pieces[kind], n, __ATOMIC_RELAXED);
    __atomic_fetch_add(&bytes_of[kind], bytes, __ATOMIC_RELAXED);
}

static void put(struct left_piece *piece)
{
    uint64_t at = mixed(piece->key);
    struct part *part = &parts[at % PARTS];
    struct left_piece **row = &part->rows[at / PARTS % ROWS];

    pthread_once(&once, unlocked);
    pthread_mutex_lock(&part->lock);
    piece->next = *row;
    *row = piece;
    pthread_mutex_unlock(&part->lock);
    count(piece->kind, 1, piece->bytes);
}

void left_add(enum left kind, uint64_t key, size_t bytes, CUcontext context)
{
    struct left_piece *piece = malloc(sizeof *piece);

    if (!piece)
        return; /* not counted: it is there all the same */
    *piece = (struct left_piece){.key = key, .bytes = bytes, .context = context, .kind = kind};
    put(piece);
}

struct left_piece *left_take(uint64_t key)
{
    uint64_t at = mixed(key);
    struct part *part = &parts[at % PARTS];
    struct left_piece *piece = NULL;

    pthread_once(&once, unlocked);
    pthread_mutex_lock(&part->lock);
    for (struct left_piece **row = &part->rows[at / PARTS % ROWS]; *row; row = &(*row)->next)
        if ((*row)->key == key) {
            piece = *row;
            *row = piece->next;
            break;
        }
    pthread_mutex_unlock(&part->lock);
    if (piece)
        count(piece->kind, -(uint64_t)1, -(uint64_t)piece->bytes);
    return piece;
}

void left_gone(struct left_piece *piece)
{
    free(piece);
}

void left_again(struct left_piece *piece)
{
    if (piece)
        put(piece);
}

void left_call(enum left kind)
{
    count(kind, 1, 0);
}

void left_context_gone(CUcontext context)
{
    pthread_once(&once, unlocked);
    for (struct part *part = parts; part < parts + PARTS; part++) {
        pthread_mutex_lock(&part->lock);
        for (int i = 0; i < ROWS; i++)
            for (struct left_piece **row = &part->rows[i]; *row;) {
                struct left_piece *piece = *row;
                if (piece->context != context) {
                    row = &piece->next;
                    continue;
                }
                *row = piece->next;
                count(piece->kind, -(uint64_t)1, -(uint64_t)piece->bytes);
                free(piece);
            }
        pthread_mutex_unlock(&part->lock);
    }
}

void left_begin_again(void)
{
    unlocked();
    for (struct part *part = parts; part < parts + PARTS; part++)
        memset(part->rows, 0, sizeof part->rows); /* what another thread was changing is not looked at */
    memset(pieces, 0, sizeof pieces);
    memset(bytes_of, 0, sizeof bytes_of);
}

void left_counts(struct counts *counts)
{
    for (int kind = 0; kind < LEFT_KINDS; kind++) {
        counts->calls[kind] = __atomic_load_n(&pieces[kind], __ATOMIC_RELAXED);
        counts->bytes[kind] = __atomic_load_n(&bytes_of[kind], __ATOMIC_RELAXED);
    }
    for (size_t i = 0; i < n_memories; i++)
        if (memories[i]->shared) {
            counts->calls[memories[i]->cause]++;
            counts->bytes[memories[i]->cause] += memories[i]->bytes;
        }
}

/* NOLINTBEGIN(bugprone-macro-parentheses): what is to be done is no expression. */
/* A function of its own for each: behind its gate it calls the driver's, and has a result. */
#define PASSED(name, arguments, ...)                                                                                   \
    EXPORT CUresult name arguments                                                                                     \
    {                                                                                                                  \
        typedef CUresult type arguments;                                                                               \
        CALLED(name);                                                                                                  \
        type *function = (type *)entry_real(&entries[AT_##name]);                                                      \
        if (!function)                                                                                                 \
            return CUDA_ERROR_NO_DEVICE;                                                                               \
        struct reader *reader = gate_enter();                                                                          \
        __VA_ARGS__                                                                                                    \
        gate_leave(reader);                                                                                            \
        return result;                                                                                                 \
    }

/* What it takes, what is to be done once it has succeeded. Memory is short only when nothing waits to be let go of. */
#define COUNTED(name, arguments, passed, then)                                                                         \
    PASSED(name, arguments, CUresult result = function passed;                                                         \
           if (result == CUDA_ERROR_OUT_OF_MEMORY && late_free(LATE_ALL)) result = function passed;                    \
           if (!result) then;)
/* NOLINTEND(bugprone-macro-parentheses) */

static CUcontext current(void)
{
    CUcontext context = NULL;

    if (shim_ready())
        real(cuCtxGetCurrent)(&context);
    return context;
}

/* Stream-ordered memory is its pool's, not a context's. */
COUNTED(cuMemAllocAsync, (CUdeviceptr * pointer, size_t bytes, void *stream), (pointer, bytes, stream),
        left_add(LEFT_POOL, *pointer, bytes, NULL))
COUNTED(cuMemAllocAsync_ptsz, (CUdeviceptr * pointer, size_t bytes, void *stream), (pointer, bytes, stream),
        left_add(LEFT_POOL, *pointer, bytes, NULL))
COUNTED(cuMemAllocFromPoolAsync, (CUdeviceptr * pointer, size_t bytes, void *pool, void *stream),
        (pointer, bytes, pool, stream), left_add(LEFT_POOL, *pointer, bytes, NULL))
COUNTED(cuMemAllocFromPoolAsync_ptsz, (CUdeviceptr * pointer, size_t bytes, void *pool, void *stream),
        (pointer, bytes, pool, stream), left_add(LEFT_POOL, *pointer, bytes, NULL))
COUNTED(cuMemPoolExportPointer, (void *data, CUdeviceptr pointer), (data, pointer), left_call(LEFT_IPC))
COUNTED(cuMemPoolImportPointer, (CUdeviceptr * pointer, void *pool, void *data), (pointer, pool, data),
        left_add(LEFT_IPC, *pointer, 0, NULL))
COUNTED(cuMemAllocManaged, (CUdeviceptr * pointer, size_t bytes, unsigned flags), (pointer, bytes, flags),
        left_add(LEFT_MANAGED, *pointer, bytes, current()))

/* How large an array is only the driver knows; what it must have for its elements is known. */
struct array2d {
    size_t width, height;
    int format;
    unsigned channels;
};
struct array3d {
    size_t width, height, depth;
    int format;
    unsigned channels, flags;
};

static size_t elements(size_t width, size_t height, size_t depth, int format, unsigned channels)
{
    size_t each = 1;

    if (format == 2 || format == 9 || format == 0x10)
        each = 2;
    else if (format == 3 || format == 10 || format == 0x20)
        each = 4;
    return width * (height ? height : 1) * (depth ? depth : 1) * each * (channels ? channels : 1);
}

COUNTED(cuArrayCreate_v2, (void **array, const struct array2d *of), (array, of),
        left_add(LEFT_ARRAY, (uintptr_t)*array, elements(of->width, of->height, 0, of->format, of->channels),
                 current()))
COUNTED(cuArray3DCreate_v2, (void **array, const struct array3d *of), (array, of),
        left_add(LEFT_ARRAY, (uintptr_t)*array, elements(of->width, of->height, of->depth, of->format, of->channels),
                 current()))
COUNTED(cuMipmappedArrayCreate, (void **array, const struct array3d *of, unsigned levels), (array, of, levels),
        left_add(LEFT_ARRAY, (uintptr_t)*array, elements(of->width, of->height, of->depth, of->format, of->channels),
                 current()))

#define TAKEN(name, key, arguments, ...)                                                                               \
    PASSED(name, arguments, struct left_piece *piece = left_take((uint64_t)(uintptr_t)(key));                          \
           CUresult result = function(__VA_ARGS__); result ? left_again(piece) : left_gone(piece);)
TAKEN(cuArrayDestroy, array, (void *array), array)
TAKEN(cuMipmappedArrayDestroy, array, (void *array), array)

struct buffer {
    unsigned long long offset, size;
};
COUNTED(cuExternalMemoryGetMappedBuffer, (CUdeviceptr * pointer, void *memory, const struct buffer *of),
        (pointer, memory, of), left_add(LEFT_FOREIGN, *pointer, of->size, current()))
COUNTED(cuGraphAddMemAllocNode, (void **node, void *graph, const void *after, size_t n, void *parameters),
        (node, graph, after, n, parameters), left_call(LEFT_GRAPH))
#define MEM_ALLOC_NODE 10 /* what a node is, is the first thing that its parameters say */
/* Whether a node that copies may be made once more. */
static bool reached(const int *parameters)
{
    const uint64_t words[REACH_WORDS] = {[4] = (uint64_t)(uintptr_t)parameters};

    return reach("cuGraphAddNode", words);
}
#define NODE(name, arguments, passed)                                                                                  \
    PASSED(name, arguments, CUresult result = function passed;                                                         \
           if (result == CUDA_ERROR_OUT_OF_MEMORY && late_free(LATE_ALL)) result = function passed;                    \
           if (result == CUDA_ERROR_INVALID_VALUE && reached(parameters)) result = function passed;                    \
           if (!result && *parameters == MEM_ALLOC_NODE) left_call(LEFT_GRAPH);)
NODE(cuGraphAddNode, (void **node, void *graph, const void *after, size_t n, const int *parameters),
     (node, graph, after, n, parameters))
NODE(cuGraphAddNode_v2,
     (void **node, void *graph, const void *after, const void *edges, size_t n, const int *parameters),
     (node, graph, after, edges, n, parameters))
/* NVIDIA's libraries ask for tables of functions that have no name: what they call through them does not pass the gate. */
COUNTED(cuGetExportTable, (const void **table, const void *which), (table, which), left_call(LEFT_TABLES))

/* The only three functions of the driver that take floating point numbers by value: a hook that hands on words would lose
 * them where it has to look for the real function first. */
COUNTED(cuTexRefSetMipmapLevelBias, (void *texture, float bias), (texture, bias), (void)0)
COUNTED(cuTexRefSetMipmapLevelClamp, (void *texture, float least, float most), (texture, least, most), (void)0)
COUNTED(cuParamSetf, (void *function_, int offset, float value), (function_, offset, value), (void)0)
