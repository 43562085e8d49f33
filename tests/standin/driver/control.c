/* Settings that a test can change while the process runs, complaints, counters, and the names of errors. */
#define _GNU_SOURCE
#include "standin.h"
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SETTING(name, value, meaning) .name = value,
static const Settings defaults = {
#include "settings.def"
};
#undef SETTING
static const volatile Settings *chosen;
static pthread_once_t once = PTHREAD_ONCE_INIT;

Work work;
Live live;

static void open_settings(void) {
    chosen = &defaults;
    const char *path = getenv("STANDIN_CONTROL");
    if (!path) return;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    void *shared = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof(Settings), PROT_READ, MAP_SHARED, fd, 0);
    if (shared == MAP_FAILED) forbid("STANDIN_CONTROL", "%s cannot be mapped: %m", path);
    close(fd);
    chosen = shared;
}

const volatile Settings *settings(void) {
    pthread_once(&once, open_settings);
    return chosen;
}

static void complain(const char *call, const char *rule, va_list values) {
    char text[512];
    vsnprintf(text, sizeof text, rule, values);
    fprintf(stderr, "stand-in CUDA driver: %s: %s\n", call, text);
}

CUresult refuse(CUresult error, const char *call, const char *rule, ...) {
    va_list values;
    va_start(values, rule);
    complain(call, rule, values);
    va_end(values);
    return error;
}

void forbid(const char *call, const char *rule, ...) {
    va_list values;
    va_start(values, rule);
    complain(call, rule, values);
    va_end(values);
    abort();
}

static const struct {
    CUresult number;
    const char *name, *text;
} errors[] = {
#define ERROR(name, number, text) {number, "CUDA_" #name, text},
#include "errors.def"
#undef ERROR
};

API CUresult cuGetErrorName(CUresult error, const char **name) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].number == error) return *name = errors[i].name, CUDA_SUCCESS;
    return *name = NULL, CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGetErrorString(CUresult error, const char **text) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].number == error) return *text = errors[i].text, CUDA_SUCCESS;
    return *text = NULL, CUDA_ERROR_INVALID_VALUE;
}

/* For tests: what this process has done, in the order of `Work`, and what it still holds, in the order of `Live`. */
API void standin_counts(uint64_t *into) {
    pthread_mutex_lock(&world);
    memcpy(into, &work, sizeof work);
    pthread_mutex_unlock(&world);
}

API void standin_live(uint64_t *into) {
    pthread_mutex_lock(&world);
    memcpy(into, &live, sizeof live);
    pthread_mutex_unlock(&world);
}
