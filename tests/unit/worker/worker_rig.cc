#include "tests/unit/worker/worker_rig.h"
#include "tests/testing/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <utility>

#include "gtest/gtest.h"
#include "runtime/base/check.h"
#include "runtime/digest/digest.h"
#include "runtime/format/directory_names.h"
#include "runtime/format/manifest.h"
#include "runtime/sys/system.h"
#include "runtime/worker/serve.h"
#include "tests/testing/random_bytes.h"

namespace holdfast::worker {
namespace {

constexpr char kWhy[] = "the rig itself must work";

}  // namespace

TestDirectory::TestDirectory(const std::string& below) {
  std::string name = below + "/holdfast-worker-XXXXXX";
  HOLDFAST_CHECK(::mkdtemp(name.data()) != nullptr, kWhy);
  path_ = name;
}

TestDirectory::~TestDirectory() { std::filesystem::remove_all(path_); }

StandIn::StandIn() : pid_(::fork()) {
  if (pid_ == 0) {
    while (true) ::pause();
  }
}

StandIn::~StandIn() { Die(); }

void StandIn::Die() {
  if (pid_ <= 0) return;
  testing::SendSignal(pid_, SIGKILL);
  int status = 0;
  ::waitpid(pid_, &status, 0);
  pid_ = -1;
}

Trainer::Trainer(uint64_t bytes, pid_t pid) : arena_bytes(bytes) {
  arena_fd = ::memfd_create("test-arena", MFD_CLOEXEC);
  HOLDFAST_CHECK(::ftruncate(arena_fd, static_cast<off_t>(bytes)) == 0, kWhy);
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, arena_fd, 0);
  HOLDFAST_CHECK(memory != MAP_FAILED, kWhy);
  arena = static_cast<char*>(memory);
  pidfd = static_cast<int>(::syscall(SYS_pidfd_open, pid != 0 ? pid : ::getpid(), 0));
  to_worker = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  to_trainer = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  HOLDFAST_CHECK(pidfd >= 0 && to_worker >= 0 && to_trainer >= 0, kWhy);
}

Trainer::~Trainer() {
  ::munmap(arena, arena_bytes);
  for (const int fd : {arena_fd, pidfd, to_worker, to_trainer}) ::close(fd);
}

TestWorker::TestWorker(Launcher launcher, const Trainer& trainer, uint32_t jobs_max,
                       uint32_t layout_version, bool in_fork)
    : launcher_(launcher), layout_version_(layout_version) {
  int ends[2];
  HOLDFAST_CHECK(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0, kWhy);
  socket_ = ends[0];
  const int other = ends[1];
  if (launcher == Launcher::kThread) {
    thread_ = std::thread([this, other, jobs_max] {
      exit_status_ = Serve({.socket = other, .launcher = Launcher::kThread, .jobs_max = jobs_max});
    });
  } else if (launcher == Launcher::kFork || in_fork) {
    pid_ = ::fork();
    HOLDFAST_CHECK(pid_ >= 0, kWhy);
    if (pid_ == 0) {
      ::close(socket_);
      ::_exit(Serve({.socket = other, .launcher = launcher, .jobs_max = jobs_max}));
    }
    ::close(other);
  } else {
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, other, layout::kWorkerSocketFd);
    const char* program = std::getenv("HOLDFAST_WORKER");
    HOLDFAST_CHECK(program != nullptr, "HOLDFAST_WORKER names the program");
    char* const arguments[] = {
        const_cast<char*>("holdfast-worker"),
        const_cast<char*>(launcher == Launcher::kPersistent ? "--kept" : "--one-job"),
        const_cast<char*>("test"), nullptr};
    HOLDFAST_CHECK(::posix_spawn(&pid_, program, &actions, nullptr, arguments, environ) == 0, kWhy);
    posix_spawn_file_actions_destroy(&actions);
    ::close(other);
  }
  Send(layout::MessageKind::kAttach, trainer.arena_bytes,
       {trainer.arena_fd, trainer.pidfd, trainer.to_worker, trainer.to_trainer});
}

TestWorker::~TestWorker() { Join(); }

void TestWorker::Send(layout::MessageKind kind, uint64_t bytes, const std::vector<int>& fds) {
  layout::Message message;
  message.layout_version = layout_version_;
  message.kind = kind;
  message.bytes = bytes;
  iovec part = {.iov_base = &message, .iov_len = sizeof(message)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 8)] = {};
  msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (!fds.empty()) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
    std::memcpy(CMSG_DATA(rights), fds.data(), sizeof(int) * fds.size());
  }
  // Tests recognize a worker that has ended by the exit status.
  (void)!::sendmsg(socket_, &header, MSG_NOSIGNAL);
}

bool TestWorker::AwaitMessage(layout::MessageKind kind) {
  pollfd entry = {.fd = socket_, .events = POLLIN, .revents = 0};
  if (::poll(&entry, 1, 10'000) != 1) return false;
  layout::Message message;
  return ::read(socket_, &message, sizeof(message)) == sizeof(message) && message.kind == kind;
}

void TestWorker::Run(const writer::JobTable& table, int parent, int lock) {
  Send(layout::MessageKind::kRun, table.bytes(), {table.fd(), parent, lock});
}

int TestWorker::Join() {
  if (socket_ >= 0) ::close(socket_);
  socket_ = -1;
  if (thread_.joinable()) thread_.join();
  if (pid_ > 0) {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    exit_status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    pid_ = -1;
  }
  return exit_status_;
}

TestSave::TestSave(Trainer* trainer, const std::string& directory)
    : trainer_(trainer), directory_(directory) {
  parent_ = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  HOLDFAST_CHECK(parent_ >= 0, kWhy);
  parameters.flags = layout::kWriteManifest | layout::kFinishWithoutTrainer;
  parameters.attempt = {.high = 0x1122334455667788, .low = 0x99aabbccddeeff00};
  parameters.step = 7;
  parameters.target = "step-7";
  parameters.partial = "step-7.partial-112233445566778899aabbccddeeff00";
  parameters.time_stalled_max_ns = 20'000'000'000;
  parameters.time_ranks_max_ns = 20'000'000'000;
}

TestSave::~TestSave() { ::close(parent_); }

void TestSave::AddFile(const std::string& name, const std::vector<uint64_t>& tensor_bytes,
                       uint64_t header_bytes) {
  PlannedFile file;
  file.name = name;
  std::string content;
  if (header_bytes != 0) {
    const std::string header(header_bytes, 'h');
    file.segments.push_back({.file_offset = 0, .bytes = header_bytes, .literal = header});
    content += header;
  }
  for (const uint64_t bytes : tensor_bytes) {
    const uint32_t tensor = static_cast<uint32_t>(plan_.tensors.size());
    plan_.tensors.push_back({.name = "tensor-" + std::to_string(tensor),
                             .dtype = "U8",
                             .shape = {static_cast<int64_t>(bytes)},
                             .file = static_cast<uint32_t>(plan_.files.size()),
                             .begin = content.size(),
                             .end = content.size() + bytes});
    file.segments.push_back({.file_offset = content.size(), .bytes = bytes, .tensor = tensor});
    content += testing::RandomBytes(bytes, 1000 * contents_.size() + tensor + 1 + parameters.rank);
  }
  file.bytes = content.size();
  plan_.files.push_back(std::move(file));
  contents_.push_back(std::move(content));
}

void TestSave::Build() {
  writer::SaveContents contents;
  contents.plan = std::make_shared<const format::PackedPlan>(format::Pack(plan_));
  contents.sources.tensors.resize(plan_.tensors.size());
  contents.sources.literals.resize(contents.plan->literals.size());
  contents.manifest = {.checkpoint = parameters.target,
                       .attempt = parameters.attempt,
                       .rank = parameters.rank,
                       .world_size = parameters.world_size,
                       .step = parameters.step,
                       .launcher = parameters.launcher};
  if (parameters.rank == 0 && (parameters.flags & layout::kFilesOnly) == 0 &&
      (parameters.flags & layout::kWriteManifest) != 0) {
    contents.commit = format::BuildCommitRecord({.checkpoint = parameters.target,
                                                 .attempt = parameters.attempt,
                                                 .world_size = parameters.world_size,
                                                 .step = parameters.step});
  }
  auto table = writer::JobTable::ForSave(parameters, contents);
  HOLDFAST_CHECK(table.ok(), kWhy);
  table_ = *std::move(table);
  published_ = std::make_unique<layout::LogWriter>(
      layout::At<layout::SharedU32>(job(), job()->published), job()->extent_count);
  uint64_t at = 0;
  for (uint32_t i = 0; i < extent_count(); ++i) {
    const uint64_t bytes = AlignUp(table_->extent(i).bytes);
    if (at + bytes > trainer_->arena_bytes) return;  // The test stages the rest as it goes.
    Stage(i, at);
    at += bytes;
  }
}

char* TestSave::Memory(uint32_t extent) const {
  return trainer_->arena + table_->extent(extent).arena_offset;
}

void TestSave::Stage(uint32_t index, uint64_t offset) {
  const layout::Extent& extent = table_->extent(index);
  table_->SetArenaOffset(index, offset);
  std::memset(trainer_->arena + offset, 0, AlignUp(extent.bytes));
  std::memcpy(trainer_->arena + offset, contents_[extent.file].data() + extent.file_offset,
              extent.bytes);
}

void TestSave::Seal(uint32_t index) {
  const layout::Extent& extent = table_->extent(index);
  table_->SetSealed(index, digest::Of(Memory(index), extent.bytes));
  const writer::StagedPiece* pieces = table_->pieces(extent);
  for (uint32_t i = 0; i < extent.piece_count; ++i) {
    if (!pieces[i].has_digest) continue;
    *table_->digest_of(extent, i) = digest::Of(Memory(index) + pieces[i].offset, pieces[i].bytes);
  }
  if (++sealed_ == extent_count()) table_->WriteManifest();
  published_->Append(index);
}

void TestSave::SealAll() {
  for (uint32_t i = 0; i < extent_count(); ++i) Seal(i);
  Ring();
}

void TestSave::Ring() const {
  const uint64_t one = 1;
  HOLDFAST_CHECK(::write(trainer_->to_worker, &one, sizeof(one)) == sizeof(one), kWhy);
}

void TestSave::StartOn(TestWorker* worker) const {
  const bool files_only = (parameters.flags & layout::kFilesOnly) != 0;
  const std::string path = files_only ? target_path() : partial_path();
  if (!files_only) ::mkdir(path.c_str(), 0777);
  // The lock's fd, as the trainer has it: on the directory that is written to.
  const int lock = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  worker->Run(*table_, parent_, lock >= 0 ? lock : parent_);
  if (lock >= 0) ::close(lock);
}

bool TestSave::Run(Launcher launcher) const {
  TestWorker worker(launcher, *trainer_);
  StartOn(&worker);
  return AwaitDone();
}

bool TestSave::AwaitPhase(layout::Phase phase) const {
  while (job()->phase.load() != static_cast<uint32_t>(phase)) {
    if (AwaitDone(0)) return false;
    ::usleep(500);
  }
  return true;
}

bool TestSave::AwaitDone(int seconds) const {
  const uint64_t end = sys::NowNs() + static_cast<uint64_t>(seconds) * 1'000'000'000;
  while (job()->completion.state.load(std::memory_order_acquire) !=
         static_cast<uint32_t>(layout::CompletionState::kDone)) {
    if (sys::NowNs() > end) return false;
    pollfd entry = {.fd = trainer_->to_trainer, .events = POLLIN, .revents = 0};
    ::poll(&entry, 1, 20);
    uint64_t rings = 0;
    (void)!::read(trainer_->to_trainer, &rings, sizeof(rings));
  }
  return true;
}

std::string TestSave::target_path() const { return directory_ + "/" + parameters.target; }
std::string TestSave::partial_path() const { return directory_ + "/" + parameters.partial; }

std::string TestSave::UnsoundAt(const std::string& path) const {
  const std::vector<std::string> names = NamesIn(path);
  const auto has = [&names](const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  for (size_t i = 0; i < plan_.files.size(); ++i) {
    if (!has(plan_.files[i].name)) return "missing: " + plan_.files[i].name;
    if (ReadFileOf(path + "/" + plan_.files[i].name) != contents_[i]) {
      return "other bytes: " + plan_.files[i].name;
    }
  }
  for (const std::string& name : names) {
    if (name.ends_with(".tmp")) return "left over: " + name;
  }
  if ((parameters.flags & layout::kWriteManifest) == 0) return "";
  if (!has(manifest_name())) return "no manifest";
  const auto manifest = format::ParseManifest(ReadFileOf(path + "/" + manifest_name()));
  if (!manifest.ok()) return std::string(manifest.status().message());
  if (manifest->attempt != parameters.attempt) return "manifest of another attempt";
  if (manifest->files.size() != plan_.files.size()) return "manifest of other files";
  if (!has(layout::kCommitRecordName)) return job()->commit_template.bytes != 0 ? "no record" : "";
  if (parameters.world_size == 1 && names.size() != plan_.files.size() + 2) return "too many names";
  const auto record = format::ParseCommitRecord(ReadFileOf(path + "/" + layout::kCommitRecordName));
  if (!record.ok()) return std::string(record.status().message());
  const std::string text = ReadFileOf(path + "/" + manifest_name());
  const auto& row = record->manifests[parameters.rank];
  const bool same = row.bytes == text.size() && row.digest == digest::Of(text.data(), text.size());
  return same && record->attempt == parameters.attempt ? "" : "a record of other manifests";
}

std::string RetiredName(const std::string& checkpoint, const AttemptId& attempt) {
  return format::FormatDirectoryName(
      {.checkpoint = checkpoint, .kind = format::DirectoryKind::kRetired, .attempt = attempt});
}

std::vector<std::string> NamesIn(const std::string& path) {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(path, error)) {
    names.push_back(entry.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string ReadFileOf(const std::string& path) {
  std::string out;
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return out;
  while (true) {
    constexpr size_t kStep = 1u << 20;
    const size_t at = out.size();
    out.resize(at + kStep);
    const ssize_t got = ::read(fd, out.data() + at, kStep);
    out.resize(at + static_cast<size_t>(std::max<ssize_t>(got, 0)));
    if (got <= 0) break;
  }
  ::close(fd);
  return out;
}

void OpenBoardOf(const TestSave& save, const std::string& directory, uint32_t rank,
                 RankBoard* board) {
  const int fd = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  HOLDFAST_CHECK(fd >= 0, kWhy);
  const writer::JobParameters& job = save.parameters;
  HOLDFAST_CHECK(OpenBoard(fd, job.attempt, rank, job.world_size, board) == 0, kWhy);
  ::close(fd);
}

void VoteAs(const TestSave& save, uint32_t rank, const std::string& attempt) {
  ::mkdir(save.partial_path().c_str(), 0755);
  char name[64];
  std::snprintf(name, sizeof(name), "/rank-%05u-of-%05u.manifest.json", rank,
                save.parameters.world_size);
  WriteFileAt(save.partial_path() + name, "{\"attempt\":\"" + attempt + "\",\"files_bytes\":7}");
  RankBoard board;
  OpenBoardOf(save, save.partial_path(), rank, &board);
  HOLDFAST_CHECK(WritePulse(board, Side::kWorker, layout::RankState::kVoted), kWhy);
  CloseBoard(&board);
}

void WriteFileAt(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

bool Exists(const std::string& path) { return std::filesystem::exists(path); }

std::string ManifestNaming(const std::vector<std::string>& files) {
  std::string text = R"({"attempt":"00000000000000050000000000000006","step":3,"files":[)";
  for (const std::string& file : files) {
    text += R"({"name":")" + file + R"(","bytes":1,"digests":[]},)";
  }
  return text + "]}";
}

int OpenFds() { return static_cast<int>(NamesIn("/proc/self/fd").size()); }

}  // namespace holdfast::worker
