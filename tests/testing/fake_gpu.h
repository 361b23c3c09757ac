// A fake GPU driver: a shared library with the calls of CUDA's driver and of HIP, loaded by
// path in place of the real driver. Each stream is a thread and copies in the order of the queue.
// A test holds streams, makes any call fail, loses a context, and finds misuse that a real driver
// does not report: a call outside the device's context, a latched error.
//
// Every test that links the library controls the copy that the device has loaded. A call in a
// forked child aborts the child.
#ifndef HOLDFAST_TESTS_TESTING_FAKE_GPU_H_
#define HOLDFAST_TESTS_TESTING_FAKE_GPU_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "runtime/device/gpu_calls.h"

namespace holdfast::testing {

/// \threadsafety All methods may be called from any thread, Reset without calls under way.
class FakeGpu {
 public:
  /// The state behind the calls, and the path to load.
  static FakeGpu& Get();
  static std::string Path();

  /// Forgets streams, memory, faults and counts. Streams are not held.
  void Reset(int devices = 2);

  // ---- Streams.

  /// Streams stand still, until Run, RunAll or LetRun.
  void Hold();
  void LetRun();
  /// Runs a stream to the end or to a wait for an event.
  void Run(device::GpuStream stream);
  /// Runs every stream as far as possible.
  void RunAll();
  /// As RunAll, while `stream` stands still.
  void RunAllBut(device::GpuStream stream);
  device::GpuStream MakeStream(int device = 0);
  void SetCapturing(device::GpuStream stream, bool capturing);
  /// Queues a write of one byte: the caller's next step.
  void QueueWrite(device::GpuStream stream, char* destination, char byte);
  size_t queued(device::GpuStream stream);

  /// Memory of a device, until Reset.
  char* Allocate(size_t bytes, int device);

  // ---- Faults. `call` is the name in device::GpuCalls.

  /// Makes `times` calls return `code`, after `skip` more calls.
  void Fail(const std::string& call, device::GpuCode code, int skip = 0, int times = 1);
  void FailNothing();
  /// True while a failure of the call is still to come.
  bool IsPlanned(const std::string& call);
  /// Ends the context after `copies` more copies: the last delivers half of the bytes, later copies
  /// deliver nothing, and every later call in the context returns `fault`.
  void LoseContext(int device, device::GpuCode fault, int copies = 0);

  // ---- Evidence.

  /// Counts of calls, by name.
  std::map<std::string, uint64_t> counts();
  uint64_t count(const std::string& call);
  void ClearCounts();
  /// Ranges of host memory that are registered.
  size_t registered();
  size_t contexts_pushed();
  uint64_t calls_outside_context();
  uint64_t calls_not_relaxed();
  /// The error that this thread's next hipGetLastError finds.
  device::GpuCode latched();
  /// This thread's device; -1 is CUDA's thread without a context.
  int current_device(device::GpuApi api);
  void SetCurrentDevice(device::GpuApi api, int device);
  /// The symbols of an API, by the name of their call.
  static const std::map<std::string, std::string>& Symbols(device::GpuApi api);

 private:
  friend struct FakeCalls;

  struct Event {
    uint64_t recorded = 0;
    uint64_t done = 0;
  };
  struct Operation {
    enum Kind { kCopy, kFill, kRecord, kWait } kind = kCopy;
    char* destination = nullptr;
    const char* source = nullptr;
    size_t bytes = 0;
    char byte = 0;
    Event* event = nullptr;
    uint64_t generation = 0;  ///< Of the event's record.
  };
  struct Stream {
    int device = 0;
    bool capturing = false;
    bool permitted = false;
    bool executing = false;
    bool ending = false;
    std::deque<Operation> operations;
    std::thread thread;
  };
  struct Failure {
    device::GpuCode code = device::GpuCode::kSuccess;
    int skip = 0;
    int times = 0;
  };
  struct Context {
    device::GpuCode fault = device::GpuCode::kSuccess;
    device::GpuCode coming = device::GpuCode::kSuccess;  ///< After `copies_left` copies.
    int copies_left = 0;
    Stream* default_stream = nullptr;
  };
  struct Block {
    std::unique_ptr<char[]> bytes;
    size_t size = 0;
    int device = 0;
    bool managed = false;
  };

  // Under mutex_.
  Stream* AddStream(int device);
  Stream* Find(device::GpuStream stream, int device);
  const Block* BlockOf(const void* address);
  bool IsRunnable(const Stream& stream) const;
  bool IsQuiet() const;
  void Queue(Stream* stream, const Operation& operation);
  /// Runs the first operation of a stream, without the lock while bytes move.
  void Execute(Stream* stream, std::unique_lock<std::mutex>* lock);
  void Lose(int device);
  void RunStream(Stream* stream);
  void EndStream(Stream* stream, std::unique_lock<std::mutex>* lock);

  std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = false;
  std::vector<Context> contexts_ = std::vector<Context>(2);
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<std::unique_ptr<Event>> events_;
  std::map<const char*, Block> memory_;
  std::map<const char*, size_t> registered_;
  std::map<std::string, Failure> failures_;
  std::map<std::string, uint64_t> counts_;
  size_t contexts_pushed_ = 0;
  uint64_t calls_outside_context_ = 0;
  uint64_t calls_not_relaxed_ = 0;
};

}  // namespace holdfast::testing

#endif  // HOLDFAST_TESTS_TESTING_FAKE_GPU_H_
