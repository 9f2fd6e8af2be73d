/* Copies in executable graphs. After a restore onto another GPU the driver takes new addresses for such a node to be on
 * another GPU than what the node has (INVALID_VALUE), until the node is given once more what it has (measured: driver
 * 580.159.04; launches, nodes that fill memory and kernels are not concerned). XLA gives its nodes new addresses between
 * two launches. So what a node was given last is kept here; where the driver refuses, the node is given that, and asked
 * again. */
#include "compiler.h"
#include "driver_api.h"
#include "forks.h"
#include "gate.h"
#include "hooks.h"
#include "reach.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MEMCPY_NODE 1 /* CU_GRAPH_NODE_TYPE_MEMCPY */
#define BUCKETS 1024

struct copy { /* CUDA_MEMCPY3D */
    uint64_t words[25];
};
struct node_params { /* CUgraphNodeParams of a copy */
    int type, spare[3];
    int flags, more;
    CUcontext context;
    struct copy copy;
};
struct given {
    struct given *next;
    void *graph, *node;
    CUcontext context;
    struct copy copy;
};

typedef CUresult set_params(void *, void *, const struct copy *, CUcontext);
typedef CUresult set_any(void *, void *, struct node_params *);
typedef CUresult get_params(void *, struct copy *);
typedef CUresult of_graph(void *);
typedef CUresult update(void *, void *, void *, void *);
typedef CUresult update_v2(void *, void *, void *);

static struct given *buckets[BUCKETS];
static _Atomic size_t n_given;
static _Atomic int guard; /* held for a short walk, never across a call */

static void take(void)
{
    while (atomic_exchange_explicit(&guard, 1, memory_order_acquire))
        ;
}

static void let_go(void)
{
    atomic_store_explicit(&guard, 0, memory_order_release);
}

/* A child has no thread that would let go of it. */
__attribute__((constructor)) static void begin(void)
{
    in_children(let_go);
}

static struct given **find(void *graph, void *node)
{
    uint64_t mixed = ((uint64_t)(uintptr_t)graph * 31 + (uint64_t)(uintptr_t)node) * UINT64_C(0x9e3779b97f4a7c15);
    struct given **at = &buckets[mixed >> 54];

    while (*at && ((*at)->graph != graph || (*at)->node != node))
        at = &(*at)->next;
    return at;
}

static void keep(void *graph, void *node, const struct copy *copy, CUcontext context)
{
    struct given *spare = NULL;

    take();
    struct given **at = find(graph, node);
    if (!*at) {
        let_go();
        if (!(spare = calloc(1, sizeof *spare)))
            return; /* at worst a later call is refused */
        *spare = (struct given){.graph = graph, .node = node};
        take();
        at = find(graph, node);
        if (!*at) {
            *at = spare;
            spare = NULL;
            n_given++;
        }
    }
    (*at)->copy = *copy;
    (*at)->context = context;
    let_go();
    free(spare);
}

static void forget(void *graph)
{
    struct given *gone = NULL;

    if (!atomic_load(&n_given))
        return;
    take();
    for (size_t i = 0; i < BUCKETS; i++)
        for (struct given **at = &buckets[i]; *at;) {
            struct given *one = *at;
            if (one->graph != graph) {
                at = &one->next;
                continue;
            }
            *at = one->next;
            one->next = gone;
            gone = one;
            n_given--;
        }
    let_go();
    while (gone) {
        struct given *one = gone;
        gone = one->next;
        free(one);
    }
}

/* Gives a node what it has; false where that is not known, or refused as well. */
static bool give_again(void *graph, void *node, CUcontext context)
{
    set_params *set = (set_params *)entry_real(AT_cuGraphExecMemcpyNodeSetParams);
    struct given one = {.context = context};

    take();
    struct given *known = *find(graph, node);
    if (known)
        one = *known;
    let_go();
    if (!known) { /* never given anything: it has what the graph had that it was made from */
        get_params *get = (get_params *)entry_real(AT_cuGraphMemcpyNodeGetParams);
        if (!get || get(node, &one.copy))
            return false;
    }
    return set && !set(graph, node, &one.copy, one.context);
}

EXPORT CUresult cuGraphExecMemcpyNodeSetParams(void *graph, void *node, const struct copy *copy, CUcontext context)
{
    const uint64_t words[REACH_WORDS] = {(uintptr_t)graph, (uintptr_t)node, (uintptr_t)copy, (uintptr_t)context};
    set_params *real = (set_params *)entry_call(AT_cuGraphExecMemcpyNodeSetParams);

    if (!real)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    CUresult result = real(graph, node, copy, context);
    if (UNLIKELY(result == CUDA_ERROR_INVALID_VALUE && copy)) {
        if (reach("cuGraphExecMemcpyNodeSetParams", words))
            result = real(graph, node, copy, context);
        if (result == CUDA_ERROR_INVALID_VALUE && give_again(graph, node, context))
            result = real(graph, node, copy, context);
    }
    if (!result && copy)
        keep(graph, node, copy, context);
    return gate_left(reader, result);
}

EXPORT CUresult cuGraphExecNodeSetParams(void *graph, void *node, struct node_params *params)
{
    const uint64_t words[REACH_WORDS] = {(uintptr_t)graph, (uintptr_t)node, (uintptr_t)params};
    set_any *real = (set_any *)entry_call(AT_cuGraphExecNodeSetParams);

    if (!real)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    CUresult result = real(graph, node, params);
    bool copies = params && params->type == MEMCPY_NODE;
    if (UNLIKELY(result == CUDA_ERROR_INVALID_VALUE && copies)) {
        if (reach("cuGraphExecNodeSetParams", words))
            result = real(graph, node, params);
        if (result == CUDA_ERROR_INVALID_VALUE && give_again(graph, node, params->context))
            result = real(graph, node, params);
    }
    if (!result && copies)
        keep(graph, node, &params->copy, params->context);
    return gate_left(reader, result);
}

EXPORT CUresult cuGraphExecDestroy(void *graph)
{
    of_graph *real = (of_graph *)entry_call(AT_cuGraphExecDestroy);

    if (!real)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    forget(graph); /* before its number can be another one's */
    return gate_left(reader, real(graph));
}

/* All nodes have what another graph's have, unless the driver refuses. */
EXPORT CUresult cuGraphExecUpdate(void *graph, void *from, void *node, void *said)
{
    update *real = (update *)entry_call(AT_cuGraphExecUpdate);

    if (!real)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    CUresult result = real(graph, from, node, said);
    if (!result)
        forget(graph);
    return gate_left(reader, result);
}

EXPORT CUresult cuGraphExecUpdate_v2(void *graph, void *from, void *said)
{
    update_v2 *real = (update_v2 *)entry_call(AT_cuGraphExecUpdate_v2);

    if (!real)
        return CUDA_ERROR_NO_DEVICE;
    struct reader *reader = gate_enter();
    CUresult result = real(graph, from, said);
    if (!result)
        forget(graph);
    return gate_left(reader, result);
}
