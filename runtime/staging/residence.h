// Returns and reallocates the arena's pages together with all registrations of them.
#ifndef HOLDFAST_RUNTIME_STAGING_RESIDENCE_H_
#define HOLDFAST_RUNTIME_STAGING_RESIDENCE_H_

#include <vector>

#include "absl/status/status.h"
#include "runtime/staging/arena.h"

namespace holdfast::staging {

/// A holder of pinned or registered arena pages: a device, a kept worker.
class Registrant {
 public:
  virtual ~Registrant() = default;
  /// Drops the registration and returns after the acknowledgment. On an error the pages stay. A
  /// missing registration is no error.
  virtual absl::Status DropRegistration() = 0;
  /// Registers again after the pages are reallocated. On an error the lease that needs the pages
  /// fails, and the next lease tries again. A registrant that works without registration returns
  /// OK.
  virtual absl::Status RestoreRegistration() = 0;
};

/// \threadsafety None. StagingPool admits one thread at a time, without holding its lock: calls
/// into registrants and page allocation are slow.
class Residence {
 public:
  explicit Residence(Arena* arena) : arena_(arena) {}

  /// Adds `registrant`, and registers at once if the arena has pages; otherwise the next Take
  /// registers.
  /// \error The registrant's error; the registrant is then not added.
  absl::Status Register(Registrant* registrant);
  /// Adds a registrant that is attached already.
  void Add(Registrant* registrant) {
    entries_.push_back({.registrant = registrant, .registered = true});
  }
  void Remove(Registrant* registrant);

  /// Returns true when the arena has pages and every registration is in place.
  bool Complete() const;
  /// Returns true when neither the arena nor a registration holds a page.
  bool Empty() const;

  /// Drops every registration, then punches. If a drop fails, the pages stay and dropped
  /// registrations are restored.
  absl::Status GiveBack();

  /// Allocates the pages, then restores the registrations.
  absl::Status Take();

  /// Drops every registration, for good.
  absl::Status DropAll();

 private:
  struct Entry {
    Registrant* registrant = nullptr;
    bool registered = false;
  };
  absl::Status RestoreAll();

  Arena* arena_;
  std::vector<Entry> entries_;
};

}  // namespace holdfast::staging

#endif  // HOLDFAST_RUNTIME_STAGING_RESIDENCE_H_
