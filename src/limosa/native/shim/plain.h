/* Peer access: who may use whose memory. */
#ifndef LIMOSA_PLAIN_H
#define LIMOSA_PLAIN_H

#include "driver_api.h"

void peers_context_gone(CUcontext context); /* with memory_lock held */

#endif
