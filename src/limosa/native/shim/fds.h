/* Descriptors of ours among the program's: out of its way, no more of its limit used than it would notice, and none of
 * them in a child. */
#ifndef LIMOSA_FDS_H
#define LIMOSA_FDS_H

#include <stdbool.h>
#include <stddef.h>

/* Between the two there may be as many descriptors as the hard limit allows. What lies above the soft limit afterwards
 * stays open, and the program's own new ones get the low numbers that they would have got without us. */
void fds_more(void);
void fds_as_before(void);
/* Whoever holds device memory by a descriptor holds the memory: a child that was forked must not. What makes or receives
 * one does so between these two, and notes it there: nobody forks meanwhile (everybody waits half a second for it at most).
 * Nothing that may wait for long is done in between. */
void fds_begin(void);
void fds_end(void);
int fds_note(int fd); /* between the two; returns it */
void fds_forget(int fd); /* it is not ours any more; between the two, or in a child */
void fds_close(int fd); /* what was noted, or may have been */
/* Moves a descriptor where programs that close everything below their limit, or count on small numbers, do not meet it,
 * and notes it. Returns where it is now (it stays where it was if there is no room). */
int fds_away(int fd);
/* Whether there is room for so many more. */
bool fds_room(size_t more);
/* Around a fork: in the child everything that was noted is closed, and the limit is the program's own. */
void fds_before_fork(void);
void fds_after_fork(void);
void fds_in_child(void);

#endif
