// Checks of job tables: every mistake of a table builder is found and named, without a read outside
// the table.
#include "runtime/layout/job.h"

#include <cstring>
#include <functional>

#include "gtest/gtest.h"
#include "tests/testing/job_table.h"

namespace holdfast::layout {
namespace {

using Table = testing::JobTable;

TEST(ValidateJob, AcceptsASoundTable) { EXPECT_EQ(Table().Verdict(), "sound"); }

TEST(ValidateJob, NamesEveryMistake) {
  const struct {
    const char* verdict;
    std::function<void(Job&)> spoil;
  } cases[] = {
      {"this is not a job table", [](Job& job) { job.magic = 1; }},
      {"the table has another layout version", [](Job& job) { ++job.layout_version; }},
      {"the table is longer than its mapping", [](Job& job) { ++job.table_bytes; }},
      {"unknown kind of job", [](Job& job) { job.kind = static_cast<JobKind>(9); }},
      {"unknown launcher", [](Job& job) { job.launcher = static_cast<Launcher>(4); }},
      {"unknown engine", [](Job& job) { job.engine = static_cast<EngineRung>(4); }},
      {"more CPUs than the table holds", [](Job& job) { job.qos.cpu_count = 65; }},
      {"queue depth not 1 to 64", [](Job& job) { job.queue_depth = 0; }},
      {"queue depth not 1 to 64", [](Job& job) { job.queue_depth = 65; }},
      {"more than 16 pwrite threads", [](Job& job) { job.pwrite_threads = 17; }},
      {"world size not 1 to 100000", [](Job& job) { job.world_size = 0; }},
      {"the rank is outside of the world", [](Job& job) { job.rank = 1; }},
      {"too many files", [](Job& job) { job.file_count = 1u << 31; }},
      {"too many extents", [](Job& job) { job.extent_count = 1u << 31; }},
      {"too many pieces", [](Job& job) { job.piece_count = 1u << 31; }},
      {"a range has the wrong size", [](Job& job) { job.file_count = 3; }},
      {"a range is not aligned to 64 bytes", [](Job& job) { job.files.offset += 8; }},
      {"a range overlaps the head", [](Job& job) { job.files.offset = 0; }},
      {"a range starts behind the table", [](Job& job) { job.files.offset = ~uint64_t{63}; }},
      {"a range starts behind the table", [](Job& job) { job.older.offset = ~uint64_t{63}; }},
      {"a range ends behind the table",
       [](Job& job) { job.manifest_template.bytes = ~uint64_t{0}; }},
      {"two ranges overlap", [](Job& job) { job.published.offset = job.acknowledged.offset; }},
      {"the names to delete have the wrong size", [](Job& job) { job.trash.bytes = 1; }},
      {"the target is not a name", [](Job& job) { job.target[0] = '\0'; }},
      {"the target is not a name", [](Job& job) { std::strcpy(job.target, ".."); }},
      {"the target is not a name", [](Job& job) { std::strcpy(job.target, "."); }},
      {"the target is not a name", [](Job& job) { std::strcpy(job.target, "a/b"); }},
      {"the target is not a name",
       [](Job& job) { std::memset(job.target, 'a', sizeof(job.target)); }},
      {"the partial name is not a name", [](Job& job) { job.partial[0] = '\0'; }},
      {"the partial name is the target", [](Job& job) { std::strcpy(job.partial, "step-1"); }},
      {"the manifest is not a name", [](Job& job) { job.manifest[0] = '\0'; }},
      {"the manifest's prefix or suffix is not terminated",
       [](Job& job) { std::memset(job.manifest_prefix, 'a', sizeof(job.manifest_prefix)); }},
      {"the manifest's name is not that of its rank",
       [](Job& job) {
         job.world_size = 2;
         job.rank = 1;
       }},
      {"ranks without a manifest",
       [](Job& job) {
         job.world_size = 2;
         job.flags = 0;
       }},
      {"a slot lies outside of the manifest",
       [](Job& job) { job.slots.engine = {.offset = 990, .width = 11}; }},
      {"a slot lies outside of the manifest",
       [](Job& job) { job.slots.engine = {.offset = ~uint64_t{0}, .width = 11}; }},
      {"the self-digest's slot has not 32 digits",
       [](Job& job) { job.slots.self_digest.width = 16; }},
      {"a file's name is not a name", [](Job& job) { std::strcpy(Files(&job)[1].name, "../x"); }},
      {"a file's name is not a name", [](Job& job) { std::memset(Files(&job)[1].name, 'x', 252); }},
      {"a file is too long", [](Job& job) { Files(&job)[0].bytes = ~uint64_t{0}; }},
      {"a file's extents do not follow the last one's",
       [](Job& job) { Files(&job)[1].extent_first = 1; }},
      {"a file's extents are not its chunks", [](Job& job) { Files(&job)[1].bytes = 1; }},
      {"a root's slot is outside", [](Job& job) { Files(&job)[0].root_slot = 969; }},
      {"a file has more extents than there are",
       [](Job& job) {
         Files(&job)[1].bytes = 1;
         Files(&job)[1].extent_count = 1;
       }},
      {"an extent is misplaced", [](Job& job) { Extents(&job)[1].file = 1; }},
      {"an extent is misplaced", [](Job& job) { Extents(&job)[1].file_offset = 4096; }},
      {"an extent has the wrong length", [](Job& job) { Extents(&job)[1].bytes = 101; }},
      {"a chunk's slot is outside", [](Job& job) { Extents(&job)[0].digest_slot = 969; }},
      {"an extent's pieces are outside", [](Job& job) { Extents(&job)[1].piece_count = 3; }},
      {"an extent's pieces are outside", [](Job& job) { Extents(&job)[1].piece_first = 4; }},
      {"a piece is outside of its extent or overlaps another",
       [](Job& job) { Pieces(&job)[2].bytes = 41; }},
      {"a piece is outside of its extent or overlaps another",
       [](Job& job) { Pieces(&job)[2].offset = 59; }},
      {"a piece names no tensor", [](Job& job) { Pieces(&job)[2].tensor = 2; }},
      {"an extent belongs to no file",
       [](Job& job) {
         Files(&job)[0].bytes = kChunkBytes;
         Files(&job)[0].extent_count = 1;
         Files(&job)[1].extent_first = 1;
       }},
  };
  for (const auto& one : cases) {
    Table table;
    one.spoil(table.job());
    EXPECT_EQ(table.Verdict(), one.verdict);
  }
}

TEST(ValidateJob, NamesEveryMistakeInACommitRecord) {
  const struct {
    const char* verdict;
    std::function<void(Job&)> spoil;
  } cases[] = {
      {"a commit record that is not this job's to write",
       [](Job& job) { job.flags |= kFilesOnly; }},
      {"a slot lies outside of the commit record",
       [](Job& job) { job.commit_slots.bytes.offset = 381; }},
      {"the commit record has no self-digest",
       [](Job& job) { job.commit_slots.self_digest.width = 0; }},
      {"the rows of the commit record have the wrong length",
       [](Job& job) { job.commit_slots.row_bytes = 0; }},
      {"the rows of the commit record have the wrong length",
       [](Job& job) { job.commit_slots.row_bytes = 401; }},
      {"a row lies outside of the commit record",
       [](Job& job) { job.commit_slots.manifest_digest = 369; }},
      {"a row lies outside of the commit record",
       [](Job& job) { job.commit_slots.manifest_digest = UINT64_MAX; }},
      {"two ranges overlap", [](Job& job) { job.commit_template = job.manifest_template; }},
  };
  for (const auto& one : cases) {
    Table table;
    table.WithCommitRecord();
    one.spoil(table.job());
    EXPECT_EQ(table.Verdict(), one.verdict);
  }
  Table table;
  EXPECT_EQ(table.WithCommitRecord().Verdict(), "sound");
  EXPECT_EQ(table.AsOfTwoRanks().Verdict(), "sound");
  table.job().commit_slots.manifest_bytes.offset = 301;
  EXPECT_EQ(table.Verdict(), "a row lies outside of the commit record");
}

TEST(ValidateJob, NamesEveryMistakeInASingleFile) {
  const struct {
    const char* verdict;
    std::function<void(Job&)> spoil;
  } cases[] = {
      {"sound", [](Job&) {}},
      {"a single file that is not alone",
       [](Job& job) {
         job.flags &= ~kFilesOnly;
         std::strcpy(job.target, "step-1");
       }},
      {"a single file that is not alone", [](Job& job) { job.flags &= ~kWriteManifest; }},
      {"a single file that is not alone", [](Job& job) { job.world_size = 2; }},
      {"a single file that is not alone",
       [](Job& job) {
         job.file_count = 2;
         job.files.bytes = 2 * sizeof(File);
       }},
      {"the partial name is not a name", [](Job& job) { job.partial[0] = '\0'; }},
  };
  for (const auto& one : cases) {
    Table table;
    table.AsSingleFile();
    one.spoil(table.job());
    EXPECT_EQ(table.Verdict(), one.verdict);
  }
}

TEST(ValidateJob, AcceptsTheFrameworksDirectoryItself) {
  Table table;
  table.job().flags = kFilesOnly;
  std::strcpy(table.job().target, ".");
  table.job().partial[0] = '\0';
  EXPECT_EQ(table.Verdict(), "sound");
}

TEST(ValidateJob, LooksAtTheNamesOfADeleteJobOnly) {
  Table table;
  EXPECT_EQ(table.AsRemoval().Verdict(), "sound");
  char* const names = At<char>(&table.job(), table.job().trash);
  std::strcpy(names + kNameBytes, "..");
  EXPECT_EQ(table.Verdict(), "a name to delete is not a name");
  std::strcpy(names + kNameBytes, "a/b");
  EXPECT_EQ(table.Verdict(), "a name to delete has a slash");
  std::memset(names + kNameBytes, 'a', kNameBytes);
  EXPECT_EQ(table.Verdict(), "a name to delete is not terminated");
}

TEST(Log, ReaderSeesEntriesInOrderAndOnce) {
  SharedU32 entries[3];
  for (SharedU32& entry : entries) entry = kEmptyEntry;
  LogWriter writer(entries, 3);
  LogReader reader(entries, 3);
  uint32_t index = 0;
  EXPECT_FALSE(reader.Next(&index));
  writer.Append(2);
  writer.Append(0);
  ASSERT_TRUE(reader.Next(&index));
  EXPECT_EQ(index, 2u);
  ASSERT_TRUE(reader.Next(&index));
  EXPECT_EQ(index, 0u);
  EXPECT_FALSE(reader.Next(&index));
  writer.Append(1);
  writer.Append(1);  // Beyond the last entry: dropped, never written behind the log.
  ASSERT_TRUE(reader.Next(&index));
  EXPECT_FALSE(reader.Next(&index));
  EXPECT_EQ(reader.taken(), 3u);
}

}  // namespace
}  // namespace holdfast::layout
