// A rank's part in a save of several ranks, and digests of what ranks have alike.
#include "holdfast/ranks.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "bindings.h"
#include "names.h"
#include "status.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace holdfast::python {
namespace {

constexpr size_t kDigestBytes = 2 * sizeof(uint64_t);
constexpr uint64_t kSliceBytes = 16 << 20;  // of a range, digested at a time by one thread
constexpr size_t kThreadsMax = 4;

void PutDigest(const Digest& digest, char* out) {
  std::memcpy(out, &digest.high, sizeof(digest.high));
  std::memcpy(out + sizeof(digest.high), &digest.low, sizeof(digest.low));
}

/// Returns the digests of ranges; of a longer one than a slice, that of its slices' digests.
std::string DigestsOf(const std::vector<uintptr_t>& addresses, const std::vector<uint64_t>& sizes) {
  struct Slice {
    uintptr_t address;
    uint64_t bytes;
  };
  std::vector<Slice> slices;
  std::vector<size_t> first;  // of each range
  uint64_t total = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    first.push_back(slices.size());
    total += sizes[i];
    for (uint64_t at = 0; at == 0 || at < sizes[i]; at += kSliceBytes) {
      slices.push_back({addresses[i] + at, std::min(kSliceBytes, sizes[i] - at)});
    }
  }
  first.push_back(slices.size());
  std::string found(slices.size() * kDigestBytes, '\0');
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < slices.size();) {
      PutDigest(DigestOf(Pointer<const void>(slices[i].address), slices[i].bytes),
                &found[i * kDigestBytes]);
    }
  };
  {
    std::vector<std::jthread> threads;
    const size_t wanted = std::min({kThreadsMax, size_t{std::thread::hardware_concurrency()},
                                    static_cast<size_t>(total / kSliceBytes)});
    try {
      while (threads.size() + 1 < wanted) threads.emplace_back(work);
    } catch (const std::system_error&) {  // a limit of threads: those that are there do it
    }
    work();
  }
  std::string digests(sizes.size() * kDigestBytes, '\0');
  for (size_t i = 0; i < sizes.size(); ++i) {
    const char* const of_range = &found[first[i] * kDigestBytes];
    const size_t count = first[i + 1] - first[i];
    if (count == 1) {
      std::memcpy(&digests[i * kDigestBytes], of_range, kDigestBytes);
    } else {
      PutDigest(DigestOf(of_range, count * kDigestBytes), &digests[i * kDigestBytes]);
    }
  }
  return digests;
}

}  // namespace

void BindRanks(nb::module_& module) {
  nb::class_<RankAnnouncement>(module, "RankAnnouncement",
                               "Says to the other ranks of a save that this one has begun it.")
      .def(
          "abandon",
          [](RankAnnouncement& self, const Message& why) {
            const GilReleased released;
            self.Abandon(absl::UnknownError(why.text));
          },
          "why"_a, "This rank takes no part; not once its save has begun.")
      .def(
          "check_ranks",
          [](RankAnnouncement& self, const std::vector<uint32_t>& ranks) {
            ThrowIfError(WithoutGil([&] { return self.CheckRanks(ranks); }));
          },
          "ranks"_a, "Raises when one of them gives no signs of life, or any rank has failed.");
  module.def(
      "announce_save",
      [](const Name& directory, const Name& name, const std::string& attempt, uint32_t rank,
         uint32_t world_size, std::optional<double> time_liveness_max) {
        RankInSave who = {.directory = directory.text,
                          .name = name.text,
                          .attempt = AttemptOf(attempt),
                          .rank = rank,
                          .world_size = world_size};
        if (time_liveness_max.has_value()) who.time_liveness_max = ToDuration(time_liveness_max);
        return ValueOrThrow(WithoutGil([&] { return RankAnnouncement::Make(who); }));
      },
      "directory"_a, "name"_a, "attempt"_a, "rank"_a, "world_size"_a, "time_liveness_max"_a.none());
  module.def(
      "digest",
      [](uintptr_t address, uint64_t bytes) {
        const Digest digest =
            WithoutGil([&] { return DigestOf(Pointer<const void>(address), bytes); });
        char out[kDigestBytes];
        PutDigest(digest, out);
        return nb::bytes(out, sizeof(out));
      },
      "address"_a, "bytes"_a, "XXH3-128 of bytes in host memory, 16 bytes.");
  module.def(
      "digests",
      [](const std::vector<uintptr_t>& addresses, const std::vector<uint64_t>& sizes) {
        if (addresses.size() != sizes.size())
          throw nb::value_error("digests: lists of different lengths");
        const std::string digests = WithoutGil([&] { return DigestsOf(addresses, sizes); });
        return nb::bytes(digests.data(), digests.size());
      },
      "addresses"_a, "sizes"_a,
      "Digests of ranges of host memory, 16 bytes each, by several threads where there is much.");
}

}  // namespace holdfast::python
