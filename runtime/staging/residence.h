// Giving the arena's pages back and taking them again, with everybody who has them registered.
#ifndef HOLDFAST_RUNTIME_STAGING_RESIDENCE_H_
#define HOLDFAST_RUNTIME_STAGING_RESIDENCE_H_

#include <vector>

#include "absl/status/status.h"
#include "runtime/staging/arena.h"

namespace holdfast::staging {

/// Somebody who has pinned or registered the arena's pages: a device, a kept worker.
class Registrant {
 public:
  virtual ~Registrant() = default;
  /// Drops the registration and returns only when that is done (acknowledged). On an error the
  /// pages stay. Dropping what is not registered is no error.
  virtual absl::Status DropRegistration() = 0;
  /// Registers anew, after the pages were taken again. On an error the lease that needed the pages
  /// fails, and the next one tries again: a registrant that can do without returns OK.
  virtual absl::Status RestoreRegistration() = 0;
};

/// \threadsafety None: one thread at a time (StagingPool sees to it without holding its lock, since
/// both calls into registrants and taking pages are slow).
class Residence {
 public:
  explicit Residence(Arena* arena) : arena_(arena) {}

  /// Registers it if there are pages; otherwise the next Take does. \error Its own: not added.
  absl::Status Register(Registrant* registrant);
  /// One that is attached already.
  void Add(Registrant* registrant) { entries_.push_back({.who = registrant, .registered = true}); }
  void Remove(Registrant* registrant);

  /// Whether there are pages, and every registration of them stands.
  bool Complete() const;
  /// Whether nobody holds a page: neither the arena nor a registration.
  bool Empty() const;

  /// Drops every registration; only when all are acknowledged, punches. Otherwise the pages stay
  /// and what was dropped is restored.
  absl::Status GiveBack();

  /// Takes the pages, then restores the registrations.
  absl::Status Take();

  /// Drops every registration, for good.
  absl::Status DropAll();

 private:
  struct Entry {
    Registrant* who = nullptr;
    bool registered = false;
  };
  absl::Status RestoreAll();

  Arena* arena_;
  std::vector<Entry> entries_;
};

#ifdef HOLDFAST_PLANTED_BUGS
namespace testing {
/// Pages are punched while they are still registered, the bug that promise 4 is about.
extern bool trim_under_registration;
}  // namespace testing
#endif

}  // namespace holdfast::staging

#endif  // HOLDFAST_RUNTIME_STAGING_RESIDENCE_H_
