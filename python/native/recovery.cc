// Lists complete checkpoints, and cleans up after crashes.
#include "holdfast/recovery.h"
#include "holdfast/ranks.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

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

template <typename Do>
auto WithoutGil(Do act) {
  auto result = [&] {
    const GilReleased released;
    return act();
  }();
  return ValueOrThrow(std::move(result));
}

}  // namespace

void BindRecovery(nb::module_& module) {
  nb::class_<RankAnnouncement>(module, "RankAnnouncement",
                               "Says to the other ranks of a save that this one has begun it.")
      .def(
          "abandon",
          [](RankAnnouncement& self, const Message& why) {
            const GilReleased released;
            self.Abandon(absl::UnknownError(why.text));
          },
          "why"_a, "This rank takes no part; not once its save has begun.")
      .def(
          "check_ranks",
          [](RankAnnouncement& self, const std::vector<uint32_t>& ranks) {
            const absl::Status status = [&] {
              const GilReleased released;
              return self.CheckRanks(ranks);
            }();
            ThrowIfError(status);
          },
          "ranks"_a, "Raises when one of them gives no signs of life, or any rank has failed.");
  module.def(
      "announce_save",
      [](const Name& directory, const Name& name, const std::string& attempt, uint32_t rank,
         uint32_t world_size, std::optional<double> time_liveness_max) {
        RankInSave who = {.directory = directory.text,
                          .name = name.text,
                          .attempt = AttemptOf(attempt),
                          .rank = rank,
                          .world_size = world_size};
        if (time_liveness_max.has_value()) who.time_liveness_max = ToDuration(time_liveness_max);
        return WithoutGil([&] { return RankAnnouncement::Make(who); });
      },
      "directory"_a, "name"_a, "attempt"_a, "rank"_a, "world_size"_a, "time_liveness_max"_a.none());
  module.def(
      "digest",
      [](uintptr_t address, uint64_t bytes) {
        const Digest digest = [&] {
          const GilReleased released;
          return DigestOf(Pointer<const void>(address), bytes);
        }();
        char out[2 * sizeof(uint64_t)];
        std::memcpy(out, &digest.high, sizeof(digest.high));
        std::memcpy(out + sizeof(digest.high), &digest.low, sizeof(digest.low));
        return nb::bytes(out, sizeof(out));
      },
      "address"_a, "bytes"_a, "XXH3-128 of bytes in host memory, 16 bytes.");
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
        RecoveryReport report = WithoutGil([&] { return Recover(directory.text, options); });
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
        switch (WithoutGil([&] { return FindSavesAtWork(directory.text); })) {
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
            WithoutGil([&] { return ListCheckpoints(directory.text, &passed_over); });
        return nb::make_tuple(ListOf(complete), MessagesOf(std::move(passed_over)));
      },
      "directory"_a, "The complete ones, and why others were passed over.");
  module.def(
      "find_newest",
      [](const Name& directory) {
        std::vector<std::string> passed_over;
        const CheckpointInfo newest =
            WithoutGil([&] { return FindNewest(directory.text, &passed_over); });
        return nb::make_tuple(DictOf(newest), MessagesOf(std::move(passed_over)));
      },
      "directory"_a, "The newest one, and why others were passed over.");
  module.def(
      "find_abandoned",
      [](const std::vector<Saved>& saved) {
        std::vector<CheckpointInfo> complete;
        complete.reserve(saved.size());
        for (const auto& [name, saved_at, step, attempt, parent] : saved) {
          CheckpointInfo info;
          info.name = name.text;
          info.saved_at = absl::UnixEpoch() + absl::Seconds(saved_at);
          info.step = step;
          info.attempt = AttemptOf(attempt);
          info.parent = AttemptOf(parent);
          complete.push_back(std::move(info));
        }
        return FindAbandoned(complete);
      },
      "saved"_a,
      "Whether a rollback has abandoned each checkpoint: name, saved_at, step, attempt, parent.");
  module.def(
      "file_manifests",
      [](const Name& directory, const Name& name) {
        return NamesOf(WithoutGil([&] { return FileManifests(directory.text, name.text); }));
      },
      "directory"_a, "name"_a);
  module.def(
      "remove_file",
      [](const Name& directory, const Name& name) {
        const absl::Status removed = [&] {
          const GilReleased released;
          return RemoveFile(directory.text, name.text);
        }();
        ThrowIfError(removed);
      },
      "directory"_a, "name"_a);
  module.def(
      "inspect",
      [](const Name& path) {
        return DictOf(WithoutGil([&] { return InspectCheckpoint(path.text); }));
      },
      "path"_a);
}

}  // namespace holdfast::python
