/* Each rank's piece of device memory, and its peers'. Between processes it is exported as a descriptor, sent by a socket of
 * the node's folder, imported and mapped until the communicator ends. Ranks of one process use it as it is, as with NCCL.
 *
 * Where a rank cannot import (a GPU that it does not see, NCCL_P2P_DISABLE=1), all of them use host memory instead, as NCCL
 * does: pages of the shared file.
 */
#define _GNU_SOURCE
#include "comm.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static bool joined(struct comm *comm, uint64_t ranks)
{
    return atomic_load(&comm->shared->joined) >= ranks;
}

/* Whether a rank is in this process. */
static bool here(const struct comm *comm, int rank)
{
    const struct member *one = &comm->shared->members[rank], *own = &comm->shared->members[comm->rank];

    return one->pid == own->pid && one->start_time == own->start_time;
}

static bool at_step(struct comm *comm, uint64_t step)
{
    for (int rank = 0; rank < comm->n; rank++)
        if (atomic_load(&comm->shared->members[rank].step) < step)
            return false;
    return true;
}

static ncclResult_t all_at(struct comm *comm, enum step step)
{
    atomic_store(&comm->shared->members[comm->rank].step, step);
    shared_tell(comm->shared);
    if (shared_await(comm, at_step, step))
        return ncclSuccess;
    return comm->aborted ? ncclInternalError : (ncclResult_t)comm->async;
}

/* NCCL takes no GPU twice. Every rank finds the same. */
static bool same_gpu(struct comm *comm)
{
    const struct member *members = comm->shared->members;

    for (int one = 0; one < comm->n; one++)
        for (int other = 0; other < one; other++)
            if (!memcmp(members[one].uuid, members[other].uuid, sizeof(members[one].uuid))) {
                say("ranks %d and %d are on the same GPU", other, one);
                return true;
            }
    return false;
}

/* ------------------------------------------------------------------------------------------------- descriptors --- */

static void address_of(const struct comm *comm, int rank, struct sockaddr_un *address)
{
    memset(address, 0, sizeof(*address));
    address->sun_family = AF_UNIX;
    snprintf(address->sun_path, sizeof(address->sun_path), NCCL_FOLDER "%s.%d", comm->name, rank);
}

static int listen_for(const struct comm *comm)
{
    struct sockaddr_un address;
    int on = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    address_of(comm, comm->rank, &address);
    if (on < 0 || bind(on, (struct sockaddr *)&address, sizeof(address)) != 0) {
        say("%s: %s", address.sun_path, strerror(errno));
        if (on >= 0)
            close(on);
        return -1;
    }
    chmod(address.sun_path, 0666);
    return on;
}

union control {
    char bytes[CMSG_SPACE(sizeof(int))];
    struct cmsghdr head;
};

static bool send_to(const struct comm *comm, int on, int rank, int fd)
{
    struct sockaddr_un address;
    union control control = {0};
    int own = comm->rank;
    struct iovec data = {&own, sizeof(own)};
    struct msghdr message = {&address, sizeof(address), &data, 1, control.bytes, sizeof(control.bytes), 0};

    address_of(comm, rank, &address);
    struct cmsghdr *part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof(fd));
    memcpy(CMSG_DATA(part), &fd, sizeof(fd));
    return sendmsg(on, &message, MSG_NOSIGNAL) == sizeof(own);
}

/* One descriptor that has come, and whose it is; -1 for none. */
static int receive_one(int on, int *rank)
{
    union control control;
    struct iovec data = {rank, sizeof(*rank)};
    struct msghdr message = {NULL, 0, &data, 1, control.bytes, sizeof(control.bytes), 0};
    int fd = -1;

    if (recvmsg(on, &message, MSG_CMSG_CLOEXEC) != sizeof(*rank))
        return -1;
    struct cmsghdr *part = CMSG_FIRSTHDR(&message);
    if (part && part->cmsg_type == SCM_RIGHTS && part->cmsg_len == CMSG_LEN(sizeof(fd)))
        memcpy(&fd, CMSG_DATA(part), sizeof(fd));
    return fd;
}

/* Map a peer's memory; the descriptor is closed. */
static bool import(struct comm *comm, int rank, int fd)
{
    CUmemGenericAllocationHandle handle;
    bool done = cuda.cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd,
                                                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        == CUDA_SUCCESS;

    close(fd);
    if (!done)
        return false;
    done = driver_map(handle, comm->device, BUFFER_BYTES, &comm->buffers[rank]) == ncclSuccess;
    comm->imported[rank] = done;
    cuda.cuMemRelease(handle);
    return done;
}

/* Send one's own descriptor to all and take theirs, in whatever order they come: the sockets' queues are short. */
static bool exchange(struct comm *comm, int on, int own)
{
    bool sent[MOST_RANKS] = {0}, imported = true;
    int to_send = 0, to_come;

    for (int rank = 0; rank < comm->n; rank++) {
        sent[rank] = here(comm, rank);
        to_send += !sent[rank];
    }
    to_come = to_send;

    while (to_send + to_come > 0 && !comm->aborted && atomic_load(&comm->shared->error) == ncclSuccess) {
        bool moved = false;
        for (int rank = 0; rank < comm->n && to_send > 0; rank++)
            if (!sent[rank] && send_to(comm, on, rank, own)) {
                sent[rank] = moved = true;
                to_send--;
            }
        int rank = -1, fd = receive_one(on, &rank);
        if (fd >= 0) {
            moved = true;
            to_come--;
            if (rank < 0 || rank >= comm->n || comm->buffers[rank])
                close(fd);
            else
                imported &= import(comm, rank, fd);
        }
        if (!moved)
            usleep(500);
    }
    return imported;
}

/* ------------------------------------------------------------------------------------------------- connecting --- */

/* False: it has gone already, because its rank has failed. */
static bool use(struct member *member)
{
    uint32_t uses = atomic_load(&member->uses);

    while (uses > 0)
        if (atomic_compare_exchange_weak(&member->uses, &uses, uses + 1))
            return true;
    return false;
}

/* The memory of the other ranks of this process. */
static bool borrow(struct comm *comm)
{
    bool all = true;

    for (int rank = 0; rank < comm->n; rank++) {
        struct member *member = &comm->shared->members[rank];
        if (rank == comm->rank || !here(comm, rank))
            continue;
        if (use(member))
            comm->buffers[rank] = member->address;
        else
            all = false;
    }
    return all;
}

/* Export and listen, if anybody is elsewhere; wait until all are ready; exchange, if all want to. */
static ncclResult_t share(struct comm *comm, CUmemGenericAllocationHandle handle)
{
    struct member *own_member = &comm->shared->members[comm->rank];
    const char *off = getenv("NCCL_P2P_DISABLE");
    /* One that is by itself exports, too: the shim leaves such memory alone. */
    bool exports = true, alone = comm->n > 1;
    int own = -1, on = -1;
    ncclResult_t result = ncclSuccess;

    for (int rank = 0; rank < comm->n; rank++)
        alone = alone && here(comm, rank);
    if (!alone) {
        result = CUDA_TRY(cuMemExportToShareableHandle, &own, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
        on = result == ncclSuccess ? listen_for(comm) : -1;
        if (result == ncclSuccess && on < 0)
            result = ncclSystemError;
    }
    if (result == ncclSuccess) {
        atomic_store(&own_member->exports, !(off && atoi(off)));
        result = all_at(comm, STEP_READY);
        for (int rank = 0; rank < comm->n; rank++)
            exports = exports && atomic_load(&comm->shared->members[rank].exports);
    }
    if (result == ncclSuccess && exports) {
        bool borrowed = borrow(comm), exchanged = alone || exchange(comm, on, own);
        atomic_store(&own_member->imports, borrowed && exchanged);
    }
    if (on >= 0) {
        struct sockaddr_un address;
        address_of(comm, comm->rank, &address);
        unlink(address.sun_path);
        close(on);
    }
    if (own >= 0)
        close(own);
    return result;
}

static void let_go(struct comm *comm, int rank)
{
    CUdeviceptr address = comm->buffers[rank];

    if (address && (comm->imported[rank] || atomic_fetch_sub(&comm->shared->members[rank].uses, 1) == 1))
        driver_unmap(address, BUFFER_BYTES);
    comm->buffers[rank] = 0;
    comm->imported[rank] = false;
}

/* Where data lies: all by the driver or, if anybody cannot, all by the host. */
static void choose(struct comm *comm)
{
    bool by_host = false;

    for (int rank = 0; rank < comm->n; rank++)
        by_host = by_host || !atomic_load(&comm->shared->members[rank].imports);
    for (int rank = 0; rank < comm->n; rank++) {
        if (by_host && rank != comm->rank)
            let_go(comm, rank);
        comm->data[rank] = by_host ? comm->shared->buffers[rank] : (char *)(uintptr_t)comm->buffers[rank];
    }
}

ncclResult_t peers_connect(struct comm *comm)
{
    CUmemGenericAllocationHandle handle = 0;
    struct member *own = &comm->shared->members[comm->rank];

    if (!shared_await(comm, joined, (uint64_t)comm->n))
        return comm->aborted ? ncclInternalError : (ncclResult_t)comm->async;
    if (same_gpu(comm))
        return ncclInvalidUsage;
    ncclResult_t result = driver_memory(comm->device, BUFFER_BYTES, &comm->buffers[comm->rank], &handle);
    if (result == ncclSuccess) {
        own->address = comm->buffers[comm->rank];
        atomic_store(&own->uses, 1);
        result = share(comm, handle);
        cuda.cuMemRelease(handle); /* the mapping holds it */
    }
    if (result == ncclSuccess)
        result = all_at(comm, STEP_CONNECTED);
    if (result == ncclSuccess)
        choose(comm);
    else
        shared_fail(comm, ncclRemoteError); /* for the others */
    return result;
}

void peers_let_go(struct comm *comm)
{
    for (int rank = 0; rank < comm->n; rank++) {
        let_go(comm, rank);
        comm->data[rank] = NULL;
    }
}
