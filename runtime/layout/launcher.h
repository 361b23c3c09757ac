// What sets the launchers apart. Everything else asks for a trait, never for a launcher by name.
#ifndef HOLDFAST_RUNTIME_LAYOUT_LAUNCHER_H_
#define HOLDFAST_RUNTIME_LAYOUT_LAUNCHER_H_

#include <cstdint>
#include <iterator>

#include "holdfast/pod.h"

namespace holdfast::layout {

struct LauncherTraits {
  bool process = false;  ///< The worker is a process of its own, not a thread of the trainer.
  bool program = false;  ///< The worker program runs, with its own heap and threads.
  bool kept = false;     ///< It serves any number of jobs.

  /// A copy of the trainer's memory: no heap, no threads, anonymous pages that are the trainer's.
  constexpr bool forked() const { return process && !program; }
};

/// By the enum's values.
inline constexpr LauncherTraits kLauncherTraits[] = {
    {.process = true, .program = true},                // kSpawn
    {.process = true},                                 // kFork
    {.process = true, .program = true, .kept = true},  // kPersistent
    {.kept = true},                                    // kThread
};

constexpr bool IsLauncher(Launcher launcher) {
  return static_cast<uint32_t>(launcher) < std::size(kLauncherTraits);
}

/// `launcher` is one: ValidateJob has checked those that come from shared memory.
constexpr LauncherTraits TraitsOf(Launcher launcher) {
  return kLauncherTraits[static_cast<uint32_t>(launcher)];
}

/// The launcher of a job that runs beside those of a kept worker process.
constexpr Launcher BackgroundLauncher(Launcher launcher) {
  const LauncherTraits traits = TraitsOf(launcher);
  return traits.process && traits.kept ? Launcher::kSpawn : launcher;
}

}  // namespace holdfast::layout

#endif  // HOLDFAST_RUNTIME_LAYOUT_LAUNCHER_H_
