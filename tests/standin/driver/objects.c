/* Physical memory: cuMemCreate, export, import. An object is a memfd; its name says of which device and with which rights,
 * so that an importer knows it from the memfds that others make. */
#define _GNU_SOURCE
#include "standin.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static Arena objects = {.size = sizeof(Object)};

static Object *add(int fd, size_t size, const CUmemAllocationProp *prop) {
    Object *object = arena_add(&objects);
    *object = (Object){.fd = fd, .size = size, .prop = *prop};
    return object;
}

Object *object_of(const char *call, CUmemGenericAllocationHandle handle) {
    Object *object = (Object *)(uintptr_t)handle;
    bool known = arena_has(&objects, object);
    if (known && object->handles) return object;
    refuse(CUDA_ERROR_INVALID_VALUE, call, known ? "handle 0x%llx was released" : "0x%llx is no handle", handle);
    return NULL;
}

void object_drop(Object *object) {
    if (object->handles || object->maps || object->fd < 0) return;
    close(object->fd);
    object->fd = -1;
}

CUresult object_create(const char *call, size_t size, const CUmemAllocationProp *prop, Object **made) {
    size_t left, total;
    free_memory(prop->location.id, &left, &total);
    if (size > left) return CUDA_ERROR_OUT_OF_MEMORY;
    char name[128];
    object_name(name, sizeof name, prop);
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0 || ftruncate(fd, (off_t)size)) return refuse(CUDA_ERROR_OUT_OF_MEMORY, call, "memfd of %zu bytes: %m", size);
    char *bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (bytes == MAP_FAILED) return close(fd), refuse(CUDA_ERROR_OUT_OF_MEMORY, call, "memfd of %zu bytes: %m", size);
    memset(bytes, 0xA5, size); /* a GPU promises no zeros either */
    munmap(bytes, size);
    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    *made = add(fd, size, prop);
    return CUDA_SUCCESS;
}

Object *object_open(int fd) {
    char link[64];
    int board, types, rdma;
    struct stat status;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (fstat(fd, &status) || !object_named(AT_FDCWD, link, &board, &types, &rdma) || ordinal_of(board) < 0) return NULL;
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (own < 0) return NULL;
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = types,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, ordinal_of(board)},
                                .allocFlags = {.gpuDirectRDMACapable = (unsigned char)rdma}};
    Object *object = add(own, (size_t)status.st_size, &prop);
    object->foreign = true;
    return object;
}

static CUresult check_prop(const char *call, const CUmemAllocationProp *prop) {
    if (!settings()->vmm) return CUDA_ERROR_NOT_SUPPORTED;
    if (prop->type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return refuse(CUDA_ERROR_INVALID_VALUE, call, "allocation type %d is not PINNED", prop->type);
    if (prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return refuse(CUDA_ERROR_INVALID_VALUE, call, "location type %d is not DEVICE", prop->location.type);
    if (prop->location.id < 0 || prop->location.id >= visible_devices())
        return refuse(CUDA_ERROR_INVALID_DEVICE, call, "there is no device %d", prop->location.id);
    if (prop->requestedHandleTypes & ~(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | CU_MEM_HANDLE_TYPE_FABRIC))
        return refuse(CUDA_ERROR_NOT_SUPPORTED, call, "handle types 0x%x", prop->requestedHandleTypes);
    if (prop->requestedHandleTypes && !settings()->posix_handles) return CUDA_ERROR_NOT_SUPPORTED;
    if (prop->allocFlags.gpuDirectRDMACapable && !settings()->gpu_direct_rdma) return CUDA_ERROR_NOT_SUPPORTED;
    return CUDA_SUCCESS;
}

API CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop, int option) {
    ENTER(NEED_INIT);
    CUresult wrong = check_prop(__func__, prop);
    if (wrong) return wrong;
    if (option != 0 && option != 1) return refuse(CUDA_ERROR_INVALID_VALUE, __func__, "option %d", option);
    *granularity = GRANULARITY;
    return CUDA_SUCCESS;
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                         unsigned long long flags) {
    ENTER(NEED_INIT);
    CUresult result = check_prop(__func__, prop);
    if (result) return result;
    if (prop->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC)
        return CUDA_ERROR_NOT_PERMITTED; /* as without an IMEX channel */
    if (!size || size % GRANULARITY || flags)
        return refuse(CUDA_ERROR_INVALID_VALUE, __func__, "size %zu is no multiple of %d, or flags 0x%llx are not 0", size,
                      GRANULARITY, flags);
    pthread_mutex_lock(&world);
    Object *object;
    result = object_create(__func__, size, prop, &object);
    if (!result) {
        object->handles = 1;
        live.handles++;
        *handle = (uintptr_t)object;
    }
    pthread_mutex_unlock(&world);
    return result;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER(NEED_INIT);
    pthread_mutex_lock(&world);
    Object *object = object_of(__func__, handle);
    if (object) {
        object->handles--;
        live.handles--;
        object_drop(object);
    }
    pthread_mutex_unlock(&world);
    return object ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    ENTER(NEED_INIT);
    pthread_mutex_lock(&world);
    Mapping *mapping = mapping_at((uintptr_t)address);
    bool found = mapping && !mapping->object->legacy;
    if (found) {
        mapping->object->handles++;
        live.handles++;
        *handle = (uintptr_t)mapping->object;
    }
    pthread_mutex_unlock(&world);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle) {
    ENTER(NEED_INIT);
    pthread_mutex_lock(&world);
    Object *object = object_of(__func__, handle);
    if (object) *prop = object->prop;
    pthread_mutex_unlock(&world);
    return object ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle, int type,
                                          unsigned long long flags) {
    ENTER(NEED_INIT);
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    if (flags) return refuse(CUDA_ERROR_INVALID_VALUE, __func__, "flags must be 0, not 0x%llx", flags);
    pthread_mutex_lock(&world);
    Object *object = object_of(__func__, handle);
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (object && !(object->prop.requestedHandleTypes & type)) {
        refuse(result, __func__, "the memory was created without CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR");
    } else if (object) {
        int fd = fcntl(object->fd, F_DUPFD_CLOEXEC, 3);
        result = fd < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
        if (!result) *(int *)shareable = fd;
    }
    pthread_mutex_unlock(&world);
    return result;
}

API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable, int type) {
    ENTER(NEED_INIT);
    if (!settings()->vmm || !settings()->posix_handles) return CUDA_ERROR_NOT_SUPPORTED;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    int fd = (int)(intptr_t)shareable, rights = fcntl(fd, F_GETFL);
    if (rights >= 0 && (rights & O_ACCMODE) != O_RDWR)
        return refuse(CUDA_ERROR_NOT_PERMITTED, __func__, "descriptor %d is not open for reading and writing", fd);
    pthread_mutex_lock(&world);
    Object *object = object_open(fd);
    if (object) {
        object->handles = 1;
        live.handles++;
        *handle = (uintptr_t)object;
    } else {
        refuse(CUDA_ERROR_INVALID_VALUE, __func__, "descriptor %d is no export of memory of a device that is visible here", fd);
    }
    pthread_mutex_unlock(&world);
    return object ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
