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
/* Waits for all work: of every primary context, and of these. Begins no further wait once it is enough. */
CUresult park_wait(const CUcontext *made, size_t n_made, const _Atomic bool *enough);
/* Takes all that can be put away out of the address space and lets it go; whoever has descriptors has the contents. */
CUresult park_unmap(void);
/* How far the last park_map came, on which of the process's devices. */
enum { PARK_IMPORT = 1, PARK_MAP, PARK_SHOW };
struct park_trouble {
    int step, device;
};
struct park_trouble park_trouble(void);
/* Makes anew, by this process itself, what is away: on a GPU that it did not see when it initialised the driver it cannot
 * import. A descriptor for whoever fills it; the caller's to close. */
CUresult park_make(struct memory *memory, int *fd);
void park_unmake(void); /* lets go of all that was made so and is mapped nowhere yet */
/* One memory is back: imported (or what was made for it, without a descriptor), mapped everywhere it was. The descriptor
 * is ours from here on, also on failure. */
CUresult park_map(struct memory *memory, int fd);

#endif
