/* What the parts of the stand-in driver know of each other. One lock, `world`, guards all tables. */
#pragma once
#include "api.h"
#include <pthread.h>
#include <stdbool.h>

enum { MAX_DEVICES = 16, GRANULARITY = 2 << 20 };

/* control.c: settings, complaints, counters */
#define SETTING(name, value, meaning) uint64_t name;
typedef struct {
#include "settings.def"
} Settings;
#undef SETTING
const volatile Settings *settings(void);

/* Says on stderr which rule of CUDA the caller broke, and returns `error`. */
CUresult refuse(CUresult error, const char *call, const char *rule, ...) __attribute__((format(printf, 3, 4)));
/* For what a GPU would not notice but answer with wrong bytes or a crash later: says so, and aborts. */
void forbid(const char *call, const char *rule, ...) __attribute__((format(printf, 2, 3), noreturn));

#define WORK(name) uint64_t name;
#define LIVE(name)
typedef struct {
#include "counters.def"
} Work;
#undef WORK
#undef LIVE
#define WORK(name)
#define LIVE(name) uint64_t name;
typedef struct {
#include "counters.def"
} Live;
#undef WORK
#undef LIVE
extern Work work;
extern Live live;

/* arena.c */
typedef struct {
    size_t size; /* of an item */
    char *start;
    size_t used;
} Arena;
void *arena_add(Arena *arena); /* zeros */
bool arena_has(const Arena *arena, const void *handle);

/* context.c */
extern pthread_mutex_t world;

typedef struct Context {
    int device; /* ordinal */
    unsigned retains, flags;
    CUresult error; /* sticky: once a copy has touched what it must not, the context is lost */
    CUstream null_stream;
} Context;

enum Need { NEED_INIT, NEED_CONTEXT };
CUresult enter(const char *call, enum Need need);
/* Returns from the calling function if the driver, the device or the context cannot serve it. */
#define ENTER(need)                             \
    do {                                        \
        CUresult entered = enter(__func__, need); \
        if (entered != CUDA_SUCCESS) return entered; \
    } while (0)
Context *current(void);
Context *primary(int ordinal);
bool is_context(const Context *context);

/* devices.c: ordinals are those that CUDA_VISIBLE_DEVICES leaves; a board is a device of the machine. */
int visible_devices(void);
int board_of(int ordinal);
int ordinal_of(int board); /* -1 where CUDA_VISIBLE_DEVICES hides the board */

/* objects.c: physical memory. An object is a memfd that its name marks; it lives while any process holds it. */
typedef struct Object {
    int fd;
    size_t size;
    unsigned handles; /* what cuMemCreate, import and retain gave out and cuMemRelease has not taken back */
    unsigned maps;
    bool legacy; /* made by cuMemAlloc */
    bool foreign; /* imported */
    CUmemAllocationProp prop;
} Object;
CUresult object_create(const char *call, size_t size, const CUmemAllocationProp *prop, Object **made);
Object *object_of(const char *call, CUmemGenericAllocationHandle handle); /* NULL after saying why */
Object *object_open(int fd);
void object_drop(Object *object); /* frees it if nothing refers to it */

/* usage.c */
void object_name(char *name, size_t length, const CUmemAllocationProp *prop);
bool object_named(int folder, const char *link, int *board, int *types, int *rdma); /* false: a file of another kind */
void free_memory(int ordinal, size_t *left, size_t *total);

/* mappings.c: addresses. The copies go through `shadow`, where all is mapped; the CPU sees no device address. */
typedef struct Mapping {
    CUdeviceptr start;
    size_t size;
    Object *object;
    int access[MAX_DEVICES]; /* CUmemAccess_flags by ordinal */
    unsigned long long id;
    bool sync_memops;
    struct Mapping *next;
} Mapping;
typedef struct Reservation {
    CUdeviceptr start;
    size_t size;
    char *shadow;
    Mapping *mappings; /* sorted by address */
    struct Reservation *next;
} Reservation;
CUresult reserve(const char *call, size_t size, Reservation **made);
void unreserve(Reservation *reservation);
Reservation *reservation_at(CUdeviceptr address);
Mapping *mapping_at(CUdeviceptr address);
CUresult map_object(const char *call, Reservation *in, CUdeviceptr start, size_t size, Object *object, Mapping **made);
void unmap(const char *call, Reservation *in, CUdeviceptr start, size_t size);
void set_access(Mapping *mapping, int ordinal, int flags);

enum Reach { REACHED, UNMAPPED, DENIED };
/* Where the CPU finds `size` bytes at `address`; those outside of every reservation are the host's own. */
enum Reach reach(CUdeviceptr address, size_t size, int ordinal, bool write, void **found);

/* host.c */
bool is_registered(CUdeviceptr address, size_t size);
bool is_read_only(CUdeviceptr address); /* registered so */

/* streams.c: work is done later, in order, by the thread of its stream */
typedef struct {
    CUdeviceptr to, from;
    size_t size;
} Copy;
typedef struct Item Item;
typedef struct {
    CUdeviceptr to, from, size;
} Row; /* of the table of kvd_copy */
enum Kind { COPY, FILL, LAUNCH, WAIT, CALL, MARK };
struct Item {
    enum Kind kind;
    uint64_t number;
    Copy *copies;
    size_t count;
    struct {
        CUdeviceptr to;
        size_t size;
        uint32_t value;
        unsigned width;
    } fill;
    struct {
        CUdeviceptr table; /* host memory that is registered */
        size_t count;
    } launch;
    struct {
        CUstream stream;
        uint64_t number;
    } wait;
    struct {
        CUstreamCallback callback;
        CUhostFn function;
        void *user;
        CUstream stream;
    } call;
    CUevent event;
    Item *next;
};
typedef struct Stream {
    Context *context;
    unsigned flags;
    int priority;
    bool destroyed;
    uint64_t queued, done, wanted; /* numbers of items; `wanted`: somebody asked whether this one is done */
    Item *first, *last;
    struct Stream *next;
} Stream;
CUresult stream_of(const char *call, CUstream handle, Stream **found);
uint64_t enqueue(Stream *stream, Item item);
CUresult await(Stream *stream, uint64_t number);
bool is_done(Stream *stream, uint64_t number);
bool is_stream(const void *handle);
void destroy_stream(Stream *stream);
void forbid_pending(const char *call, CUdeviceptr start, size_t size);
Stream *null_stream(Context *context);
extern Stream *streams; /* those that are not destroyed, or have work to do */

/* copies.c */
void run_copies(Context *context, const Item *item);
const Row *rows_of(const Item *launch); /* NULL where a GPU would not reach them */

/* events.c */
void event_reached(CUevent event, const Stream *stream, uint64_t number);
