// Proving checkpoints on disk.
#include "holdfast/verify.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "bindings.h"
#include "status.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace holdfast::python {
namespace {

const char* WordOfVerdict(Verdict verdict) {
  switch (verdict) {
    case Verdict::kSound:
      return "sound";
    case Verdict::kCorrupt:
      return "corrupt";
    case Verdict::kIncomplete:
      return "incomplete";
    case Verdict::kUnreadable:
      break;
  }
  return "unreadable";
}

nb::dict VerifyPath(const std::string& path, uint32_t threads, uint64_t buffer_bytes,
                    const std::string& engine, bool direct_io) {
  VerifyOptions options;
  options.threads = threads;
  options.buffer_bytes = buffer_bytes;
  options.engine = EngineOf(engine);
  options.direct_io = direct_io;
  auto verified = [&] {
    const GilReleased released;
    return Verify(path, options);
  }();
  const VerifyReport report = ValueOrThrow(std::move(verified));
  nb::dict d;
  d["path"] = report.path;
  d["verdict"] = WordOfVerdict(report.verdict);
  d["checked"] = report.checked;
  nb::list faults;
  for (const Fault& fault : report.faults) {
    nb::dict f;
    f["file"] = fault.file;
    f["tensor"] = fault.tensor;
    f["begin"] = fault.begin;
    f["end"] = fault.end;
    f["reason"] = fault.reason;
    f["expected"] = fault.expected;
    f["found"] = fault.found;
    faults.append(f);
  }
  d["faults"] = faults;
  d["faults_total"] = report.faults_total;
  d["bytes"] = report.bytes;
  d["files"] = report.files;
  d["tensors"] = report.tensors;
  d["seconds"] = report.seconds;
  d["step"] = report.step;
  d["attempt"] = AttemptText(report.attempt);
  d["engine"] = WordOf(report.engine);
  d["direct_io"] = WordOf(report.direct_io);
  d["note"] = report.note;
  return d;
}

}  // namespace

void BindVerify(nb::module_& module) {
  module.def("verify", &VerifyPath, "path"_a, "threads"_a, "buffer_bytes"_a, "engine"_a,
             "direct_io"_a);
}

}  // namespace holdfast::python
