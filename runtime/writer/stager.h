// Stages a save's bytes. The caller's thread and the sealer's threads copy host tensors before the
// call returns. Extents with device tensors go to the device thread.
#ifndef HOLDFAST_RUNTIME_WRITER_STAGER_H_
#define HOLDFAST_RUNTIME_WRITER_STAGER_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "runtime/staging/staging_pool.h"
#include "runtime/writer/device_stager.h"
#include "runtime/writer/lease_taker.h"
#include "runtime/writer/save_state.h"
#include "runtime/writer/sealer.h"

namespace holdfast::writer {

struct StagerOptions {
  bool fused_copy = false;
  bool second_look = false;
  absl::Duration time_memory_max = absl::Minutes(10);
};

/// The stager of an extent.
enum class Way {
  kHost,   ///< The caller's thread or a sealer's: only host tensors and literals.
  kMixed,  ///< The caller's thread first, then the device thread.
  /// The device thread: the extent holds no data that the caller may change after the call.
  kDevice,
};

class Stager {
 public:
  Stager(staging::StagingPool* pool, Sealer* sealer, const StagerOptions& options);
  absl::Status Start() { return devices_.Start(); }

  /// Copies everything that lives in host memory and queues the rest. On an error the save's
  /// staging has failed (see SaveState::FailStaging) and the error is returned as well.
  absl::Status Stage(const std::shared_ptr<SaveState>& save);

 private:
  /// Returns true when all extents must be leased in order. An extent with a place for the checksum
  /// of a device tensor holds its memory until that tensor was staged. Too many such extents ahead
  /// of the tensor would leave no memory for it.
  bool MustLeaseInOrder(const SaveState& save) const;
  absl::Status StageAll(const std::shared_ptr<SaveState>& save);
  class HelpedCopies;

  absl::Status StageExtents(const std::shared_ptr<SaveState>& save);
  absl::Status StageExtents(const std::shared_ptr<SaveState>& save,
                            const std::shared_ptr<HelpedCopies>& helped);
  /// Whether the copy of extent `index` may be, and was, handed to another thread.
  bool CopiesElsewhere(const std::shared_ptr<SaveState>& save, uint32_t index,
                       const std::shared_ptr<HelpedCopies>& helped);
  absl::Status CopyHost(const std::shared_ptr<SaveState>& save, uint32_t index, Way way);
  /// Copies the host pieces of extent `index`. Returns true if the extent was sealed as well.
  absl::StatusOr<bool> CopyHostPieces(const std::shared_ptr<SaveState>& save, uint32_t index,
                                      Way way);
  /// As CopyHostPieces, but digests during the copy, up to the first place of an unknown checksum.
  absl::StatusOr<bool> CopyFused(const std::shared_ptr<SaveState>& save, uint32_t index);
  absl::Status LookAgain(const SaveState& save, uint32_t index) const;

  staging::StagingPool* pool_;
  Sealer* sealer_;
  StagerOptions options_;
  LeaseTaker leases_;
  DeviceStager devices_;
};

}  // namespace holdfast::writer

#endif  // HOLDFAST_RUNTIME_WRITER_STAGER_H_
