/* The driver's one large mmap of a checkpoint, answered with memory that is there already. */
#ifndef LIMOSA_BULK_H
#define LIMOSA_BULK_H

#include <stdbool.h>
#include <stddef.h>

/* Has so many bytes ready, populated in huge pages where the machine has them; 0: lets go of what is ready. From then
 * on, or with the gate closed, a large populated private mapping that is asked for is taken to be the driver's. */
int bulk_prepare(size_t bytes);
void bulk_gate(bool closed);
/* Memory is there that the driver would save and never bring back. While it is, a checkpoint by whomever is refused
 * its memory: the driver answers OUT_OF_MEMORY and an unlock brings the process back (measured), where a checkpoint would
 * have been its end. Seen from outside as a mapping of that name, for those who would rather not try: after a checkpoint
 * that has failed the driver never checkpoints that process again. */
#define BULK_SIGN "limosa-imported"
void bulk_guard(bool needed);
bool bulk_guarded(void);
void bulk_find_driver(void *address); /* of a function of libcuda: whose mmap is the driver's */
/* How many checkpoints were refused so. */
size_t bulk_refused(void);
/* For good: nothing is prepared any more, nothing answered. */
void bulk_switch_off(void);
/* After a fork. */
void bulk_in_child(void);
/* What the driver asked for the last time, 0 where it has not; what is ready now. */
size_t bulk_asked(void);
size_t bulk_ready(void);

#endif
