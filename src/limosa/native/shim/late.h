/* Memory that was freed and is not let go of yet: work that uses it may still be under way, and may not be waited for. */
#ifndef LIMOSA_LATE_H
#define LIMOSA_LATE_H

#include <stdbool.h>

#include "driver_api.h"
#include "memory.h"

/* What may be waited for: nothing at all; nothing that the driver can mark; what cuMemFree would have waited for; and what
 * was freed in a stream's order, too (where there is no memory otherwise). */
enum late { LATE_LOOK, LATE_MARK, LATE_FREED, LATE_ALL };

/* With memory_lock held: this mapping, which is being freed, is let go of later. */
void late_add(struct mapping *mapping, void *event, CUcontext recorded, bool ordered);
void late_taken(struct mapping *mapping); /* likewise: it is not among those that wait any longer */
/* Lets go of what is over by now. Without memory_lock. Whether anything was let go of. */
bool late_free(enum late wait);
/* With the gate closed and the device at rest: all of it is over. */
void late_at_rest(void);
/* With memory_lock held, which is let go of meanwhile: waits until no other thread looks at pieces that have to do with a
 * context; NULL: at any, those left out that wait for the GPU themselves. Whether one did. */
bool late_nobody_looks(CUcontext context);
/* With memory_lock held: what was to be done in a context is over with it. */
void late_context_gone(CUcontext context);
/* An event behind all that a stream has to do now; 0 with no event: it cannot be had, and has to be waited for instead. */
CUresult late_record(void *stream, bool per_thread, void **event, CUcontext *context);
void late_forget(void *event);
void late_in_child(void); /* after fork */
/* Waits for the work of the context that some memory is of (NULL: of the current one). Without memory_lock. */
CUresult wait_for_work(CUcontext owner);

#endif
