// Which checkpoints are complete, and cleaning up after crashes.
#include "holdfast/recovery.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>

#include "bindings.h"
#include "status.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace holdfast::python {
namespace {

nb::dict DictOf(const CheckpointInfo& info) {
  nb::dict d;
  d["name"] = info.name;
  d["path"] = info.path;
  d["step"] = info.step;
  d["attempt"] = AttemptText(info.attempt);
  d["world_size"] = info.world_size;
  d["bytes"] = info.bytes;
  return d;
}

nb::list ListOf(const std::vector<CheckpointInfo>& infos) {
  nb::list list;
  for (const CheckpointInfo& info : infos) list.append(DictOf(info));
  return list;
}

template <typename Do>
auto WithoutGil(Do act) {
  auto result = [&] {
    const nb::gil_scoped_release release;
    return act();
  }();
  return ValueOrThrow(std::move(result));
}

}  // namespace

void BindRecovery(nb::module_& module) {
  module.def(
      "abandon_save",
      [](const std::string& directory, const std::string& name, const std::string& attempt) {
        const AttemptId id = AttemptOf(attempt);
        ThrowIfError([&] {
          const nb::gil_scoped_release release;
          return AbandonSave(directory, name, id);
        }());
      },
      "directory"_a, "name"_a, "attempt"_a,
      "Tells the other ranks of a save that this one takes no part in it.");
  module.def(
      "recover",
      [](const std::string& directory, std::optional<double> wait_for_orphans, bool promote,
         bool clean_up, std::optional<double> age_without_locks) {
        RecoveryOptions options;
        options.wait_for_orphans = ToDuration(wait_for_orphans);
        options.promote = promote;
        options.clean_up = clean_up;
        options.age_without_locks = ToDuration(age_without_locks);
        const RecoveryReport report = WithoutGil([&] { return Recover(directory, options); });
        nb::dict d;
        d["complete"] = ListOf(report.complete);
        d["promoted"] = report.promoted;
        d["removed"] = report.removed;
        d["fenced"] = report.fenced;
        d["kept_incomplete"] = report.kept_incomplete;
        return d;
      },
      "directory"_a, "wait_for_orphans"_a.none(), "promote"_a, "clean_up"_a,
      "age_without_locks"_a.none());
  module.def(
      "list_checkpoints",
      [](const std::string& directory) {
        return ListOf(WithoutGil([&] { return ListCheckpoints(directory); }));
      },
      "directory"_a);
  module.def(
      "find_newest",
      [](const std::string& directory) {
        return DictOf(WithoutGil([&] { return FindNewest(directory); }));
      },
      "directory"_a);
  module.def(
      "inspect",
      [](const std::string& path) {
        return DictOf(WithoutGil([&] { return InspectCheckpoint(path); }));
      },
      "path"_a);
}

}  // namespace holdfast::python
