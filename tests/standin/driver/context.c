/* The start of the driver, primary contexts, and what every call checks first. */
#include "standin.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

pthread_mutex_t world = PTHREAD_MUTEX_INITIALIZER;

static pid_t initialised_by;
static Context contexts[MAX_DEVICES];
enum { DEPTH = 64 };
static __thread Context *stack[DEPTH];
static __thread unsigned depth;

API CUresult cuInit(unsigned flags) {
    if (flags) return refuse(CUDA_ERROR_INVALID_VALUE, __func__, "flags must be 0, not %u", flags);
    if (settings()->device_error) return (CUresult)settings()->device_error;
    if (initialised_by && initialised_by != getpid())
        return refuse(CUDA_ERROR_NOT_INITIALIZED, __func__, "this process was forked from one that has used CUDA");
    if (!visible_devices()) return CUDA_ERROR_NO_DEVICE;
    for (int i = 0; i < MAX_DEVICES; i++) contexts[i].device = i;
    initialised_by = getpid();
    return CUDA_SUCCESS;
}

API CUresult cuDriverGetVersion(int *version) {
    *version = (int)settings()->driver_version;
    return CUDA_SUCCESS;
}

bool is_context(const Context *context) { return context >= contexts && context < contexts + visible_devices(); }

Context *primary(int ordinal) { return &contexts[ordinal]; }

Context *current(void) { return depth ? stack[depth - 1] : NULL; }

CUresult enter(const char *call, enum Need need) {
    if (!initialised_by) return refuse(CUDA_ERROR_NOT_INITIALIZED, call, "cuInit was not called");
    if (initialised_by != getpid())
        return refuse(CUDA_ERROR_NOT_INITIALIZED, call, "this process was forked from one that has used CUDA");
    if (settings()->device_error) return (CUresult)settings()->device_error;
    if (need == NEED_INIT) return CUDA_SUCCESS;
    Context *context = current();
    if (!context) return refuse(CUDA_ERROR_INVALID_CONTEXT, call, "no context is current to this thread");
    if (!context->retains)
        return refuse(CUDA_ERROR_CONTEXT_IS_DESTROYED, call, "the current context was released by all who retained it");
    return context->error;
}

static CUresult check_device(const char *call, CUdevice device) {
    if (device >= 0 && device < visible_devices()) return CUDA_SUCCESS;
    return refuse(CUDA_ERROR_INVALID_DEVICE, call, "there is no device %d", device);
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER(NEED_INIT);
    if (check_device(__func__, device)) return CUDA_ERROR_INVALID_DEVICE;
    if (settings()->compute_mode == 2) return CUDA_ERROR_DEVICE_UNAVAILABLE;
    pthread_mutex_lock(&world);
    if (!contexts[device].retains++) live.contexts++;
    *context = &contexts[device];
    pthread_mutex_unlock(&world);
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    ENTER(NEED_INIT);
    if (check_device(__func__, device)) return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&world);
    Context *context = &contexts[device];
    CUresult result = CUDA_SUCCESS;
    if (!context->retains) {
        result = refuse(CUDA_ERROR_INVALID_CONTEXT, __func__, "device %d's context is not retained", device);
    } else if (!--context->retains) {
        live.contexts--;
        context->error = CUDA_SUCCESS;
        for (Stream *stream = streams; stream; stream = stream->next)
            if (stream->context == context && !stream->destroyed) {
                if (stream->done < stream->queued) forbid(__func__, "the last release came before a stream's work was done");
                destroy_stream(stream);
            }
        context->null_stream = NULL;
    }
    pthread_mutex_unlock(&world);
    return result;
}

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    ENTER(NEED_INIT);
    if (check_device(__func__, device)) return CUDA_ERROR_INVALID_DEVICE;
    *flags = contexts[device].flags;
    *active = contexts[device].retains > 0;
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags) {
    ENTER(NEED_INIT);
    if (check_device(__func__, device)) return CUDA_ERROR_INVALID_DEVICE;
    contexts[device].flags = flags;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTER(NEED_INIT);
    *context = current();
    return CUDA_SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER(NEED_INIT);
    if (context && !is_context(context)) return refuse(CUDA_ERROR_INVALID_CONTEXT, __func__, "%p is no context", (void *)context);
    if (depth) depth--;
    if (context) stack[depth++] = context;
    return CUDA_SUCCESS;
}

API CUresult cuCtxPushCurrent_v2(CUcontext context) {
    ENTER(NEED_INIT);
    if (!is_context(context)) return refuse(CUDA_ERROR_INVALID_CONTEXT, __func__, "%p is no context", (void *)context);
    if (depth == DEPTH) forbid(__func__, "%d contexts were pushed and not popped", DEPTH);
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

API CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    ENTER(NEED_INIT);
    if (!depth) return refuse(CUDA_ERROR_INVALID_CONTEXT, __func__, "no context is current to this thread");
    depth--;
    if (context) *context = stack[depth];
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice *device) {
    ENTER(NEED_CONTEXT);
    *device = current()->device;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetId(CUcontext context, unsigned long long *id) {
    ENTER(NEED_INIT);
    if (!context) context = current();
    if (!is_context(context)) return refuse(CUDA_ERROR_INVALID_CONTEXT, __func__, "%p is no context", (void *)context);
    *id = (unsigned long long)context->device + 1;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetFlags(unsigned *flags) {
    ENTER(NEED_CONTEXT);
    *flags = current()->flags;
    return CUDA_SUCCESS;
}

API CUresult cuCtxSetFlags(unsigned flags) {
    ENTER(NEED_CONTEXT);
    current()->flags = flags;
    return CUDA_SUCCESS;
}
