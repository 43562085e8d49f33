/* Events: a place in a stream's queue. One is complete when the stream's thread has passed that place. */
#include "standin.h"
#include <time.h>

typedef struct Event {
    Context *context;
    unsigned flags;
    bool destroyed;
    Stream *stream; /* of the last record; NULL: never recorded, which counts as complete */
    uint64_t number;
    double reached; /* milliseconds */
} Event;
static Arena events = {.size = sizeof(Event)};

static CUresult event_of(const char *call, CUevent handle, Event **found) {
    if (!arena_has(&events, handle)) return refuse(CUDA_ERROR_INVALID_HANDLE, call, "%p is no event", (void *)handle);
    if (handle->destroyed) forbid(call, "event %p was destroyed", (void *)handle);
    *found = handle;
    return CUDA_SUCCESS;
}

void event_reached(Event *event, const Stream *stream, uint64_t number) {
    if (event->stream != stream || event->number != number) return; /* recorded again since */
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    event->reached = (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

API CUresult cuEventCreate(CUevent *made, unsigned flags) {
    ENTER(NEED_CONTEXT);
    if (flags & ~(unsigned)(CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING))
        return refuse(CUDA_ERROR_NOT_SUPPORTED, __func__, "flags 0x%x", flags);
    pthread_mutex_lock(&world);
    *made = arena_add(&events);
    **made = (Event){.context = current(), .flags = flags};
    live.events++;
    pthread_mutex_unlock(&world);
    return CUDA_SUCCESS;
}

API CUresult cuEventDestroy_v2(CUevent handle) {
    ENTER(NEED_CONTEXT);
    pthread_mutex_lock(&world);
    Event *event = NULL;
    CUresult result = event_of(__func__, handle, &event);
    if (!result) {
        event->destroyed = true;
        live.events--;
    }
    pthread_mutex_unlock(&world);
    return result;
}

API CUresult cuEventRecord(CUevent handle, CUstream on) {
    ENTER(NEED_CONTEXT);
    pthread_mutex_lock(&world);
    Event *event = NULL;
    Stream *stream = NULL;
    CUresult result = event_of(__func__, handle, &event);
    if (!result) result = stream_of(__func__, on, &stream);
    if (!result && event->context != stream->context)
        result = refuse(CUDA_ERROR_INVALID_HANDLE, __func__, "event and stream are of different contexts");
    if (!result) {
        event->number = enqueue(stream, (Item){.kind = MARK, .event = event});
        event->stream = stream;
    }
    pthread_mutex_unlock(&world);
    return result;
}

API CUresult cuEventQuery(CUevent handle) {
    ENTER(NEED_INIT);
    pthread_mutex_lock(&world);
    Event *event = NULL;
    CUresult result = event_of(__func__, handle, &event);
    if (!result && event->stream)
        result = is_done(event->stream, event->number) ? event->context->error : CUDA_ERROR_NOT_READY;
    pthread_mutex_unlock(&world);
    return result;
}

API CUresult cuEventSynchronize(CUevent handle) {
    ENTER(NEED_INIT);
    pthread_mutex_lock(&world);
    Event *event = NULL;
    CUresult result = event_of(__func__, handle, &event);
    if (!result && event->stream) result = await(event->stream, event->number);
    pthread_mutex_unlock(&world);
    return result;
}

API CUresult cuStreamWaitEvent(CUstream handle, CUevent awaited, unsigned flags) {
    ENTER(NEED_CONTEXT);
    (void)flags;
    pthread_mutex_lock(&world);
    Event *event = NULL;
    Stream *stream = NULL;
    CUresult result = event_of(__func__, awaited, &event);
    if (!result) result = stream_of(__func__, handle, &stream);
    if (!result && event->stream)
        enqueue(stream, (Item){.kind = WAIT, .wait = {event->stream, event->number}});
    pthread_mutex_unlock(&world);
    return result;
}

API CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent from, CUevent to) {
    ENTER(NEED_INIT);
    pthread_mutex_lock(&world);
    Event *first = NULL, *second = NULL;
    CUresult result = event_of(__func__, from, &first);
    if (!result) result = event_of(__func__, to, &second);
    if (!result && (!first->stream || !second->stream || (first->flags | second->flags) & CU_EVENT_DISABLE_TIMING))
        result = refuse(CUDA_ERROR_INVALID_HANDLE, __func__, "an event was not recorded, or was created without timing");
    if (!result && (!is_done(first->stream, first->number) || !is_done(second->stream, second->number)))
        result = CUDA_ERROR_NOT_READY;
    if (!result) *milliseconds = (float)(second->reached - first->reached);
    pthread_mutex_unlock(&world);
    return result;
}

API CUresult cuEventElapsedTime(float *milliseconds, CUevent from, CUevent to) {
    return cuEventElapsedTime_v2(milliseconds, from, to);
}
