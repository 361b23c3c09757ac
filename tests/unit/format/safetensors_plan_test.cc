#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "holdfast/plan.h"
#include "runtime/format/safetensors.h"
#include "tests/unit/format/sample.h"

namespace holdfast::format {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

constexpr AttemptId kAttempt = {.high = 0x0123456789abcdef, .low = 0xfedcba9876543210};

void ExpectRefused(const std::vector<TensorSource>& tensors, const SafetensorsOptions& options,
                   const std::string& what) {
  const auto plan = PlanSafetensors("f.safetensors", tensors, options);
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(plan.status().message()), HasSubstr(what));
}

TensorSource Source(const std::string& name, const std::string& dtype, std::vector<int64_t> shape,
                    uint64_t bytes) {
  static const char kData[4096] = {};
  return {.name = name, .dtype = dtype, .shape = std::move(shape), .data = kData, .bytes = bytes};
}

nlohmann::ordered_json HeaderJson(const SavePlan& plan) {
  return nlohmann::ordered_json::parse(plan.files[0].segments[0].literal.substr(8));
}

TEST(PlanSafetensors, WritesTheHeaderToTheByte) {
  const SavePlan plan = ExamplePlan();
  const std::string json =
      R"({"__metadata__":{"holdfast.attempt":"00112233445566778899aabbccddeeff"},)"
      R"("layer.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
      R"("layer.bias":{"dtype":"BF16","shape":[3],"data_offsets":[24,30]}})";
  const std::string literal = plan.files[0].segments[0].literal;
  EXPECT_EQ(literal.size(), 4096u);
  EXPECT_EQ(literal.substr(0, 8), std::string("\xf8\x0f\0\0\0\0\0\0", 8));
  EXPECT_EQ(literal.substr(8), json + std::string(4088 - json.size(), ' '));
  EXPECT_EQ(plan.files[0].bytes, 4126u);
}

TEST(PlanSafetensors, OrdersByElementSizeThenAsGiven) {
  SampleTensors tensors;
  tensors.Add("u8", "U8", {3}, 3);
  tensors.Add("f32.1", "F32", {1}, 4);
  tensors.Add("odd", "MYSTERY", {5}, 15);  // three bytes each: aligned to one
  tensors.Add("f64", "F64", {1}, 8);
  tensors.Add("c128", "C128", {1}, 16);
  tensors.Add("f32.0", "F32", {}, 4);
  tensors.Add("bf16", "BF16", {1}, 2);
  const auto plan = PlanSafetensors("f.safetensors", tensors.sources, {});
  ASSERT_TRUE(plan.ok()) << plan.status();
  std::vector<std::string> names;
  for (const PlannedTensor& tensor : plan->tensors) names.push_back(tensor.name);
  EXPECT_THAT(names, ElementsAre("c128", "f64", "f32.1", "f32.0", "bf16", "u8", "odd"));
  for (const PlannedTensor& tensor : plan->tensors) {
    const uint32_t element_bytes = DtypeBytes(tensor.dtype);
    if (element_bytes != 0) {
      EXPECT_EQ(tensor.begin % element_bytes, 0u) << tensor.name;
    }
  }
  EXPECT_TRUE(ValidatePlan(*plan).ok()) << ValidatePlan(*plan);
  for (const Segment& segment : plan->files[0].segments) {
    if (segment.tensor == Segment::kLiteral) continue;
    for (const TensorSource& source : tensors.sources) {
      if (source.name == plan->tensors[segment.tensor].name) {
        EXPECT_EQ(segment.data, source.data);
      }
    }
  }
}

TEST(PlanSafetensors, KeepsUnknownDtypesAsBytes) {
  SampleTensors tensors;
  tensors.Add("q \"\\", "QINT8", {2, 3}, 6);
  tensors.Add("c", "C64", {1}, 8);
  tensors.Add("half", "F4", {4}, 2);
  tensors.Add("w", "F32", {2}, 8);
  tensors.Add("scale", "F8_E8M0", {2}, 2);
  const auto plan = PlanSafetensors("f.safetensors", tensors.sources, {});
  ASSERT_TRUE(plan.ok()) << plan.status();
  const auto json = HeaderJson(*plan);
  EXPECT_EQ(json["q \"\\"]["dtype"], "U8");
  EXPECT_EQ(json["q \"\\"]["shape"], nlohmann::ordered_json::array({6}));
  EXPECT_EQ(json["c"]["dtype"], "U8");
  EXPECT_EQ(json["half"]["dtype"], "U8");
  EXPECT_EQ(json["w"]["dtype"], "F32");
  EXPECT_EQ(json["scale"]["dtype"], "F8_E8M0");
  const auto dtypes =
      nlohmann::ordered_json::parse(json["__metadata__"]["holdfast.dtypes"].get<std::string>());
  EXPECT_EQ(dtypes.size(), 3u);
  EXPECT_EQ(dtypes["q \"\\"]["dtype"], "QINT8");
  EXPECT_EQ(dtypes["q \"\\"]["shape"], nlohmann::ordered_json::array({2, 3}));
  EXPECT_EQ(dtypes["c"]["dtype"], "C64");
  EXPECT_EQ(dtypes["half"]["dtype"], "F4");
}

TEST(PlanSafetensors, IsReadBackAsItWasGiven) {
  SampleTensors tensors;
  tensors.Add("q", "QINT8", {2, 3}, 6);
  tensors.Add("c", "C64", {1}, 8);
  tensors.Add("scalar", "F32", {}, 4);
  tensors.Add("none", "F64", {0, 5}, 0);
  tensors.Add("\xe5\xb1\xa4\n\x01", "I16", {1}, 2);
  const auto plan = PlanSafetensors("f.safetensors", tensors.sources,
                                    {.metadata = {{"holdfast.attempt", "x"}, {"k\"", "v\n"}}});
  ASSERT_TRUE(plan.ok()) << plan.status();
  const auto header = ParseSafetensors(plan->files[0].segments[0].literal, plan->files[0].bytes);
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->data_begin % kIoAlignment, 0u);
  ASSERT_EQ(header->tensors.size(), plan->tensors.size());
  for (size_t i = 0; i < plan->tensors.size(); ++i) {
    EXPECT_EQ(header->tensors[i].name, plan->tensors[i].name);
    EXPECT_EQ(header->tensors[i].dtype, plan->tensors[i].dtype);
    EXPECT_EQ(header->tensors[i].shape, plan->tensors[i].shape);
    EXPECT_EQ(header->tensors[i].begin, plan->tensors[i].begin);
    EXPECT_EQ(header->tensors[i].end, plan->tensors[i].end);
  }
  ASSERT_EQ(header->metadata.size(), 3u);
  EXPECT_EQ(header->metadata[0].first, kAttemptKey);
  EXPECT_EQ(header->metadata[1], std::make_pair(std::string("k\""), std::string("v\n")));
}

TEST(PlanSafetensors, PlansNoTensorsAtAll) {
  const auto plan = PlanSafetensors("f.safetensors", {}, {});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->files[0].bytes, 4096u);
  EXPECT_TRUE(ValidatePlan(*plan).ok());
  EXPECT_TRUE(ParseSafetensors(plan->files[0].segments[0].literal, 4096).ok());
}

TEST(PlanSafetensors, AlignsTheDataWhateverTheHeadersLength) {
  for (size_t extra = 4000; extra < 4100; ++extra) {
    const auto plan =
        PlanSafetensors("f.safetensors", {}, {.metadata = {{"k", std::string(extra, 'v')}}});
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->files[0].bytes % kIoAlignment, 0u);
    EXPECT_EQ(plan->files[0].bytes, extra + 33 <= 4096 ? 4096u : 8192u) << extra;
  }
}

TEST(PlanSafetensors, RefusesNames) {
  ExpectRefused({Source("", "U8", {1}, 1)}, {}, "name is empty");
  ExpectRefused({Source("__metadata__", "U8", {1}, 1)}, {}, "the format's own");
  ExpectRefused({Source("\xc3", "U8", {1}, 1)}, {}, "not UTF-8");
  ExpectRefused({Source("a", "\xc3", {1}, 1)}, {}, "dtype is not UTF-8");
  ExpectRefused({Source("a", "U8", {1}, 1), Source("a", "U8", {1}, 1)}, {},
                "tensor \"a\": the name occurs twice");
  EXPECT_FALSE(PlanSafetensors("a/b", {}, {}).ok());
  EXPECT_FALSE(PlanSafetensors("x.tmp", {}, {}).ok());
}

TEST(PlanSafetensors, RefusesSizesThatDoNotMatch) {
  ExpectRefused({Source("a", "F32", {2, 3}, 23)}, {}, "23 bytes given, shape and dtype make 24");
  ExpectRefused({Source("a", "F32", {}, 0)}, {}, "make 4");
  ExpectRefused({Source("a", "F32", {-1}, 4)}, {}, "dimension -1 is negative");
  const int64_t large = std::numeric_limits<int64_t>::max();
  ExpectRefused({Source("a", "F32", {large, 3}, 4)}, {}, "more than 2^64 - 1 elements");
  ExpectRefused({Source("a", "F32", {large}, 4)}, {}, "more than 2^64 - 1 bytes");
  ExpectRefused({Source("a", "F4", {3}, 2)}, {}, "ends within a byte");
  ExpectRefused({Source("a", "U8", {large}, static_cast<uint64_t>(large))}, {}, "2^63 - 1");
  TensorSource nowhere = Source("a", "U8", {1}, 1);
  nowhere.data = nullptr;
  ExpectRefused({nowhere}, {}, "has no data");
}

TEST(PlanSafetensors, RefusesMetadata) {
  ExpectRefused({}, {.metadata = {{"a", "1"}, {"a", "2"}}}, "occurs twice");
  ExpectRefused({}, {.metadata = {{"a", "\xff"}}}, "not UTF-8");
  ExpectRefused({}, {.metadata = {{"holdfast.dtypes", "{}"}}}, "Holdfast's own");
}

TEST(PlanSafetensors, RefusesAHeaderOverTheFormatsLimit) {
  ExpectRefused({}, {.metadata = {{"a", std::string(kSafetensorsHeaderMax, 'x')}}}, "limit");
}

SampleTensors TensorsOfAllKinds() {
  SampleTensors tensors;
  tensors.Add("u8", "U8", {3}, 3);
  tensors.Add("a \"name\" with\tescapes", "F32", {1}, 4);
  tensors.Add("odd", "MYSTERY", {5}, 15);
  tensors.Add("empty", "F32", {2, 0}, 0);
  tensors.Add("f64", "F64", {1, 1}, 8);
  return tensors;
}

TEST(SafetensorsStructure, IsThePlanWithoutTheAttempt) {
  const SampleTensors tensors = TensorsOfAllKinds();
  const auto structure = PackSafetensors("f.safetensors", tensors.sources);
  ASSERT_TRUE(structure.ok()) << structure.status();
  const PackedPlan& packed = structure->plan;
  const auto plan = PlanSafetensors("f.safetensors", tensors.sources, {.attempt = kAttempt});
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ(packed.files.size(), 1u);
  EXPECT_EQ(packed.files[0].name, plan->files[0].name);
  EXPECT_EQ(packed.files[0].bytes, plan->files[0].bytes);
  ASSERT_EQ(packed.literals.size(), 2u);
  EXPECT_EQ(structure->HeadFor(kAttempt) + packed.literals[1], plan->files[0].segments[0].literal);
  ASSERT_EQ(packed.tensors.size(), plan->tensors.size());
  ASSERT_EQ(structure->order.size(), plan->tensors.size());
  for (size_t i = 0; i < plan->tensors.size(); ++i) {
    const PlannedTensor& tensor = plan->tensors[i];
    EXPECT_EQ(packed.tensors.name(i), tensor.name);
    EXPECT_EQ(packed.tensors.dtype(i), tensor.dtype);
    EXPECT_THAT(packed.tensors.shape(i), ElementsAreArray(tensor.shape));
    EXPECT_EQ(packed.tensors.begin(i), tensor.begin);
    EXPECT_EQ(packed.tensors.end(i), tensor.end);
    EXPECT_EQ(tensors.sources[structure->order[i]].name, tensor.name);
  }
}

TEST(SafetensorsStructure, DescribesNothingThatDiffersInAnyPart) {
  const SampleTensors tensors = TensorsOfAllKinds();
  const auto structure = PackSafetensors("f.safetensors", tensors.sources);
  ASSERT_TRUE(structure.ok()) << structure.status();
  EXPECT_TRUE(structure->Describes("f.safetensors", tensors.sources));
  EXPECT_FALSE(structure->Describes("g.safetensors", tensors.sources));
  const auto with = [&](auto change) {
    std::vector<TensorSource> changed = tensors.sources;
    change(changed);
    return structure->Describes("f.safetensors", changed);
  };
  static const char kElsewhere[16] = {};
  EXPECT_TRUE(with([](auto& t) { t[4].data = kElsewhere; }));
  EXPECT_FALSE(with([](auto& t) { t[4].data = nullptr; }));
  EXPECT_FALSE(with([](auto& t) { t[4].name = "f65"; }));
  EXPECT_FALSE(with([](auto& t) { t[4].name = "f6"; }));
  EXPECT_FALSE(with([](auto& t) { t[4].dtype = "I64"; }));
  EXPECT_FALSE(with([](auto& t) { t[4].shape = {1}; }));
  EXPECT_FALSE(with([](auto& t) { t[4].bytes = 9; }));
  EXPECT_FALSE(with([](auto& t) { t[3].shape = {3, 0}; }));
  EXPECT_FALSE(with([](auto& t) { std::swap(t[0], t[1]); }));
  EXPECT_FALSE(with([](auto& t) { t.pop_back(); }));
  EXPECT_FALSE(with([](auto& t) { t.push_back(Source("more", "U8", {1}, 1)); }));
}

TEST(SafetensorsStructure, RefusesWhatThePlanRefuses) {
  const std::vector<TensorSource> twice = {Source("x", "U8", {1}, 1), Source("x", "U8", {1}, 1)};
  EXPECT_THAT(std::string(PackSafetensors("f.safetensors", twice).status().message()),
              HasSubstr("\"x\": the name occurs twice"));
  EXPECT_FALSE(PackSafetensors("a/b", {}).ok());
}

}  // namespace
}  // namespace holdfast::format
