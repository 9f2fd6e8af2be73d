/* The steady clock of whoever watches over NCCL. */
#ifndef LIMOSA_CLOCK_H
#define LIMOSA_CLOCK_H

void clock_watched_by(const void *caller); /* the library that it lies in watches over communicators */
/* By the shim's thread. What is done already is done. */
void clock_stop(void);
void clock_go(void);
void clock_in_child(void);

#endif
