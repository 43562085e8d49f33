/* What can be asked about an address. */
#include "standin.h"
#include <string.h>

API CUresult cuMemGetAddressRange_v2(CUdeviceptr *start, size_t *size, CUdeviceptr address) {
    ENTER(NEED_CONTEXT);
    pthread_mutex_lock(&world);
    Mapping *mapping = mapping_at(address);
    if (mapping && start) *start = mapping->start;
    if (mapping && size) *size = mapping->size;
    pthread_mutex_unlock(&world);
    return mapping ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* No DMA-BUF: peers on other hosts need a real GPU. */
API CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr start, size_t size, int type, unsigned long long flags) {
    ENTER(NEED_CONTEXT);
    (void)handle, (void)start, (void)size, (void)type, (void)flags;
    return CUDA_ERROR_NOT_SUPPORTED;
}

API CUresult cuMemRangeGetAttribute(void *data, size_t size, int attribute, CUdeviceptr start, size_t count) {
    ENTER(NEED_CONTEXT);
    (void)data, (void)size, (void)attribute, (void)start, (void)count;
    return CUDA_ERROR_INVALID_VALUE; /* only managed memory has such */
}

#define ANSWER(type, value)                        \
    do {                                           \
        type answer = (value);                     \
        return memcpy(data, &answer, sizeof answer), CUDA_SUCCESS; \
    } while (0)

static CUresult attribute_of(void *data, int attribute, const Mapping *mapping, CUdeviceptr address) {
    const Object *object = mapping->object;
    switch (attribute) {
        case 1: ANSWER(CUcontext, object->legacy ? primary(object->prop.location.id) : NULL); /* CONTEXT: VMM memory has none */
        case 2: ANSWER(unsigned, CU_MEMORYTYPE_DEVICE);                                       /* MEMORY_TYPE */
        case 3: ANSWER(CUdeviceptr, address);                                                 /* DEVICE_POINTER */
        case 6: ANSWER(int, mapping->sync_memops);                                            /* SYNC_MEMOPS */
        case 7: ANSWER(unsigned long long, mapping->id);                                      /* BUFFER_ID */
        case 8: ANSWER(unsigned, 0);                                                          /* IS_MANAGED */
        case 9: ANSWER(int, object->prop.location.id);                                        /* DEVICE_ORDINAL */
        case 10: ANSWER(int, object->legacy);                                                 /* IS_LEGACY_CUDA_IPC_CAPABLE */
        case 11: ANSWER(CUdeviceptr, mapping->start);                                         /* RANGE_START_ADDR */
        case 12: ANSWER(size_t, mapping->size);                                               /* RANGE_SIZE */
        case 13: ANSWER(int, 1);                                                              /* MAPPED */
        case 14: ANSWER(unsigned long long, (unsigned)object->prop.requestedHandleTypes);     /* ALLOWED_HANDLE_TYPES */
        case 15: ANSWER(int, object->prop.allocFlags.gpuDirectRDMACapable);                   /* IS_GPU_DIRECT_RDMA_CAPABLE */
        case 16: ANSWER(int, mapping->access[object->prop.location.id]);                      /* ACCESS_FLAGS */
        case 17: ANSWER(void *, NULL);                                                        /* MEMPOOL_HANDLE */
        case 18: ANSWER(size_t, mapping->size);                                               /* MAPPING_SIZE */
        case 19: ANSWER(CUdeviceptr, mapping->start);                                         /* MAPPING_BASE_ADDR */
        default: return CUDA_ERROR_INVALID_VALUE;
    }
}

/* For an address that is no device's, cuPointerGetAttributes says so in each attribute and succeeds. */
static void attribute_of_none(void *data, int attribute) {
    switch (attribute) {
        case 9: *(int *)data = -2; break; /* CU_DEVICE_INVALID */
        case 2: case 6: case 8: case 10: case 13: case 15: case 16: *(int *)data = 0; break;
        default: *(void **)data = NULL;
    }
}

API CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address) {
    ENTER(NEED_INIT);
    pthread_mutex_lock(&world);
    Mapping *mapping = mapping_at(address);
    CUresult result = mapping ? attribute_of(data, attribute, mapping, address) : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&world);
    return result;
}

API CUresult cuPointerGetAttributes(unsigned count, const int *attributes, void **data, CUdeviceptr address) {
    ENTER(NEED_INIT);
    pthread_mutex_lock(&world);
    Mapping *mapping = mapping_at(address);
    for (unsigned i = 0; i < count; i++)
        if (!mapping || attribute_of(data[i], attributes[i], mapping, address)) attribute_of_none(data[i], attributes[i]);
    pthread_mutex_unlock(&world);
    return CUDA_SUCCESS;
}

API CUresult cuPointerSetAttribute(const void *value, int attribute, CUdeviceptr address) {
    ENTER(NEED_INIT);
    pthread_mutex_lock(&world);
    Mapping *mapping = mapping_at(address);
    bool fits = mapping && attribute == 6; /* SYNC_MEMOPS */
    if (fits) mapping->sync_memops = *(const unsigned *)value;
    pthread_mutex_unlock(&world);
    return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
