/* Which streams are being captured into a graph, and how the gate gets along with it. */
#ifndef LIMOSA_CAPTURE_H
#define LIMOSA_CAPTURE_H

#include <stdbool.h>

#include "driver.h"
#include "driver_api.h"
#include "gate.h"

bool capture_any(void); /* as far as is known right now */
bool capture_goes_on(void); /* the driver is asked, too: only with the gate closed and nobody inside */
/* Whoever wants to begin a capture, and is not in the middle of one, waits until it is let go of, by all who hold it. */
enum hold { HOLD_TO_CLOSE = 1, HOLD_AT_CUT = 2 };
void capture_hold(enum hold why, bool hold);
void capture_context_ends(CUcontext context);
void capture_thread_ends(const struct reader *thread);
void capture_in_child(void);
/* The calling thread's calls neither fail because of other threads' captures nor spoil them, where the driver can choose. */
static inline void capture_leave_alone(void)
{
    int mode = CAPTURE_MODE_RELAXED;

    real(cuThreadExchangeStreamCaptureMode)(&mode);
}

#endif
