#include "runtime/writer/worker_source.h"

#include <utility>

#include "runtime/base/status.h"
#include "runtime/layout/launcher.h"

namespace holdfast::writer {
WorkerSource::WorkerSource(staging::StagingPool* pool, Launcher launcher, std::string program)
    : pool_(pool), launcher_(launcher), program_(std::move(program)) {}

WorkerSource::~WorkerSource() {
  const base::MutexLock lock(&mutex_);
  ForgetKept();
}

absl::StatusOr<std::shared_ptr<WorkerLink>> WorkerSource::Launch(Launcher launcher,
                                                                 const std::string& title) {
  return WorkerLink::Launch({.launcher = launcher,
                             .program = program_,
                             .title = title,
                             .arena_fd = pool_->arena().fd(),
                             .arena_bytes = pool_->arena().bytes()});
}

void WorkerSource::ForgetKept() {
  if (kept_ == nullptr) return;
  pool_->RemoveRegistrant(kept_.get());
  kept_.reset();
}

absl::StatusOr<std::shared_ptr<WorkerLink>> WorkerSource::Kept() {
  if (kept_ != nullptr && !kept_->IsGone() && !kept_->given_up()) return kept_;
  ForgetKept();
  HOLDFAST_ASSIGN_OR_RETURN(kept_, Launch(launcher_, "kept"));
  pool_->AddRegistrant(kept_.get());
  return kept_;
}

absl::Status WorkerSource::WarmUp() {
  if (!layout::TraitsOf(launcher_).kept) return absl::OkStatus();
  const base::MutexLock lock(&mutex_);
  return Kept().status();
}

absl::StatusOr<std::shared_ptr<WorkerLink>> WorkerSource::Start(const std::string& title,
                                                                const JobTable& table,
                                                                int parent_fd, int lock_fd) {
  if (!layout::TraitsOf(launcher_).kept) {
    HOLDFAST_ASSIGN_OR_RETURN(std::shared_ptr<WorkerLink> link, Launch(launcher_, title));
    HOLDFAST_RETURN_IF_ERROR(link->Run(table.fd(), table.bytes(), parent_fd, lock_fd));
    return link;
  }
  const base::MutexLock lock(&mutex_);
  HOLDFAST_ASSIGN_OR_RETURN(std::shared_ptr<WorkerLink> link, Kept());
  absl::Status handed = link->Run(table.fd(), table.bytes(), parent_fd, lock_fd);
  if (!handed.ok()) {
    // The worker died between the look and the message: try again with a new worker.
    ForgetKept();
    HOLDFAST_ASSIGN_OR_RETURN(link, Kept());
    handed = link->Run(table.fd(), table.bytes(), parent_fd, lock_fd);
  }
  if (!handed.ok()) return handed;
  return link;
}

absl::StatusOr<std::shared_ptr<WorkerLink>> WorkerSource::StartBackground(const std::string& title,
                                                                          const JobTable& table,
                                                                          int parent_fd,
                                                                          int lock_fd) {
  const Launcher launcher = layout::BackgroundLauncher(launcher_);
  HOLDFAST_ASSIGN_OR_RETURN(std::shared_ptr<WorkerLink> link, Launch(launcher, title));
  HOLDFAST_RETURN_IF_ERROR(
      link->Run(table.fd(), table.bytes(), parent_fd, lock_fd >= 0 ? lock_fd : parent_fd));
  return link;
}

}  // namespace holdfast::writer
