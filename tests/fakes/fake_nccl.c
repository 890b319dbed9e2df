/* What stands in for libnccl.so.2 where there is no GPU: ranks of one machine that meet in a file they map.
 *
 * Sums are made in fp32 and rounded to the type, in the order of the ranks; a call returns when all have come. Calls are
 * counted in the file: FAKE_NCCL is the folder that it lies in, by the name that the id has. Signatures: nccl.h 2.28. */
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST = 8, SLOT = 1 << 22, HALF = 6, SINGLE = 7, BRAIN = 9 };
enum { OK = 0, SYSTEM = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };
typedef struct { char internal[128]; } Id;
typedef struct {
    atomic_uint joined, came[MOST], reduces[MOST], gathers[MOST], on_streams[MOST];
    char slots[2][MOST][SLOT];
} Shared;
typedef struct { Shared *shared; int rank, ranks; } Communicator;

int ncclGetVersion(int *version) { *version = 22803; return OK; }
const char *ncclGetErrorString(int result) { return result == INVALID_ARGUMENT ? "invalid argument" : "unhandled system error"; }

int ncclGetUniqueId(Id *id) {
    memset(id, 0, sizeof *id);
    const char *folder = getenv("FAKE_NCCL");
    if (!folder) return SYSTEM;
    snprintf(id->internal, sizeof id->internal, "%s/meeting-%d", folder, getpid());
    int file = open(id->internal, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (file < 0 || ftruncate(file, sizeof(Shared))) return SYSTEM;
    close(file);
    return OK;
}

int ncclCommInitRank(Communicator **made, int ranks, Id id, int rank) {
    int file = open(id.internal, O_RDWR);
    if (file < 0) return SYSTEM;
    Shared *shared = mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (shared == MAP_FAILED || rank < 0 || rank >= ranks || ranks > MOST) return INVALID_ARGUMENT;
    const char *absent = getenv("FAKE_NCCL_ABSENT");
    if (absent && atoi(absent) == rank) for (;;) sleep(1); /* a rank that never comes */
    atomic_fetch_add(&shared->joined, 1);
    while (atomic_load(&shared->joined) < (unsigned)ranks) sched_yield();
    *made = malloc(sizeof **made);
    **made = (Communicator){shared, rank, ranks};
    return OK;
}

static size_t size_of(int type) { return type == SINGLE ? 4 : type == HALF || type == BRAIN ? 2 : 0; }

static float widened(const char *at, int type) {
    float value;
    uint16_t bits;
    if (type == SINGLE) return memcpy(&value, at, 4), value;
    if (type == HALF) { _Float16 half; return memcpy(&half, at, 2), (float)half; }
    uint32_t wide = (memcpy(&bits, at, 2), (uint32_t)bits << 16);
    return memcpy(&value, &wide, 4), value;
}

static void narrowed(char *at, float value, int type) {
    if (type == SINGLE) { memcpy(at, &value, 4); return; }
    if (type == HALF) { _Float16 half = (_Float16)value; memcpy(at, &half, 2); return; }
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint16_t rounded = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    memcpy(at, &rounded, 2);
}

/* Give `size` bytes, and wait until all have given theirs; returns their slots. */
static char (*meet(Communicator *own, const void *from, size_t size))[SLOT] {
    Shared *shared = own->shared;
    const unsigned number = atomic_load(&shared->came[own->rank]) + 1;
    memcpy(shared->slots[number % 2][own->rank], from, size);
    atomic_store(&shared->came[own->rank], number);
    for (int r = 0; r < own->ranks; r++)
        while ((int)(atomic_load(&shared->came[r]) - number) < 0) sched_yield();
    return shared->slots[number % 2];
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, Communicator *own, void *stream) {
    const size_t each = size_of(type), most = SLOT / 4;
    if (!each || operation) return INVALID_ARGUMENT;
    atomic_fetch_add(&own->shared->reduces[own->rank], 1);
    if (stream) atomic_fetch_add(&own->shared->on_streams[own->rank], 1);
    for (size_t begin = 0; begin < count; begin += most) {
        const size_t some = count - begin < most ? count - begin : most;
        char (*slots)[SLOT] = meet(own, (const char *)from + begin * each, some * each);
        for (size_t i = 0; i < some; i++) {
            float sum = 0;
            for (int r = 0; r < own->ranks; r++) sum += widened(slots[r] + i * each, type);
            narrowed((char *)to + (begin + i) * each, sum, type);
        }
    }
    return OK;
}

int ncclAllGather(const void *from, void *to, size_t count, int type, Communicator *own, void *stream) {
    const size_t size = count * size_of(type);
    if (!size_of(type)) return INVALID_ARGUMENT;
    atomic_fetch_add(&own->shared->gathers[own->rank], 1);
    if (stream) atomic_fetch_add(&own->shared->on_streams[own->rank], 1);
    for (size_t begin = 0; begin < size; begin += SLOT) {
        const size_t some = size - begin < SLOT ? size - begin : SLOT;
        char (*slots)[SLOT] = meet(own, (const char *)from + begin, some);
        for (int r = 0; r < own->ranks; r++) memcpy((char *)to + r * size + begin, slots[r], some);
    }
    return OK;
}
