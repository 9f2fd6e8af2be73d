/* The few declarations of nccl.h that the shim needs, in its own words; tests/shim compares them with NVIDIA's header. */
#ifndef LIMOSA_NCCL_API_H
#define LIMOSA_NCCL_API_H

#include <limits.h>
#include <stddef.h>

enum {
    NCCL_SUCCESS = 0,
    NCCL_SYSTEM_ERROR = 2,
    NCCL_INVALID_ARGUMENT = 4,
    NCCL_INVALID_USAGE = 5,
    NCCL_REMOTE_ERROR = 6,
    NCCL_IN_PROGRESS = 7,
};

#define NCCL_NO_COLOR (-1)
#define NCCL_OPERATIONS 5 /* sum, product, max, min, average; what programs make has larger numbers */
#define NCCL_HOST_SCALAR 1 /* ncclScalarHostImmediate */

struct nccl_unique_id {
    char bytes[128];
};

/* What every version of ncclConfig_t begins with; `size` says how long it is. */
struct nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share, traffic_class;
    const char *comm_name;
};

#endif
