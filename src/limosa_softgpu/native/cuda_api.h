/* The part of cuda.h that the software GPU implements, in our own words.
 *
 * tests/softgpu/test_headers.py compiles every source of this folder against NVIDIA's own cuda.h
 * (-DSOFTGPU_REAL_HEADERS) and compares every constant and every structure's layout.
 */
#ifndef LIMOSA_CUDA_API_H
#define LIMOSA_CUDA_API_H

#ifdef SOFTGPU_REAL_HEADERS
#define __CUDA_API_VERSION_INTERNAL /* declare every version of a function under its own name */
#include <cuda.h>
#else
#include <stddef.h>
#include <stdint.h>
#define CUDAAPI
// IWYU pragma: begin_exports
#include "api/base.h"       /* results, handles */
#include "api/checkpoint.h" /* cuCheckpointProcess* */
#include "api/device.h"     /* initialisation, devices, contexts, modules, launches */
#include "api/entry.h"      /* cuGetProcAddress, error names, versions */
#include "api/memory.h"     /* allocations, VMM, IPC, pointer attributes */
#include "api/stream.h"     /* streams, events, copies, memsets, callbacks */
// IWYU pragma: end_exports
#endif

#endif
