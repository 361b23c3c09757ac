// Reading checkpoints into memory whose address the caller knows.
#include "holdfast/load.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
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

/// name, address, bytes, device (or None), first byte of a part (or None: the whole tensor).
using Target = std::tuple<std::string, uintptr_t, uint64_t, Device*, std::optional<uint64_t>>;
/// name, dtype, shape, file, begin, end.
using Place =
    std::tuple<std::string, std::string, std::vector<int64_t>, uint32_t, uint64_t, uint64_t>;

nb::dict Load(const CheckpointReader& reader, const std::vector<Target>& given, bool verify,
              uint64_t buffer_bytes, uint32_t threads, const std::string& engine, bool direct_io) {
  std::vector<TensorTarget> targets;
  targets.reserve(given.size());
  for (const auto& [name, address, bytes, device, begin] : given) {
    targets.push_back(
        {.name = name, .data = Pointer(address), .bytes = bytes, .device = device, .begin = begin});
  }
  LoadOptions options;
  options.verify = verify;
  options.buffer_bytes = buffer_bytes;
  options.threads = threads;
  options.engine = EngineOf(engine);
  options.direct_io = direct_io;
  const LoadReport report = ValueOrThrow(WithoutGil([&] { return reader.Load(targets, options); }));
  nb::dict d;
  d["bytes"] = report.bytes;
  d["bytes_read"] = report.bytes_read;
  d["seconds"] = report.seconds;
  d["verified"] = report.verified;
  d["engine"] = WordOf(report.engine);
  d["engine_reason"] = Message{report.engine_reason};
  d["direct_io"] = WordOf(report.direct_io);
  return d;
}

template <typename Open>
std::unique_ptr<CheckpointReader> Opened(Open open) {
  return ValueOrThrow(WithoutGil(open));
}

}  // namespace

void BindLoad(nb::module_& module) {
  nb::class_<CheckpointReader>(module, "CheckpointReader",
                               "An open checkpoint of one rank, or several.")
      .def_static(
          "open",
          [](const Name& path, uint32_t rank) {
            return Opened([&] { return CheckpointReader::Open(path.text, rank); });
          },
          "path"_a, "rank"_a)
      .def_static(
          "open_file",
          [](const Name& path) {
            return Opened([&] { return CheckpointReader::OpenFile(path.text); });
          },
          "path"_a)
      .def_static(
          "open_manifest",
          [](const Name& path, const Name& manifest_name, const std::optional<Digest>& digest) {
            return Opened([&] {
              return CheckpointReader::OpenManifest(path.text, manifest_name.text, digest);
            });
          },
          "path"_a, "manifest_name"_a, "digest"_a = nb::none())
      .def_static(
          "open_places",
          [](const Name& path, const std::vector<std::string>& files,
             const std::vector<Place>& places) {
            std::vector<PlannedTensor> tensors;
            tensors.reserve(places.size());
            for (const auto& [name, dtype, shape, file, begin, end] : places) {
              tensors.push_back({.name = name,
                                 .dtype = dtype,
                                 .shape = shape,
                                 .file = file,
                                 .begin = begin,
                                 .end = end});
            }
            return Opened([&] { return CheckpointReader::OpenPlaces(path.text, files, tensors); });
          },
          "path"_a, "files"_a, "places"_a)
      .def(
          "tensors",
          [](const CheckpointReader& reader) {
            nb::list tensors;
            for (const PlannedTensor& t : reader.tensors()) {
              tensors.append(
                  nb::make_tuple(t.name, t.dtype, nb::cast(t.shape), t.file, t.begin, t.end));
            }
            return tensors;
          },
          "(name, dtype, shape, file, begin, end) of each.")
      .def(
          "entry_bytes",
          [](const CheckpointReader& reader) {
            nb::dict bytes;
            for (const PlannedTensor& t : reader.tensors())
              bytes[nb::str(t.name.data(), t.name.size())] = t.end - t.begin;
            return bytes;
          },
          "The length of each tensor by its name; of two of one name the later one counts.")
      .def(
          "add",
          [](CheckpointReader& reader, uint32_t rank) {
            ThrowIfError(WithoutGil([&] { return reader.Add(rank); }));
          },
          "rank"_a, "Adds the tensors of another rank, which count before those of one name.")
      .def_prop_ro("files", &CheckpointReader::files)
      .def_prop_ro("step", &CheckpointReader::step)
      .def_prop_ro("world_size", &CheckpointReader::world_size)
      .def_prop_ro("attempt",
                   [](const CheckpointReader& reader) { return AttemptText(reader.attempt()); })
      .def("load", &Load, "targets"_a, "verify"_a, "buffer_bytes"_a, "threads"_a, "engine"_a,
           "direct_io"_a);
}

}  // namespace holdfast::python
