/* Putting memory away and taking it back, with the gate closed. Called by the shim's own thread only. */
#ifndef LIMOSA_PARK_H
#define LIMOSA_PARK_H

#include <stdbool.h>
#include <stddef.h>

#include "memory.h"

/* Whether this memory can be put away: nobody else has it, and it is there. */
bool park_can(const struct memory *memory);
/* A descriptor of it for somebody else to hold: the caller's to close. -1 with a CUresult where there is none. */
int park_descriptor(struct memory *memory, CUresult *result);
/* Waits for all work of all contexts. */
CUresult park_wait(void);
/* Takes all that can be put away out of the address space and lets it go; whoever has descriptors has the contents. */
CUresult park_unmap(void);
/* One memory is back: imported, mapped everywhere it was. The descriptor is ours from here on, also on failure. */
CUresult park_map(struct memory *memory, int fd);
/* A context to make these calls in: the first that the application has memory in. */
CUresult park_current(void);

#endif
