#include "runtime/format/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "runtime/digest/digest.h"
#include "runtime/format/tensor_parts.h"
#include "tests/unit/format/sample.h"

namespace holdfast::format {
namespace {

using ::testing::HasSubstr;

absl::Status Refusal(const std::string& text) { return ParseManifest(text).status(); }

/// Refused with kDataLoss and a message that has `what`, although the self-digest is right.
void ExpectRefused(const std::string& text, const std::string& what) {
  const absl::Status status = Refusal(Reseal(text));
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(what));
}

/// Three chunks and a bit: tensors that own, share and span chunks, and a tensor without bytes.
class ManifestOfManyChunks : public ::testing::Test {
 protected:
  ManifestOfManyChunks() {
    tensors_.Add("big", "F32", {5 << 18}, 5u << 20);
    tensors_.Add("empty", "F32", {0, 7}, 0);
    tensors_.Add("second", "F32", {(kChunkBytes * 3 - (5 << 20)) / 4 + 1},
                 kChunkBytes * 3 - (5u << 20) + 4);
    tensors_.Add("complex", "C128", {2}, 32);
    tensors_.Add("\xf0\x9f\x90\x99 \"quoted\"\n", "I8", {}, 1);
    auto plan = PlanSafetensors(ModelFileName(0, 2), tensors_.sources, {});
    EXPECT_TRUE(plan.ok()) << plan.status();
    plan_ = *std::move(plan);
    text_ = CompleteManifest(SampleInput(), plan_);
  }

  SampleTensors tensors_;
  SavePlan plan_;
  std::string text_;
};

TEST_F(ManifestOfManyChunks, ComesBackAsItWasBuilt) {
  ASSERT_TRUE(ValidatePlan(plan_).ok()) << ValidatePlan(plan_);
  const auto read = ParseManifest(text_);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->checkpoint, "step-1200");
  EXPECT_EQ(read->attempt, SampleInput().attempt);
  EXPECT_EQ(read->rank, 0u);
  EXPECT_EQ(read->world_size, 2u);
  EXPECT_EQ(read->step, 1200u);
  EXPECT_EQ(read->saved_at_ns, 1'700'000'000'123'456'789u);
  EXPECT_EQ(read->writer, "holdfast 0.1.0");
  EXPECT_EQ(read->launcher, "spawn");
  EXPECT_EQ(read->pages, "hugetlb");
  EXPECT_EQ(read->engine, "io_uring-fixed");
  EXPECT_EQ(read->engine_reason, "registered buffers on huge pages");
  EXPECT_EQ(read->direct_io, "proven");
  EXPECT_EQ(read->bytes_written, plan_.total_bytes());
  EXPECT_EQ(read->time_writing_ns, 1'234'567u);
  EXPECT_EQ(read->time_syncing_ns, 456'789u);
  EXPECT_EQ(read->time_total_ns, 2'345'678u);
  EXPECT_FALSE(read->streamed || read->read_back || read->adopted);
  ASSERT_EQ(read->files.size(), 1u);
  EXPECT_EQ(read->files[0].name, plan_.files[0].name);
  EXPECT_EQ(read->files[0].bytes, plan_.files[0].bytes);
  EXPECT_EQ(read->files[0].chunks.size(), 4u);
  ASSERT_EQ(read->tensors.size(), plan_.tensors.size());
  for (size_t i = 0; i < plan_.tensors.size(); ++i) {
    EXPECT_EQ(read->tensors[i].name, plan_.tensors[i].name);
    EXPECT_EQ(read->tensors[i].dtype, plan_.tensors[i].dtype);
    EXPECT_EQ(read->tensors[i].shape, plan_.tensors[i].shape);
    EXPECT_EQ(read->tensors[i].begin, plan_.tensors[i].begin);
    EXPECT_EQ(read->tensors[i].end, plan_.tensors[i].end);
  }
}

TEST_F(ManifestOfManyChunks, HasDigestsOfTheFilesOwnBytes) {
  const std::string file = FileBytes(plan_, 0);
  const auto read = ParseManifest(text_);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->files[0].chunks[1], digest::Of(file.data() + kChunkBytes, kChunkBytes));
  EXPECT_EQ(read->files[0].chunks[3],
            digest::Of(file.data() + 3 * kChunkBytes, file.size() - 3 * kChunkBytes));
  const Manifest::Tensor& second = read->tensors.back();
  EXPECT_TRUE(second.has_head);
}

TEST_F(ManifestOfManyChunks, IsJsonForOtherReaders) {
  const nlohmann::json json = nlohmann::json::parse(text_, nullptr, false);
  ASSERT_FALSE(json.is_discarded());
  EXPECT_EQ(json["format"], "holdfast.manifest");
  EXPECT_EQ(json["step"], 1200);
  EXPECT_EQ(json["files"][0]["digests"].size(), 4u);
  EXPECT_EQ(json["tensors"].size(), plan_.tensors.size());
}

TEST_F(ManifestOfManyChunks, IsRefusedWhereverOneByteIsMissing) {
  for (size_t bytes = 0; bytes < text_.size(); ++bytes) {
    EXPECT_EQ(Refusal(text_.substr(0, bytes)).code(), absl::StatusCode::kDataLoss) << bytes;
  }
}

TEST_F(ManifestOfManyChunks, IsRefusedWhereverOneBitIsWrong) {
  for (size_t bit = 0; bit < text_.size() * 8; ++bit) {
    std::string changed = text_;
    changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ (1 << bit % 8));
    ASSERT_FALSE(ParseManifest(changed).ok()) << "bit " << bit;
  }
}

TEST(ManifestTemplate, IsNoManifestUntilEverySlotIsFilled) {
  const SavePlan plan = ExamplePlan();
  const ManifestTemplate made = BuildManifest(SampleInput(), plan);
  EXPECT_EQ(Refusal(made.text).code(), absl::StatusCode::kDataLoss);
  const std::string whole = CompleteManifest(SampleInput(), plan);
  ASSERT_EQ(whole.size(), made.text.size());
  const auto blank = [&](uint64_t offset, uint32_t width) {
    std::string text = whole;
    text.replace(offset, width, made.text, offset, width);
    EXPECT_FALSE(ParseManifest(Reseal(text)).ok()) << "slot at " << offset;
  };
  for (const layout::Slot& slot :
       {made.slots.engine, made.slots.engine_reason, made.slots.direct_io, made.slots.streamed,
        made.slots.bytes_written, made.slots.time_writing_ns, made.slots.time_syncing_ns,
        made.slots.time_total_ns}) {
    ASSERT_GT(slot.width, 0u);
    blank(slot.offset, slot.width);
  }
  blank(made.file_roots[0], 32);
  blank(made.chunk_digests[0][0], 32);
  blank(made.tensors[0].head, 32);
  EXPECT_FALSE(
      ParseManifest(Replace(whole, whole.substr(whole.size() - 35, 32), std::string(32, '-')))
          .ok());
}

TEST(ManifestTemplate, EndsInTheSelfDigest) {
  const ManifestTemplate made = BuildManifest(SampleInput(), ExamplePlan());
  EXPECT_EQ(made.slots.self_digest.offset, made.text.size() - 35);
  EXPECT_EQ(made.slots.self_digest.width, 32u);
  EXPECT_EQ(made.text.substr(made.text.size() - 50),
            "\"self_digest\":\"" + std::string(32, '-') + "\"}\n");
}

/// Of a single file, or of an earlier version.
ManifestInput Unrecorded() {
  ManifestInput input = SampleInput();
  input.recorded = false;
  input.parent = {};
  return input;
}

TEST(ManifestTemplate, SaysWhatTheSaveWas) {
  ManifestInput input = SampleInput();
  input.launcher = Launcher::kFork;
  input.pages = PageRung::kTmpfsHuge;
  input.read_back = true;
  input.replaces = {{.high = 1, .low = 2}, {.high = 3, .low = 4}};
  auto read = ParseManifest(CompleteManifest(input, ExamplePlan(), /*streamed=*/true));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->launcher, "fork");
  EXPECT_EQ(read->pages, "tmpfs-huge");
  EXPECT_TRUE(read->streamed && read->read_back);
  EXPECT_EQ(read->replaces, input.replaces);
  EXPECT_EQ(read->parent, input.parent);
  EXPECT_TRUE(read->Recorded());
  EXPECT_EQ(ParseManifest(CompleteManifest(Unrecorded(), ExamplePlan()))->version, 2u);
  input.adopted = true;
  read = ParseManifest(CompleteManifest(input, ExamplePlan(), /*streamed=*/true));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_TRUE(read->adopted);
  EXPECT_EQ(read->launcher, "none");
  EXPECT_EQ(read->pages, "none");
}

TEST(ManifestTemplate, IsBuiltForARankWithoutFiles) {
  const auto read = ParseManifest(CompleteManifest(SampleInput(), SavePlan()));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_TRUE(read->files.empty() && read->tensors.empty());
}

class ParseManifestRefuses : public ::testing::Test {
 protected:
  const std::string good_ = CompleteManifest(SampleInput(), ExamplePlan());
  const std::string old_ = CompleteManifest(Unrecorded(), ExamplePlan());
  std::string With(const std::string& from, const std::string& to) const {
    return Replace(good_, from, to);
  }
};

TEST_F(ParseManifestRefuses, NothingThatIsWhole) { EXPECT_TRUE(ParseManifest(good_).ok()); }

TEST_F(ParseManifestRefuses, WrongSelfDigestBeforeAnythingElse) {
  const absl::Status status = Refusal(With("\"step\":1200", "\"step\":1201"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("self_digest"));
}

TEST_F(ParseManifestRefuses, OtherFormatsAndVersions) {
  ExpectRefused(With("holdfast.manifest", "holdfast.manifesto"), "unknown format");
  ExpectRefused(With("\"version\":4", "\"version\":5"), "version 5, only 1 to 4 are known");
  ExpectRefused(With("\"version\":4", "\"version\":0"), "version 0");
  ExpectRefused(With("\"version\":4", "\"version\":3"), "parent: versions below 4 lack it");
}

TEST_F(ParseManifestRefuses, WrongReplicas) {
  SavePlan plan = ExamplePlan();
  plan.files[0].replicated = true;
  for (const uint32_t rank : {0, 1}) {
    ManifestInput input = Unrecorded();
    input.rank = rank;
    const std::string text = CompleteManifest(input, plan);
    const auto read = ParseManifest(text);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->Wrote(read->files[0]), rank == 0);
    EXPECT_EQ(read->files_bytes, rank == 0 ? 4126u : 0u);
    const auto with = [&text](const std::string& from, const std::string& to) {
      return Reseal(Replace(text, from, to));
    };
    ExpectRefused(with("\"replicas\":\"", "\"replicas\":\"0"), "");
    ExpectRefused(with("\"version\":3", "\"version\":2"), "versions below 3 lack it");
    ExpectRefused(with(",\"replicated\":true", ""), rank == 0 ? "replicas" : "");
    const size_t at = text.find("\"replicas\":\"") + 12;
    ExpectRefused(with(text.substr(at, 32), std::string(32, '0')),
                  "replicas: not the digest of the replicated files");
  }
}

TEST_F(ParseManifestRefuses, WrongSyntax) {
  ExpectRefused(With("\"step\":1200", "\"step\":01200"), "leading zero");
  ExpectRefused(With("\"step\":1200", "\"step\":-1200"), "whole number");
  ExpectRefused(With("\"step\":1200", "\"step\":1200.0"), "whole number");
  ExpectRefused(With("\"step\":1200", "\"step\":99999999999999999999"), "over 2^64");
  ExpectRefused(With("\"rank\":0", "\"rank\":4294967296"), "over 2^32");
  ExpectRefused(With("\"rank\":0", "\"rank\":null"), "whole number");
  ExpectRefused(With("\"streamed\":false", "\"streamed\":0"), "true or false");
  ExpectRefused(With("\"step\":1200,", "\"step\":1200,,"), "expected a string");
  ExpectRefused(With("\"step\":1200", "\"steps\":1200"), "unknown key \"steps\"");
  ExpectRefused(With("\"step\":1200", "\"step\":1200,\"step\":1200"), "second time");
  ExpectRefused(With("\"step\":1200,", ""), "no key \"step\"");
  ExpectRefused(With(",\"file\":0,\"begin\":4120", ",\"begin\":4120"), "no key \"file\"");
}

TEST_F(ParseManifestRefuses, AnotherSumOfItsFiles) {
  ExpectRefused(With("\"files_bytes\":4126", "\"files_bytes\":4127"), "files_bytes");
}

TEST_F(ParseManifestRefuses, ATimeThatDoesNotBelongToTheVersion) {
  ExpectRefused(With("\"version\":4", "\"version\":1"), "saved_at_ns");
  ExpectRefused(With(",\"saved_at_ns\":1700000000123456789,\"files_bytes\":4126", ""),
                "saved_at_ns");
}

TEST_F(ParseManifestRefuses, NotVersionOneThatLacksTheTime) {
  const auto read = ParseManifest(
      Reseal(Replace(Replace(old_, ",\"saved_at_ns\":1700000000123456789,\"files_bytes\":4126", ""),
                     "version\":2", "version\":1")));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->version, 1u);
  EXPECT_FALSE(read->saved_at_ns.has_value() || read->files_bytes.has_value());
}

TEST_F(ParseManifestRefuses, AListOfWhatItReplacesThatCannotBe) {
  const std::string with = "\"step\":1200,\"replaces\":[\"00112233445566778899aabbccddeeff\"]";
  EXPECT_TRUE(ParseManifest(Reseal(Replace(good_, "\"step\":1200", with))).ok());
  ExpectRefused(With("\"step\":1200", "\"step\":1200,\"replaces\":[12]"), "expected a string");
  const std::string one =
      Replace(Replace(old_, ",\"saved_at_ns\":1700000000123456789,\"files_bytes\":4126", ""),
              "version\":2", "version\":1");
  ExpectRefused(Replace(one, "\"step\":1200", with), "version 1 lacks it");
}

TEST_F(ParseManifestRefuses, SomethingInFrontOrBehind) {
  EXPECT_FALSE(ParseManifest(Reseal(" " + good_)).ok());
  EXPECT_FALSE(ParseManifest("\xef\xbb\xbf" + good_).ok());
  EXPECT_FALSE(ParseManifest(good_ + "\n").ok());
  EXPECT_FALSE(ParseManifest(good_ + good_).ok());
  // A second self-digest, so that the framing is there twice.
  ExpectRefused(good_.substr(0, good_.size() - 2) + ",\n" + good_.substr(good_.size() - 50),
                "second time");
}

TEST_F(ParseManifestRefuses, ImpossibleHeads) {
  ExpectRefused(With("\"rank\":0", "\"rank\":2"), "rank 2 of 2");
  ExpectRefused(With("step-1200", ".."), "directory's");
  ExpectRefused(With("step-1200", "a/b"), "'/'");
  ExpectRefused(With("00112233445566778899aabbccddeeff", std::string(32, '0')), "attempt");
  ExpectRefused(With("00112233445566778899aabbccddeeff", std::string(32, 'A')), "hex");
}

TEST_F(ParseManifestRefuses, FilesThatCannotBe) {
  const std::string name = "model-00000-of-00002.safetensors";
  ExpectRefused(With(name, "../" + name), "'/'");
  ExpectRefused(With(name, ".."), "directory's");
  ExpectRefused(With(name, "a\\u0000b"), "zero byte");
  ExpectRefused(With(name, ""), "empty");
  ExpectRefused(With(name, "rank-00000-of-00001.manifest.json"), "rank manifest's");
  ExpectRefused(With(name, name + ".tmp"), ".tmp");
  ExpectRefused(With(name, std::string(256, 'n')), "255");
  ExpectRefused(With("\"bytes\":4126", "\"bytes\":4194305"), "1 digests for 4194305 bytes");
  ExpectRefused(With("\"bytes\":4126", "\"bytes\":4127"), "root");
  ExpectRefused(With("\"bytes\":4126", "\"bytes\":18446744073709551615"), "digests for");
  ExpectRefused(With("\"chunk_bytes\":4194304", "\"chunk_bytes\":4096"), "chunk_bytes");
}

TEST_F(ParseManifestRefuses, RootsAndRanksThatAreAnotherFiles) {
  ExpectRefused(With("\"world_size\":2", "\"world_size\":3"), "root");
  ExpectRefused(With("00112233445566778899aabbccddeeff", "10112233445566778899aabbccddeeff"),
                "root");
  ExpectRefused(With("\"rank\":0", "\"rank\":1"), "root");
}

TEST_F(ParseManifestRefuses, TensorsThatCannotBe) {
  const std::string bias = "\"file\":0,\"begin\":4120,\"end\":4126";
  ExpectRefused(With(bias, "\"file\":1,\"begin\":4120,\"end\":4126"), "file 1 of 1");
  ExpectRefused(With(bias, "\"file\":0,\"begin\":4120,\"end\":4127"), "of a file of 4126");
  ExpectRefused(With(bias, "\"file\":0,\"begin\":4120,\"end\":4119"), "bytes 4120 to 4119");
  ExpectRefused(With(bias, "\"file\":0,\"begin\":4119,\"end\":4126"), "overlaps");
  ExpectRefused(With(bias, "\"file\":0,\"begin\":4120,\"end\":4120"), "head and tail");
  ExpectRefused(With("layer.bias", "layer.weight"), "occurs twice");
  ExpectRefused(With("layer.bias", ""), "empty");
  ExpectRefused(With("\"shape\":[3]", "\"shape\":[9223372036854775808]"), "over 2^63");
  ExpectRefused(With("\"shape\":[3]", "\"shape\":[-3]"), "whole number");
}

TEST(ParseManifestRefusesTwoFiles, OfOneName) {
  SavePlan plan = ExamplePlan();
  plan.files.push_back({.name = plan.files[0].name});
  EXPECT_FALSE(ValidatePlan(plan).ok());
  const absl::Status status = Refusal(CompleteManifest(SampleInput(), plan));
  EXPECT_THAT(std::string(status.message()), HasSubstr("occurs twice"));
}

TEST(PartsOf, FollowsChunkBorders) {
  constexpr uint64_t kC = kChunkBytes;
  const auto check = [](uint64_t begin, uint64_t end, uint64_t file, bool head, bool tail) {
    const TensorParts parts = PartsOf(begin, end, file);
    EXPECT_EQ(parts.has_head, head) << begin << " " << end << " " << file;
    EXPECT_EQ(parts.has_tail, tail) << begin << " " << end << " " << file;
  };
  check(0, 0, 3 * kC, false, false);
  check(5, 5, 3 * kC, false, false);
  check(0, kC, 3 * kC, false, false);                   // a chunk of its own
  check(0, 3 * kC, 3 * kC, false, false);               // three
  check(kC, 2 * kC + 7, 2 * kC + 7, false, false);      // the last one ends with the file
  check(2 * kC, 2 * kC + 7, 2 * kC + 7, false, false);  // nothing but that one
  check(kC, 2 * kC + 6, 2 * kC + 7, false, true);       // someone else has the last byte
  check(1, kC, 3 * kC, true, false);                    // within one chunk there is no tail
  check(0, kC - 1, 3 * kC, true, false);
  check(1, kC + 1, 3 * kC, true, true);
  check(1, 2 * kC, 3 * kC, true, false);
  check(0, kC + 1, 3 * kC, false, true);
  check(3, 9, 9, true, false);  // shares the last chunk with what is in front
  const TensorParts parts = PartsOf(1, 2 * kC + 1, 3 * kC);
  EXPECT_EQ(parts.head_end, kC);
  EXPECT_EQ(parts.tail_begin, 2 * kC);
}

TEST(ManifestName, SortsByRank) {
  EXPECT_EQ(ManifestName(3, 8), "rank-00003-of-00008.manifest.json");
  EXPECT_EQ(ManifestName(3, 8), ManifestPrefix() + "00003" + ManifestSuffix(8));
  EXPECT_EQ(ModelFileName(3, 8), "model-00003-of-00008.safetensors");
  EXPECT_EQ(ManifestName(123456, 200000), "rank-123456-of-200000.manifest.json");
}

}  // namespace
}  // namespace holdfast::format
