// Lists complete checkpoints, and cleans up after crashes.
#include "holdfast/recovery.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "names.h"
#include "status.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace holdfast::python {
namespace {

/// name, saved_at, step, attempt, parent.
using Saved = std::tuple<Name, double, uint64_t, std::string, std::string>;

nb::dict DictOf(const CheckpointInfo& info) {
  nb::dict d;
  d["name"] = Name{info.name};
  d["path"] = Name{info.path};
  d["step"] = info.step;
  d["saved_at"] = absl::ToDoubleSeconds(info.saved_at - absl::UnixEpoch());
  d["attempt"] = AttemptText(info.attempt);
  d["parent"] = info.parent == AttemptId{} ? nb::none() : nb::cast(AttemptText(info.parent));
  d["world_size"] = info.world_size;
  d["bytes"] = info.bytes;
  return d;
}

nb::list ListOf(const std::vector<CheckpointInfo>& infos) {
  nb::list list;
  for (const CheckpointInfo& info : infos) list.append(DictOf(info));
  return list;
}

std::vector<CheckpointInfo> InfosOf(const std::vector<Saved>& saved) {
  std::vector<CheckpointInfo> infos;
  infos.reserve(saved.size());
  for (const auto& [name, saved_at, step, attempt, parent] : saved) {
    CheckpointInfo info;
    info.name = name.text;
    info.saved_at = absl::UnixEpoch() + absl::Seconds(saved_at);
    info.step = step;
    info.attempt = AttemptOf(attempt);
    info.parent = AttemptOf(parent);
    infos.push_back(std::move(info));
  }
  return infos;
}

}  // namespace

void BindRecovery(nb::module_& module) {
  module.def(
      "recover",
      [](const Name& directory, std::optional<double> wait_for_orphans, bool promote, bool clean_up,
         std::optional<double> silence_without_locks, std::optional<double> age_without_locks) {
        RecoveryOptions options;
        options.wait_for_orphans = ToDuration(wait_for_orphans);
        options.promote = promote;
        options.clean_up = clean_up;
        options.silence_without_locks = ToDuration(silence_without_locks);
        options.age_without_locks = ToDuration(age_without_locks);
        RecoveryReport report =
            ValueOrThrow(WithoutGil([&] { return Recover(directory.text, options); }));
        nb::dict d;
        d["complete"] = ListOf(report.complete);
        d["promoted"] = NamesOf(std::move(report.promoted));
        d["removed"] = NamesOf(std::move(report.removed));
        d["fenced"] = NamesOf(std::move(report.fenced));
        d["kept_incomplete"] = NamesOf(std::move(report.kept_incomplete));
        return d;
      },
      "directory"_a, "wait_for_orphans"_a.none(), "promote"_a, "clean_up"_a,
      "silence_without_locks"_a.none(), "age_without_locks"_a.none());
  module.def(
      "saves_at_work",
      [](const Name& directory) {
        switch (ValueOrThrow(WithoutGil([&] { return FindSavesAtWork(directory.text); }))) {
          case SavesAtWork::kNone:
            return "none";
          case SavesAtWork::kTrainer:
            return "trainer";
          case SavesAtWork::kOrphan:
            return "orphan";
          case SavesAtWork::kUnknown:
            break;
        }
        return "unknown";
      },
      "directory"_a, "Who writes into a framework's directory: none, trainer, orphan, unknown.");
  module.def(
      "list_checkpoints",
      [](const Name& directory) {
        std::vector<std::string> passed_over;
        const auto complete =
            ValueOrThrow(WithoutGil([&] { return ListCheckpoints(directory.text, &passed_over); }));
        return nb::make_tuple(ListOf(complete), MessagesOf(std::move(passed_over)));
      },
      "directory"_a, "The complete ones, and why others were passed over.");
  module.def(
      "list_recorded",
      [](const Name& directory) {
        std::vector<std::string> passed_over;
        const auto recorded =
            ValueOrThrow(WithoutGil([&] { return ListRecorded(directory.text, &passed_over); }));
        return nb::make_tuple(ListOf(recorded), MessagesOf(std::move(passed_over)));
      },
      "directory"_a, "The same by the commit records alone.");
  module.def(
      "find_newest",
      [](const Name& directory) {
        std::vector<std::string> passed_over;
        const CheckpointInfo newest =
            ValueOrThrow(WithoutGil([&] { return FindNewest(directory.text, &passed_over); }));
        return nb::make_tuple(DictOf(newest), MessagesOf(std::move(passed_over)));
      },
      "directory"_a, "The newest one, and why others were passed over.");
  module.def(
      "remove_checkpoint",
      [](const Name& path, const std::string& attempt) {
        const AttemptId id = AttemptOf(attempt);
        ThrowIfError(WithoutGil([&] { return RemoveCheckpoint(path.text, id); }));
      },
      "path"_a, "attempt"_a, "Removes a checkpoint of that attempt as retention does.");
  module.def(
      "select_for_removal",
      [](const std::vector<Saved>& saved, uint32_t keep_last, uint64_t keep_every,
         const Name& name) {
        return NamesOf(SelectForRemoval(
            InfosOf(saved), {.keep_last = keep_last, .keep_every = keep_every}, name.text));
      },
      "saved"_a, "keep_last"_a, "keep_every"_a, "name"_a,
      "Names that retention removes once the checkpoint `name` is there, oldest first.");
  module.def(
      "find_abandoned",
      [](const std::vector<Saved>& saved) { return FindAbandoned(InfosOf(saved)); }, "saved"_a,
      "Whether a rollback has abandoned each checkpoint: name, saved_at, step, attempt, parent.");
  module.def(
      "file_manifests",
      [](const Name& directory, const Name& name) {
        return NamesOf(
            ValueOrThrow(WithoutGil([&] { return FileManifests(directory.text, name.text); })));
      },
      "directory"_a, "name"_a);
  module.def(
      "remove_file",
      [](const Name& directory, const Name& name) {
        ThrowIfError(WithoutGil([&] { return RemoveFile(directory.text, name.text); }));
      },
      "directory"_a, "name"_a);
  module.def(
      "inspect",
      [](const Name& path) {
        return DictOf(ValueOrThrow(WithoutGil([&] { return InspectCheckpoint(path.text); })));
      },
      "path"_a);
}

}  // namespace holdfast::python
