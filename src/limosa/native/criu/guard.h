/* SPDX-License-Identifier: MIT */
/* The names that CRIU opens as root. */
#ifndef LIMOSA_GUARD_H
#define LIMOSA_GUARD_H

#include <stdbool.h>

/* Whether CRIU's calls come there, where Limosa has asked for it. */
bool guard_is_there(void);

#endif
