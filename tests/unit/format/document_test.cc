// FORMAT.md is a promise: its examples must be what the code writes.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>

#include "runtime/digest/digest.h"
#include "runtime/format/manifest.h"
#include "tests/unit/format/sample.h"

namespace holdfast::format {
namespace {

/// The contents of the fenced block behind the comment <!-- example: NAME -->.
std::string Example(const std::string& name) {
  std::ifstream in(HOLDFAST_FORMAT_DOCUMENT);
  std::stringstream document;
  document << in.rdbuf();
  const std::string text = document.str();
  EXPECT_FALSE(text.empty()) << HOLDFAST_FORMAT_DOCUMENT;
  const size_t comment = text.find("<!-- example: " + name + " -->");
  const size_t begin = text.find('\n', text.find("```", comment)) + 1;
  const size_t end = text.find("```", begin);
  EXPECT_LT(begin, end);
  return comment == std::string::npos ? "" : text.substr(begin, end - begin);
}

/// As `xxd -g1` without its text column: offset and 16 bytes a line.
std::string Dump(const std::string& bytes) {
  std::ostringstream out;
  for (size_t at = 0; at < bytes.size(); at += 16) {
    char text[24];
    snprintf(text, sizeof(text), "%08zx", at);
    out << text;
    for (size_t i = at; i < at + 16 && i < bytes.size(); ++i) {
      snprintf(text, sizeof(text), " %02x", static_cast<unsigned char>(bytes[i]));
      out << text;
    }
    out << "\n";
  }
  return out.str();
}

TEST(FormatDocument, ShowsTheTemplate) {
  EXPECT_EQ(Example("template"), BuildManifest(SampleInput(), ExamplePlan()).text);
}

TEST(FormatDocument, ShowsTheCompletedManifest) {
  const std::string shown = Example("manifest");
  EXPECT_EQ(shown, CompleteManifest(SampleInput(), ExamplePlan()));
  const auto read = ParseManifest(shown);
  EXPECT_TRUE(read.ok()) << read.status();
}

TEST(FormatDocument, ShowsTheCommitRecord) {
  EXPECT_EQ(Example("commit template"), BuildCommitRecord(SampleCommit()).text);
  EXPECT_EQ(Example("commit record"), CompleteCommitRecord(SampleCommit()));
}

TEST(FormatDocument, ShowsTheFilesHeaderAndData) {
  const std::string file = FileBytes(ExamplePlan(), 0);
  const size_t blank = file.find_last_not_of(' ', 4095) + 1;
  EXPECT_EQ(Example("header"), file.substr(8, blank - 8) + "\n");
  EXPECT_EQ(Example("length"), Dump(file.substr(0, 8)));
  EXPECT_EQ(Example("data"), Dump(file.substr(4096)));
}

TEST(FormatDocument, ShowsTheBytesUnderTheRoot) {
  const auto manifest = ParseManifest(Example("manifest"));
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  // Spelled out here a second time, after the document rather than after the code.
  std::string bytes = "holdfast-root-v1";
  const auto little = [&bytes](uint64_t value, size_t width) {
    for (size_t i = 0; i < width; ++i) bytes.push_back(static_cast<char>(value >> (8 * i)));
  };
  little(manifest->attempt.high, 8);
  little(manifest->attempt.low, 8);
  little(manifest->rank, 4);
  little(manifest->world_size, 4);
  little(0, 4);
  little(4194304, 4);
  little(manifest->files[0].bytes, 8);
  char hex[32];
  digest::ToHex(manifest->files[0].chunks[0], hex);
  for (size_t i = 0; i < 32; i += 2) {
    bytes.push_back(static_cast<char>(std::stoi(std::string(hex + i, 2), nullptr, 16)));
  }
  EXPECT_EQ(Example("root"), Dump(bytes));
  EXPECT_EQ(digest::Of(bytes.data(), bytes.size()), manifest->files[0].root);
}

TEST(FormatDocument, ShowsTheBytesUnderTheDigestOfTheReplicas) {
  SavePlan plan = ExamplePlan();
  plan.files[0].name = "model-replicas.safetensors";
  plan.files[0].replicated = true;
  const auto manifest = ParseManifest(CompleteManifest(SampleInput(), plan));
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  const std::string shown = Example("replicas");
  // Spelled out here a second time, after the document rather than after the code.
  std::string bytes = "holdfast-repl-v1";
  const auto little = [&bytes](uint64_t value) {
    for (size_t i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(value >> (8 * i)));
  };
  little(manifest->attempt.high);
  little(manifest->attempt.low);
  little(plan.files[0].name.size());
  bytes += plan.files[0].name;
  little(plan.files[0].bytes);
  char hex[32];
  digest::ToHex(manifest->files[0].chunks[0], hex);
  for (size_t i = 0; i < 32; i += 2) {
    bytes.push_back(static_cast<char>(std::stoi(std::string(hex + i, 2), nullptr, 16)));
  }
  EXPECT_EQ(shown, Dump(bytes));
  EXPECT_EQ(digest::Of(bytes.data(), bytes.size()), manifest->replicas);
}

}  // namespace
}  // namespace holdfast::format
