/* What cuda_wheel.py puts in the place of cuDNN, besides functions that do nothing: STAND_IN_CUDNN is `accept`, `refuse`
 * (what it is without it), or `fail`, which takes a graph and fails when it is run. Every descriptor is the same object;
 * an attribute that is asked for is there once, and 0. Numbers of statuses: cuDNN 9, cudnn_graph.h. */
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3000, EXECUTION_FAILED = 5000 };
static int mode(void) {
  const char *text = getenv("STAND_IN_CUDNN");
  return !text ? 'r' : text[0];
}
static long executed;
long stand_in_cudnn_executed(void) { return executed; }
unsigned long cudnnGetVersion(void) { return 91900; }
const char *cudnnGetErrorString(int status) { return "stand-in"; }
void cudnnGetLastErrorString(char *text, size_t size) { strncpy(text, "stand-in", size); }

static char descriptor[64];
int cudnnBackendCreateDescriptor(int kind, void **made) { *made = descriptor; return SUCCESS; }
int cudnnBackendDestroyDescriptor(void *made) { return SUCCESS; }
int cudnnBackendSetAttribute(void *made, int name, int kind, long count, const void *values) { return SUCCESS; }
int cudnnBackendFinalize(void *made) { return mode() == 'r' ? NOT_SUPPORTED : SUCCESS; }
int cudnnBackendGetAttribute(void *made, int name, int kind, long wanted, long *count, void *values) {
  static const char size[] = {8, 1, 4, 8}; /* of handles, booleans are 1, … by kind, as far as it is asked for here */
  if (count) *count = 1;
  if (values && wanted > 0 && kind != 15) memset(values, 0, kind >= 0 && kind < 4 ? size[kind] : 8);
  return SUCCESS;
}
int cudnnBackendExecute(void *handle, void *plan, void *pack) {
  executed++;
  return mode() == 'f' ? EXECUTION_FAILED : SUCCESS;
}
int cudnnBackendPopulateCudaGraph(void *handle, void *plan, void *pack, void *graph) { return SUCCESS; }
