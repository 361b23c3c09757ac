// Saves in flight of other processes.
#include "holdfast/watch.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

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
}

}  // namespace holdfast::python
