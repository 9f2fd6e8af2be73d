/* Memory that is the driver's whatever its size: stream-ordered, managed, arrays, small pieces. It passes, and is counted
 * while it is there, so that whoever plans a move knows what the driver will have to copy. */
#include "count.h"
#include "compiler.h"
#include "driver.h"
#include "gate.h"
#include "hooks.h"
#include "late.h"
#include "memory.h"
#include "reach.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
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

void left_freed(struct left_piece *piece, CUresult result)
{
    if (!result)
        free(piece);
    else if (piece)
        put(piece); /* it is there still */
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

void left_in_child(void)
{
    unlocked();
    for (struct part *part = parts; part < parts + PARTS; part++)
        memset(part->rows, 0, sizeof part->rows); /* what another thread was changing is not looked at */
    memset(pieces, 0, sizeof pieces);
    memset(bytes_of, 0, sizeof bytes_of);
}

void left_counts(struct counts *counts)
{
    const struct memory *memory;

    for (int kind = 0; kind < LEFT_KINDS; kind++) {
        counts->calls[kind] = __atomic_load_n(&pieces[kind], __ATOMIC_RELAXED);
        counts->bytes[kind] = __atomic_load_n(&bytes_of[kind], __ATOMIC_RELAXED);
    }
    for (size_t i = 0; (memory = memory_nth(i)); i++)
        if (memory->shared) {
            counts->calls[memory->cause]++;
            counts->bytes[memory->cause] += memory->bytes;
        }
}

/* The functions that are counted take integers and pointers, six words at most: handed on as they are. */
typedef uint64_t word;
typedef CUresult words_function(word, word, word, word, word, word);
#define WORDS 6

static inline CUresult call(words_function *function, const word *w)
{
    return function(w[0], w[1], w[2], w[3], w[4], w[5]);
}

static void *at(word address)
{
    return (void *)(uintptr_t)address;
}

/* Where an address or a handle was put. */
static uint64_t put_at(word address)
{
    return *(const uint64_t *)at(address);
}

/* Memory is short only when nothing waits to be let go of. */
static inline CUresult call_with_room(words_function *function, const word *w)
{
    CUresult result = call(function, w);

    return result == CUDA_ERROR_OUT_OF_MEMORY && late_free(LATE_ALL) ? call(function, w) : result;
}

/* Behind its gate the driver's function is called, and counted once it has succeeded. Each caller has it for itself, so
 * that what counts costs no call more. */
static inline __attribute__((always_inline)) CUresult counted(int place, void (*counts)(const word *), const word *w)
{
    words_function *function = (words_function *)entry_call(place);

    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    CUresult result = call_with_room(function, w);
    if (!result)
        counts(w);
    return gate_left(reader, result);
}

/* What is let go of by its address or handle, the first word. */
static CUresult taken(int place, const word *w)
{
    words_function *function = (words_function *)entry_call(place);

    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    struct left_piece *piece = left_take(w[0]);
    CUresult result = call(function, w);
    left_freed(piece, result);
    return gate_left(reader, result);
}

static CUcontext current(void)
{
    CUcontext context = NULL;

    if (shim_ready())
        real(cuCtxGetCurrent)(&context);
    return context;
}

/* Stream-ordered memory is its pool's, not a context's. */
static void count_pool(const word *w)
{
    left_add(LEFT_POOL, put_at(w[0]), w[1], NULL);
}

EXPORT CUresult cuMemAllocAsync(word pointer, word bytes, word stream)
{
    return counted(AT_cuMemAllocAsync, count_pool, (word[WORDS]){pointer, bytes, stream});
}

EXPORT CUresult cuMemAllocAsync_ptsz(word pointer, word bytes, word stream)
{
    return counted(AT_cuMemAllocAsync_ptsz, count_pool, (word[WORDS]){pointer, bytes, stream});
}

EXPORT CUresult cuMemAllocFromPoolAsync(word pointer, word bytes, word pool, word stream)
{
    return counted(AT_cuMemAllocFromPoolAsync, count_pool, (word[WORDS]){pointer, bytes, pool, stream});
}

EXPORT CUresult cuMemAllocFromPoolAsync_ptsz(word pointer, word bytes, word pool, word stream)
{
    return counted(AT_cuMemAllocFromPoolAsync_ptsz, count_pool, (word[WORDS]){pointer, bytes, pool, stream});
}

static void count_given(const word *w)
{
    (void)w;
    left_call(LEFT_IPC);
}

EXPORT CUresult cuMemPoolExportPointer(word data, word pointer)
{
    return counted(AT_cuMemPoolExportPointer, count_given, (word[WORDS]){data, pointer});
}

static void count_imported(const word *w)
{
    left_add(LEFT_IPC, put_at(w[0]), 0, NULL);
}

EXPORT CUresult cuMemPoolImportPointer(word pointer, word pool, word data)
{
    return counted(AT_cuMemPoolImportPointer, count_imported, (word[WORDS]){pointer, pool, data});
}

static void count_managed(const word *w)
{
    left_add(LEFT_MANAGED, put_at(w[0]), w[1], current());
}

EXPORT CUresult cuMemAllocManaged(word pointer, word bytes, word flags)
{
    return counted(AT_cuMemAllocManaged, count_managed, (word[WORDS]){pointer, bytes, flags});
}

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

static void count_2d(const word *w)
{
    const struct array2d *of = at(w[1]);

    left_add(LEFT_ARRAY, put_at(w[0]), elements(of->width, of->height, 0, of->format, of->channels), current());
}

static void count_3d(const word *w)
{
    const struct array3d *of = at(w[1]);

    left_add(LEFT_ARRAY, put_at(w[0]), elements(of->width, of->height, of->depth, of->format, of->channels), current());
}

EXPORT CUresult cuArrayCreate_v2(word array, word of)
{
    return counted(AT_cuArrayCreate_v2, count_2d, (word[WORDS]){array, of});
}

EXPORT CUresult cuArray3DCreate_v2(word array, word of)
{
    return counted(AT_cuArray3DCreate_v2, count_3d, (word[WORDS]){array, of});
}

EXPORT CUresult cuMipmappedArrayCreate(word array, word of, word levels)
{
    return counted(AT_cuMipmappedArrayCreate, count_3d, (word[WORDS]){array, of, levels});
}

EXPORT CUresult cuArrayDestroy(word array)
{
    return taken(AT_cuArrayDestroy, (word[WORDS]){array});
}

EXPORT CUresult cuMipmappedArrayDestroy(word array)
{
    return taken(AT_cuMipmappedArrayDestroy, (word[WORDS]){array});
}

struct buffer {
    unsigned long long offset, size;
};

static void count_buffer(const word *w)
{
    left_add(LEFT_FOREIGN, put_at(w[0]), ((const struct buffer *)at(w[2]))->size, current());
}

EXPORT CUresult cuExternalMemoryGetMappedBuffer(word pointer, word memory, word of)
{
    return counted(AT_cuExternalMemoryGetMappedBuffer, count_buffer, (word[WORDS]){pointer, memory, of});
}

static void count_graph(const word *w)
{
    (void)w;
    left_call(LEFT_GRAPH);
}

EXPORT CUresult cuGraphAddMemAllocNode(word node, word graph, word after, word n, word parameters)
{
    return counted(AT_cuGraphAddMemAllocNode, count_graph, (word[WORDS]){node, graph, after, n, parameters});
}

#define MEM_ALLOC_NODE 10 /* what a node is, is the first thing that its parameters say */

/* Whether a node that copies may be made once more. */
static bool reached(word parameters)
{
    const uint64_t words[REACH_WORDS] = {[4] = parameters};

    return reach("cuGraphAddNode", words);
}

static CUresult add_node(int place, word parameters, const word *w)
{
    words_function *function = (words_function *)entry_call(place);

    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    CUresult result = call_with_room(function, w);
    if (result == CUDA_ERROR_INVALID_VALUE && reached(parameters))
        result = call(function, w);
    if (!result && *(const int *)at(parameters) == MEM_ALLOC_NODE)
        left_call(LEFT_GRAPH);
    return gate_left(reader, result);
}

EXPORT CUresult cuGraphAddNode(word node, word graph, word after, word n, word parameters)
{
    return add_node(AT_cuGraphAddNode, parameters, (word[WORDS]){node, graph, after, n, parameters});
}

EXPORT CUresult cuGraphAddNode_v2(word node, word graph, word after, word edges, word n, word parameters)
{
    return add_node(AT_cuGraphAddNode_v2, parameters, (word[WORDS]){node, graph, after, edges, n, parameters});
}

static void count_table(const word *w)
{
    (void)w;
    left_call(LEFT_TABLES);
}

/* NVIDIA's libraries ask for tables of functions that have no name: what they call through them does not pass the gate. */
EXPORT CUresult cuGetExportTable(word table, word which)
{
    return counted(AT_cuGetExportTable, count_table, (word[WORDS]){table, which});
}

/* The only three functions of the driver that take floating point numbers by value: a hook that hands on words would lose
 * them where it has to look for the real function first. */
EXPORT CUresult cuTexRefSetMipmapLevelBias(void *texture, float bias)
{
    typedef CUresult type(void *, float);
    type *function = (type *)entry_call(AT_cuTexRefSetMipmapLevelBias);

    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    return gate_left(reader, function(texture, bias));
}

EXPORT CUresult cuTexRefSetMipmapLevelClamp(void *texture, float least, float most)
{
    typedef CUresult type(void *, float, float);
    type *function = (type *)entry_call(AT_cuTexRefSetMipmapLevelClamp);

    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    return gate_left(reader, function(texture, least, most));
}

EXPORT CUresult cuParamSetf(void *function_, int offset, float value)
{
    typedef CUresult type(void *, int, float);
    type *function = (type *)entry_call(AT_cuParamSetf);

    if (!function)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    return gate_left(reader, function(function_, offset, value));
}
