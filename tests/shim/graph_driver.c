/* A libcuda.so.1 with one copy in one executable graph, by the real driver's rule: after a restore onto another GPU
 * (restored()) it refuses new addresses until the node is given what it has. */
#include <stdbool.h>
#include <stdint.h>

struct copy {
    uint64_t words[25]; /* 6 from, 17 to */
};
static uint64_t original = 1000, has = 1000;
static bool lost;
static int calls;

void restored(void)
{
    lost = true;
}

int calls_made(void)
{
    int made = calls;
    calls = 0;
    return made;
}

int cuGraphMemcpyNodeGetParams(void *node, struct copy *copy)
{
    *copy = (struct copy){.words = {[6] = original, [17] = 1}};
    return 0;
}

int cuGraphExecMemcpyNodeSetParams(void *graph, void *node, const struct copy *copy, void *context)
{
    calls++;
    if (copy->words[6] > 1000000 || (lost && copy->words[6] != has))
        return 1;
    lost = false;
    has = copy->words[6];
    return 0;
}

int cuGraphExecNodeSetParams(void *graph, void *node, const uint64_t *params)
{
    return (int)params[0] == 1 ? cuGraphExecMemcpyNodeSetParams(graph, node, (const struct copy *)(params + 4), 0) : 0;
}

int cuGraphExecUpdate_v2(void *graph, void *from, void *said)
{
    if (from)
        return 910; /* CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE */
    has = original = 3000;
    return 0;
}

int cuGraphExecDestroy(void *graph)
{
    has = original = 1000;
    return 0;
}
