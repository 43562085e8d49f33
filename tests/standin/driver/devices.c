/* The devices of the machine, and which of them CUDA_VISIBLE_DEVICES shows to this process. */
#include "standin.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int boards[MAX_DEVICES], visible = -1; /* boards[ordinal] */
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* The same in all processes; a MIG instance has another one than the GPU that it is a part of. */
static void uuid_of(int board, char bytes[16]) {
    memcpy(bytes, settings()->mig ? "standin-mig-0000" : "standin-gpu-0000", 16);
    bytes[14] += (char)(board / 10);
    bytes[15] += (char)(board % 10);
}

/* -1 if `name`, an index or the beginning of a UUID, means none. */
static int board_named(const char *name, int count) {
    const char *prefix = settings()->mig ? "MIG-" : "GPU-";
    char *end;
    long index = strtol(name, &end, 10);
    if (end != name && !*end) return index >= 0 && index < count ? (int)index : -1;
    for (int board = 0; board < count; board++) {
        unsigned char u[16];
        char text[64];
        uuid_of(board, (char *)u);
        snprintf(text, sizeof text, "%s%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", prefix, u[0], u[1],
                 u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
        if (strlen(name) > strlen(prefix) && !strncmp(text, name, strlen(name))) return board;
    }
    return -1;
}

/* As the real driver: what follows the first name that means nothing is not visible either. */
static void choose(void) {
    int count = settings()->device_count > MAX_DEVICES ? MAX_DEVICES : (int)settings()->device_count;
    const char *wanted = getenv("CUDA_VISIBLE_DEVICES");
    visible = 0;
    if (!wanted) {
        while (visible < count) boards[visible] = visible, visible++;
        return;
    }
    char *names = strdup(wanted), *rest = names, *name;
    while ((name = strtok_r(rest, ", ", &rest)) && visible < MAX_DEVICES) {
        int board = board_named(name, count);
        if (board < 0) break;
        boards[visible++] = board;
    }
    free(names);
}

int visible_devices(void) {
    pthread_once(&once, choose);
    return visible;
}

int board_of(int ordinal) { return boards[ordinal]; }

int ordinal_of(int board) {
    for (int ordinal = 0; ordinal < visible_devices(); ordinal++)
        if (boards[ordinal] == board) return ordinal;
    return -1;
}

/* Returns from the calling function unless `device` is an ordinal. */
#define CHECK_DEVICE(device)                      \
    if ((device) < 0 || (device) >= visible_devices()) \
    return refuse(CUDA_ERROR_INVALID_DEVICE, __func__, "there is no device %d", device)

API CUresult cuDeviceGetCount(int *count) {
    ENTER(NEED_INIT);
    *count = visible_devices();
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER(NEED_INIT);
    CHECK_DEVICE(ordinal);
    *device = ordinal;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    ENTER(NEED_INIT);
    CHECK_DEVICE(device);
    snprintf(name, (size_t)length, settings()->mig ? "Stand-in GPU MIG 1g.1gb" : "Stand-in GPU");
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    ENTER(NEED_INIT);
    CHECK_DEVICE(device);
    uuid_of(boards[device], uuid->bytes);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) { return cuDeviceGetUuid_v2(uuid, device); }

API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    ENTER(NEED_INIT);
    CHECK_DEVICE(device);
    *bytes = settings()->total_memory;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device) {
    ENTER(NEED_INIT);
    CHECK_DEVICE(device);
    snprintf(text, (size_t)length, "0000:%02X:00.0", boards[device] + 1);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    ENTER(NEED_INIT);
    CHECK_DEVICE(device);
    CHECK_DEVICE(peer);
    *can = device != peer;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    ENTER(NEED_INIT);
    CHECK_DEVICE(device);
    switch (attribute) {
        case 16: *value = 132; break;                               /* MULTIPROCESSOR_COUNT */
        case 18: *value = (int)settings()->integrated; break;       /* INTEGRATED */
        case 19: *value = 1; break;                                 /* CAN_MAP_HOST_MEMORY */
        case 20: *value = (int)settings()->compute_mode; break;     /* COMPUTE_MODE */
        case 33: *value = boards[device] + 1; break;                /* PCI_BUS_ID */
        case 40: *value = 3; break;                                 /* ASYNC_ENGINE_COUNT */
        case 41: *value = 1; break;                                 /* UNIFIED_ADDRESSING */
        case 75: *value = 9; break;                                 /* COMPUTE_CAPABILITY_MAJOR */
        case 78: *value = 1; break;                                 /* STREAM_PRIORITIES_SUPPORTED */
        case 99: *value = 1; break;                                 /* HOST_REGISTER_SUPPORTED */
        case 102: *value = (int)settings()->vmm; break;             /* VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED */
        case 103: *value = (int)settings()->posix_handles; break;   /* HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED */
        case 110: *value = (int)settings()->gpu_direct_rdma; break; /* GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED */
        case 116: *value = (int)settings()->gpu_direct_rdma; break; /* GPU_DIRECT_RDMA_SUPPORTED */
        case 117: *value = 1; break;                                /* GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: by the host */
        case 118: *value = (int)settings()->writes_ordering; break; /* GPU_DIRECT_RDMA_WRITES_ORDERING */
        case 124: *value = (int)settings()->dma_buf; break;         /* DMA_BUF_SUPPORTED */
        case 133: *value = (int)settings()->mps; break;             /* MPS_ENABLED */
        default: *value = 0; /* PCI domain and device, capability's minor and FABRIC, too: this GPU has none */
    }
    return CUDA_SUCCESS;
}
