// Checksums that a plan has places for: right whatever the order in which extents come, filled once
// all of the tensor is there and not before.
#include "runtime/writer/checksums.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/base/mutex.h"
#include "runtime/format/torch_zip.h"
#include "tests/testing/framed_plan.h"
#include "tests/testing/random_bytes.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/slow_device.h"

namespace holdfast::writer {
namespace {

using ::testing::ElementsAre;
using testing::FramedPlan;
using testing::Framing;
using ::testing::IsEmpty;
using testing::SlowDevice;
using testing::WrongFraming;

constexpr uint64_t kChunk = kChunkBytes;

/// A file with the tensors that a test asks for, staged extent by extent, as the sealer does.
class ChecksumsTest : public ::testing::Test {
 protected:
  void Plan(const std::vector<uint64_t>& sizes, const Framing& framing) {
    contents_.clear();
    std::vector<TensorSource> sources;
    for (const uint64_t bytes : sizes) {
      contents_.push_back(testing::RandomBytes(bytes, contents_.size()));
    }
    for (size_t i = 0; i < sizes.size(); ++i) {
      sources.push_back({.name = absl::StrCat("t", i),
                         .dtype = "U8",
                         .shape = {static_cast<int64_t>(sizes[i])},
                         .data = contents_[i].data(),
                         .bytes = sizes[i]});
    }
    plan_ = FramedPlan(sources, framing);
    ASSERT_TRUE(ValidatePlan(plan_).ok()) << ValidatePlan(plan_);
    checksums_ = Checksums::For(plan_);
    ASSERT_NE(checksums_, nullptr);
    Fill();
  }

  /// The file's bytes as they are when all was copied: its places are not filled yet.
  void Fill() {
    file_.clear();
    for (const Segment& segment : plan_.files[0].segments) {
      file_.append(segment.tensor == Segment::kLiteral ? segment.literal.data()
                                                       : static_cast<const char*>(segment.data),
                   segment.bytes);
    }
    sealed_.assign(extents(), 0);
  }

  uint32_t extents() const { return static_cast<uint32_t>((file_.size() + kChunk - 1) / kChunk); }

  /// Takes the extent, and then the extents that became ready. Returns what was sealed.
  std::vector<uint32_t> Take(uint32_t index) {
    std::vector<uint32_t> queue = {index};
    std::vector<uint32_t> sealed;
    while (!queue.empty()) {
      const uint32_t next = queue.back();
      queue.pop_back();
      std::vector<uint32_t> ready;
      if (checksums_->Take(next, file_.data() + next * kChunk, &ready)) {
        sealed.push_back(next);
        ++sealed_[next];
      }
      queue.insert(queue.end(), ready.begin(), ready.end());
    }
    std::sort(sealed.begin(), sealed.end());
    return sealed;
  }

  /// What a copy that takes checksums on its way does. Returns what was sealed: the extent, if
  /// nothing was missing where its places are, and those that waited for its tensors.
  std::vector<uint32_t> Copy(uint32_t index) {
    char* const memory = file_.data() + index * kChunk;
    const uint64_t begin = index * kChunk, end = std::min<uint64_t>(begin + kChunk, file_.size());
    bool missing = false, added = false;
    for (const Segment& segment : plan_.files[0].segments) {
      const uint64_t from = std::max(begin, segment.file_offset);
      const uint64_t to = std::min(end, segment.file_offset + segment.bytes);
      if (from >= to) continue;
      const auto at = static_cast<uint32_t>(from - begin), bytes = static_cast<uint32_t>(to - from);
      if (checksums_->HasPlaces(index, at, bytes)) {
        EXPECT_EQ(segment.tensor, Segment::kLiteral);
        missing = missing || !checksums_->Fill(index, at, bytes, memory);
      } else if (checksums_->Wants(index, at)) {
        checksums_->Add(index, at, format::Crc32(0, memory + at, bytes));
        added = true;
      }
    }
    std::vector<uint32_t> sealed;
    const auto add = [&](const std::vector<uint32_t>& more) {
      sealed.insert(sealed.end(), more.begin(), more.end());
    };
    if (!missing) {
      ++sealed_[index];
      sealed.push_back(index);
    }
    for (const uint32_t ready : added ? checksums_->Ready() : std::vector<uint32_t>())
      add(Take(ready));
    if (missing) add(Take(index));
    std::sort(sealed.begin(), sealed.end());
    return sealed;
  }

  void ExpectAllSealedAndRight() {
    for (uint32_t i = 0; i < extents(); ++i) EXPECT_EQ(sealed_[i], 1) << "extent " << i;
    EXPECT_EQ(WrongFraming(plan_, plan_.files[0], file_), "");
  }

  std::vector<std::string> contents_;
  SavePlan plan_;
  std::string file_;
  std::vector<int> sealed_;
  std::unique_ptr<Checksums> checksums_;
};

TEST_F(ChecksumsTest, PlansWithoutPlacesHaveNone) {
  Plan({100, 200}, {});
  for (Segment& segment : plan_.files[0].segments) segment.crc32_slots.clear();
  EXPECT_EQ(Checksums::For(plan_), nullptr);
}

TEST_F(ChecksumsTest, FillsPlacesOfTensorsInOneExtent) {
  Plan({1, 100, 4096}, {});
  EXPECT_NE(WrongFraming(plan_, plan_.files[0], file_), "") << "nothing was filled yet";
  EXPECT_THAT(Take(0), ElementsAre(0));
  ExpectAllSealedAndRight();
}

TEST_F(ChecksumsTest, JoinsATensorOverSeveralChunks) {
  Plan({3 * kChunk + 12345}, {});
  EXPECT_THAT(Take(0), ElementsAre(0));
  EXPECT_THAT(Take(1), ElementsAre(1));
  EXPECT_THAT(Take(2), ElementsAre(2));
  EXPECT_THAT(Take(3), ElementsAre(3));
  ExpectAllSealedAndRight();
}

TEST_F(ChecksumsTest, AnExtentWithPlacesWaitsForTheLastPartOfTheTensor) {
  Plan({2 * kChunk + 1}, {});
  EXPECT_THAT(Take(2), IsEmpty());
  EXPECT_THAT(Take(0), ElementsAre(0));
  EXPECT_THAT(Take(1), ElementsAre(1, 2));
  ExpectAllSealedAndRight();
}

TEST_F(ChecksumsTest, SplitsAPlaceAtAChunkBorder) {
  for (uint32_t before = 1; before < 4; ++before) {
    // The place begins `before` bytes ahead of the border.
    Plan({kChunk - 9 - before, kChunk}, {.behind_bytes = 9, .directory_bytes = 0});
    ASSERT_EQ(
        plan_.files[0].segments[1].crc32_slots[0].offset + plan_.files[0].segments[1].file_offset,
        kChunk - before);
    EXPECT_THAT(Take(1), IsEmpty()) << before;
    EXPECT_THAT(Take(0), ElementsAre(0, 1)) << before;
    EXPECT_THAT(Take(2), ElementsAre(2));
    ExpectAllSealedAndRight();
  }
}

TEST_F(ChecksumsTest, FillsADirectoryFarBehindItsTensors) {
  // A last literal of several chunks, with the places of 40 tensors spread over it.
  Plan(std::vector<uint64_t>(40, 100'000), {.directory_bytes = 200'000});
  ASSERT_EQ(extents(), 3u);
  EXPECT_THAT(Take(2), IsEmpty());
  EXPECT_THAT(Take(1), IsEmpty());
  EXPECT_THAT(Take(0), ElementsAre(0, 1, 2));
  ExpectAllSealedAndRight();
}

TEST_F(ChecksumsTest, AnyOrderGivesTheSameBytes) {
  const std::vector<uint64_t> sizes = {kChunk + 3, 17, 2 * kChunk - 5, 1, kChunk, 3 * kChunk + 1};
  Plan(sizes, {});
  std::vector<uint32_t> order(extents());
  std::iota(order.begin(), order.end(), 0u);
  for (uint32_t seed = 0; seed < (holdfast::testing::kThreadSanitizer ? 2 : 20); ++seed) {
    Plan(sizes, {});
    std::shuffle(order.begin(), order.end(), std::mt19937(seed));
    for (const uint32_t index : order) Take(index);
    SCOPED_TRACE(seed);
    ExpectAllSealedAndRight();
  }
}

TEST_F(ChecksumsTest, CopiesThatTakeThemSealWhatHasItsTensorsBehindIt) {
  Plan({kChunk / 2, kChunk, kChunk}, {.directory_bytes = 0});
  EXPECT_THAT(Copy(0), ElementsAre(0));
  EXPECT_THAT(Copy(2), IsEmpty()) << "its place is that of a tensor that begins in extent 1";
  EXPECT_THAT(Copy(1), ElementsAre(1, 2));
  ExpectAllSealedAndRight();
}

TEST_F(ChecksumsTest, CopiesInAnyOrderGiveTheSameBytes) {
  const std::vector<uint64_t> sizes = {kChunk + 3, 17, 2 * kChunk - 5, 1, 1000, 3 * kChunk + 1};
  Plan(sizes, {});
  std::vector<uint32_t> order(extents());
  std::iota(order.begin(), order.end(), 0u);
  for (uint32_t seed = 0; seed < (holdfast::testing::kThreadSanitizer ? 2 : 20); ++seed) {
    Plan(sizes, {});
    std::mt19937 random(seed);
    std::shuffle(order.begin(), order.end(), random);
    // Some as the sealer takes them.
    for (const uint32_t index : order) random() % 4 == 0 ? Take(index) : Copy(index);
    SCOPED_TRACE(seed);
    ExpectAllSealedAndRight();
  }
}

TEST_F(ChecksumsTest, PlacesMayNameTheirTensorsInAnyOrder) {
  Plan(std::vector<uint64_t>(40, 100'000), {.behind_bytes = 0, .directory_bytes = 50});
  std::vector<Crc32Slot>& slots = plan_.files[0].segments.back().crc32_slots;
  ASSERT_EQ(slots.size(), 40u);
  for (Segment& segment : plan_.files[0].segments) {
    if (&segment.crc32_slots != &slots) segment.crc32_slots.clear();
  }
  // The same places, told from the last to the first.
  std::reverse(slots.begin(), slots.end());
  checksums_ = Checksums::For(plan_);
  for (uint32_t i = 0; i < extents(); ++i) Copy(i);
  for (uint32_t i = 0; i < extents(); ++i) EXPECT_EQ(sealed_[i], 1) << "extent " << i;
  const char* directory = file_.data() + plan_.files[0].segments.back().file_offset;
  for (const Crc32Slot& slot : slots) {
    const Segment& tensor = plan_.files[0].segments[slot.segment];
    const uint32_t crc = format::Crc32(0, tensor.data, tensor.bytes);
    EXPECT_EQ(std::memcmp(directory + slot.offset, &crc, sizeof(crc)), 0) << slot.segment;
  }
}

TEST_F(ChecksumsTest, ThreadsTakeExtentsAtTheSameTime) {
  const std::vector<uint64_t> sizes = {kChunk / 2, 5 * kChunk, 3, 4 * kChunk + 1, kChunk, kChunk};
  for (uint32_t round = 0; round < (holdfast::testing::kThreadSanitizer ? 2 : 5); ++round) {
    Plan(sizes, {.alignment = 64});
    std::vector<uint32_t> queue(extents());
    std::iota(queue.begin(), queue.end(), 0u);
    std::shuffle(queue.begin(), queue.end(), std::mt19937(round));
    base::Mutex mutex;
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&] {
        while (true) {
          uint32_t index = 0;
          {
            const base::MutexLock lock(&mutex);
            if (queue.empty()) return;
            index = queue.back();
            queue.pop_back();
          }
          std::vector<uint32_t> ready;
          const bool complete = checksums_->Take(index, file_.data() + index * kChunk, &ready);
          const base::MutexLock lock(&mutex);
          if (complete) ++sealed_[index];
          queue.insert(queue.end(), ready.begin(), ready.end());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    SCOPED_TRACE(round);
    ExpectAllSealedAndRight();
  }
}

TEST_F(ChecksumsTest, CountsExtentsThroughTheFiles) {
  Plan({kChunk + 1}, {});
  SavePlan two = plan_;
  two.files.push_back(two.files[0]);
  two.files[1].name = "other.zip";
  two.tensors.push_back(two.tensors[0]);
  two.tensors[1].name = "other";
  two.tensors[1].file = 1;
  two.files[1].segments[0].tensor = 1;
  ASSERT_TRUE(ValidatePlan(two).ok()) << ValidatePlan(two);
  checksums_ = Checksums::For(two);
  std::string other = file_;
  std::vector<uint32_t> ready;
  EXPECT_TRUE(checksums_->Take(2, other.data(), &ready));
  EXPECT_TRUE(checksums_->Take(3, other.data() + kChunk, &ready));
  EXPECT_EQ(WrongFraming(two, two.files[1], other), "");
  EXPECT_THAT(Take(0), ElementsAre(0));
  EXPECT_THAT(Take(1), ElementsAre(1));
  ExpectAllSealedAndRight();
}

TEST_F(ChecksumsTest, KnowsWhichExtentsWaitForADevice) {
  SlowDevice device;
  Plan({kChunk + 100, 2 * kChunk}, {});
  plan_.files[0].segments[0].device = &device;
  checksums_ = Checksums::For(plan_);
  EXPECT_FALSE(checksums_->WaitsForDevice(0)) << "it has no place at all";
  EXPECT_TRUE(checksums_->WaitsForDevice(1)) << "the tensor began in the extent before";
  EXPECT_FALSE(checksums_->WaitsForDevice(2)) << "all host";
  EXPECT_TRUE(checksums_->WaitsForDevice(3)) << "the directory";
  plan_.files[0].segments[0].device = HostDevice();
  EXPECT_FALSE(Checksums::For(plan_)->WaitsForDevice(1));
}

}  // namespace
}  // namespace holdfast::writer
