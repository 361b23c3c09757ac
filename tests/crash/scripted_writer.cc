#include "tests/crash/scripted_writer.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "runtime/directory/entries.h"
#include "runtime/directory/locks.h"
#include "runtime/directory/removal.h"
#include "runtime/format/directory_names.h"
#include "runtime/layout/job.h"
#include "runtime/sys/owned_fds.h"
#include "runtime/sys/system.h"
#include "runtime/worker/contents.h"
#include "runtime/worker/exchange.h"

namespace holdfast::testing {
namespace {

/// Makes NAME.tmp, writes two parts (so that a kill can fall between), fsyncs and renames the file.
bool WriteNamed(int directory, const std::string& name, const std::string& content,
                bool sync = true) {
  const sys::SystemCalls& sys = sys::Sys();
  const std::string temporary = name + ".tmp";
  const base::UniqueFd fd(
      sys::OpenOwned(directory, temporary.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0666));
  if (!fd.valid()) return false;
  const size_t half = content.size() / 2;
  return sys.write(fd.get(), content.data(), half) == static_cast<ssize_t>(half) &&
         sys.write(fd.get(), content.data() + half, content.size() - half) ==
             static_cast<ssize_t>(content.size() - half) &&
         (!sync || sys.fsync(fd.get()) == 0) &&
         sys.renameat2(directory, temporary.c_str(), directory, name.c_str(), RENAME_NOREPLACE) ==
             0;
}

/// As a worker, before its first file.
bool Mark(int directory) {
  const base::UniqueFd fd(
      sys::OpenOwned(directory, worker::kMarkName, O_CREAT | O_WRONLY | O_CLOEXEC, 0666));
  return fd.valid() && sys::Sys().fsync(directory) == 0;
}

bool WriteRank(int directory, const SmallRank& rank) {
  const sys::SystemCalls& sys = sys::Sys();
  return Mark(directory) && WriteNamed(directory, rank.file_name(), rank.file_bytes()) &&
         sys.fsync(directory) == 0 &&
         WriteNamed(directory, rank.manifest_name(), rank.manifest_text()) &&
         sys.fsync(directory) == 0;
}

decltype(sys::SystemCalls::renameat2) g_renameat2 = nullptr;

int RenameOnly(int a, const char* from, int b, const char* to, unsigned flags) {
  if ((flags & RENAME_EXCHANGE) == 0) return g_renameat2(a, from, b, to, flags);
  errno = EINVAL;
  return -1;
}

}  // namespace

WithoutExchange::WithoutExchange(bool active) : active_(active), outer_(g_renameat2) {
  if (active_) g_renameat2 = std::exchange(sys::g_system.renameat2, RenameOnly);
}

WithoutExchange::~WithoutExchange() {
  if (active_) sys::g_system.renameat2 = std::exchange(g_renameat2, outer_);
}

std::string Scratch() { return access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp"; }

bool WriteRankDurably(int parent, const std::string& partial, const SmallRank& rank) {
  auto made = directory::MakePartialDirectory(parent, partial);
  return made.ok() && WriteRank(made->in_use.get(), rank);
}

bool RunScript(const Script& script) {
  const sys::SystemCalls& sys = sys::Sys();
  auto parent = directory::OpenDirectory(AT_FDCWD, script.directory);
  if (!parent.ok()) return false;
  const std::string partial = format::PartialName(script.like.checkpoint, script.like.attempt);
  std::vector<directory::PartialDirectory> held;
  for (uint32_t i : script.order) {
    SmallRank rank = script.like;
    rank.rank = i;
    auto made = directory::MakePartialDirectory(parent->get(), partial);
    if (!made.ok()) return false;
    held.push_back(*std::move(made));
    // Each rank's worker first makes the directory's entry durable.
    if (sys.fsync(parent->get()) != 0) return false;
    if (!WriteRank(held.back().in_use.get(), rank)) return false;
  }
  // Rank 0's record, once all ranks have voted.
  const int directory = held.front().in_use.get();
  if (!WriteNamed(directory, layout::kCommitRecordName, script.like.record_text(),
                  script.sync_record) ||
      sys.fsync(directory) != 0) {
    return false;
  }
  const WithoutExchange without(!script.exchange);
  const char* const target = script.like.checkpoint.c_str();
  char old[kNameBytes] = {};
  if (script.replace) {
    if (worker::Exchange(parent->get(), partial.c_str(), target, script.like.replaces.at(0), old) !=
        0)
      return false;
  } else if (sys.renameat2(parent->get(), partial.c_str(), parent->get(), target,
                           RENAME_NOREPLACE) != 0) {
    return false;
  }
  if (sys.fsync(parent->get()) != 0) return false;
  if (script.acknowledge) script.acknowledge();
  return !script.replace || directory::RemoveDirectory(parent->get(), old).ok();
}

}  // namespace holdfast::testing
