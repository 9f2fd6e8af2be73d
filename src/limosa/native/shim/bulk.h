/* The driver's one large mmap of a checkpoint, answered with memory that is there already. */
#ifndef LIMOSA_BULK_H
#define LIMOSA_BULK_H

#include <stddef.h>

/* Between the two, a large populated private mapping that is asked for is the driver's. */
void bulk_arm(void);
void bulk_disarm(void);
/* Has so many bytes ready, populated in huge pages where the machine has them; 0: lets go of what is ready. */
int bulk_prepare(size_t bytes);
/* What the driver asked for the last time, 0 where it has not; what is ready now. */
size_t bulk_asked(void);
size_t bulk_ready(void);

#endif
