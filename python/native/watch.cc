// Saves in flight of other processes.
#include "holdfast/watch.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bindings.h"
#include "names.h"
#include "status.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace holdfast::python {
namespace {

nb::dict Read(int fd) {
  const SaveInFlight save = ValueOrThrow(ReadSaveInFlight(fd));
  nb::dict d;
  d["name"] = Name{save.name};
  d["partial"] = Name{save.partial};
  d["attempt"] = AttemptText(save.attempt);
  d["step"] = save.step;
  d["rank"] = save.rank;
  d["world_size"] = save.world_size;
  d["launcher"] = WordOf(save.launcher);
  d["engine"] = WordOf(save.engine);
  d["phase"] = save.progress.phase;
  d["bytes_total"] = save.progress.bytes_total;
  d["bytes_sealed"] = save.progress.bytes_sealed;
  d["bytes_written"] = save.progress.bytes_written;
  d["bytes_held"] = save.bytes_held;
  d["streams"] = save.streams;
  d["worker_pid"] = save.worker_pid;
  return d;
}

}  // namespace

void BindWatch(nb::module_& module) {
  module.attr("JOB_TABLE_NAME") = kJobTableName;
  module.def("read_save_in_flight", &Read, "fd"_a, "What the job table behind `fd` shows.");
  module.def(
      "read_ranks_waited_for",
      [](int fd, const std::string& attempt, uint32_t world_size) {
        return ValueOrThrow(ReadRanksWaitedFor(fd, AttemptOf(attempt), world_size));
      },
      "fd"_a, "attempt"_a, "world_size"_a,
      "The ranks whose part is not durable, by the rank board behind `fd`.");
}

}  // namespace holdfast::python
