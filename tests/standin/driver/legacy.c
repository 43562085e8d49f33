/* cuMemAlloc and its IPC handles: memory that dies with its maker and cannot be exported as a descriptor. */
#define _GNU_SOURCE
#include "standin.h"
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    char magic[8];
    int pid, fd;
    size_t size;
} IpcHandle;

/* Maps a whole object at an address of its own, or frees it. */
static CUresult place(const char *call, Object *object, CUdeviceptr *address) {
    Reservation *reservation;
    Mapping *mapping;
    object->legacy = true;
    CUresult result = reserve(call, object->size, &reservation);
    if (!result) result = map_object(call, reservation, reservation->start, object->size, object, &mapping);
    if (result) return object_drop(object), result;
    set_access(mapping, current()->device, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    *address = reservation->start;
    return CUDA_SUCCESS;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
    ENTER(NEED_CONTEXT);
    if (!size) return CUDA_ERROR_INVALID_VALUE;
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, current()->device},
                                .allocFlags = {.gpuDirectRDMACapable = 1}};
    pthread_mutex_lock(&world);
    Object *object;
    CUresult result = object_create(__func__, (size + 4095) / 4096 * 4096, &prop, &object);
    if (!result) result = place(__func__, object, address);
    pthread_mutex_unlock(&world);
    return result;
}

static CUresult free_legacy(const char *call, CUdeviceptr address, bool foreign) {
    pthread_mutex_lock(&world);
    Reservation *in = reservation_at(address);
    Mapping *mapping = in && in->start == address ? in->mappings : NULL;
    bool fits = mapping && mapping->object->legacy && mapping->object->foreign == foreign;
    if (fits) {
        unmap(call, in, in->start, in->size);
        unreserve(in);
    }
    pthread_mutex_unlock(&world);
    return fits ? CUDA_SUCCESS : refuse(CUDA_ERROR_INVALID_VALUE, call, "0x%llx is not what it gave", address);
}

/* Waits for the work of the context first, as the real one does. */
API CUresult cuMemFree_v2(CUdeviceptr address) {
    ENTER(NEED_CONTEXT);
    pthread_mutex_lock(&world);
    for (Stream *stream = streams; stream; stream = stream->next) await(stream, stream->queued);
    pthread_mutex_unlock(&world);
    return free_legacy(__func__, address, false);
}

API CUresult cuMemAllocManaged(CUdeviceptr *address, size_t size, unsigned flags) {
    ENTER(NEED_CONTEXT);
    (void)address, (void)size, (void)flags;
    return CUDA_ERROR_NOT_SUPPORTED;
}

API CUresult cuMemGetInfo_v2(size_t *left, size_t *total) {
    ENTER(NEED_CONTEXT);
    pthread_mutex_lock(&world);
    free_memory(current()->device, left, total);
    pthread_mutex_unlock(&world);
    return CUDA_SUCCESS;
}

API CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    ENTER(NEED_CONTEXT);
    pthread_mutex_lock(&world);
    Mapping *mapping = mapping_at(address);
    bool fits = mapping && mapping->object->legacy && !mapping->object->foreign;
    if (fits) {
        IpcHandle made = {"standin", getpid(), mapping->object->fd, mapping->object->size};
        memset(handle, 0, sizeof *handle);
        memcpy(handle, &made, sizeof made);
    }
    pthread_mutex_unlock(&world);
    return fits ? CUDA_SUCCESS : refuse(CUDA_ERROR_INVALID_VALUE, __func__, "0x%llx is not cuMemAlloc's", address);
}

API CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle shared, unsigned flags) {
    ENTER(NEED_CONTEXT);
    (void)flags;
    IpcHandle handle;
    memcpy(&handle, &shared, sizeof handle);
    if (strcmp(handle.magic, "standin")) return refuse(CUDA_ERROR_INVALID_VALUE, __func__, "no handle of cuIpcGetMemHandle");
    if (handle.pid == getpid()) return refuse(CUDA_ERROR_INVALID_CONTEXT, __func__, "this process made the handle");
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return refuse(CUDA_ERROR_INVALID_VALUE, __func__, "the maker of the memory is gone");
    pthread_mutex_lock(&world);
    Object *object = object_open(fd);
    CUresult result = object ? place(__func__, object, address) : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&world);
    close(fd);
    return result;
}

API CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    ENTER(NEED_CONTEXT);
    return free_legacy(__func__, address, true);
}
