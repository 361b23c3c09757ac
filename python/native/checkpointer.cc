// Checkpointer and SaveHandle.
#include "holdfast/checkpointer.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings.h"
#include "callback.h"
#include "names.h"
#include "status.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace holdfast::python {
namespace {

/// A Checkpointer whose destructor, which waits for saves in flight, releases the GIL.
class Saver {
 public:
  explicit Saver(std::unique_ptr<Checkpointer> checkpointer)
      : checkpointer_(std::move(checkpointer)) {}
  ~Saver() { Close(); }
  Saver(const Saver&) = delete;
  Saver& operator=(const Saver&) = delete;

  Checkpointer* operator->() const {
    if (checkpointer_ == nullptr) throw nb::value_error("this Checkpointer is closed");
    return checkpointer_.get();
  }
  void Close() {
    const GilReleased released;
    checkpointer_.reset();
  }

 private:
  std::unique_ptr<Checkpointer> checkpointer_;
};

WhenFull WhenFullOf(const std::string& word) {
  if (word == "wait") return WhenFull::kWait;
  if (word == "skip") return WhenFull::kSkip;
  if (word == "fail") return WhenFull::kFail;
  Raise(absl::InvalidArgumentError("when_full: there is only wait, skip, fail"));
}

TrainerDeath TrainerDeathOf(const std::string& word) {
  if (word == "finish") return TrainerDeath::kFinish;
  if (word == "stop") return TrainerDeath::kStop;
  Raise(absl::InvalidArgumentError("trainer_death: there is only finish, stop"));
}

/// Options by name, as Python gives them; records every requested name.
class Given {
 public:
  explicit Given(nb::dict from) : from_(std::move(from)) {}

  /// Returns true if the option is given; otherwise leaves `*value` unchanged.
  template <typename T>
  bool Take(const char* key, T* value) {
    names_.emplace_back(key);
    if (!from_.contains(key)) return false;
    if (nb::try_cast(from_[key], *value)) return true;
    Raise(absl::InvalidArgumentError(std::string("option ") + key + " = " +
                                     nb::repr(from_[key]).c_str() +
                                     ": of a wrong type, or too large or small for it"));
  }
  void Take(const char* key, absl::Duration* value) {
    std::optional<double> seconds;
    if (Take(key, &seconds)) *value = ToDuration(seconds);
  }
  /// Reads a path.
  void Take(const char* key, std::string* value) {
    Name name;
    if (Take(key, &name)) *value = std::move(name.text);
  }
  /// Reads a choice by its word.
  template <typename T>
  void Take(const char* key, T* value, T (*of_word)(const std::string&)) {
    Name word;
    if (Take(key, &word)) *value = of_word(word.text);
  }
  const std::vector<std::string>& names() const { return names_; }

 private:
  const nb::dict from_;
  std::vector<std::string> names_;
};

/// Reads the options by their C++ names; those of `staging` and `qos` are flat among them.
CheckpointerOptions OptionsOf(Given* given) {
  CheckpointerOptions options;
  given->Take("directory", &options.directory);
  given->Take("arena_bytes", &options.staging.arena_bytes);
  given->Take("control_bytes_max", &options.staging.control_bytes_max);
  given->Take("threads", &options.staging.threads);
  given->Take("idle_trim", &options.staging.idle_trim);
  given->Take("pages", &options.staging.pages, PagesOf);
  given->Take("launcher", &options.launcher, LauncherOf);
  given->Take("engine", &options.engine, EngineOf);
  given->Take("queue_depth", &options.queue_depth);
  given->Take("pwrite_threads", &options.pwrite_threads);
  given->Take("direct_io", &options.direct_io);
  given->Take("read_back", &options.read_back);
  given->Take("second_look", &options.second_look);
  given->Take("fused_copy", &options.fused_copy);
  given->Take("trainer_death", &options.trainer_death, TrainerDeathOf);
  given->Take("when_full", &options.when_full, WhenFullOf);
  given->Take("nice", &options.qos.nice);
  given->Take("io_priority_class", &options.qos.io_priority_class);
  given->Take("io_priority_level", &options.qos.io_priority_level);
  given->Take("bytes_per_second_max", &options.qos.bytes_per_second_max);
  std::vector<uint16_t> cpus;
  if (given->Take("cpus", &cpus)) {
    if (cpus.size() > std::size(options.qos.cpus))
      Raise(absl::InvalidArgumentError("cpus: at most 64"));
    std::copy(cpus.begin(), cpus.end(), options.qos.cpus);
    options.qos.cpu_count = static_cast<uint32_t>(cpus.size());
  }
  given->Take("keep_last", &options.retention.keep_last);
  given->Take("keep_every", &options.retention.keep_every);
  given->Take("rank", &options.rank);
  given->Take("world_size", &options.world_size);
  given->Take("time_memory_max", &options.time_memory_max);
  given->Take("time_stalled_max", &options.time_stalled_max);
  given->Take("time_ranks_max", &options.time_ranks_max);
  given->Take("time_liveness_max", &options.time_liveness_max);
  given->Take("worker_program", &options.worker_program);
  nb::object on_sealed;
  if (given->Take("on_sealed", &on_sealed)) {
    // The last copy goes where no thread holds the GIL.
    const std::shared_ptr<nb::object> hook(new nb::object(std::move(on_sealed)),
                                           [](nb::object* object) {
                                             const Callback call;
                                             if (call) delete object;
                                           });
    options.on_sealed = [hook](const SealedExtent& extent) {
      const Callback call;
      if (!call) return;
      (*hook)(reinterpret_cast<uintptr_t>(extent.memory), extent.bytes, extent.file,
              extent.file_offset, extent.epoch);
    };
  }
  return options;
}

CheckpointerOptions OptionsOf(const nb::dict& options) {
  Given given(options);
  return OptionsOf(&given);
}

nb::dict DictOf(const SaveReport& report) {
  nb::dict d;
  ForEachField(report, [&d](const char* name, const auto& value) {
    using Value = std::decay_t<decltype(value)>;
    if constexpr (std::is_enum_v<Value>) {
      d[name] = WordOf(value);
    } else if constexpr (std::is_same_v<Value, AttemptId>) {
      d[name] = AttemptText(value);
    } else if constexpr (std::is_same_v<Value, std::string>) {
      d[name] = Name{value};
    } else {
      d[name] = value;
    }
  });
  return d;
}

nb::dict DictOf(const SaveProgress& progress) {
  nb::dict d;
  d["phase"] = progress.phase;
  d["bytes_total"] = progress.bytes_total;
  d["bytes_sealed"] = progress.bytes_sealed;
  d["bytes_written"] = progress.bytes_written;
  return d;
}

nb::dict DictOf(const StagingStats& stats) {
  nb::dict d;
  d["arena_bytes"] = stats.arena_bytes;
  d["bytes_held"] = stats.bytes_held;
  d["bytes_held_peak"] = stats.bytes_held_peak;
  d["bytes_quarantined"] = stats.bytes_quarantined;
  d["saves_in_flight"] = stats.saves_in_flight;
  d["control_bytes_held"] = stats.control_bytes_held;
  d["control_bytes_peak"] = stats.control_bytes_peak;
  d["leases"] = stats.leases;
  d["waits"] = stats.waits;
  d["time_waiting"] = absl::ToDoubleSeconds(stats.time_waiting);
  d["trims"] = stats.trims;
  d["resident"] = stats.resident;
  d["pages"] = WordOf(stats.pages);
  d["page_bytes"] = stats.page_bytes;
  d["pages_reason"] = Message{stats.pages_reason};
  nb::list epochs;
  for (const EpochHolding& holding : stats.epochs) {
    nb::dict epoch;
    epoch["epoch"] = holding.epoch;
    epoch["bytes_held"] = holding.bytes_held;
    epoch["age"] = absl::ToDoubleSeconds(holding.age);
    epoch["quarantined"] = Message{holding.quarantined};
    epochs.append(epoch);
  }
  d["epochs"] = epochs;
  return d;
}

SaveHandle Save(Saver* saver, const Name& name, const SavePlan& plan, uint64_t step, bool replace,
                const std::string& attempt, bool files_only, bool confirm,
                const std::string& parent, bool single_file, uint64_t saved_after_ns) {
  SaveRequest request;
  request.name = name.text;
  request.step = step;
  request.plan = &plan;
  request.replace = replace;
  request.attempt = AttemptOf(attempt);
  request.parent = AttemptOf(parent);
  request.files_only = files_only;
  request.confirm = confirm;
  request.single_file = single_file;
  request.saved_after_ns = saved_after_ns;
  Checkpointer* const checkpointer = saver->operator->();
  return ValueOrThrow(WithoutGil([&] { return checkpointer->SaveAsync(request); }));
}

}  // namespace

void BindCheckpointer(nb::module_& module) {
  nb::class_<SaveHandle>(module, "SaveHandle", "One save under way.")
      .def(
          "wait_staged",
          [](const SaveHandle& save, std::optional<double> timeout) {
            ThrowIfError(WaitInterruptibly(ToDuration(timeout),
                                           [&](absl::Duration t) { return save.WaitStaged(t); }));
          },
          "timeout"_a.none() = nb::none())
      .def(
          "wait_staged_on",
          [](const SaveHandle& save, Device* device, uintptr_t stream) {
            ThrowIfError(WithoutGil([&] { return save.WaitStagedOn(device, Pointer(stream)); }));
          },
          "device"_a, "stream"_a)
      .def(
          "wait_durable",
          [](const SaveHandle& save, std::optional<double> timeout) {
            return DictOf(ValueOrThrow(WaitInterruptibly(
                ToDuration(timeout), [&](absl::Duration t) { return save.WaitDurable(t); })));
          },
          "timeout"_a.none() = nb::none())
      .def("is_done", &SaveHandle::IsDone)
      .def(
          "confirm",
          [](const SaveHandle& save, const Message& fault) {
            ThrowIfError(save.Confirm(fault.text.empty() ? absl::OkStatus()
                                                         : absl::DataLossError(fault.text)));
          },
          "fault"_a)
      .def("cancel", [](const SaveHandle& save) { ThrowIfError(save.Cancel()); })
      .def("progress", [](const SaveHandle& save) { return DictOf(save.progress()); })
      .def_prop_ro("epoch", &SaveHandle::epoch)
      // None instead of 0: a signal to process 0 goes to the caller's whole group.
      .def_prop_ro("worker_pid", [](const SaveHandle& save) -> std::optional<int> {
        const int pid = save.worker_pid();
        return pid > 0 ? std::optional(pid) : std::nullopt;
      });

  nb::class_<Saver>(module, "Checkpointer", "Staging memory and the workers behind it.")
      .def(
          "__init__",
          [](Saver* self, const nb::dict& options) {
            const CheckpointerOptions given = OptionsOf(options);
            new (self)
                Saver(ValueOrThrow(WithoutGil([&] { return Checkpointer::CreateMemory(given); })));
          },
          "options"_a)
      .def(
          "create_beside",
          [](const Saver& self, const nb::dict& options) {
            const CheckpointerOptions given = OptionsOf(options);
            const Checkpointer* const checkpointer = self.operator->();
            return std::make_unique<Saver>(
                ValueOrThrow(WithoutGil([&] { return checkpointer->CreateBeside(given); })));
          },
          "options"_a)
      .def("save", &Save, "name"_a, "plan"_a, "step"_a, "replace"_a, "attempt"_a, "files_only"_a,
           "confirm"_a = false, "parent"_a = "", "single_file"_a = false, "saved_after_ns"_a = 0)
      .def(
          "flush",
          [](const Saver& self, std::optional<double> timeout) {
            ThrowIfError(WaitInterruptibly(ToDuration(timeout),
                                           [&](absl::Duration t) { return self->Flush(t); }));
          },
          "timeout"_a.none() = nb::none())
      .def("trim",
           [](const Saver& self) {
             Checkpointer* const checkpointer = self.operator->();
             ThrowIfError(WithoutGil([&] { return checkpointer->Trim(); }));
           })
      .def(
          "register_device",
          [](const Saver& self, Device* device) {
            Checkpointer* const checkpointer = self.operator->();
            ThrowIfError(WithoutGil([&] { return checkpointer->RegisterDevice(device); }));
          },
          "device"_a)
      .def("staging", [](const Saver& self) { return DictOf(self->staging()); })
      .def("close", &Saver::Close);

  module.def(
      "check_options",
      [](const nb::dict& options) {
        CheckpointerOptions given = OptionsOf(options);
        given.directory = "/";
        ThrowIfError(ValidateOptions(given));
      },
      "options"_a, "Refuses what no Checkpointer would take.");
  module.def(
      "option_names",
      [] {
        Given none{nb::dict()};
        OptionsOf(&none);
        return none.names();
      },
      "Every option's name.");
  module.def(
      "default_arena_bytes",
      [](uint64_t state_bytes, uint32_t processes, uint64_t bytes_owned) {
        return DefaultArenaBytes(
            {.state_bytes = state_bytes, .processes = processes, .bytes_owned = bytes_owned});
      },
      "state_bytes"_a, "processes"_a, "bytes_owned"_a, "See holdfast/staging.h.");
  module.def(
      "new_attempt", [] { return AttemptText(NewAttemptId()); },
      "A random attempt id, 32 hex digits.");
}

}  // namespace holdfast::python
