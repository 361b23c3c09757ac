// Plans: files and their tensors, by address.
#include "holdfast/plan.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings.h"
#include "holdfast/checkpointer.h"
#include "names.h"
#include "status.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace holdfast::python {
namespace {

/// A plan whose first file is a safetensors file. The file is planned once; each save renews the
/// addresses and the attempt, and adds its other files.
struct ModelPlan : SavePlan {
  std::vector<uint32_t> order;  // of the file's tensors, as indices of the given ones
  std::string attempt;          // hex digits, as in the file's header
};

PlannedFile& LastFile(SavePlan* plan) {
  if (plan->files.empty()) throw nb::value_error("plan: add a file first");
  return plan->files.back();
}

uint32_t AddTensor(SavePlan* plan, const std::string& name, const std::string& dtype,
                   const std::vector<int64_t>& shape, uintptr_t address, uint64_t bytes,
                   Device* device, uintptr_t stream) {
  PlannedFile& file = LastFile(plan);
  plan->tensors.push_back({.name = name,
                           .dtype = dtype,
                           .shape = shape,
                           .file = static_cast<uint32_t>(plan->files.size() - 1),
                           .begin = file.bytes,
                           .end = file.bytes + bytes});
  if (bytes == 0) return Segment::kLiteral;
  Segment segment;
  segment.file_offset = file.bytes;
  segment.bytes = bytes;
  segment.tensor = static_cast<uint32_t>(plan->tensors.size() - 1);
  segment.data = Pointer<const void>(address);
  segment.device = device;
  segment.stream = Pointer(stream);
  file.segments.push_back(std::move(segment));
  file.bytes += bytes;
  return static_cast<uint32_t>(file.segments.size() - 1);
}

/// Adds the memory of an object with a buffer, where it lies.
uint64_t AddBytes(SavePlan* plan, const std::string& name, nb::handle data) {
  Py_buffer view;
  if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  const auto address = reinterpret_cast<uintptr_t>(view.buf);
  const auto bytes = static_cast<uint64_t>(view.len);
  PyBuffer_Release(&view);
  AddTensor(plan, name, "U8", {static_cast<int64_t>(bytes)}, address, bytes, nullptr, 0);
  return bytes;
}

void AddLiteral(SavePlan* plan, const nb::bytes& bytes,
                const std::vector<std::pair<uint64_t, uint32_t>>& crc32_slots) {
  if (bytes.size() == 0) return;
  PlannedFile& file = LastFile(plan);
  Segment segment;
  segment.file_offset = file.bytes;
  segment.bytes = bytes.size();
  segment.literal.assign(bytes.c_str(), bytes.size());
  for (const auto& [offset, tensor] : crc32_slots) {
    segment.crc32_slots.push_back({.offset = offset, .segment = tensor});
  }
  file.bytes += bytes.size();
  file.segments.push_back(std::move(segment));
}

/// How far a plan goes: the part that later saves have, too.
using Extent = std::tuple<size_t, size_t, uint64_t>;  // tensors, segments, bytes

Extent ExtentOf(SavePlan* plan) {
  const PlannedFile& file = LastFile(plan);
  return {plan->tensors.size(), file.segments.size(), file.bytes};
}

/// Takes a plan of one file back to an extent, with the memory of each tensor in it that has bytes.
void RenewTo(SavePlan* plan, const Name& name, const Extent& extent,
             const std::vector<uintptr_t>& addresses) {
  const auto [tensors, segments, bytes] = extent;
  if (plan->files.empty() || plan->files[0].segments.size() < segments ||
      plan->tensors.size() < tensors) {
    throw nb::value_error("plan: shorter than its extent");
  }
  plan->files.resize(1);
  plan->tensors.resize(tensors);
  PlannedFile& file = plan->files[0];
  file.name = name.text;
  file.segments.resize(segments);
  file.bytes = bytes;
  auto address = addresses.begin();
  for (Segment& segment : file.segments) {
    if (segment.tensor == Segment::kLiteral) continue;
    if (address == addresses.end()) throw nb::value_error("plan: fewer addresses than tensors");
    segment.data = Pointer<const void>(*address++);
  }
  if (address != addresses.end()) throw nb::value_error("plan: more addresses than tensors");
}

/// name, dtype, shape, address, bytes, device (or None), stream.
using Source = std::tuple<std::string, std::string, std::vector<int64_t>, uintptr_t, uint64_t,
                          Device*, uintptr_t>;

void AddSafetensors(SavePlan* plan, const Name& file_name, const std::vector<Source>& sources,
                    const std::vector<std::pair<std::string, std::string>>& metadata,
                    const std::string& attempt, bool replicated) {
  std::vector<TensorSource> tensors;
  tensors.reserve(sources.size());
  for (const auto& [name, dtype, shape, address, bytes, device, stream] : sources) {
    tensors.push_back({.name = name,
                       .dtype = dtype,
                       .shape = shape,
                       .data = Pointer<const void>(address),
                       .bytes = bytes,
                       .device = device,
                       .stream = Pointer(stream)});
  }
  SavePlan one = ValueOrThrow(PlanSafetensors(
      file_name.text, tensors, {.metadata = metadata, .attempt = AttemptOf(attempt)}));
  const auto files_before = static_cast<uint32_t>(plan->files.size());
  const auto tensors_before = static_cast<uint32_t>(plan->tensors.size());
  for (PlannedTensor& tensor : one.tensors) {
    tensor.file += files_before;
    plan->tensors.push_back(std::move(tensor));
  }
  for (PlannedFile& file : one.files) {
    for (Segment& segment : file.segments) {
      if (segment.tensor != Segment::kLiteral) segment.tensor += tensors_before;
    }
    file.replicated = replicated;
    plan->files.push_back(std::move(file));
  }
}

ModelPlan PlanModel(const std::string& file_name, const std::vector<std::string>& names,
                    const std::vector<std::string>& dtypes,
                    const std::vector<std::vector<int64_t>>& shapes,
                    const std::vector<uint64_t>& bytes,
                    const std::vector<std::pair<std::string, std::string>>& metadata) {
  if (dtypes.size() != names.size() || shapes.size() != names.size() ||
      bytes.size() != names.size()) {
    throw nb::value_error("plan: lists of different lengths");
  }
  static constexpr char kNoData = 0;  // until the addresses are there
  std::vector<TensorSource> tensors;
  std::unordered_map<std::string_view, uint32_t> index;
  for (size_t i = 0; i < names.size(); ++i) {
    tensors.push_back({.name = names[i],
                       .dtype = dtypes[i],
                       .shape = shapes[i],
                       .data = &kNoData,
                       .bytes = bytes[i]});
    index[names[i]] = static_cast<uint32_t>(i);
  }
  const AttemptId attempt = NewAttemptId();
  ModelPlan plan;
  static_cast<SavePlan&>(plan) =
      ValueOrThrow(PlanSafetensors(file_name, tensors, {.metadata = metadata, .attempt = attempt}));
  plan.attempt = AttemptText(attempt);
  for (const PlannedTensor& tensor : plan.tensors) plan.order.push_back(index.at(tensor.name));
  return plan;
}

void Renew(ModelPlan* plan, const std::string& attempt, const std::vector<uintptr_t>& addresses,
           const std::vector<Device*>& devices, const std::vector<uintptr_t>& streams) {
  const size_t count = plan->order.size();
  if (addresses.size() != count || devices.size() != streams.size() ||
      (!devices.empty() && devices.size() != count)) {
    throw nb::value_error("plan: lists of different lengths");
  }
  plan->files.resize(1);
  plan->tensors.resize(count);
  std::vector<Segment>& segments = plan->files[0].segments;
  // Holdfast's metadata comes before all names, so the first match is the attempt.
  std::string& header = segments[0].literal;
  const std::string text = AttemptText(AttemptOf(attempt));
  if (text.size() != plan->attempt.size()) throw nb::value_error("plan: an attempt id is needed");
  header.replace(header.find(plan->attempt), plan->attempt.size(), text);
  plan->attempt = text;
  for (size_t i = 1; i < segments.size(); ++i) {
    const uint32_t index = plan->order[segments[i].tensor];
    segments[i].data = Pointer<const void>(addresses[index]);
    segments[i].device = devices.empty() ? nullptr : devices[index];
    segments[i].stream = streams.empty() ? nullptr : Pointer(streams[index]);
  }
}

}  // namespace

void BindPlan(nb::module_& module) {
  nb::class_<SavePlan>(module, "Plan", "What one rank writes: files, and the place of every byte.")
      .def(nb::init<>())
      .def(
          "add_file",
          [](SavePlan* plan, const Name& name) {
            plan->files.push_back({.name = name.text, .bytes = 0, .segments = {}});
          },
          "name"_a, "Begins a file; what is added next goes to its end.")
      .def("add_tensor", &AddTensor, "name"_a, "dtype"_a, "shape"_a, "address"_a, "bytes"_a,
           "device"_a.none(), "stream"_a,
           "Appends a tensor's bytes; returns the segment's index for CRC-32 slots.")
      .def("add_bytes", &AddBytes, "name"_a, "data"_a,
           "Appends the bytes of an object, which keeps them in place until the save has staged; "
           "returns their number.")
      .def("add_literal", &AddLiteral, "bytes"_a, "crc32_slots"_a,
           "Appends bytes of the format's own. A slot is (offset in the bytes, segment).")
      .def("add_safetensors", &AddSafetensors, "file_name"_a, "tensors"_a, "metadata"_a,
           "attempt"_a, "replicated"_a = false,
           "Adds a whole safetensors file; `replicated`: see PlannedFile.")
      .def("extent", &ExtentOf, "What `renew_to` goes back to.")
      .def("renew_to", &RenewTo, "file_name"_a, "extent"_a, "addresses"_a,
           "Drops all that was added to a plan of one file since `extent`, and gives the rest a "
           "save's name and addresses.")
      .def_prop_ro(
          "file_bytes",
          [](const SavePlan& plan) { return LastFile(const_cast<SavePlan*>(&plan)).bytes; },
          "Length of the last file so far.")
      .def_prop_ro("total_bytes", &SavePlan::total_bytes);
  nb::class_<ModelPlan, SavePlan>(module, "ModelPlan",
                                  "A plan that begins with a safetensors file, for many saves.")
      .def(nb::new_(&PlanModel), "file_name"_a, "names"_a, "dtypes"_a, "shapes"_a, "bytes"_a,
           "metadata"_a)
      .def("renew", &Renew, "attempt"_a, "addresses"_a, "devices"_a, "streams"_a,
           "Gives the file a save's attempt and addresses, and drops all further files. Devices "
           "and streams are empty for tensors of the host.");
}

}  // namespace holdfast::python
