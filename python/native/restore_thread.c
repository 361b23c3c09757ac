// In C, where a cleanup handler is a jump back into this frame: in C++ it is a destructor, for
// which the frames above would be unwound.
#include "python/native/restore_thread.h"

#include <pthread.h>
#include <unistd.h>

static void Stop(void* unused) {
  (void)unused;
  for (;;) pause();
}

void RestoreThreadOrStop(PyThreadState* state) {
  pthread_cleanup_push(Stop, NULL);
  PyEval_RestoreThread(state);
  pthread_cleanup_pop(0);
}
