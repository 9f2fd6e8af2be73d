/* The node: what all processes on it share. Both libraries (libcuda, libnvidia-ml) are built on it.
 *
 * A node lives in one folder, a tmpfs that `limosa softgpu` mounts at NODE_FOLDER in a mount namespace of its own:
 *
 *   state        struct node_state, mapped by every process that has initialised the driver
 *   lock         flock()ed while `state` is changed
 *   memory/ID    one file for each block of device memory. Whoever maps it or has it open shares one open file
 *                description, which holds a flock: a block whose file can be locked exclusively is held by nobody,
 *                its memory is free again. So memory lives exactly as long as a mapping, handle or descriptor of it,
 *                in whatever process, and nothing has to be told when a process is killed.
 *   requests/    what controllers ask of their targets, and the answers (checkpoint.h)
 *   faults/      one file for each fault to inject (fault.h)
 *   nccl/        where ranks of a communicator meet (nccl/shared.c)
 *   log          functions that were called and are not implemented, faults that were injected
 *
 * Device nodes: /dev/nvidia<minor> are character devices of a major number that no driver has (opened with O_PATH, as
 * a name in /proc/PID/fd is all that is wanted of them); /dev/nvidiactl and /dev/nvidia-uvm are /dev/zero under another
 * name, so that they can be mapped.
 */
#ifndef LIMOSA_NODE_H
#define LIMOSA_NODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define NODE_FOLDER "/dev/nvidia-soft"
#define NODE_MAGIC 0x3155504774666f53ull /* "SoftGPU1" */
#define NODE_MAX_GPUS 16
#define NODE_MAX_BLOCKS 65536
#define NODE_GRANULARITY ((size_t)2 << 20) /* of device memory: every block is a multiple of it */

enum node_kind { NODE_CONTEXT = 1, NODE_PLAIN = 2, NODE_VMM = 3, NODE_RESERVED = 4 };

struct node_gpu {
    uint8_t uuid[16];
    char name[64];     /* "Soft GPU H200" */
    char pci[20];      /* "00000000:01:00.0" */
    int32_t minor;     /* /dev/nvidia<minor> */
    int32_t cc_major, cc_minor, multiprocessors;
    uint64_t memory;   /* bytes */
    uint64_t reserved; /* bytes that the idle GPU shows as used (4 MiB on an H200) */
    uint32_t mig, persistence, compute_mode;
    uint32_t lost;     /* it fell off the bus */
    uint32_t pad[8];
};

enum node_nvml { NODE_NVML_MPS = 1 /* compute processes are told as clients of MPS */ };

/* Bytes a second (0: as fast as the machine is) and seconds. */
struct node_rates {
    double checkpoint, restore;                   /* the driver's own copies in a checkpoint and a restore */
    double checkpoint_fixed, restore_fixed;       /* what either takes with nothing on the device */
    double lock_fixed, unlock_fixed;
    double host_to_device, device_to_host, device_to_device, peer;
    double copy_fixed;                            /* what each copy takes beside its bytes */
    double pinned;                                /* allocation of pinned host memory */
    double init_fixed, context_fixed;             /* cuInit, for each GPU that can be opened; making a context */
    uint64_t context_bytes;                       /* device memory that a context takes */
    uint64_t checkpoint_bytes;                    /* host memory that a checkpoint takes beyond the application's */
};

struct node_block {
    uint64_t id; /* 0: a free place */
    uint64_t bytes;
    uint64_t start_time; /* of pid, field 22 of /proc/PID/stat */
    int32_t pid;         /* who made it, as it is called in its own pid namespace */
    int16_t gpu;         /* index in gpus[] */
    int16_t kind;
    uint64_t pid_namespace; /* that namespace: a container sees the node, and not the machine's pids */
};

struct node_state {
    uint64_t magic;
    uint32_t size; /* sizeof(struct node_state) */
    int32_t n_gpus;
    int32_t cuda_version;    /* 13000 */
    char driver_version[32]; /* "580.159.04" */
    struct node_gpu gpus[NODE_MAX_GPUS];
    struct node_rates rates;
    uint32_t fault_generation; /* counted up whenever faults/ changes; read without the lock */
    uint32_t nvml_flags;       /* of enum node_nvml */
    uint64_t next_block;
    int32_t n_blocks; /* places ever used */
    struct node_block blocks[NODE_MAX_BLOCKS];
};

static inline int node_bounded(int n, int most)
{
    if (n < 0)
        return 0;
    return n < most ? n : most;
}

/* How many there are. Everybody in the node may write there, also while root's processes read: numbers by which memory
 * is taken or found are read once, by these and node_identify alone, and bounded. */
static inline int node_gpus(const struct node_state *node)
{
    return node_bounded(__atomic_load_n(&node->n_gpus, __ATOMIC_RELAXED), NODE_MAX_GPUS);
}

static inline int node_blocks(const struct node_state *node)
{
    return node_bounded(__atomic_load_n(&node->n_blocks, __ATOMIC_RELAXED), NODE_MAX_BLOCKS);
}

/* Sums of that many bytes do not overflow. What is larger, nobody but a stranger has written: it counts as none. */
#define NODE_MOST_BYTES (1ULL << 40)
#define NODE_MOST_CHECKPOINT_BYTES (1ULL << 30)

static inline uint64_t node_checkpoint_bytes(const struct node_state *node)
{
    uint64_t bytes = __atomic_load_n(&node->rates.checkpoint_bytes, __ATOMIC_RELAXED);
    return bytes <= NODE_MOST_CHECKPOINT_BYTES ? bytes : 0;
}

/* Map the node's state; the same pointer ever after. NULL with errno where there is no node.
 * After node_close (a process that is checkpointed) a private copy stands there, without blocks and with no faults, and
 * node_open opens nothing: only node_reopen maps the node at the same address again (NULL: there is none, still closed).
 * A forked child has nothing mapped and may call node_open anew. */
struct node_state *node_open(void);
void node_close(void);
struct node_state *node_reopen(void);

/* What node_open would answer, as long as it would open nothing for it; else NULL. */
struct node_state *node_mapped(void);

/* Read a part of the state without keeping anything of the node open: for processes that have no driver (yet). False
 * where there is no node, and while it is closed. */
bool node_peek(size_t offset, void *to, size_t bytes);

/* Take and give back the node's lock (a descriptor; -1 with errno, ENODEV while the node is closed). Held for
 * microseconds, released by the kernel when its holder is killed. */
int node_lock(void);
void node_unlock(int lock);

/* Take device memory: 0, or -ENOMEM (the GPU is full), -ENODEV (it is lost), -ENOSPC (no place left), -errno.
 * bytes is rounded up to NODE_GRANULARITY, except for NODE_CONTEXT, whose bytes are counted and never touched.
 * *fd is an open descriptor (close-on-exec) whose open file description holds the block's flock. */
int node_take(int gpu, uint64_t bytes, enum node_kind kind, int *fd, uint64_t *id);

/* Which block a descriptor is: 0, or -EINVAL where it is none. Any of the pointers may be NULL. */
int node_identify(int fd, uint64_t *id, int *gpu, uint64_t *bytes, enum node_kind *kind);

/* Look at once whether a block is held by nobody (after its last mapping and descriptor here were let go). Without this
 * its memory is free again all the same, but goes on taking the machine's memory until somebody needs it. Disowned: who
 * made it has let go of it: while others hold it, it is counted for nobody (measured, by NVML). */
void node_dropped(uint64_t id, bool disowned);

/* Give places of blocks that nobody holds back. Called with the lock held or not (locked says which). */
void node_reap(bool locked);

/* Whether this process can open a GPU's device node: the libraries leave out the others. */
bool node_openable(const struct node_gpu *gpu);

/* Bytes in use on a GPU (reserved ones counted), after a reap. */
uint64_t node_used(int gpu);

struct node_process {
    int32_t pid;
    uint64_t bytes;
};
/* Living processes that hold memory or a context on a GPU, with their bytes; returns how many there are, of which at
 * most `room` are written. Their pids are the caller's: those that its pid namespace does not have are left out. */
int node_processes(int gpu, struct node_process *found, int room);

/* When a process was started (field 22 of /proc/PID/stat, clock ticks since boot), 0 where there is no such process. The
 * kernel answers by the clock of the reader's time namespace, and CRIU gives what it restores one of its own: that is
 * taken off, which may leave one tick, so two start times are compared by node_same_start. */
uint64_t node_start_time(pid_t pid);
bool node_same_start(uint64_t one, uint64_t other);

/* The inode of the calling process's pid namespace, 0 where it cannot be known. Takes no descriptor. */
uint64_t node_pid_namespace(void);

/* Open a file that everybody in the node could have put there: -1 with errno where it is a link (which would lead a process
 * of root's to a file of the machine's), a pipe (which would have it wait) or anything else than a file. Flags as of
 * open(2); files that are made have mode 0666 but for the umask. */
int node_open_file(const char *path, int flags);

/* One line to the node's log: time, pid, text. */
void node_log(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Sleep until `seconds` + bytes / rate have passed since `since` (CLOCK_MONOTONIC seconds); rate 0: no rate. */
double node_now(void);
void node_pace(double since, double seconds, uint64_t bytes, double rate);

#endif
