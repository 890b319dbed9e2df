/* What cuda_wheel.py puts in the place of libcudart: one device whose memory is that of the host, and no computation.
 *
 * Everything that is not defined here is a function that returns 0 (success, or no pointer). Launching a kernel is such
 * a function: buffers keep their zeros. Layout of cudaDeviceProp and numbers of attributes: CUDA 13.0, driver_types.h.
 * STAND_IN_SM is the compute capability that the device claims, 90 if it is not set; STAND_IN_DEVICES how many there are,
 * STAND_IN_PROCESSORS the multiprocessors of one, 132.
 *
 * How many blocks of a kernel a multiprocessor holds is reckoned from STAND_IN_OCCUPANCY, a file with a line for each
 * kernel: its name, registers of a thread, bytes of shared memory (`cuobjdump -res-usage`; from SM 90 on those contain
 * the KiB that every block takes). Without the file it is 1.
 *
 * Between the begin and the end of a capture, what CUDA forbids there is counted: calls that wait for the device, that
 * copy or clear memory beside the stream, or that take memory by other means than the stream's pool.
 *
 * stand_in_calls gives what was sent to a stream or waited for since it was asked last, a line for each call: its name,
 * the number of its stream (0: none, or the default), and the bytes of a copy. Streams count from 1.
 *
 * stand_in_launches gives the kernels that were launched since it was asked last, in a capture or not: a line for each,
 * with its name, how often, and how many blocks in all. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIZE = 1008, GLOBAL = 288, SHARED = 296, WARP = 308, THREADS = 320, GRID = 336, MAJOR = 360, MINOR = 364 };
enum { PROCESSORS = 384, SHARED_OF_PROCESSOR = 624, COOPERATIVE = 668, SHARED_OPTIN = 672 };
static const size_t MEMORY = 80ul << 30;

static int capturing, captures, replays, forbidden;
static const char *first_forbidden = "";
static int forbid(const char *name) {
  if (capturing && !forbidden++) first_forbidden = name;
  return 0;
}
int stand_in_captures(void) { return captures; }
int stand_in_replays(void) { return replays; }
int stand_in_forbidden(void) { return forbidden; }
const char *stand_in_first_forbidden(void) { return first_forbidden; }

static char calls[1 << 20], given[1 << 20];
static size_t used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int note(const char *name, const void *stream, size_t size) {
  pthread_mutex_lock(&lock);
  if (used + 128 < sizeof calls) used += sprintf(calls + used, "%s %zu %zu\n", name, (size_t)stream, size);
  pthread_mutex_unlock(&lock);
  return 0;
}
const char *stand_in_calls(void) {
  pthread_mutex_lock(&lock);
  memcpy(given, calls, used);
  given[used] = 0;
  used = 0;
  pthread_mutex_unlock(&lock);
  return given;
}

static int sm(void) {
  const char *text = getenv("STAND_IN_SM");
  return text ? atoi(text) : 90;
}
static int processors(void) {
  const char *text = getenv("STAND_IN_PROCESSORS");
  return text ? atoi(text) : 132;
}
static _Thread_local int chosen;
int cudaGetDeviceCount(int *count) {
  const char *text = getenv("STAND_IN_DEVICES");
  *count = text ? atoi(text) : 1;
  return 0;
}
int cudaSetDevice(int device) { chosen = device; return 0; }
int cudaGetDevice(int *device) { *device = chosen; return 0; }

int cudaGetDeviceProperties(char *prop, int device) {
  memset(prop, 0, SIZE);
  strcpy(prop, "stand-in");
  *(size_t *)(prop + GLOBAL) = MEMORY;
  *(size_t *)(prop + SHARED) = 48 << 10;
  *(size_t *)(prop + SHARED_OF_PROCESSOR) = 100 << 10;
  *(size_t *)(prop + SHARED_OPTIN) = 99 << 10;
  *(int *)(prop + WARP) = 32;
  *(int *)(prop + THREADS) = 1024;
  for (int axis = 0; axis < 3; axis++) ((int *)(prop + GRID))[axis] = axis ? 65535 : 2147483647;
  *(int *)(prop + MAJOR) = sm() / 10;
  *(int *)(prop + MINOR) = sm() % 10;
  *(int *)(prop + COOPERATIVE) = 1; /* kernels whose blocks wait for one another: TopK's */
  *(int *)(prop + PROCESSORS) = processors();
  return 0;
}

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case 10: *value = 32; break;        /* warp size */
    case 16: *value = processors(); break;
    case 75: *value = sm() / 10; break; /* compute capability */
    case 76: *value = sm() % 10; break;
    case 97: *value = 99 << 10; break; /* shared memory of a block, opt-in */
    default: *value = 48 << 10;
  }
  return 0;
}

static int nothing_to_encode(void) { return 0; }
int cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, unsigned long long flags,
                                     int *status) {
  *function = (void *)nothing_to_encode; /* cuTensorMapEncodeTiled, of experts on SM 90 */
  if (status) *status = 0;
  return 0;
}
int cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
const char *cudaGetErrorString(int error) { return "stand-in"; }
const char *cudaGetErrorName(int error) { return "stand-in"; }

static int take(void **address, size_t size) { /* aligned as CUDA aligns: to 256 bytes */
  size_t whole = (size + 511) & ~(size_t)255;
  *address = aligned_alloc(256, whole);
  if (*address) memset(*address, 0, whole);
  return *address ? 0 : 2;
}
int cudaMalloc(void **address, size_t size) { forbid("cudaMalloc"); return take(address, size); }
int cudaMallocHost(void **address, size_t size) { forbid("cudaMallocHost"); return take(address, size); }
int cudaHostAlloc(void **address, size_t size, unsigned flags) { forbid("cudaHostAlloc"); return take(address, size); }
int cudaFree(void *address) { forbid("cudaFree"); free(address); return 0; }
int cudaFreeHost(void *address) { forbid("cudaFreeHost"); free(address); return 0; }
int cudaMemGetInfo(size_t *left, size_t *total) { *left = *total = MEMORY; return 0; }

int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
  memmove(to, from, size);
  return note("cudaMemcpy", 0, size), forbid("cudaMemcpy");
}
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
  memmove(to, from, size);
  return note("cudaMemcpyAsync", stream, size);
}
int cudaMemset(void *to, int value, size_t size) {
  memset(to, value, size);
  return note("cudaMemset", 0, size), forbid("cudaMemset");
}
int cudaMemsetAsync(void *to, int value, size_t size, void *stream) {
  memset(to, value, size);
  return note("cudaMemsetAsync", stream, size);
}
int cudaDeviceSynchronize(void) { return note("cudaDeviceSynchronize", 0, 0), forbid("cudaDeviceSynchronize"); }
int cudaStreamSynchronize(void *stream) {
  return note("cudaStreamSynchronize", stream, 0), forbid("cudaStreamSynchronize");
}
int cudaEventSynchronize(void *event) { return note("cudaEventSynchronize", 0, 0), forbid("cudaEventSynchronize"); }
int cudaEventRecord(void *event, void *stream) { return note("cudaEventRecord", stream, 0); }
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) { return note("cudaStreamWaitEvent", stream, 0); }

static size_t streams;
int cudaStreamCreateWithFlags(void **stream, unsigned flags) { *stream = (void *)++streams; return 0; }
int cudaStreamCreate(void **stream) { return cudaStreamCreateWithFlags(stream, 0); }

/* Of a constant in device code: XQA asks for the shared memory of its kernels, and goes elsewhere if it is too much. */
int cudaMemcpyFromSymbol(void *to, const void *symbol, size_t size, size_t offset, int kind) {
  memset(to, 0, size);
  return forbid("cudaMemcpyFromSymbol");
}

static char made;

/* Kernels, by the address of what launches them: open addressing. */
enum { KERNELS = 1 << 16 };
static struct { const void *at; const char *name; size_t launches, blocks; int registers, shared; } kernels[KERNELS];
static size_t place(const void *at) {
  size_t i = ((size_t)at >> 4) % KERNELS;
  while (kernels[i].at && kernels[i].at != at) i = (i + 1) % KERNELS;
  return i;
}
void __cudaRegisterFunction(void **handle, const char *at, char *function, const char *name) {
  size_t i = place(at);
  kernels[i].at = at;
  kernels[i].name = name;
}
int __cudaGetKernel(void **kernel, const void *at) { *kernel = (void *)at; return 0; }

struct dim3 { unsigned x, y, z; };
static struct dim3 one_grid, one_block;
static size_t one_shared;
static void *one_stream;
unsigned __cudaPushCallConfiguration(struct dim3 grid, struct dim3 block, size_t shared, void *stream) {
  pthread_mutex_lock(&lock);
  one_grid = grid, one_block = block, one_shared = shared, one_stream = stream;
  return 0;
}
int __cudaPopCallConfiguration(struct dim3 *grid, struct dim3 *block, size_t *shared, void **stream) {
  *grid = one_grid, *block = one_block, *shared = one_shared, *stream = one_stream;
  pthread_mutex_unlock(&lock);
  return 0;
}
static int failed;
static int launch(const void *kernel, struct dim3 grid) {
  size_t i = place(kernel);
  if (!grid.x || !grid.y || !grid.z) return failed = 9; /* cudaErrorInvalidConfiguration */
  pthread_mutex_lock(&lock);
  kernels[i].launches++;
  kernels[i].blocks += (size_t)grid.x * grid.y * grid.z;
  pthread_mutex_unlock(&lock);
  return 0;
}
int cudaLaunchKernel(const void *kernel, struct dim3 grid, struct dim3 block, void **arguments, size_t shared,
                     void *stream) {
  return launch(kernel, grid);
}
int __cudaLaunchKernel(void *kernel, struct dim3 grid, struct dim3 block, void **arguments, size_t shared,
                       void *stream) {
  return launch(kernel, grid);
}
int cudaLaunchCooperativeKernel(const void *kernel, struct dim3 grid, struct dim3 block, void **arguments,
                                size_t shared, void *stream) {
  return launch(kernel, grid);
}
int cudaLaunchKernelExC(const struct dim3 *configuration, const void *kernel, void **arguments) {
  return launch(kernel, *configuration);
}
int cudaGetLastError(void) {
  int error = failed;
  failed = 0;
  return error;
}
int cudaPeekAtLastError(void) { return failed; }
static char launched[1 << 22];
const char *stand_in_launches(void) {
  size_t end = 0;
  pthread_mutex_lock(&lock);
  for (size_t i = 0; i < KERNELS; i++) {
    if (!kernels[i].launches) continue;
    if (end + 4096 < sizeof launched)
      end += snprintf(launched + end, 4096, "%s %zu %zu\n", kernels[i].name ? kernels[i].name : "?",
                      kernels[i].launches, kernels[i].blocks);
    kernels[i].launches = kernels[i].blocks = 0;
  }
  pthread_mutex_unlock(&lock);
  launched[end] = 0;
  return launched;
}

/* Threads, KiB of shared memory and bytes that each block takes besides, of a multiprocessor: CUDA C++ Programming
 * Guide 13.0, technical specifications per compute capability. */
static void limits(int *threads, int *shared, int *taken) {
  int has = sm();
  *threads = has == 75 ? 1024 : has == 80 || has == 90 ? 2048 : 1536;
  *shared = (has == 75 ? 64 : has == 80 ? 164 : has == 90 ? 228 : 100) << 10;
  *taken = has >= 80 && has < 90 ? 1024 : 0;
}
static int read_usage(const char *file) {
  static char name[4096];
  int registers, shared;
  FILE *usage = fopen(file, "r");
  if (!usage) return 0;
  while (fscanf(usage, "%4095s %d %d", name, &registers, &shared) == 3)
    for (size_t i = 0; i < KERNELS; i++) /* a kernel of several sources is registered by each of them */
      if (kernels[i].name && !strcmp(kernels[i].name, name))
        kernels[i].registers = registers, kernels[i].shared = shared;
  return fclose(usage), 1;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int size, size_t shared,
                                                           unsigned flags) {
  const char *file = getenv("STAND_IN_OCCUPANCY");
  static int known = -1;
  size_t i = place(kernel);
  if (known < 0) known = file && read_usage(file);
  *blocks = 1;
  if (!known || !kernels[i].registers || size < 1) return 0;
  int threads, bytes, taken, warps = (size + 31) / 32, of_warp = (kernels[i].registers * 32 + 255) / 256 * 256;
  limits(&threads, &bytes, &taken);
  int of_block = kernels[i].shared + (int)shared + taken, held = threads / (warps * 32);
  if (65536 / (of_warp * warps) < held) held = 65536 / (of_warp * warps);
  if (of_block && bytes / of_block < held) held = bytes / of_block;
  *blocks = held;
  return 0;
}
int cudaStreamBeginCapture(void *stream, int mode) { capturing = 1; return 0; }
int cudaStreamEndCapture(void *stream, void **graph) { capturing = 0; captures++; *graph = &made; return 0; }
int cudaStreamIsCapturing(void *stream, int *status) { *status = capturing; return 0; }
int cudaGraphInstantiate(void **instance, void *graph, unsigned long long flags) { *instance = &made; return 0; }
int cudaGraphLaunch(void *instance, void *stream) {
  replays++;
  return note("cudaGraphLaunch", stream, 0);
}
