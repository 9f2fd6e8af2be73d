/* The table of the driver's functions: what the application gets instead of each, where the real one is, what was called.
 * An entry is known by its place: those of the lists by name (AT_cuMemAlloc_v2), behind them those that no list knows, in
 * turn. */
#ifndef LIMOSA_HOOKS_H
#define LIMOSA_HOOKS_H

#include <stdbool.h>

/* What becomes of a function: ../driver/functions.list and newer.list say it of each. */
enum role { ROLE_UNKNOWN, ROLE_PASS, ROLE_USES, ROLE_HOST, ROLE_OLD, ROLE_OWN, ROLE_COPY };

enum place {
#define FUNCTION(symbol, base, version, per_thread, what) AT_##symbol,
#include "../driver/functions.list"
#include "newer.list"
#undef FUNCTION
    LISTED
};

/* What is known of an entry, for those who tell of it. */
struct told_of {
    const char *symbol;
    enum role role;
    bool called, asked_for; /* by the program; by dlsym or cuGetProcAddress */
};

void entry_called(int place); /* the first thing that every definition of our own does, or the next */
void *entry_call(int place); /* the same; the real function comes back, as from entry_real */
void *entry_real(int place); /* the real function; NULL where the program has no libcuda, or none with it */
void *entry_known(int place); /* likewise, where somebody has asked for it before: nothing is looked up */
void *entry_hook(int place); /* what the application is to have instead of it */
void entry_asked_for(int place);
int entry_of(const char *symbol); /* its place; -1 where no list has it */
/* What the application is to have instead of a function of libcuda that is really at that address. */
void *entry_instead(const char *symbol, void *real);
int entry_count(void);
struct told_of entry_told(int place);

#endif
