/* Streams. Each has a thread, which does what was queued in order and later: what the caller has not waited for has not
 * happened. The null stream and the blocking ones wait for each other, as the real ones do. */
#define _GNU_SOURCE
#include "standin.h"
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

Stream *streams;
static Arena all = {.size = sizeof(Stream)};
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;

/* Under the lock: until something moves, or a millisecond, as settings change without a signal. */
static void pause_briefly(void) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 1000000;
    if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
    pthread_cond_timedwait(&moved, &world, &until);
}

static void sleep_unlocked(uint64_t microseconds) {
    pthread_mutex_unlock(&world);
    usleep((useconds_t)microseconds);
    pthread_mutex_lock(&world);
}

static void run(Stream *stream, const Item *item) {
    switch (item->kind) {
        case COPY:
        case FILL:
        case LAUNCH:
            run_copies(stream->context, item);
            break;
        case WAIT:
            while (item->wait.stream->done < item->wait.number) {
                if (stream->wanted >= item->number) is_done(item->wait.stream, item->wait.number);
                pause_briefly();
            }
            break;
        case CALL:
            pthread_mutex_unlock(&world);
            if (item->call.callback) item->call.callback(item->call.stream, stream->context->error, item->call.user);
            if (item->call.function) item->call.function(item->call.user);
            pthread_mutex_lock(&world);
            break;
        case MARK:
            event_reached(item->event, stream, item->number);
    }
}

static bool is_held(const Stream *stream, const Item *item) {
    uint64_t hold = settings()->hold;
    return hold == 1 || (hold == 2 && stream->wanted < item->number);
}

static void *serve(void *argument) {
    Stream *stream = argument;
    pthread_mutex_lock(&world);
    for (;;) {
        bool idle = !stream->first;
        while (!stream->first && !stream->destroyed) pthread_cond_wait(&moved, &world);
        Item *item = stream->first;
        if (!item) break;
        if (idle) sleep_unlocked(settings()->delay_us);
        while (is_held(stream, item)) pause_briefly();
        run(stream, item);
        stream->first = item->next;
        if (!stream->first) stream->last = NULL;
        stream->done = item->number;
        free(item->copies);
        free(item);
        pthread_cond_broadcast(&moved);
    }
    Stream **at = &streams;
    while (*at != stream) at = &(*at)->next;
    *at = stream->next;
    pthread_mutex_unlock(&world);
    return NULL;
}

static Stream *start(Context *context, unsigned flags, int priority) {
    Stream *stream = arena_add(&all);
    *stream = (Stream){.context = context, .flags = flags, .priority = priority, .next = streams};
    pthread_t thread;
    if (pthread_create(&thread, NULL, serve, stream)) forbid("cuStreamCreate", "no thread for the stream: %m");
    pthread_detach(thread);
    return streams = stream;
}

Stream *null_stream(Context *context) {
    if (!context->null_stream) context->null_stream = start(context, 0, 0);
    return context->null_stream;
}

CUresult stream_of(const char *call, CUstream handle, Stream **found) {
    if ((uintptr_t)handle <= 2) return *found = null_stream(current()), CUDA_SUCCESS; /* 1, 2: legacy and per thread */
    if (!arena_has(&all, handle)) return refuse(CUDA_ERROR_INVALID_HANDLE, call, "%p is no stream", (void *)handle);
    if (handle->destroyed) forbid(call, "stream %p was destroyed", (void *)handle);
    if (handle->context != current())
        return refuse(CUDA_ERROR_INVALID_HANDLE, call, "the stream is device %d's, the current context device %d's",
                      handle->context->device, current()->device);
    *found = handle;
    return CUDA_SUCCESS;
}

static uint64_t append(Stream *stream, const Item *item) {
    Item *queued = malloc(sizeof *queued);
    *queued = *item;
    queued->next = NULL;
    queued->number = ++stream->queued;
    if (stream->last) stream->last->next = queued;
    else stream->first = queued;
    stream->last = queued;
    pthread_cond_broadcast(&moved);
    return queued->number;
}

static void wait_for(Stream *stream, Stream *other) {
    Item wait = {.kind = WAIT, .wait = {other, other->queued}};
    if (other->done < other->queued) append(stream, &wait);
}

uint64_t enqueue(Stream *stream, Item item) {
    Stream *null = stream->context->null_stream;
    if (stream == null) {
        for (Stream *other = streams; other; other = other->next)
            if (other->context == stream->context && other != null && !(other->flags & CU_STREAM_NON_BLOCKING))
                wait_for(null, other);
    } else if (null && !(stream->flags & CU_STREAM_NON_BLOCKING)) {
        wait_for(stream, null);
    }
    return append(stream, &item);
}

bool is_done(Stream *stream, uint64_t number) {
    if (stream->wanted < number) stream->wanted = number;
    return stream->done >= number;
}

CUresult await(Stream *stream, uint64_t number) {
    while (!is_done(stream, number)) {
        if (settings()->device_error) return (CUresult)settings()->device_error;
        pause_briefly();
    }
    return stream->context->error;
}

/* Work that is queued is still done. */
void destroy_stream(Stream *stream) {
    stream->destroyed = true;
    if (stream != stream->context->null_stream) live.streams--;
    pthread_cond_broadcast(&moved);
}

bool is_stream(const void *handle) { return arena_has(&all, handle); }

static bool overlap(CUdeviceptr a, size_t a_size, CUdeviceptr b, size_t b_size) { return a < b + b_size && b < a + a_size; }

static void forbid_launched(const char *call, const Item *item, CUdeviceptr start, size_t size) {
    bool taken = overlap(item->launch.table, item->launch.count * sizeof(Row), start, size);
    const Row *rows = rows_of(item);
    for (size_t i = 0; rows && i < item->launch.count; i++)
        taken |= overlap(rows[i].to, rows[i].size, start, size) || overlap(rows[i].from, rows[i].size, start, size);
    if (taken) forbid(call, "a kernel is not complete: synchronise before you take the memory away");
}

void forbid_pending(const char *call, CUdeviceptr start, size_t size) {
    for (Stream *stream = streams; stream; stream = stream->next)
        for (Item *item = stream->first; item; item = item->next) {
            if (item->kind == LAUNCH) forbid_launched(call, item, start, size);
            if (item->kind == FILL && overlap(item->fill.to, item->fill.size, start, size))
                forbid(call, "a memset of 0x%llx is not complete: synchronise before you take the memory away", item->fill.to);
            for (size_t i = 0; item->kind == COPY && i < item->count; i++)
                if (overlap(item->copies[i].to, item->copies[i].size, start, size) ||
                    overlap(item->copies[i].from, item->copies[i].size, start, size))
                    forbid(call, "a copy from 0x%llx to 0x%llx is not complete: synchronise before you take the memory away",
                           item->copies[i].from, item->copies[i].to);
        }
}

API CUresult cuStreamCreateWithPriority(CUstream *made, unsigned flags, int priority) {
    ENTER(NEED_CONTEXT);
    if (flags & ~(unsigned)CU_STREAM_NON_BLOCKING) return refuse(CUDA_ERROR_INVALID_VALUE, __func__, "flags 0x%x", flags);
    pthread_mutex_lock(&world);
    *made = start(current(), flags, priority);
    live.streams++;
    pthread_mutex_unlock(&world);
    return CUDA_SUCCESS;
}

API CUresult cuStreamCreate(CUstream *made, unsigned flags) { return cuStreamCreateWithPriority(made, flags, 0); }

API CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER(NEED_CONTEXT);
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return CUDA_SUCCESS;
}

API CUresult cuStreamDestroy_v2(CUstream handle) {
    ENTER(NEED_CONTEXT);
    pthread_mutex_lock(&world);
    Stream *stream = NULL;
    CUresult result = (uintptr_t)handle <= 2 ? CUDA_ERROR_INVALID_HANDLE : stream_of(__func__, handle, &stream);
    if (!result) {
        destroy_stream(stream);
    }
    pthread_mutex_unlock(&world);
    return result;
}

API CUresult cuStreamQuery(CUstream handle) {
    ENTER(NEED_CONTEXT);
    pthread_mutex_lock(&world);
    Stream *stream = NULL;
    CUresult result = stream_of(__func__, handle, &stream);
    if (!result) result = is_done(stream, stream->queued) ? stream->context->error : CUDA_ERROR_NOT_READY;
    pthread_mutex_unlock(&world);
    return result;
}

API CUresult cuStreamSynchronize(CUstream handle) {
    ENTER(NEED_CONTEXT);
    pthread_mutex_lock(&world);
    Stream *stream = NULL;
    CUresult result = stream_of(__func__, handle, &stream);
    if (!result) result = await(stream, stream->queued);
    pthread_mutex_unlock(&world);
    return result;
}

API CUresult cuCtxSynchronize(void) {
    ENTER(NEED_CONTEXT);
    pthread_mutex_lock(&world);
    CUresult result = CUDA_SUCCESS;
    for (Stream *stream = streams; stream && !result; stream = stream->next)
        if (stream->context == current()) result = await(stream, stream->queued);
    pthread_mutex_unlock(&world);
    return result;
}

API CUresult cuStreamGetFlags(CUstream handle, unsigned *flags) {
    ENTER(NEED_CONTEXT);
    pthread_mutex_lock(&world);
    Stream *stream = NULL;
    CUresult result = stream_of(__func__, handle, &stream);
    if (!result) *flags = stream->flags;
    pthread_mutex_unlock(&world);
    return result;
}

static CUresult call_later(const char *call, CUstream handle, Item item) {
    pthread_mutex_lock(&world);
    Stream *stream = NULL;
    CUresult result = stream_of(call, handle, &stream);
    item.call.stream = handle;
    if (!result) enqueue(stream, item);
    pthread_mutex_unlock(&world);
    return result;
}

API CUresult cuStreamAddCallback(CUstream handle, CUstreamCallback callback, void *user, unsigned flags) {
    ENTER(NEED_CONTEXT);
    if (!callback || flags) return CUDA_ERROR_INVALID_VALUE;
    return call_later(__func__, handle, (Item){.kind = CALL, .call = {.callback = callback, .user = user}});
}

API CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void *user) {
    ENTER(NEED_CONTEXT);
    if (!function) return CUDA_ERROR_INVALID_VALUE;
    return call_later(__func__, handle, (Item){.kind = CALL, .call = {.function = function, .user = user}});
}
