/* The queues of work behind streams and events: what stream.c, event.c, copy.c and kernels.c know of each other.
 *
 * Each stream is a list of work that is done in order, one piece at a time, by a thread that is made when the first piece
 * is submitted, or by the calling thread where it would only wait for that one. All waiting is on condition variables:
 * CRIU can dump the threads. One lock (streams_lock) guards all of it.
 */
#ifndef LIMOSA_QUEUE_H
#define LIMOSA_QUEUE_H

#include "driver.h" // IWYU pragma: export

/* A point in a stream's work, reached or not: what an event records. */
struct mark {
    int references;
    bool reached;
    double time;
};

struct work {
    struct work *next;
    void (*run)(void *); /* NULL: nothing to do but to be in order */
    void *argument;
    bool keep;           /* the argument is the caller's */
    bool taken;          /* being run */
    uint64_t number;     /* in the order of submission, over all streams */
    struct mark *after;  /* not before this mark is reached */
    struct mark *sets;
};

struct stream {
    struct stream *next;
    struct context *context;
    struct work *head, **tail; /* the head stays until it is done */
    unsigned flags;
    int priority;
    unsigned long long id;
    bool legacy;            /* the context's default stream */
    unsigned long long owner; /* the thread whose default stream it is, 0 for none */
    bool gone;              /* destroyed: no handle of it is valid, its work is still done */
    bool worker;            /* its thread runs */
    int references;
    CUstreamCaptureStatus capture;
    CUstreamCaptureMode capture_mode;
    pthread_t capturer;       /* the thread that has begun the capture */
    pthread_cond_t submitted;
};

/* With the lock held: the stream that a handle means; NULL with *error. Makes default streams. */
struct stream *stream_find(struct context *context, CUstream handle, CUresult *error);
/* With the lock held: submit; marks may be NULL (their references pass over). */
CUresult stream_append(struct stream *stream, void (*run)(void *), void *argument, bool keep, struct mark *after,
                       struct mark *sets);
/* With the lock held: whether something may be done with a stream; if it is being captured it may not, and that capture is
 * spoilt. Of nothing that is submitted a graph is made: NOT_SUPPORTED is the answer, not a graph without it. */
bool stream_spoil(struct stream *stream);
/* Whether its capture forbids the calling thread what is unsafe beside captures (capture.c: the modes of both). */
bool stream_forbids(const struct stream *stream);
/* With the lock held, and a reference: wait until a mark is reached (the lock is let go meanwhile). */
void mark_wait(struct mark *mark);
void mark_drop(struct mark *mark);
/* With the lock held: a mark behind all that a context's streams have to do now (one reference passes over). */
CUresult streams_mark(struct context *context, struct mark *mark);

/* With the lock held: forget a context's events. */
void events_context_gone(struct context *context);

/* shared_event.c: what several processes know of an event. All but shared_event_reached and shared_event_wait are
 * called with the lock held. NULL where there is no memory. */
struct shared_event;
struct shared_event *shared_event_make(void);
void shared_event_keep(struct shared_event *event);
void shared_event_drop(struct shared_event *event);
/* A record begins: its number; it is reached; the newest one. */
uint64_t shared_event_record(struct shared_event *event);
void shared_event_reach(struct shared_event *event, uint64_t number);
uint64_t shared_event_last(const struct shared_event *event);
/* Whether a record is reached, or will never be, as its process has ended. */
bool shared_event_reached(const struct shared_event *event, uint64_t number);
/* Wait for it, as long as the context is well. A reference must be held. */
void shared_event_wait(const struct shared_event *event, uint64_t number, const struct context *context);
CUresult shared_event_export(struct shared_event *event, CUipcEventHandle *handle);
CUresult shared_event_open(const CUipcEventHandle *handle, struct shared_event **event);
void shared_events_forked(void);

/* A wrong access by work that runs: the context does not recover from it. */
void context_fail(struct context *context, CUresult error);

#endif
