// Proving checkpoints on disk.
#include "holdfast/verify.h"
#include "holdfast/commit_file.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "names.h"
#include "status.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace holdfast::python {
namespace {

nb::dict VerifyPath(const Name& path, uint32_t threads, uint64_t buffer_bytes,
                    const std::string& engine, bool direct_io) {
  VerifyOptions options;
  options.threads = threads;
  options.buffer_bytes = buffer_bytes;
  options.engine = EngineOf(engine);
  options.direct_io = direct_io;
  auto verified = [&] {
    const GilReleased released;
    return Verify(path.text, options);
  }();
  const VerifyReport report = ValueOrThrow(std::move(verified));
  nb::dict d;
  d["path"] = Name{report.path};
  d["verdict"] = WordOf(report.verdict);
  d["checked"] = Message{report.checked};
  nb::list faults;
  for (const Fault& fault : report.faults) {
    nb::dict f;
    f["file"] = Name{fault.file};
    f["tensor"] = Message{fault.tensor};
    f["begin"] = fault.begin;
    f["end"] = fault.end;
    f["reason"] = Message{fault.reason};
    f["expected"] = Message{fault.expected};
    f["found"] = Message{fault.found};
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
  d["note"] = Message{report.note};
  return d;
}

CommitFile CommitFileOf(const Name& name, const nb::bytes& contents) {
  return {.name = name.text, .contents = {contents.c_str(), contents.size()}};
}

nb::tuple MakeRecord(const Name& path, const std::string& attempt, const std::string& parent,
                     uint32_t world_size, const Name& name, const nb::bytes& contents) {
  const FrameworkSave save = {
      .attempt = AttemptOf(attempt), .parent = AttemptOf(parent), .world_size = world_size};
  const CommitFile file = CommitFileOf(name, contents);
  auto made = [&] {
    const GilReleased released;
    return MakeCommitRecord(path.text, save, file);
  }();
  const CommitRecordFile record = ValueOrThrow(std::move(made));
  return nb::make_tuple(record.name, nb::bytes(record.text.data(), record.text.size()));
}

std::optional<std::vector<Digest>> CheckFile(const Name& path, const std::string& attempt,
                                             const Name& name, const nb::bytes& contents) {
  const AttemptId id = AttemptOf(attempt);
  const CommitFile file = CommitFileOf(name, contents);
  auto checked = [&] {
    const GilReleased released;
    return CheckCommitFile(path.text, id, file);
  }();
  return ValueOrThrow(std::move(checked));
}

}  // namespace

void BindVerify(nb::module_& module) {
  nb::class_<Digest>(module, "Digest", "XXH3-128 of a file.");
  module.def("make_commit_record", &MakeRecord, "path"_a, "attempt"_a, "parent"_a, "world_size"_a,
             "name"_a, "contents"_a, "Name and text of a commit record.");
  module.def("check_commit_file", &CheckFile, "path"_a, "attempt"_a, "name"_a, "contents"_a,
             "Digests of the manifests by rank; None without a commit record.");
  module.def(
      "find_checkpoints",
      [](const Name& path) {
        FoundCheckpoints found = [&] {
          const GilReleased released;
          return FindCheckpoints(path.text);
        }();
        return nb::make_tuple(NamesOf(std::move(found.checkpoints)),
                              NamesOf(std::move(found.uncommitted)));
      },
      "path"_a, "Paths to verify at and below a path, and of directories without a commit.");
  module.def("verify", &VerifyPath, "path"_a, "threads"_a, "buffer_bytes"_a, "engine"_a,
             "direct_io"_a);
}

}  // namespace holdfast::python
