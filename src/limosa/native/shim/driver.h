/* The driver's own functions, as far as the shim calls them itself: real(cuMemMap)(…). */
#ifndef LIMOSA_DRIVER_H
#define LIMOSA_DRIVER_H

#include <stdbool.h>

#include "driver_api.h" /* IWYU pragma: export */

enum {
#define F(name, arguments) REAL_##name,
    DRIVER_FUNCTIONS(F)
#undef F
        REAL_FUNCTIONS
};
extern void *real_functions[REAL_FUNCTIONS]; /* for real() alone: it stands in the way of every call */
#define real(name) ((name##_type *)real_functions[REAL_##name]) /* NULL where it has not been found */

/* Whether memory is to be taken over at all: the driver is there, and has every function that is needed for it. */
bool shim_ready(void);

#endif
