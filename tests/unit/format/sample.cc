#include "tests/unit/format/sample.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "runtime/digest/digest.h"
#include "runtime/format/tensor_parts.h"
#include "runtime/layout/manifest_slots.h"

namespace holdfast::format {

void SampleTensors::Add(const std::string& name, const std::string& dtype,
                        std::vector<int64_t> shape, uint64_t byte_count) {
  std::string data(byte_count, '\0');
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(bytes.size() + i);
  bytes.push_back(std::move(data));
  TensorSource& source = sources.emplace_back();
  source.name = name;
  source.dtype = dtype;
  source.shape = std::move(shape);
  source.bytes = byte_count;
  // The strings move when `bytes` grows; short strings take the characters along.
  for (size_t i = 0; i < sources.size(); ++i) sources[i].data = bytes[i].data();
}

std::string FileBytes(const SavePlan& plan, size_t index) {
  std::string bytes;
  for (const Segment& segment : plan.files[index].segments) {
    if (segment.tensor == Segment::kLiteral) {
      bytes += segment.literal;
    } else {
      bytes.append(static_cast<const char*>(segment.data), segment.bytes);
    }
  }
  return bytes;
}

ManifestInput SampleInput() {
  ManifestInput input;
  input.checkpoint = "step-1200";
  input.attempt = {.high = 0x0011223344556677, .low = 0x8899aabbccddeeff};
  input.rank = 0;
  input.world_size = 2;
  input.step = 1200;
  input.saved_at_ns = 1'700'000'000'123'456'789;
  input.launcher = Launcher::kSpawn;
  input.pages = PageRung::kHugetlb;
  input.recorded = true;
  input.writer = "holdfast 0.1.0";
  input.parent = {.high = 0xffeeddccbbaa9988, .low = 0x7766554433221100};
  return input;
}

CommitInput SampleCommit() {
  const ManifestInput save = SampleInput();
  return {.checkpoint = save.checkpoint,
          .attempt = save.attempt,
          .parent = save.parent,
          .world_size = save.world_size,
          .step = save.step,
          .saved_at_ns = save.saved_at_ns};
}

std::string CompleteCommitRecord(const CommitInput& input) {
  const std::string manifest = CompleteManifest(SampleInput(), ExamplePlan());
  std::vector<CommitRecord::RankManifest> manifests;
  for (uint32_t rank = 0; rank < input.world_size; ++rank) {
    manifests.push_back(
        {manifest.size() + rank, digest::Of(manifest.data(), manifest.size() - rank % 2)});
  }
  return CompleteCommitRecord(input, 1'700'000'002'000'000'000, input.world_size * uint64_t{4126},
                              manifests);
}

std::string CompleteManifest(const ManifestInput& input, const SavePlan& plan, bool streamed) {
  const ManifestTemplate made = BuildManifest(input, plan);
  std::string text = made.text;
  const auto put = [&text](uint64_t place, const Digest& digest) {
    digest::ToHex(digest, text.data() + place);
  };
  std::vector<std::string> files;
  digest::ReplicaStream replicas(input.attempt);
  for (size_t f = 0; f < plan.files.size(); ++f) {
    files.push_back(FileBytes(plan, f));
    digest::RootStream root({.attempt = input.attempt,
                             .rank = input.rank,
                             .world_size = input.world_size,
                             .file = static_cast<uint32_t>(f),
                             .file_bytes = files[f].size()});
    const PlannedFile& file = plan.files[f];
    if (file.replicated) replicas.AddFile(file.name.data(), file.name.size(), file.bytes);
    for (size_t c = 0; c < made.chunk_digests[f].size(); ++c) {
      const size_t begin = c * kChunkBytes;
      const Digest chunk = digest::Of(files[f].data() + begin,
                                      std::min<size_t>(kChunkBytes, files[f].size() - begin));
      root.Add(chunk);
      if (file.replicated) replicas.Add(chunk);
      put(made.chunk_digests[f][c], chunk);
    }
    put(made.file_roots[f], root.Finish());
  }
  for (size_t t = 0; t < plan.tensors.size(); ++t) {
    const PlannedTensor& tensor = plan.tensors[t];
    const std::string& file = files[tensor.file];
    const TensorParts parts = PartsOf(tensor.begin, tensor.end, file.size());
    EXPECT_EQ(parts.has_head, made.tensors[t].head != 0);
    EXPECT_EQ(parts.has_tail, made.tensors[t].tail != 0);
    if (parts.has_head) {
      put(made.tensors[t].head,
          digest::Of(file.data() + tensor.begin, parts.head_end - tensor.begin));
    }
    if (parts.has_tail) {
      put(made.tensors[t].tail,
          digest::Of(file.data() + parts.tail_begin, tensor.end - parts.tail_begin));
    }
  }
  const layout::ManifestSlots& slots = made.slots;
  if (slots.replicas.width != 0) put(slots.replicas.offset, replicas.Finish());
  layout::FillText(text.data(), slots.engine, layout::ManifestWord(EngineRung::kUringFixed));
  layout::FillText(text.data(), slots.engine_reason, "registered buffers on huge pages");
  layout::FillText(text.data(), slots.direct_io, layout::ManifestWord(DirectIo::kProven));
  layout::FillBool(text.data(), slots.streamed, streamed);
  layout::FillNumber(text.data(), slots.bytes_written, plan.total_bytes());
  layout::FillNumber(text.data(), slots.time_writing_ns, 1'234'567);
  layout::FillNumber(text.data(), slots.time_syncing_ns, 456'789);
  layout::FillNumber(text.data(), slots.time_total_ns, 2'345'678);
  put(slots.self_digest.offset, digest::Of(text.data(), slots.self_digest.offset));
  return text;
}

SavePlan ExamplePlan() {
  // Literal bytes only: the data lives as long as the program.
  static const float kWeight[] = {1, 2, 3, 4, 5, 6};
  static const uint16_t kBias[] = {0x3f80, 0x4000, 0x4040};
  TensorSource sources[2];
  sources[0] = {.name = "layer.bias", .dtype = "BF16", .shape = {3}, .data = kBias, .bytes = 6};
  sources[1] = {
      .name = "layer.weight", .dtype = "F32", .shape = {2, 3}, .data = kWeight, .bytes = 24};
  auto plan =
      PlanSafetensors(ModelFileName(0, 2), sources,
                      {.metadata = {{"holdfast.attempt", "00112233445566778899aabbccddeeff"}}});
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *plan;
}

std::string Reseal(std::string text) {
  const size_t place = text.size() - 35;  // 32 digits and "}\n behind them
  digest::ToHex(digest::Of(text.data(), place), text.data() + place);
  return text;
}

uint32_t Seed() {
  const char* const text = std::getenv("HOLDFAST_SEED");
  return text != nullptr ? static_cast<uint32_t>(std::strtoul(text, nullptr, 10)) : 20240229;
}

std::string Replace(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  if (at == std::string::npos) return text;
  EXPECT_EQ(text.find(from, at + 1), std::string::npos) << "more than one " << from;
  return text.replace(at, from.size(), to);
}

}  // namespace holdfast::format
