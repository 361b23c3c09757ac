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
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "status.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace holdfast::python {
namespace {

/// name, dtype, shape, address, bytes, device (or None), stream.
using Source = std::tuple<std::string, std::string, std::vector<int64_t>, uintptr_t, uint64_t,
                          Device*, uintptr_t>;

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

void AddSafetensors(SavePlan* plan, const std::string& file_name,
                    const std::vector<Source>& sources,
                    const std::vector<std::pair<std::string, std::string>>& metadata,
                    const std::string& attempt) {
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
  SavePlan one = ValueOrThrow(
      PlanSafetensors(file_name, tensors, {.metadata = metadata, .attempt = AttemptOf(attempt)}));
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
    plan->files.push_back(std::move(file));
  }
}

}  // namespace

void BindPlan(nb::module_& module) {
  nb::class_<SavePlan>(module, "Plan", "What one rank writes: files, and the place of every byte.")
      .def(nb::init<>())
      .def(
          "add_file",
          [](SavePlan* plan, const std::string& name) {
            plan->files.push_back({.name = name, .bytes = 0, .segments = {}});
          },
          "name"_a, "Begins a file; what is added next goes to its end.")
      .def("add_tensor", &AddTensor, "name"_a, "dtype"_a, "shape"_a, "address"_a, "bytes"_a,
           "device"_a.none(), "stream"_a,
           "Appends a tensor's bytes; returns the segment's index for CRC-32 slots.")
      .def("add_literal", &AddLiteral, "bytes"_a, "crc32_slots"_a,
           "Appends bytes of the format's own. A slot is (offset in the bytes, segment).")
      .def("add_safetensors", &AddSafetensors, "file_name"_a, "tensors"_a, "metadata"_a,
           "attempt"_a, "Adds a whole safetensors file.")
      .def_prop_ro(
          "file_bytes",
          [](const SavePlan& plan) { return LastFile(const_cast<SavePlan*>(&plan)).bytes; },
          "Length of the last file so far.")
      .def_prop_ro("total_bytes", &SavePlan::total_bytes);
}

}  // namespace holdfast::python
