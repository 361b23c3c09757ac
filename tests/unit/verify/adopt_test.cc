// A manifest for other programs' files: every later change is found.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fcntl.h>
#include <cerrno>
#include <filesystem>

#include "holdfast/load.h"
#include "holdfast/verify.h"
#include "runtime/sys/system.h"
#include "tests/testing/checkpoint_files.h"
#include "tests/testing/training_state.h"
#include "tests/testing/zip_files.h"

namespace holdfast {
namespace {

using ::testing::ElementsAre;
using testing::FlipBit;
using ::testing::HasSubstr;
using testing::ReadFileBytes;
using testing::ScratchDirectory;
using testing::TrainingState;
using testing::WriteFileBytes;
using testing::ZipArchive;

class AdoptTest : public ::testing::Test {
 protected:
  void TearDown() override { sys::g_system = sys::kKernel; }
  std::string Path(const std::string& name) const { return scratch_.path() + "/" + name; }
  Verdict VerdictOf(const std::string& path) const {
    const auto report = Verify(path, {});
    EXPECT_TRUE(report.ok()) << report.status();
    return report.ok() ? report->verdict : Verdict::kUnreadable;
  }
  /// As the reference library would: no attempt id.
  void WriteSafetensors(const std::string& name, const TrainingState& state) const {
    const auto plan = PlanSafetensors("x", state.Sources(), {});
    ASSERT_TRUE(plan.ok());
    std::string content;
    for (const Segment& segment : plan->files[0].segments) {
      content += segment.tensor == Segment::kLiteral
                     ? segment.literal
                     : std::string(static_cast<const char*>(segment.data), segment.bytes);
    }
    WriteFileBytes(Path(name), content);
  }

  ScratchDirectory scratch_;
  const std::string manifest_ = "rank-00000-of-00001.manifest.json";
};

TEST_F(AdoptTest, TakesRelativePaths) {
  const std::filesystem::path before = std::filesystem::current_path();
  for (const char* path : {".", "./", "one.safetensors"}) {
    std::filesystem::create_directories(Path("model"));
    WriteSafetensors("model/one.safetensors", TrainingState::Uniform(1, 1000, 1));
    std::filesystem::current_path(Path("model"));
    const absl::Status adopted = Adopt(path);
    const Verdict verdict = VerdictOf(".");
    std::filesystem::current_path(before);
    EXPECT_TRUE(adopted.ok()) << path << ": " << adopted;
    EXPECT_EQ(verdict, Verdict::kSound) << path;
    std::filesystem::remove_all(Path("model"));
  }
}

TEST_F(AdoptTest, RefusesNamesThatNoManifestMayHoldBeforeItReads) {
  WriteSafetensors("one.safetensors", TrainingState::Uniform(1, 1000, 1));
  WriteFileBytes(Path("half.tmp"), "x");
  sys::g_system.pread = [](int, void*, size_t, off_t) -> ssize_t {
    errno = EIO;
    return -1;
  };
  const absl::Status refused = Adopt(scratch_.path());
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("half.tmp"));
}

TEST_F(AdoptTest, MakesEveryByteOfADirectoryProvable) {
  WriteSafetensors("a.safetensors", TrainingState::Uniform(5, 2'000'000, 1));
  WriteFileBytes(Path("b.pt"), ZipArchive({{"archive/data/0", std::string(5000, 'x')}}, {}));
  WriteFileBytes(Path("c.pt"), ZipArchive({{"archive/data/0", std::string(6000, 'y')}}, {}));
  WriteFileBytes(Path("config.json"), "{}");
  WriteFileBytes(Path(".metadata"), "pickle");
  WriteFileBytes(Path("empty"), "");
  const absl::Status adopted = Adopt(scratch_.path() + "/");
  ASSERT_TRUE(adopted.ok()) << adopted;
  const auto report = Verify(scratch_.path(), {});
  ASSERT_TRUE(report.ok());
  EXPECT_EQ(report->verdict, Verdict::kSound);
  EXPECT_EQ(report->checked, "XXH3-128 digests of the time of adoption");
  EXPECT_EQ(report->files, 6u);
  EXPECT_EQ(report->tensors, 7u);
  for (const char* name : {"a.safetensors", "b.pt", "config.json", ".metadata"}) {
    const auto middle = std::filesystem::file_size(Path(name)) / 2;
    FlipBit(Path(name), middle);
    const auto damaged = Verify(scratch_.path(), {});
    EXPECT_EQ(damaged->verdict, Verdict::kCorrupt) << name;
    ASSERT_EQ(damaged->faults.size(), 1u);
    EXPECT_EQ(damaged->faults[0].file, name);
    FlipBit(Path(name), middle);
  }
}

TEST_F(AdoptTest, MakesLoadsVerified) {
  const TrainingState state = TrainingState::Assorted(2);
  WriteSafetensors("model.safetensors", state);
  ASSERT_TRUE(Adopt(Path("model.safetensors")).ok());
  EXPECT_TRUE(state.CompareWith(scratch_.path()).ok()) << state.CompareWith(scratch_.path());
}

TEST_F(AdoptTest, LeavesNothingButTheManifest) {
  WriteSafetensors("m.safetensors", TrainingState::Uniform(2, 1000, 3));
  ASSERT_TRUE(Adopt(scratch_.path()).ok());
  EXPECT_THAT(scratch_.Names(), ElementsAre("m.safetensors", manifest_));
}

TEST_F(AdoptTest, RefusesADirectoryThatHasAManifest) {
  WriteSafetensors("m.safetensors", TrainingState::Uniform(2, 1000, 4));
  ASSERT_TRUE(Adopt(scratch_.path()).ok());
  EXPECT_EQ(Adopt(scratch_.path()).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(Adopt(Path("m.safetensors")).code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(AdoptTest, RefusesADirectoryOfCheckpoints) {
  const std::string lock = ".holdfast-drain-0123abcd.lock";
  WriteFileBytes(Path(lock), "");
  EXPECT_THAT(Adopt(scratch_.path()).message(), HasSubstr("no file is there"));
  WriteFileBytes(Path("notes"), "of the run");
  std::filesystem::create_directory(Path("step-10"));
  WriteFileBytes(Path("step-10/a"), "bytes");
  ASSERT_TRUE(Adopt(Path("step-10")).ok());
  for (const std::string& path : {scratch_.path(), Path("notes")}) {
    EXPECT_THAT(Adopt(path).message(), HasSubstr("it holds checkpoints (\"step-10\")"));
  }
  EXPECT_THAT(scratch_.Names(), ElementsAre(lock, "notes", "step-10"));
  std::filesystem::remove_all(Path("step-10"));
  ASSERT_TRUE(Adopt(scratch_.path()).ok());
  EXPECT_THAT(ReadFileBytes(Path(manifest_)), ::testing::Not(HasSubstr(lock)));
}

TEST_F(AdoptTest, NeverMakesAnUnfinishedSaveComplete) {
  const TrainingState state = TrainingState::Uniform(2, 1000, 5);
  testing::WriteRank(scratch_.path(), {}, state.Sources());
  std::filesystem::remove(Path(manifest_));
  const absl::Status refused = Adopt(scratch_.path());
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("attempt id"));
  EXPECT_EQ(Adopt(Path(testing::RankFiles{}.model_name())).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(VerdictOf(scratch_.path()), Verdict::kIncomplete);

  const std::string partial = Path("x.partial-00112233445566778899aabbccddeeff");
  std::filesystem::create_directory(partial);
  WriteFileBytes(partial + "/a.pt", ZipArchive({{"a", "b"}}, {}));
  EXPECT_EQ(Adopt(partial).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(AdoptTest, RefusesWhatIsDamagedAlready) {
  std::string zip = ZipArchive({{"archive/data/0", std::string(5000, 'x')}}, {});
  zip[200] = static_cast<char>(zip[200] ^ 1);
  WriteFileBytes(Path("a.pt"), zip);
  EXPECT_EQ(Adopt(scratch_.path()).code(), absl::StatusCode::kDataLoss);
  WriteFileBytes(Path("a.pt"), "");
  WriteFileBytes(Path("b.safetensors"), "nonsense");
  EXPECT_EQ(Adopt(scratch_.path()).code(), absl::StatusCode::kDataLoss);
}

TEST_F(AdoptTest, RefusesWhatAManifestCannotName) {
  EXPECT_EQ(Adopt(Path("nothing")).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Adopt(scratch_.path()).code(), absl::StatusCode::kFailedPrecondition) << "no files";
  WriteFileBytes(Path("real"), "x");
  std::filesystem::create_symlink("real", Path("link"));
  EXPECT_EQ(Adopt(scratch_.path()).code(), absl::StatusCode::kFailedPrecondition);
  std::filesystem::remove(Path("link"));
  WriteFileBytes(Path("not\xff utf8"), "x");
  EXPECT_EQ(Adopt(scratch_.path()).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(AdoptTest, AFailureLeavesNoManifestAndNoRemains) {
  WriteSafetensors("m.safetensors", TrainingState::Uniform(2, 1000, 6));
  const auto fail = [this](const char* what) {
    const absl::Status status = Adopt(scratch_.path());
    EXPECT_FALSE(status.ok()) << what;
    sys::g_system = sys::kKernel;
    EXPECT_THAT(scratch_.Names(), ElementsAre("m.safetensors")) << what;
  };
  sys::g_system.write = [](int, const void*, size_t) -> ssize_t {
    errno = ENOSPC;
    return -1;
  };
  fail("write");
  sys::g_system.fsync = [](int) {
    errno = EIO;
    return -1;
  };
  fail("fsync");
  static int syncs = 0;
  sys::g_system.fsync = [](int fd) {
    if (++syncs == 2) {
      errno = EIO;
      return -1;
    }
    return sys::kKernel.fsync(fd);
  };
  fail("fsync of the manifest");
  sys::g_system.renameat2 = [](int, const char*, int, const char*, unsigned) {
    errno = EIO;
    return -1;
  };
  fail("rename");
  sys::g_system.openat = [](int directory, const char* path, int flags, mode_t mode) {
    if ((flags & O_CREAT) != 0) {
      errno = EROFS;
      return -1;
    }
    return sys::kKernel.openat(directory, path, flags, mode);
  };
  fail("create");
  EXPECT_TRUE(Adopt(scratch_.path()).ok());
}

TEST_F(AdoptTest, WorksWhereRenameKnowsNoFlags) {
  WriteSafetensors("m.safetensors", TrainingState::Uniform(2, 1000, 7));
  sys::g_system.renameat2 = [](int from, const char* old_name, int to, const char* name,
                               unsigned flags) {
    if (flags != 0) {
      errno = EINVAL;
      return -1;
    }
    return sys::kKernel.renameat2(from, old_name, to, name, flags);
  };
  EXPECT_TRUE(Adopt(scratch_.path()).ok());
  EXPECT_EQ(VerdictOf(scratch_.path()), Verdict::kSound);
}

}  // namespace
}  // namespace holdfast
