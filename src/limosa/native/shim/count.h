/* Memory that is left to the driver, counted while it is there, so that whoever plans a move knows what the driver will have
 * to copy. */
#ifndef LIMOSA_COUNT_H
#define LIMOSA_COUNT_H

#include <stddef.h>
#include <stdint.h>

#include "driver_api.h"

/* What is left to the driver, by kind: pieces that there are now and their bytes. Of graphs and tables, whose end nobody
 * sees, the calls that were made. */
enum left {
    LEFT_SMALL,
    LEFT_POOL,
    LEFT_MANAGED,
    LEFT_FAILED, /* large, and the driver would not have it otherwise */
    LEFT_SHARED, /* exported, imported, seen by the processor: somebody else has it */
    LEFT_FOREIGN, /* virtual memory that is not a GPU's, or of a kind that cannot be exported */
    LEFT_ARRAY,
    LEFT_IPC, /* legacy handles of the driver's own, given and opened */
    LEFT_GRAPH, /* nodes that allocate */
    LEFT_TABLES, /* cuGetExportTable: what is called through them is not seen */
    LEFT_KINDS
};
struct counts {
    uint64_t calls[LEFT_KINDS], bytes[LEFT_KINDS];
};

/* By its address or handle; these take locks of their own, for a few instructions. */
void left_add(enum left kind, uint64_t key, size_t bytes, CUcontext context);
/* It is about to be freed: NULL where it is not known; else for left_freed, with what came of it. */
struct left_piece *left_take(uint64_t key);
void left_freed(struct left_piece *piece, CUresult result);
void left_call(enum left kind);
void left_context_gone(CUcontext context);
void left_counts(struct counts *counts); /* with memory_lock held */
void left_in_child(void); /* after fork */

#endif
