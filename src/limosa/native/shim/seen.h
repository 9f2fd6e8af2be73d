/* GPUs that the driver sees and the program does not: those that CUDA_VISIBLE_DEVICES leaves out. */
#ifndef LIMOSA_SEEN_H
#define LIMOSA_SEEN_H

#include <limits.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "compiler.h"
#include "driver_api.h"

/* These two for the functions below alone. */
extern _Atomic int seen_count; /* devices that the program sees; INT_MAX: all that there are */
extern _Atomic int seen_hidden; /* behind them, those that only the driver sees */

static inline bool seen_is_hidden(CUdevice device)
{
    return UNLIKELY(device >= atomic_load_explicit(&seen_count, memory_order_relaxed));
}

/* What the driver is to be handed instead of a device that the program names. One that the program must not see becomes
 * one that there is not: so the driver gives its own answer to that, whatever else is wrong with the call. */
static inline CUdevice seen_device(CUdevice device)
{
    int hidden = atomic_load_explicit(&seen_hidden, memory_order_relaxed);

    return seen_is_hidden(device) && device <= INT_MAX - hidden ? device + hidden : device;
}

CUresult seen_init(unsigned flags); /* the real cuInit; inside the gate */

#endif
