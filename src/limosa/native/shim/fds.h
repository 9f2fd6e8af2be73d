/* Descriptors of ours among the program's: out of its way, and no more of its limit used than it would notice. */
#ifndef LIMOSA_FDS_H
#define LIMOSA_FDS_H

#include <stdbool.h>
#include <stddef.h>

/* Between the two there may be as many descriptors as the hard limit allows. What lies above the soft limit afterwards
 * stays open, and the program's own new ones get the low numbers that they would have got without us. */
void fds_more(void);
void fds_as_before(void);
/* Moves a descriptor where programs that close everything below their limit, or count on small numbers, do not meet it.
 * Returns where it is now (it stays where it was if there is no room). */
int fds_away(int fd);
/* Whether there is room for so many more. */
bool fds_room(size_t more);

#endif
