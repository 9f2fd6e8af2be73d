/* What stands before libnccl: its functions as the application calls them, and those behind, for the shim itself. */
#ifndef LIMOSA_NCCL_H
#define LIMOSA_NCCL_H

#include <stdbool.h>

#include "nccl_api.h"

enum nccl_place {
#define NCCL(symbol, what, comm, op) AT_##symbol,
#include "../nccl/functions.list"
#undef NCCL
    NCCL_LISTED
};

void *nccl_real(int place); /* NULL where the program has no libnccl, or none with it */
#define nccl(name) ((name##_type *)nccl_real(AT_##name))
bool nccl_switched_on(void); /* whether communicators are looked after at all */
bool nccl_is_own(const void *address); /* whether it lies in libnccl */
bool nccl_names(const char *symbol); /* whether it is a name as NCCL's functions have, also those for profilers */
/* What dlsym is to give instead of a function that really is at this address; the same where it is not taken over. */
void *nccl_instead(const char *symbol, void *found);
/* A function that the list does not have, and that was called, or that the program is linked with; NULL: none. */
const char *nccl_newer(void);
struct comm;
/* Whether what goes on behind a call has come to its end, for the shim's own thread: comms_alone(). */
void nccl_look(struct comm *comm);
/* Memory that ncclMemAlloc gave and that was not freed. */
unsigned nccl_memories(void);

typedef int ncclCommInitRankConfig_type(void **, int, struct nccl_unique_id, int, struct nccl_config *);
typedef int ncclCommInitRank_type(void **, int, struct nccl_unique_id, int);
typedef int ncclCommInitRankScalable_type(void **, int, int, int, struct nccl_unique_id *, struct nccl_config *);
typedef int ncclCommInitAll_type(void **, int, const int *);
typedef int ncclCommSplit_type(void *, int, int, void **, struct nccl_config *);
typedef int ncclCommShrink_type(void *, int *, int, void **, struct nccl_config *, int);
typedef int ncclCommFinalize_type(void *);
typedef int ncclCommDestroy_type(void *);
typedef int ncclCommAbort_type(void *);
typedef int ncclCommCount_type(void *, int *);
typedef int ncclCommCuDevice_type(void *, int *);
typedef int ncclCommUserRank_type(void *, int *);
typedef int ncclCommGetAsyncError_type(void *, int *);
typedef const char *ncclGetLastError_type(void *);
typedef int ncclGetUniqueId_type(struct nccl_unique_id *);
typedef int ncclGroupStart_type(void);
typedef int ncclGroupEnd_type(void);
typedef int ncclGroupSimulateEnd_type(void *);
typedef int ncclCommRegister_type(void *, void *, size_t, void **);
typedef int ncclCommDeregister_type(void *, void *);
typedef int ncclRedOpCreatePreMulSum_type(int *, void *, int, int, void *);
typedef int ncclRedOpDestroy_type(int, void *);
typedef int ncclMemAlloc_type(void **, size_t);
typedef int ncclMemFree_type(void *);

#endif
