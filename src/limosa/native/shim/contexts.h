/* Contexts that the application has made, beside the primary ones, and those that are ending. */
#ifndef LIMOSA_CONTEXTS_H
#define LIMOSA_CONTEXTS_H

#include <stdbool.h>
#include <stddef.h>

#include "driver_api.h"

CUcontext context_owner(CUcontext current, CUdevice device); /* whose memory is made there */
bool context_ending(CUcontext context); /* with memory_lock held: some thread is about to destroy it */
/* With the gate closed: how many there are, and all of them into an array that has room for so many. */
size_t contexts_count(void);
void contexts_copy(CUcontext *all);
void contexts_in_child(void); /* after fork */

#endif
