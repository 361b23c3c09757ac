// The GIL for threads that must not be unwound.
#ifndef HOLDFAST_PYTHON_NATIVE_RESTORE_THREAD_H_
#define HOLDFAST_PYTHON_NATIVE_RESTORE_THREAD_H_

#include <Python.h>

#ifdef __cplusplus
extern "C" {
#endif

/// PyEval_RestoreThread(state), for a thread that must not be unwound: if the interpreter ends it
/// by pthread_exit, it stops here until the process has ended.
void RestoreThreadOrStop(PyThreadState* state);

#ifdef __cplusplus
}
#endif

#endif  // HOLDFAST_PYTHON_NATIVE_RESTORE_THREAD_H_
